"""Programs that use the packages on real models: `python -m examples.NAME`."""

"""What things cost, measured here: `python -m fattn bench NAME`."""

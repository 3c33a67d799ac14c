"""Public bug reports as named cases: one function a report, run on every layer and on implementations with a fault of its kind."""

"""The oracle: float64 NumPy, loops, one query at a time. Every function returns its value and an error bound for correct kernels."""

ARRAYS = "numpy"  # what the functions take and return; the conformance kit reads it

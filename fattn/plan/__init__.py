"""What the host decides before anything is computed: NumPy only, validates everything, serves `fattn` and `npu` alike."""

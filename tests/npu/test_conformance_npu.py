"""`npu` conforms through the emulated operators, on few examples: `python -m fattn conform npu` is the whole of it."""

from fattn import conformance

globals().update(conformance.tests("npu", operations=["dense.attend", "rope.half", "paged.write", "paged.attend"], examples=10))

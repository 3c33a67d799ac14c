"""The definitions conform, on few examples: `python -m fattn conform fattn` is the whole of it."""

from fattn import conformance

# these compile in little time
QUICK = ["masks.compressed", "dense.alibi", "merge.merge", "merge.finish", "rope.yarn", "rope.half", "paged.gather", "standard.prepare"]
globals().update(conformance.tests("fattn", operations=QUICK, examples=5))

"""The conformance kit: holds an implementation of these functions to the definitions.

From a test file: `globals().update(conformance.tests("mypackage"))`. For one operation: `conformance.check("dense.attend", "mypackage")`.
From a shell: `python -m fattn conform mypackage`.
"""

from fattn.conformance.kit import check, tests
from fattn.conformance.targets import Target, target_of

__all__ = ["Target", "check", "target_of", "tests"]

"""What an operator's own error means: the documented codes of aclnn and of the runtime, read for the caller.

Source: the documents "aclnn return codes" and "aclError" of CANN 8.5 to 9.1.
"""

from __future__ import annotations

import re

from fattn.types import Unsupported

_TABLE = "python -m npu support lists the limits that are known; python -m npu probe asks this host's operators"
# What the operator refuses: its arguments. Everything else is a failure, of the installation or of the device.
_REFUSALS = {
    161001: "a tensor that the operator needs was not given",
    161002: "the operator's argument check: a dtype, rank, shape or attribute that it does not take",
    561001: "the operator could not infer its output shape from these inputs",
    561002: "the operator's tiling: a shape, head size, block size or mode that its kernel has no plan for",
    561103: "the operator met a null pointer inside: usually a combination of optional arguments that it does not take",
}
_FAILURES = {
    361001: "the operator's call of the runtime failed: usually no memory; free some, or make the batch smaller",
    561003: "no kernel binary for these dtypes on this chip: install the operator package (opp kernels) of this chip and CANN release",
    561107: "CANN is not set up in this process: source its set_env.sh, so that ASCEND_OPP_PATH is set",
    107002: "no device context in this thread: call torch.npu.set_device first",
    207001: "the device has no memory left",
    507899: "the driver failed: no device, a device in a bad state, or stand-ins for CANN; see npu-smi info, and python -m npu doctor",
}
_FAMILIES = (
    (re.compile("107"), "the runtime did not take a handle, context or parameter"),
    (re.compile("207"), "the device has no more memory, streams or events"),
    (
        re.compile("507"),
        "the device failed while it worked, perhaps in an earlier call; a new process is needed before it can be used again",
    ),
    (re.compile("561"), "a failure inside the operator; the text says more"),
)
_CODE = re.compile(r"(?:error code is|errorcode|retcode|error code:?|error)\W{0,3}([1-5]\d{5})\b", re.IGNORECASE)
_WHEEL = re.compile(r"ERR\d\d(\d)\d\d")  # torch_npu's own checks: ERR01003 OPS invalid value
_LATER = "Errors may surface after the call that made them: with ASCEND_LAUNCH_BLOCKING=1 they come from it"


def code_of(error: Exception) -> int | None:
    """The code of aclnn or of the runtime in an error's text, or None."""
    found = _CODE.search(str(error))
    return int(found.group(1)) if found else None


def device_failed(error: Exception) -> bool:
    """Whether the device itself failed, so that the process cannot go on using it."""
    return str(code_of(error) or "").startswith("507")


def reading(error: RuntimeError, operator: str) -> RuntimeError | None:
    """The error to raise instead of one that an operator raised, with its text and what it means; None where it means nothing to us.

    Unsupported where the operator refuses its arguments, RuntimeError where the installation or the device failed.
    """
    text, code = str(error).strip(), code_of(error)
    if code is None:
        if not _WHEEL.search(text):
            return None
        return Unsupported(operator, "refused by torch_npu", f"its own argument check says: {text}", _TABLE)
    if code in _REFUSALS:
        return Unsupported(operator, f"error {code}", f"{_REFUSALS[code]}. It says: {text}", f"{_TABLE}. {_LATER}")
    said = _FAILURES.get(code) or next((says for family, says in _FAMILIES if family.match(str(code))), None)
    return said and RuntimeError(f"{operator} failed with error {code}: {said}. {_LATER}. It says: {text}")

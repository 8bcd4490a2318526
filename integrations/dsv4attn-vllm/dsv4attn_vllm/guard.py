"""Which versions of vLLM this wheel serves, and its refusals and log; all else is shared by the wheels of engines."""

from __future__ import annotations

from dsv4attn.integrations.engines import VLLM, Guard, OnceLog
from dsv4attn.integrations.engines import RefusedError as EngineRefusedError

LOG = OnceLog(VLLM, "vllm.dsv4attn")


class RefusedError(EngineRefusedError):
    """dsv4attn cannot serve this vLLM, model or configuration. The message says what to change."""

    engine = VLLM


GUARD = Guard(RefusedError, tested=("0.32.0", "0.33.0"))
"""tested: the versions of vLLM whose classes the tests of this package ran with."""


def is_before_0_33(version: str) -> bool:
    """Whether a version of vLLM is older than 0.33. One without numbers, as a source tree has it, is not."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return [] < numbers < [0, 33]

"""Which versions of vLLM this wheel serves, and its refusals and log; all else is shared by the wheels of engines."""

from __future__ import annotations

from dsv4attn.integrations.engines import VLLM, Guard, OnceLog
from dsv4attn.integrations.engines import RefusedError as EngineRefusedError

__all__ = ["GUARD", "LOG", "RefusedError"]

LOG = OnceLog(VLLM, "vllm.dsv4attn")


class RefusedError(EngineRefusedError):
    """dsv4attn cannot serve this vLLM, model or configuration. The message says what to change."""

    engine = VLLM


GUARD = Guard(RefusedError, tested=("0.33.0",))
"""tested: the versions of vLLM whose classes the tests of this package ran with."""

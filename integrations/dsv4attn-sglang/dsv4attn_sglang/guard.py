"""Which versions of SGLang this wheel serves, and its refusals and log; all else is shared by the wheels of engines."""

from __future__ import annotations

from dsv4attn.integrations.engines import SGLANG, Guard, OnceLog
from dsv4attn.integrations.engines import RefusedError as EngineRefusedError

LOG = OnceLog(SGLANG, "dsv4attn_sglang")


class RefusedError(EngineRefusedError):
    """dsv4attn cannot serve this SGLang, model or configuration. The message says what to change."""

    engine = SGLANG


GUARD = Guard(RefusedError, tested=("0.5.23",))
"""tested: the versions of SGLang whose modules the tests of this package ran with."""

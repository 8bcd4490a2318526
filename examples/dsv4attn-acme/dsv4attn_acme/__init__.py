"""DeepSeek-V4 attention on `acme1` devices.

Hardware: `acme1`, and any CPU when asked for by name. Status: as `dsv4attn new-plugin` wrote it, with kernels in torch;
passes the conformance kit on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.core.contract.backend import BackendInfo
from dsv4attn.hookspecs import hookimpl
from dsv4attn_acme.support import support

INFO = BackendInfo(
    name="acme",
    api="1.0",
    factory="dsv4attn_acme.launch:AcmeBackend",
    support=support,
    summary="plain torch in tiles, to start from",
    native=("acme1",),
    runs_on=("cpu",),
    options={"tile_tokens": None},
)


@hookimpl
def dsv4attn_backends() -> Sequence[BackendInfo]:
    """One backend."""
    return [INFO]

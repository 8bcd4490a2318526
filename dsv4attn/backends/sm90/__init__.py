"""NVIDIA Hopper (H100, H200, GH200): warp-specialised kernels in Gluon, on pages of records or gathered bf16 rows.

Chosen automatically on sm_90. Requested by name, it also runs on a CPU under Triton's interpreter (TRITON_INTERPRET=1),
with twins of the kernels that have the same schedule. The Gluon kernels serve bf16 queries of at most 128 heads: one
over records, of V4's 448 + 64 dims in OCP codes or e2m1 or of V4.1's 512, one over bf16 rows, and for decodes of few
tokens one with a program for each tile of records in OCP codes or of V4.1. The kernel that all Triton backends share
serves every other call, with the same answers, and decodes of few tokens on bf16 rows and on V4's records of 4 bits,
where it is faster. Shapes, strides and dtypes determine which kernel serves a call.

Prefill reads pages, or rows to which core has copied a chunk's keys in the workspace, whichever is faster for a chunk.
Option `prefill=paged` or `prefill=gathered` takes one of them for all; pages need no workspace for keys.

Status: correct and measured on an NVIDIA H200, torch 2.11, Triton 3.6.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends._triton.support import support
from dsv4attn.backends.sm90.explain_notes import notes
from dsv4attn.core.contract.backend import API_VERSION, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.hookspecs import hookimpl

INFO = BackendInfo(
    name="sm90",
    api=API_VERSION,
    factory="dsv4attn.backends.sm90.launch:Sm90Backend",
    support=support,
    layer_ops=LAYER_PARTS,
    notes=notes,
    summary="Hopper; decode and prefill on pages or rows, by warp-specialised kernels in Gluon",
    native=("sm_90",),
    runs_on=("sm_90", "cpu"),
    rank=Rank.VENDOR,
    packages=("torch",),
    options={"prefill": "auto", "tuning": "auto", "deterministic": False, "projection": "bf16", "index_sums": "fp8"},
)


@hookimpl
def dsv4attn_backends() -> Sequence[BackendInfo]:
    """The Hopper backend."""
    return [INFO]

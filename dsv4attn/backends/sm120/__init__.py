"""RTX 5090, RTX PRO 6000 (sm_120) and DGX Spark (sm_121): FlashInfer where it serves a call, our kernel where not.

Chosen automatically there. By name it also runs on any other GPU that Triton drives, or on a CPU under Triton's
interpreter (TRITON_INTERPRET=1), with our kernel. Both phases read pages; nothing is gathered. FlashInfer is optional,
imported only after this backend was chosen on such a card, and rounds queries and weights to fp8; option
`kernel=own` gives every call to our kernel, which does not round them.

FlashInfer's formats `fp8_dsv41` and `fp8_dsv41_fp4_ca`, of split V4.1 records, and `fp8_dsv41_inline` and
`fp8_dsv41_inline_fp4_ca`, of interleaved ones, are served where the installed version has them. Its format `nvfp4`, of
`v4_nvfp4` records, rounds queries and weights to 4 bits: option `kernel=flashinfer` asks for it, and otherwise our
kernel reads these records. The formats follow 0.7.2.post1, the inline ones 0.7.4, and are untested on real hardware.

Status: our kernel is correct in the interpreter and on an NVIDIA H200, and compiled for sm_120; calls of FlashInfer's
follow its package's interface, which tests check without a card. Neither has run on SM120 hardware. `dsv4attn conform
sm120` writes a certificate on such a card.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends._triton.support import support
from dsv4attn.backends.sm120.explain_notes import notes
from dsv4attn.core.contract.backend import API_VERSION, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.hookspecs import hookimpl

INFO = BackendInfo(
    name="sm120",
    api=API_VERSION,
    factory="dsv4attn.backends.sm120.launch:Sm120Backend",
    support=support,
    layer_ops=LAYER_PARTS,
    notes=notes,
    summary="SM120 GPUs; decode and prefill on pages, by FlashInfer where it serves, else by our Triton kernel",
    native=("sm_12*",),
    runs_on=("cuda", "hip", "xpu", "cpu"),
    rank=Rank.VENDOR,
    packages=("torch",),
    options={
        "kernel": "auto",
        "in_range": False,
        "tuning": "auto",
        "deterministic": False,
        "projection": "bf16",
    },
)


@hookimpl
def dsv4attn_backends() -> Sequence[BackendInfo]:
    """Return the descriptor of the `sm120` backend."""
    return [INFO]

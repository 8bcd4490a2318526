"""The Backend of the SM120 room: both phases on pages."""

from __future__ import annotations

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends.sm120.tuning import ROWS

__all__ = ["Sm120Backend"]


class Sm120Backend(TritonBackend):
    """tmp."""

    name = "sm120"
    rows = ROWS

    def __init__(self, *, kernel="auto", precision="auto", tuning="auto", deterministic=False):
        super().__init__(tuning=tuning, deterministic=deterministic)

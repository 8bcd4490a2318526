"""The generic backend: the shared one, with its own numbers."""

from __future__ import annotations

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends.triton.tuning import TUNING


class GenericBackend(TritonBackend):
    """Attention straight on pages, decode and prefill."""

    name = "triton"
    tunings = TUNING

"""Constants and numbers that launchers of index kernels share."""

from __future__ import annotations

from dsv4attn.backends._triton.launching.launch_cache import Constants

CONSTANTS = Constants({"BLOCK": 1024})
"""Columns that a program reads together; wider rows take several rounds."""


def depth_of(num_reqs: int) -> int:
    """Halvings after which `request_of` has one request left."""
    return max(num_reqs - 1, 0).bit_length()

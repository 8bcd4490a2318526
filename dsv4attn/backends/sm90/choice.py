"""Which kernel serves a problem, for `dsv4attn explain`: from facts alone, on any machine."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends._triton.support import index_notes
from dsv4attn.core.device import DeviceFacts
from dsv4attn.core.problem import CacheFacts, Problem

__all__ = ["MOST_HEADS", "notes"]

MOST_HEADS = 128
"""Most heads of a layer. More heads take more than two blocks of 64, which has not been tested."""


def notes(device: DeviceFacts, problem: Problem) -> Sequence[str]:
    """The kernel that attends, and how scores of the indexer are computed."""
    return [_attends(device, problem), *index_notes(device, problem)]


def _attends(device: DeviceFacts, problem: Problem) -> str:
    """One line: the kernel that serves the problem, and every reason if it is the shared kernel."""
    against = [*_against(problem)]
    if against:
        return f"the shared Triton kernel: {'; '.join(against)}"
    return "the Gluon kernel for Hopper, where q, out and pages begin at multiples of 16 bytes"


def _against(problem: Problem) -> Sequence[str]:
    found = []
    layer = problem.layer
    if problem.q_dtype != "bfloat16":
        found.append(f"q is {problem.q_dtype}, not bfloat16")
    if (layer.nope_dim, layer.rope_dim) != (448, 64):
        found.append(f"keys of {layer.nope_dim} + {layer.rope_dim} dims, not 448 + 64")
    if layer.num_heads > MOST_HEADS:
        found.append(f"{layer.num_heads} heads, more than {MOST_HEADS}")
    caches = [cache for cache in (problem.swa, problem.compressed) if cache is not None]
    rows = len(caches) == 1 and _layout_and_dtype(caches[0]) == ("rows", "bfloat16")
    if not rows and any(_layout_and_dtype(cache) != ("fp8_ds_mla", "e4m3fn") for cache in caches):
        found.append("caches that are not fp8_ds_mla of e4m3fn")
    if problem.deterministic:
        found.append("deterministic")
    return found


def _layout_and_dtype(cache: CacheFacts) -> tuple[str, str]:
    return cache.layout, cache.dtype

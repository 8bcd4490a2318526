"""Which kernel serves a problem, for `dsv4attn explain`: from facts alone, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dsv4attn.backends._triton.support import index_notes
from dsv4attn.backends.sm90.tuning import PREFILL_COST_MODEL
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.layer_geometry import LayerGeometry

__all__ = ["MOST_HEADS", "notes"]

_V4, _CODES, _NIBBLES = ("fp8_ds_mla", "e4m3fn", 64), ("v41_fp8", "e4m3fn", 32), ("v41_fp4", "e2m1", 16)
_RECORDS = {(_V4,), (_V4, _V4), (_CODES,), (_CODES, _CODES), (_CODES, _NIBBLES)}
MOST_HEADS = 128
"""Most heads of a layer. More heads take more than two blocks of 64, which has not been tested."""


def notes(device: DeviceFacts, problem: Problem) -> Sequence[str]:
    """The kernel that attends, what `prefill=auto` would choose, and how scores of the indexer are computed."""
    return [_attends(device, problem), *_roads(problem), *index_notes(device, problem)]


def _roads(problem: Problem) -> Iterator[str]:
    """Prefill from records: from how many tokens on, behind some, `prefill=auto` gathers keys, and takes raw q."""
    if problem.phase != "prefill" or problem.swa.layout == "rows" or [*_against(problem)]:
        return
    layer = problem.layer

    def rows(before: int, tokens: int) -> bool:
        return not PREFILL_COST_MODEL.prefers_pages(layer, [(before, tokens)], _rows(layer, before, tokens))

    def raw(before: int, tokens: int) -> bool:
        return PREFILL_COST_MODEL.prefers_raw_q(layer, [([(before, tokens)], _rows(layer, before, tokens))])

    yield f"prefill=auto gathers a prompt's keys from {_fewest(rows)} (by its model)"
    if layer.q_norm:
        yield f"layers with raw_q have q's norm and rotation in that kernel from {_fewest(raw)}"


def _fewest(chosen: Callable[[int, int], bool]) -> str:
    """From how many tokens on something is chosen, behind none and many."""
    fewest = [next((n for n in (2**i for i in range(7, 15)) if chosen(before, n)), 0) for before in (0, 8192, 65536)]
    return f"{', '.join(f'{n:,}' if n else 'none' for n in fewest)} tokens on, behind 0, 8,192, 65,536"


def _rows(layer: LayerGeometry, before: int, tokens: int) -> int:
    """Rows that are gathered for the tokens of one request."""
    return layer.entries(before + tokens) + min(before, layer.window - 1) + tokens


def _attends(device: DeviceFacts, problem: Problem) -> str:
    """One line: the kernel that serves the problem, and every reason if it is the shared kernel."""
    against = [*_against(problem)]
    if against:
        return f"the shared Triton kernel: {'; '.join(against)}"
    few = ""
    if problem.phase == "decode":
        other = "its kernels of one tile" if problem.swa.layout == "fp8_ds_mla" else "the shared Triton kernel"
        few = f"; {other} for few tokens, unless small=gluon"
    return f"the Gluon kernel for Hopper, where q, out and pages begin at multiples of 16 bytes{few}"


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
    records = [(*_layout_and_dtype(cache), cache.group_size) for cache in caches]
    if not rows and tuple(records) not in _RECORDS:
        found.append("caches that are not all fp8_ds_mla of e4m3fn, nor v41_fp8, or v41_fp8 and v41_fp4")
    elif len({cache.arrangement for cache in caches}) > 1 or (_V4 in records and caches[0].arrangement != "split"):
        found.append("scales elsewhere: behind the page's records in fp8_ds_mla, and in V4.1's two caches alike")
    if problem.deterministic:
        found.append("deterministic")
    return found


def _layout_and_dtype(cache: CacheFacts) -> tuple[str, str]:
    return cache.layout, cache.dtype

"""Constructors of the case inputs of conformance cases: a step, a call, or rows, with defaults.

Geometry is that of DeepSeek-V4-Flash (448 + 64 dims, window 128, ratios 4 and 128) with few tokens and, mostly, few
heads, so that kernels for this geometry alone run every case. Only the cases `dims-*` need another geometry.
"""

from __future__ import annotations

from typing import Any

import attrs

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing.check_insert import CacheRows
from dsv4attn.testing.oracle_cache import PagePlacement
from dsv4attn.testing.random_step import StepFixture, layouts, v41_layouts
from dsv4attn.testing.single_call import Pattern, SingleCall

__all__ = ["KINDS", "call", "flash", "layout", "rows", "step"]

KINDS = tuple(kind.value for kind in LayerKind)
HEADS = 8
GROUP = 64


def flash(kind: str, heads: int = HEADS, select: int = 512, ratio: int = 0) -> ModelGeometry:
    """DeepSeek-V4-Flash with one window-only layer and one of a kind. select: entries that an indexer selects.

    ratio: another one than the kind has in V4; V4.1's 1, say.
    """
    whole = ModelGeometry.preset("flash")
    kinds = {LayerKind.SWA: 1, LayerKind(kind): ratio or whole.layer_of_kind(kind).compress_ratio}
    return attrs.evolve(whole, num_heads=heads, o_groups=1, index_topk=select, layers=tuple(kinds.items()))


def layout(name: str, geometry: ModelGeometry | None = None) -> KVCacheLayout:
    """A built-in layout by its short name: ocp, fnuz, interleaved, bf16, fp32, or one of `v41_layouts`."""
    geometry = geometry or flash("swa")
    return {**layouts(geometry, GROUP), **v41_layouts(geometry)}[name]


def step(
    kind: str,
    *requests: tuple[int, ...],
    heads: int = HEADS,
    select: int = 512,
    cache: str = "ocp",
    compressed: str | None = None,
    pages: tuple[int, int] = (64, 256),
    ratio: int = 0,
    **more: Any,  # noqa: ANN401 - fields of a StepFixture
) -> StepFixture:
    """One step of a batch. pages: records of a window page, tokens of a compressed one."""
    geometry = more.pop("geometry", None) or flash(kind, heads, select, ratio)
    fields: dict[str, Any] = {
        "kind": kind,
        "requests": requests,
        "geometry": geometry,
        "layout": layout(cache, geometry),
        "compressed_layout": layout(compressed, geometry) if compressed else None,
        "swa_block_size": pages[0],
        "compressed_block_tokens": pages[1],
    }
    return StepFixture(**{**fields, **more})


def call(
    phase: Phase,
    pattern: Pattern,
    kind: str = "c4a",
    *,
    heads: int = HEADS,
    cache: str = "ocp",
    **more: Any,  # noqa: ANN401 - fields of a Call
) -> SingleCall:
    """One call of a backend, made by hand."""
    geometry = flash(kind, heads)
    fields = {"phase": phase, "pattern": pattern, "kind": kind, "geometry": geometry, "layout": layout(cache)}
    return SingleCall(**{**fields, **more})


def rows(cache: str = "ocp", *, heads: int = HEADS, page: int = 64, **more: Any) -> CacheRows:  # noqa: ANN401 - fields of Rows
    """Rows for a step around attention."""
    return CacheRows(
        **{"geometry": flash("swa", heads), "layout": layout(cache), "placement": PagePlacement(page), **more}
    )

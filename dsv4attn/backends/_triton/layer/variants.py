"""Every variant that the layer's steps can need, part by part, for warm-up and cross-compilation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from triton import next_power_of_2

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.layer import (
    candidates,
    compress,
    hyper_connections_variants,
    index_logits,
    index_query,
    latents,
    norms,
    ranks,
    select,
)
from dsv4attn.core.contract.info import LAYER_PARTS
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry

__all__ = ["variants"]

NORMS = torch.bfloat16, torch.float32
"""Dtypes of the weights of norms."""


def variants(bounds: WarmupSpec, arch: str, *, deterministic: bool = False) -> Iterator[Variant]:
    """Every variant that the steps of a model within the bounds can need on an architecture.

    deterministic: whether the backend is.
    """
    model = bounds.model
    assert model is not None
    if {*LAYER_PARTS} <= {*bounds.parts}:  # whole layers; engines have norms of their own
        dims = model.q_lora_rank, bounds.layers[0].head_dim
        yield from norms.variants(*dims, bounds.q_dtype, NORMS, aligned_rows=bounds.aligned_rows)
    for layer in bounds.layers:
        if layer.kind is LayerKind.SWA:
            continue
        if "compressor" in bounds.parts:
            yield from _latents(layer, bounds) if model.shared_latent else _entries(layer, bounds, arch)
        if layer.kind is LayerKind.CSA:
            yield from _indexer(model, layer, bounds, arch)
    if "hyper_connections" in bounds.parts:
        streams = hyper_connections_variants.StreamForms(
            model.hc_mult,
            model.hidden_size,
            bounds.q_dtype,
            delayed=model.shared_latent,
            aligned=bounds.aligned_rows,
            arch=arch,
            deterministic=deterministic,
            sinkhorn_eps=model.hc_eps,
        )
        for norm_dtype in dict.fromkeys((None, bounds.q_dtype, torch.float32)):
            yield from hyper_connections_variants.variants(streams, norm_dtype)


def _entries(layer: LayerGeometry, bounds: WarmupSpec, arch: str) -> Iterator[Variant]:
    """DeepSeek-V4's compressor, for keys and for index keys."""
    for layout in [bounds.compressed, *([bounds.index_layout] if layer.kind is LayerKind.CSA else [])]:
        yield from compress.variants(
            layout,
            layer.compress_ratio,
            layer.rope_dim,
            overlap=layer.overlap,
            aligned=bounds.aligned,
            norms=NORMS,
            arch=arch,
        )


def _latents(layer: LayerGeometry, bounds: WarmupSpec) -> Iterator[Variant]:
    """DeepSeek-V4.1's compressor, and the kernels that store its latents."""
    ratio, rope, aligned = layer.compress_ratio, layer.rope_dim, bounds.aligned
    yield from latents.latent_variants(layer.head_dim, ratio, aligned=aligned, norms=NORMS)
    yield from latents.variants(bounds.compressed, ratio, rope, torch.bfloat16, (None,), aligned=aligned)
    for dtype in NORMS:
        yield from latents.variants(bounds.index_layout, ratio, rope, dtype, NORMS, aligned=aligned)


def _indexer(model: ModelGeometry, layer: LayerGeometry, bounds: WarmupSpec, arch: str) -> Iterator[Variant]:
    """Index queries, scores and selection. Selection has two levels if the model has candidates."""
    index, heads, parts, sharing = bounds.index_layout, model.index_n_heads, bounds.parts, model.sharing
    if sharing is not None and sharing.candidate_source_layer_id < 0:
        sharing = None
    if "indexer" in parts:
        dtypes = tuple(dict.fromkeys((bounds.q_dtype, torch.float32)))
        yield from index_query.variants(index, heads, layer.rope_dim, bounds.q_dtype, dtypes, arch=arch)
    if "indexer" in parts or "selection" in parts:
        of_blocks = {}
        if sharing is not None:
            places = next_power_of_2(sharing.candidate_topk_blocks)
            of_blocks = {"block_size": sharing.candidate_block_size, "places": places}
        yield from index_logits.variants(index, heads, arch, aligned=bounds.aligned, **of_blocks)
    if "selection" not in parts:
        return
    entries = bounds.limits.max_model_len // layer.compress_ratio
    over_ranks = bounds.over_ranks and not model.shared_latent and layer.topk <= select.MOST
    yield from select.variants(layer.topk, entries, arch, proposes=over_ranks)
    if over_ranks:
        yield from ranks.variants(layer.topk)
    if sharing is not None:
        size, most = sharing.candidate_block_size, sharing.candidate_topk_blocks
        yield from candidates.variants(size, most)
        yield from select.variants(most, -(-entries // size), arch)
        yield from select.variants(layer.topk, min(most * size, entries), arch, of_blocks=True)

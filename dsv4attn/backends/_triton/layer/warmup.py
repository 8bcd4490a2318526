"""The launches of a layer's ops for a model: which sizes, dtypes and layouts a warm-up records them with."""

from __future__ import annotations

import torch

from dsv4attn.backends._triton.layer.compressor import latents
from dsv4attn.backends._triton.layer.compressor import launch as compress
from dsv4attn.backends._triton.layer.hyper_connections import launch as hyper_connections
from dsv4attn.backends._triton.layer.indexer import candidates
from dsv4attn.backends._triton.layer.indexer import launch as index_logits
from dsv4attn.backends._triton.layer.indexer import query as index_query
from dsv4attn.backends._triton.layer.projections import norms
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends._triton.layer.selection import ranks
from dsv4attn.backends._triton.sizes import next_power_of_2
from dsv4attn.core.contract.info import LAYER_PARTS
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry

NORMS = torch.bfloat16, torch.float32
"""Dtypes of the weights of norms."""


def launch_within(bounds: WarmupSpec, *, deterministic: bool = False, exact_sums: bool = False) -> None:
    """Launch every form that the ops of a model within the bounds can ask for, inside a recording.

    deterministic: whether the backend is. exact_sums: see `index_logits.multiplies_codes`.
    """
    model = bounds.model
    assert model is not None
    if {*LAYER_PARTS} <= {*bounds.parts}:  # whole layers; engines have norms of their own
        dims = model.q_lora_rank, bounds.layers[0].head_dim
        norms.variants(*dims, bounds.q_dtype, NORMS, aligned_rows=bounds.aligned_rows)
    for layer in bounds.layers:
        if layer.kind is LayerKind.SWA:
            continue
        if "compressor" in bounds.parts:
            (_latents if model.shared_latent else _entries)(layer, bounds)
        if layer.kind is LayerKind.CSA:
            _indexer(model, layer, bounds, exact_sums=exact_sums)
    if "hyper_connections" in bounds.parts:
        for norm_dtype in dict.fromkeys((None, bounds.q_dtype, torch.float32)):
            hyper_connections.variants(
                model.hc_mult,
                model.hidden_size,
                bounds.q_dtype,
                norm_dtype,
                delayed=model.shared_latent,
                aligned=bounds.aligned_rows,
                deterministic=deterministic,
                sinkhorn_eps=model.hc_eps,
            )


def _entries(layer: LayerGeometry, bounds: WarmupSpec) -> None:
    """DeepSeek-V4's compressor, for keys and for index keys."""
    for layout in [bounds.compressed, *([bounds.index_layout] if layer.kind is LayerKind.CSA else [])]:
        ratio, aligned = layer.compress_ratio, bounds.aligned
        compress.variants(layout, ratio, layer.rope_dim, overlap=layer.overlap, aligned=aligned, norms=NORMS)


def _latents(layer: LayerGeometry, bounds: WarmupSpec) -> None:
    """DeepSeek-V4.1's compressor, and the kernels that store its latents."""
    ratio, rope, aligned = layer.compress_ratio, layer.rope_dim, bounds.aligned
    latents.latent_variants(layer.head_dim, ratio, aligned=aligned, norms=NORMS)
    latents.variants(bounds.compressed, ratio, rope, torch.bfloat16, (None,), aligned=aligned)
    for dtype in NORMS:
        latents.variants(bounds.index_layout, ratio, rope, dtype, NORMS, aligned=aligned)


def _indexer(model: ModelGeometry, layer: LayerGeometry, bounds: WarmupSpec, *, exact_sums: bool) -> None:
    """Index queries, scores and selection. Selection has two levels if the model has candidates."""
    index, heads, parts, sharing = bounds.index_layout, model.index_n_heads, bounds.parts, model.sharing
    if sharing is not None and sharing.candidate_source_layer_id < 0:
        sharing = None
    if "indexer" in parts:
        dtypes = tuple(dict.fromkeys((bounds.q_dtype, torch.float32)))
        index_query.variants(index, heads, layer.rope_dim, bounds.q_dtype, dtypes)
    if "indexer" in parts or "selection" in parts:
        of_blocks: dict[str, int] = {}
        if sharing is not None:
            places = next_power_of_2(sharing.candidate_topk_blocks)
            of_blocks = {"block_size": sharing.candidate_block_size, "places": places}
        index_logits.variants(index, heads, aligned=bounds.aligned, exact_sums=exact_sums, **of_blocks)
    if "selection" not in parts:
        return
    entries = bounds.limits.max_model_len // layer.compress_ratio
    over_ranks = bounds.over_ranks and not model.shared_latent and layer.topk <= select.MOST
    select.variants(layer.topk, entries, proposes=over_ranks)
    if over_ranks:
        ranks.variants(layer.topk)
    if sharing is not None:
        size, most = sharing.candidate_block_size, sharing.candidate_topk_blocks
        candidates.variants(size, most)
        select.variants(most, -(-entries // size))
        select.variants(layer.topk, min(most * size, entries), of_blocks=True)

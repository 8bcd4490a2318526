"""`WarmupSpec`: the layers, cache layouts and options that a backend compiles its kernels for ahead of time."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen, validators

from dsv4attn.core.argument_checks import at_least
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.record_layout import check_window
from dsv4attn.core.contract.info import LAYER_PARTS
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError

__all__ = ["WarmupSpec"]

_positive = at_least(1)
_plain = validators.in_((torch.bfloat16, torch.float32))
_parts = validators.deep_iterable(validators.in_(LAYER_PARTS), validators.instance_of(tuple))
_PAGE_TOKENS = 256
"""Tokens whose entries share a page of a compressed cache, by default."""


@frozen(kw_only=True)
class WarmupSpec:
    """The layers, caches and options of every later call. Build it with `of`.

    Kernels do not depend on a batch: the numbers of tokens, requests, heads and keys are arguments of a launch. None
    for an option means that kernels with and without it are compiled.

    layers: at least one of each kind that will run.
    limits: of every batch.
    swa: layout of the window caches.
    compressed: layout of the compressed caches.
    swa_block_size: records of a window cache's page.
    compressed_block_size: records of a compressed cache's page, on every layer; default: the entries of 256 tokens.
    q_dtype: of q, kv, o and the output: bf16 or fp32. k that is rotated already may have either dtype.
    sink: whether heads have sinks.
    lse: whether the log-sum-exp is an output.
    aligned: whether all caches, their pages, and rows of plain caches begin at multiples of 16 bytes.
    aligned_rows: whether all rows of q, kv, k, o, wo_a and outputs begin at multiples of 16 bytes, as those of the
        model's tensors and of slices of its fused projections do. False: kernels for other rows are compiled too.
    num_groups: groups of heads of the output projection on this device.
    o_lora_rank: elements that the output projection makes of each group.
    wo_a_dtype: of the projection's matrices. Matrices in fp8 are converted, and count as bf16. None: bf16 and fp32.
    wo_a_blocks: rows and columns that share a scale in fp8 matrices, for backends that multiply fp8 codes.
    model: the model whose ops around attention run on the backend too; None: attention alone.
    parts: the parts of `model` that run on the backend, names of `LAYER_PARTS`.
    index: layout of the index keys; default: `index_fp8` of the model's dims.
    over_ranks: whether ranks share the compressed entries (`ContextParallel`), and exchange and merge their results.
    """

    layers: tuple[LayerGeometry, ...] = field(validator=validators.min_len(1))
    limits: Limits
    swa: KVCacheLayout
    compressed: KVCacheLayout
    swa_block_size: int = field(default=64, validator=_positive)
    compressed_block_size: int | None = field(default=None, validator=validators.optional(_positive))
    q_dtype: torch.dtype = field(default=torch.bfloat16, validator=_plain)
    sink: bool | None = True
    lse: bool | None = None
    aligned: bool = True
    aligned_rows: bool = False
    num_groups: int = field(default=1, validator=_positive)
    o_lora_rank: int = field(default=1024, validator=_positive)
    wo_a_dtype: torch.dtype | None = field(default=None, validator=validators.optional(_plain))
    wo_a_blocks: tuple[int, ...] = (128, 32)
    model: ModelGeometry | None = None
    parts: tuple[str, ...] = field(default=LAYER_PARTS, validator=_parts)
    index: KVCacheLayout | None = None
    over_ranks: bool = False

    def __attrs_post_init__(self) -> None:
        check_window(self.swa, "bounds.swa")
        for layer in self.layers:
            for name, layout in (("swa", self.swa), ("compressed", self.compressed)):
                dims, actual = f"{layer.nope_dim} + {layer.rope_dim}", f"{layout.nope_dim} + {layout.rope_dim}"
                if actual != dims:
                    expected = f"a layout of {dims} dims, as the {layer.kind.value} layer has"
                    raise ArgumentError(f"bounds.{name}", expected=expected, actual=actual)

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        limits: Limits,
        *,
        swa: KVCacheLayout | None = None,
        compressed: KVCacheLayout | None = None,
        layer_parts: bool = False,
        **options: Any,  # noqa: ANN401 - the other fields
    ) -> WarmupSpec:
        """The spec of a model on one rank: a layer of each kind that it has, and a window-only layer for drafts.

        swa: layout of the window caches, by default `fp8_ds_mla` of the model's dims.
        compressed: layout of the compressed caches, by default that of the window caches.
        layer_parts: whether the parts around attention, all or those of `parts`, run on the backend too.
        options: the other fields.
        """
        if swa is None:
            swa = KVCacheLayout.fp8_ds_mla(geometry.head_dim - geometry.rope_dim, geometry.rope_dim)
        layers = tuple(dict.fromkeys((geometry.layer_of_kind(LayerKind.SWA), *geometry.distinct_layers)))
        # checkpoints of V4.1 have blocks of 32 x 32; engines also convert them to others
        blocks = (32, 128) if geometry.shared_latent else (128,)
        of_model: dict[str, Any] = {"num_groups": geometry.o_groups, "o_lora_rank": geometry.o_lora_rank}
        of_model["wo_a_blocks"] = blocks
        if layer_parts:
            of_model["model"] = geometry
        compressed = swa if compressed is None else compressed
        return cls(layers=layers, limits=limits, swa=swa, compressed=compressed, **{**of_model, **options})

    def caches(self, layer: LayerGeometry) -> tuple[tuple[KVCacheLayout, int], ...]:
        """(layout, records of a page) of each cache of a layer, the window's first."""
        window = (self.swa, self.swa_block_size)
        if layer.kind is LayerKind.SWA:
            return (window,)
        entries = max(_PAGE_TOKENS // layer.compress_ratio, 1)
        return (window, (self.compressed, self.compressed_block_size or entries))

    @property
    def index_layout(self) -> KVCacheLayout:
        """Layout of the index keys of `model`."""
        assert self.model is not None
        return self.index or KVCacheLayout.index_fp8(self.model.index_head_dim)

    @property
    def with_sink(self) -> tuple[bool, ...]:
        """The values of `sink` to compile for."""
        return (False, True) if self.sink is None else (self.sink,)

    @property
    def wo_a_dtypes(self) -> tuple[torch.dtype, ...]:
        """The values of `wo_a_dtype` to compile for."""
        return (torch.bfloat16, torch.float32) if self.wo_a_dtype is None else (self.wo_a_dtype,)

    @property
    def with_lse(self) -> tuple[bool, ...]:
        """The values of `lse` to compile for."""
        return (False, True) if self.lse is None else (self.lse,)

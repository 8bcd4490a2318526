"""What all case inputs are made of: geometries, layouts, random numbers, and the base class `CaseInput`.

The geometry is that of DeepSeek-V4-Flash (448 + 64 dims, window 128, ratios 4 and 128) with few tokens and, mostly, few
heads, so that kernels for this geometry alone run every case. Only the cases `dims-*` need another geometry.

Every random number is a function of the seed, the request and the position. Steps that share a position therefore share
its rows, whatever else is in the batch, and position 1,048,575 costs no more than position 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import PRESETS, LayerGeometry, LayerKind, ModelGeometry, Rope, Yarn
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.kit.tolerances import F64, rounded, tolerance
from dsv4attn.testing.oracle import attention as oracle

KINDS = tuple(kind.value for kind in LayerKind)
HEADS = 8
GROUP = 64
PAGE_SIZES = (64, 128, 256, 512)
"""Records of a page that engines use."""
MOST_RANKS = 16
"""Largest size of tensor parallel whose head counts and group counts have cases."""


def _ranks() -> Iterator[ModelGeometry]:
    """The geometry of one rank, for each preset and each size of tensor parallel that the preset can be divided by."""
    for model in PRESETS.values():
        for size in range(1, MOST_RANKS + 1):
            with suppress(ArgumentError):
                yield model.tensor_parallel(size)


HEAD_COUNTS = tuple(sorted({rank.num_heads for rank in _ranks()}))
"""Heads of one rank."""
GROUP_COUNTS = tuple(sorted({rank.o_groups for rank in _ranks()}))
"""Output groups of one rank."""
INDEX_TOPKS = tuple(sorted({model.index_topk for model in PRESETS.values()}))
"""Entries that an indexer selects."""
INDEX_HEAD_COUNTS = tuple(sorted({model.index_n_heads for model in PRESETS.values()}))
"""Heads of an indexer; every rank has all of them."""


def flash(kind: str, heads: int = HEADS, select: int = 512, ratio: int = 0) -> ModelGeometry:
    """DeepSeek-V4-Flash with one window-only layer and one of a kind. select: entries that an indexer selects.

    ratio: another one than the kind has in V4; V4.1's 1, say.
    """
    whole = ModelGeometry.preset("flash")
    kinds = {LayerKind.SWA: 1, LayerKind(kind): ratio or whole.layer_of_kind(kind).compress_ratio}
    return attrs.evolve(whole, num_heads=heads, o_groups=1, index_topk=select, layers=tuple(kinds.items()))


def layout(name: str, geometry: ModelGeometry | None = None) -> KVCacheLayout:
    """A layout by its short name: ocp, fnuz, interleaved, bf16, fp32, nvfp4, or of `v41_layouts`."""
    geometry = geometry or flash("swa")
    if name == "nvfp4":
        return KVCacheLayout.of_record("v4_nvfp4", geometry.head_dim - geometry.rope_dim, geometry.rope_dim)
    return {**layouts(geometry, GROUP), **v41_layouts(geometry)}[name]


def tiny_geometry(
    *,
    num_heads: int = 4,
    head_dim: int = 32,
    rope_dim: int = 8,
    window: int = 8,
    topk: int = 6,
    ratios: tuple[int, int] = (4, 16),
    o_groups: int = 1,
) -> ModelGeometry:
    """A model with one layer of each kind, so small that every row can be judged."""
    return ModelGeometry(
        num_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        window=window,
        index_topk=topk,
        layers=tuple(zip(LayerKind, (1, *ratios), strict=True)),
        max_position=2**20,
        hidden_size=64,
        o_groups=o_groups,
        o_lora_rank=8,
        compress_yarn=Yarn(16.0, 256),
        name="tiny",
    )


def layouts(geometry: ModelGeometry, group_size: int = 16) -> dict[str, KVCacheLayout]:
    """Every built-in layout for the dims of a model, by a short name."""
    dims = geometry.head_dim - geometry.rope_dim, geometry.rope_dim
    ocp = KVCacheLayout.fp8_ds_mla(*dims, group_size=group_size)
    return {
        "ocp": ocp,
        "fnuz": attrs.evolve(ocp, fp8_format=Fp8Format.FNUZ, fp8_max=Fp8Format.FNUZ.max),
        "interleaved": attrs.evolve(ocp, arrangement=Arrangement.INTERLEAVED),
        "bf16": KVCacheLayout.rows(*dims),
        "fp32": KVCacheLayout.rows(*dims, dtype=torch.float32),
    }


def v41_layouts(geometry: ModelGeometry) -> dict[str, KVCacheLayout]:
    """V4.1's records for the dims of a model, by a short name. Those of fp4 are for compressed caches."""
    dims, split = (geometry.head_dim - geometry.rope_dim, geometry.rope_dim), Arrangement.SPLIT
    return {
        "v41": KVCacheLayout.v41_fp8(*dims),
        "v41-split": KVCacheLayout.v41_fp8(*dims, arrangement=split),
        "v41-fp4": KVCacheLayout.v41_fp4(*dims),
        "v41-fp4-split": KVCacheLayout.v41_fp4(*dims, arrangement=split),
    }


def window_of(compressed: KVCacheLayout) -> KVCacheLayout:
    """The layout of the window next to a compressed cache: the same, if windows have it."""
    record = compressed.key_record
    return KVCacheLayout.of_record(record.window_record) if record and record.window_record else compressed


@cache
def frequencies(rope: Rope) -> oracle.F32:
    """Frequencies of a layer's rotation."""
    yarn = oracle.Yarn(**attrs.asdict(rope.yarn)) if rope.yarn else None
    return oracle.rope_inv_freq(rope.dim, rope.theta, yarn)


@cache
def _start(key: tuple[int, ...]) -> np.uint64:
    """Where the numbers of a key begin."""
    start: np.uint64 = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return start


def normal(key: tuple[int, ...], rows: NDArray[np.int64], width: int) -> F64:
    """Standard normal numbers [*rows.shape, width] that depend on the key, the row number and the column only."""
    x = rows.astype(np.uint64)[..., None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += _start(key)
    x ^= x >> np.uint64(30)  # the finaliser of splitmix64
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    first, second = ((x >> np.uint64(32)) + np.uint64(1)) / 2.0**32, (x & np.uint64(0xFFFFFFFF)) / 2.0**32
    return np.asarray(np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second))


def index_layout(name: str, dim: int = 128) -> KVCacheLayout:
    """A layout of index keys by its short name: fp8, fnuz, mxfp4, bf16, fp32."""
    if name == "mxfp4":
        return KVCacheLayout.index_mxfp4(dim)
    if name in ("fp8", "fnuz"):
        return KVCacheLayout.index_fp8(dim, fp8_format=Fp8Format.FNUZ if name == "fnuz" else Fp8Format.OCP)
    return KVCacheLayout.rows(dim - 64, 64, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[name])


@attrs.frozen(kw_only=True, eq=False, slots=False)
class CaseInput:
    """What a case runs: the base of all case inputs, with the model, the layer, and random numbers by a seed.

    A subclass has the tensors of an op or of a step, runs it, or both. The fields of every case input are:

    geometry: the model.
    layout: layout of the cache that the case is about.
    kind: kind of the layer.
    strided: names of the arguments whose rows lie apart, separated by spaces, or "all".
    seed: seed of all random numbers.
    device: torch device.
    """

    geometry: ModelGeometry
    layout: KVCacheLayout
    kind: LayerKind = attrs.field(default=LayerKind.CSA, converter=LayerKind)
    strided: str = ""
    seed: int = 0
    device: str = "cpu"

    @cached_property
    def layer(self) -> LayerGeometry:
        """The layer's geometry."""
        return self.geometry.layer_of_kind(self.kind)

    def named_layouts(self) -> list[KVCacheLayout]:
        """Layouts of all caches; a subclass with more than one cache names them all."""
        return [self.layout]

    @property
    def index_page(self) -> int:
        """Index keys of a page, and so entries of a page of the compressed cache of their layer."""
        return 64

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """The problems that a backend must support to run the case.

        Here: decode on the layer that an indexer belongs to. Its keys and the index keys have one dialect of fp8.
        """
        facts = CacheFacts.named((self.layout.fp8_format or Fp8Format.OCP).value, 64)
        return [Problem("decode", self.layer, facts, attrs.evolve(facts, page_size=self.index_page), 128, lse=lse)]

    def tensor(self, values: NDArray[np.generic], dtype: torch.dtype | None = None) -> Tensor:
        """Values on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

    def drawn(self, stream: int, *shape: int) -> F64:
        """Standard normal numbers [*shape] of a stream."""
        return normal((self.seed, stream), np.arange(math.prod(shape[:-1])), shape[-1]).reshape(shape)

    def drawn_norm_weight(self, stream: int, dim: int, dtype: torch.dtype = torch.float32) -> F64:
        """[dim] weight of an RMSNorm, around 1."""
        return rounded(1 + 0.5 * self.drawn(stream, 1, dim)[0], dtype)

    def drawn_angles(self, stream: int, rows: int, pairs: int) -> F64:
        """[rows, pairs] random angles: with them only a backend that reads the table of cosines and sines is right."""
        return np.random.default_rng((self.seed, stream)).uniform(-math.pi, math.pi, (rows, pairs))

    def drawn_positions(self, stream: int, rows: int, count: int) -> NDArray[np.int64]:
        """[count] positions below `rows`, the first and the last of them among these."""
        positions = np.random.default_rng((self.seed, stream)).integers(0, rows, count)
        positions[:2] = [0, rows - 1][:count]
        return positions


@attrs.frozen(kw_only=True, eq=False, slots=False)
class AttentionInput(CaseInput):
    """What a case of decode or prefill runs, with the fields of `CaseInput` and these.

    layout: layout of the window cache.
    compressed_layout: layout of the compressed cache, or None for that of the window cache; both must read as the same
    type.
    q_dtype: type of q and kv.
    """

    compressed_layout: KVCacheLayout | None = None
    q_dtype: torch.dtype = torch.bfloat16

    @property
    def entry_layout(self) -> KVCacheLayout:
        """Layout of the compressed cache."""
        return self.compressed_layout or self.layout

    def named_layouts(self) -> list[KVCacheLayout]:
        """Layouts of all caches, the window first."""
        return [self.layout] if self.kind is LayerKind.SWA else [self.layout, self.entry_layout]

    @property
    def budget(self) -> float:
        """Largest error allowed, as the formats give it."""
        return tolerance(self.layout, self.q_dtype)


def cos_sin_table(angles: F64) -> F64:
    """[rows, 2 * pairs] cosines, then sines, of angles [rows, pairs], as fp32 holds them."""
    return rounded(np.concatenate([np.cos(angles), np.sin(angles)], 1), torch.float32)

"""The geometry of one attention layer: its kind, its dims, its rotary embedding. Letters are those of `geometry`."""

from __future__ import annotations

from enum import Enum
from math import inf

from attrs import Factory, field, frozen, validators

from dsv4attn.core.argument_checks import at_least, round_up
from dsv4attn.errors import ArgumentError

__all__ = ["TABLE_COLUMNS", "LayerGeometry", "LayerKind", "Rope", "Yarn"]

_positive = at_least(1)

TABLE_COLUMNS = 128
"""Widths of C128A tables are multiples of this, as FlashMLA's kernels require."""


class LayerKind(str, Enum):
    """How a layer chooses its keys; the compress ratio is a number of its own.

    SWA: the sliding window only.
    CSA: the window, and the entries that an indexer selects from a compressed cache: ratio 4 in DeepSeek-V4, 1 and 2 in
       V4.1. "compressed_sparse" in transformers' configuration.
    HCA: the window, and every entry of a compressed cache of ratio 128. "heavily_compressed" in that configuration.
    C4A, C128A: the same kinds by the names that DeepSeek-V4's engines have for them, which are also their values.
    """

    SWA = "swa"
    CSA = "c4a"
    HCA = "c128a"
    C4A = CSA
    C128A = HCA


@frozen
class Yarn:
    """YaRN frequency scaling. Cos and sin are never multiplied by an attention factor: DeepSeek-V4 fixes it at 1."""

    factor: float = field(validator=validators.gt(0))
    original_max_position: int = field(validator=_positive)
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@frozen
class Rope:
    """Rotary embedding of one layer: interleaved pairs (2i, 2i+1) over the trailing `dim` elements of a head."""

    dim: int = field(validator=_positive)
    theta: float = field(validator=validators.gt(0))
    yarn: Yarn | None = None


@frozen
class LayerGeometry:
    """One attention layer: the part of the model that `forward_mqa` and a backend read.

    kind: swa, c4a or c128a.
    compress_ratio: r - tokens per compressed entry. 1 on window-only layers, where it means nothing; on a c4a layer 1
       is a compressed cache with one entry per token.
    num_heads: H - query heads on this device.
    head_dim: D - elements of a head, and of a key; the trailing `rope.dim` carry positions.
    rope: the layer's rotary embedding.
    window: W - tokens that a query sees through the window, itself included.
    topk: K - entries that the indexer selects for a query of a c4a layer; 0 for the other kinds.
    eps: epsilon of the RMSNorms, the weightless one of q among them.
    softmax_scale: factor of the logits; None is head_dim ** -0.5.
    overlap: whether an entry of the compressor covers the window of r tokens before its own too; by default on c4a
       layers.
    q_norm: whether each head of q is normalised before it is rotated, as in DeepSeek-V4; in V4.1 it is not.
    """

    kind: LayerKind
    compress_ratio: int = field(validator=_positive)
    num_heads: int = field(validator=_positive)
    head_dim: int = field(validator=_positive)
    rope: Rope
    window: int = field(validator=_positive)
    topk: int
    eps: float = 1e-6
    softmax_scale: float | None = None
    overlap: bool = Factory(lambda self: self.kind is LayerKind.CSA, takes_self=True)
    q_norm: bool = True

    def __attrs_post_init__(self) -> None:
        limits = {LayerKind.SWA: (1, 1), LayerKind.HCA: (2, inf)}.get(self.kind, (1, inf))
        if not limits[0] <= self.compress_ratio <= limits[1]:
            expected = "1 for window-only layers, more than 1 for c128a layers"
            actual = f"{self.compress_ratio} on a {self.kind.value} layer"
            raise ArgumentError("compress_ratio", expected=expected, actual=actual)
        if (self.kind is LayerKind.CSA) != (self.topk > 0):
            actual = f"{self.topk} on {self.kind.value}"
            raise ArgumentError("topk", expected="> 0 exactly on c4a layers", actual=actual)

    @property
    def rope_dim(self) -> int:
        """Elements of a head that carry RoPE: the trailing ones."""
        return self.rope.dim

    @property
    def nope_dim(self) -> int:
        """Elements of a head that carry no position: the leading ones."""
        return self.head_dim - self.rope.dim

    @property
    def key(self) -> tuple[LayerKind, int]:
        """(kind, compress ratio): layers of a model with equal keys share the metadata of a step."""
        return self.kind, self.compress_ratio

    @property
    def has_states(self) -> bool:
        """Whether an entry of the compressor needs more than one token, so that tokens have states."""
        return self.has_entries and (self.overlap or self.compress_ratio > 1)

    @property
    def shared_latent(self) -> bool:
        """Whether the layer selects among entries of DeepSeek-V4.1: the windows of its entries do not overlap."""
        return self.kind is LayerKind.CSA and not self.overlap

    @property
    def q_eps(self) -> float | None:
        """The eps of `Backend.qnorm_rope_kv_insert`: None where q is not normalised."""
        return self.eps if self.q_norm else None

    @property
    def has_entries(self) -> bool:
        """Whether the layer reads a compressed cache."""
        return self.kind is not LayerKind.SWA

    def entries(self, tokens: int) -> int:
        """Complete compressed entries of the first `tokens` tokens; 0 on window-only layers.

        tokens: number of tokens, from the first token of the sequence on.
        """
        return tokens // self.compress_ratio if self.has_entries else 0

    def first_state(self, position: int) -> int:
        """The first position whose compressor state is needed at or after a position.

        position: position of the next token.
        """
        return max(position - position % self.compress_ratio - (self.compress_ratio if self.overlap else 0), 0)

    def table_columns(self, max_model_len: int) -> int:
        """Columns of a c128a layer's widest table: an entry for every `compress_ratio` tokens, rounded up.

        max_model_len: largest number of tokens of a sequence.
        """
        return round_up(-(-max_model_len // self.compress_ratio), TABLE_COLUMNS)

    @property
    def scale(self) -> float:
        """Softmax scale, head_dim ** -0.5 unless given. No YaRN correction on any layer."""
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

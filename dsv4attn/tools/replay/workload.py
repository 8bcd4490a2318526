"""Random inputs of a replay: hidden states, or queries, keys, entries and selections, by the seed and the token.

Every row comes from a seeded bank of a few thousand rows, selected by a hash of the token. Equal prompt blocks
(`Request.hash_ids`) hold equal tokens; all other tokens belong to one request. A preempted request computes the same
rows again, and the checks make their rows again without storing any.

Whole layers take hidden states, rows of unit RMS. Attention alone takes:

- q: N(0, 1) before its norm. Keys: rows of unit RMS times one weight per channel, as a norm leaves them, with a few
  channels much louder than the rest. Compressed entries: rows of that kind, taken to be rotated already.
- Selected entries: as an indexer leaves them, see `Workload.topk`.

Letters are those of `core.model.geometry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.serving.request import HASH_BLOCK_TOKENS, Request
from dsv4attn.tools.replay.random_weights import hidden_bank, norm_weights

__all__ = ["Tokens", "Workload"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_BANK_ROWS = 4096
_GOLDEN = 0x9E3779B97F4A7C15
_Q, _KV, _ENTRY, _TOPK = range(4)
# primes above every count of entries, so that they share no factor with it
_STRIDES = np.array([1057387, 1235191, 1297771, 1458521, 1605341, 1733393, 1877717, 2017783])


@frozen(eq=False)
class Tokens:
    """Tokens by request and position.

    rows: [T] int64 row numbers of their requests, see `Workload.row_of`.
    positions: [T] int64.
    ids: [T] uint64, equal for equal tokens at equal positions.
    """

    rows: I64
    positions: I64
    ids: U64 = field(repr=False)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.positions)


class Workload:
    """Inputs of every layer type, for the tokens of a set of requests.

    dtype: of q and keys, bf16 or fp32. device: where inputs are. Equal arguments give equal numbers on every machine
    and device with the same torch, because they are drawn on the CPU.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        requests: Sequence[Request],
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Draw the banks."""
        self.device = torch.device(device)
        self.geometry, self.dtype, self.requests = geometry, dtype, tuple(requests)
        self.row_of = {request.index: row for row, request in enumerate(requests)}
        """Row number of each request in the tables below, by `Request.index`."""
        width = max((len(request.hash_ids) for request in requests), default=0) or 1
        self._blocks = np.zeros((len(requests), width), np.int64)
        for row, request in enumerate(requests):
            self._blocks[row, : len(request.hash_ids)] = request.hash_ids
        self._shared = np.array([min(r.input_length, HASH_BLOCK_TOKENS * len(r.hash_ids)) for r in requests], np.int64)
        self._number, self._seed = seed, _mixed(np.array([seed % 2**64], np.uint64))

        heads, dim = geometry.num_heads, geometry.head_dim
        random = torch.Generator().manual_seed(seed)
        queries = torch.randn(_BANK_ROWS, dim, generator=random, dtype=torch.float32, device="cpu")
        self._q_bank = queries.to(self.device, dtype)
        weights = norm_weights((dim,), random, loud=True)
        keys = torch.randn(_BANK_ROWS, dim, generator=random, dtype=torch.float32, device="cpu")
        self._key_bank = (keys * keys.square().mean(-1, keepdim=True).rsqrt() * weights).to(self.device, dtype)
        self._sinks = {
            kind: torch.randn(heads, generator=random, dtype=torch.float32, device="cpu").to(self.device)
            for kind in LayerKind
        }
        self._random = random

    @cached_property
    def _hidden_bank(self) -> Tensor:
        return hidden_bank(self.geometry, _BANK_ROWS, self._number, self.dtype).to(self.device)

    def hidden_states(self, kind: LayerKind, tokens: Tokens) -> Tensor:
        """[T, hidden] inputs of a whole layer, in `dtype`."""
        return self._hidden_bank.index_select(0, self.placed(self._picked(kind, _KV, tokens.ids)))

    def projection(self) -> Tensor:
        """A new wo_a [G * rank, H / G * D] fp32, scaled to preserve magnitudes; the same for all layer types.

        fp32 because the reference multiplies in fp32 and would convert a bf16 weight again in every step.
        """
        rows = self.geometry.o_groups * self.geometry.o_lora_rank
        columns = self.geometry.num_heads // self.geometry.o_groups * self.geometry.head_dim
        drawn = torch.randn(rows, columns, generator=self._random, dtype=torch.float32, device="cpu")
        return drawn.mul_(columns**-0.5).to(self.device)

    def placed(self, numbers: I64) -> Tensor:
        """Host numbers as a tensor on the device."""
        return torch.from_numpy(numbers).to(self.device)

    def tokens(self, rows: I64, positions: I64) -> Tokens:
        """The tokens at these positions [T] of these requests [T], given by row number."""
        shared = positions < self._shared[rows]
        block = np.minimum(positions // HASH_BLOCK_TOKENS, self._blocks.shape[1] - 1)
        # even numbers are blocks that requests can share, odd ones are requests
        owner = np.where(shared, 2 * self._blocks[rows, block], 2 * rows + 1)
        return Tokens(rows, positions, _mixed(_mixed(owner.astype(np.uint64)) + positions.astype(np.uint64)))

    def sink(self, kind: LayerKind) -> Tensor:
        """[H] fp32 sinks, N(0, 1)."""
        return self._sinks[kind]

    def q_numbers(self, kind: LayerKind, tokens: Tokens) -> I64:
        """[T, H] bank rows of the queries."""
        heads = np.arange(self.geometry.num_heads, dtype=np.uint64)
        return self._picked(kind, _Q, tokens.ids[:, None] + heads * np.uint64(_GOLDEN))

    def kv_numbers(self, kind: LayerKind, tokens: Tokens) -> I64:
        """[T] bank rows of the keys of these tokens, before their rotation."""
        return self._picked(kind, _KV, tokens.ids)

    def entry_numbers(self, kind: LayerKind, completing: Tokens) -> I64:
        """[T] bank rows of the compressed entries that these tokens complete; other tokens get an unused row."""
        return self._picked(kind, _ENTRY, completing.ids)

    def q_rows(self, numbers: I64, out: Tensor | None = None) -> Tensor:
        """[T, H, D] raw queries; `out`, if given, is filled and returned."""
        flat = None if out is None else out.view(-1, self.geometry.head_dim)
        rows = torch.index_select(self._q_bank, 0, self.placed(numbers.reshape(-1)), out=flat)
        return rows.view(*numbers.shape, -1)

    def key_rows(self, numbers: I64) -> Tensor:
        """[T, D] raw keys or entries."""
        return self._key_bank.index_select(0, self.placed(numbers))

    def topk(self, kind: LayerKind, tokens: Tokens) -> Tensor:
        """[T, K] int32 entry numbers as an indexer leaves them.

        A token at position p has n = (p + 1) // ratio entries to choose from. Its row holds exactly min(n, K)
        different ones of them in no order, then -1. The choice is an arithmetic progression modulo n with a random
        start and stride: distinct by construction, drawn for all rows at once.
        """
        layer = self.geometry.layer_of_kind(kind)
        entries = ((tokens.positions + 1) // layer.compress_ratio)[:, None]
        drawn = _mixed(tokens.ids ^ self._salt(kind, _TOPK))[:, None]
        modulus = np.maximum(entries, 1)
        stride = _STRIDES[(drawn % np.uint64(len(_STRIDES))).astype(np.int64)] % modulus
        start = (drawn >> np.uint64(8)).astype(np.int64) % modulus
        columns = np.arange(layer.topk)
        chosen = (start + stride * columns) % modulus
        return torch.from_numpy(np.where(columns < entries, chosen, -1).astype(np.int32)).to(self.device)

    def _salt(self, kind: LayerKind, stream: int) -> U64:
        number = 4 * list(LayerKind).index(kind) + stream + 1
        return _mixed(self._seed + np.array([number], np.uint64))

    def _picked(self, kind: LayerKind, stream: int, ids: U64) -> I64:
        picked: I64 = (_mixed(ids ^ self._salt(kind, stream)) % np.uint64(_BANK_ROWS)).astype(np.int64)
        return picked


def _mixed(x: U64) -> U64:
    """Scatter 64-bit numbers: the last steps of the SplitMix64 generator, one-to-one."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))

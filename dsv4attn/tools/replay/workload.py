"""Random inputs of a replay: hidden states of unit RMS, by the seed and the token.

Every row comes from a seeded bank of a few thousand rows, selected by a hash of the token. Equal prompt blocks
(`Request.hash_ids`) hold equal tokens; all other tokens belong to one request. A preempted request computes the same
rows again, and the checks make their rows again without storing any.

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
from dsv4attn.serving.request import Request
from dsv4attn.tools.replay.random_weights import hidden_bank

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_BANK_ROWS = 4096
_GOLDEN = 0x9E3779B97F4A7C15


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

    dtype: of hidden states, bf16 or fp32. device: where inputs are. Equal arguments give equal numbers on every machine
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
        shared = [min(r.input_length, r.hash_block_tokens * len(r.hash_ids)) for r in requests]
        self._shared = np.array(shared, np.int64)
        self._block_tokens = np.array([r.hash_block_tokens for r in requests], np.int64)
        self._number, self._seed = seed, _mixed(np.array([seed % 2**64], np.uint64))

        random = torch.Generator().manual_seed(seed)
        self._sinks = {
            kind: torch.randn(geometry.num_heads, generator=random, dtype=torch.float32, device="cpu").to(self.device)
            for kind in LayerKind
        }

    @cached_property
    def _hidden_bank(self) -> Tensor:
        return hidden_bank(self.geometry, _BANK_ROWS, self._number, self.dtype).to(self.device)

    def hidden_states(self, kind: LayerKind, tokens: Tokens) -> Tensor:
        """[T, hidden] inputs of a whole layer, in `dtype`."""
        return self._hidden_bank.index_select(0, self.placed(self._picked(kind, tokens.ids)))

    def placed(self, numbers: I64) -> Tensor:
        """Host numbers as a tensor on the device."""
        return torch.from_numpy(numbers).to(self.device)

    def tokens(self, rows: I64, positions: I64) -> Tokens:
        """The tokens at these positions [T] of these requests [T], given by row number."""
        shared = positions < self._shared[rows]
        block = np.minimum(positions // self._block_tokens[rows], self._blocks.shape[1] - 1)
        # even numbers are blocks that requests can share, odd ones are requests
        owner = np.where(shared, 2 * self._blocks[rows, block], 2 * rows + 1)
        return Tokens(rows, positions, _mixed(_mixed(owner.astype(np.uint64)) + positions.astype(np.uint64)))

    def sink(self, kind: LayerKind) -> Tensor:
        """[H] fp32 sinks, N(0, 1)."""
        return self._sinks[kind]

    def _picked(self, kind: LayerKind, ids: U64) -> I64:
        """[T] bank rows of tokens, others for each layer type."""
        salt = _mixed(self._seed + np.array([1 + list(LayerKind).index(kind)], np.uint64))
        picked: I64 = (_mixed(ids ^ salt) % np.uint64(_BANK_ROWS)).astype(np.int64)
        return picked


def _mixed(x: U64) -> U64:
    """Scatter 64-bit numbers: the last steps of the SplitMix64 generator, one-to-one."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))

"""A replay over the ranks of a process group: what each rank holds, what the ranks send, and whether they agree.

Every rank serves the same steps and checks the same rows against float64, on its own outputs. Bytes in caches of other
ranks come by exchanges of their own, which are not counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.memory.rank_buffers import attention_bytes, candidate_bytes
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.testing.oracle.attention import F64
from dsv4attn.tools.replay.read_back import KeyReader


class MeteredContext(ContextParallel):
    """A context that counts the bytes which this rank sends."""

    @cached_property
    def sent(self) -> Counter[str]:
        """Bytes by what they are: `attention`, `keys` or `candidates`."""
        return Counter()

    def start(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Callable[[], Tensor]:
        """As the base class does."""
        self.sent[what] += mine.numel() * mine.element_size()
        return super().start(mine, what, out=out)


@frozen
class Traffic:
    """Bytes that a rank sends for a token of one layer. From each other rank it receives the same number.

    attention: out and lse, by the formula for tokens whose keys stay where they are.
    selection: candidates, by the formula; 0 on layers that select nothing.
    attention_sent: mean over the tokens of the run, counted.
    selection_sent: the same of candidates; steps whose tokens see few entries send none.
    keys_sent: the same of keys that are gathered for prefill, whose tokens send a part of their attention, and no lse.
    """

    attention: int
    selection: int
    attention_sent: float = 0.0
    selection_sent: float = 0.0
    keys_sent: float = 0.0

    @classmethod
    def of(cls, layer: LayerGeometry, dtype: torch.dtype, sent: Counter[str], tokens: int) -> Traffic:
        """The traffic of a layer. sent: bytes by what they are. tokens: tokens of the run. dtype: of q."""
        if not layer.has_entries:
            return cls(0, 0)
        attention = attention_bytes(layer.num_heads, layer.head_dim, dtype.itemsize)
        selection = candidate_bytes(layer.topk) if layer.topk else 0
        means = (sent[name] / max(tokens, 1) for name in ("attention", "candidates", "keys"))
        return cls(attention, selection, *means)


@frozen
class LayerOnRank:
    """A layer type on one rank.

    kind: layer type.
    compressed_bytes: most bytes of pages of entries and index keys in use at once.
    other_bytes: the same of windows and compressor states.
    traffic: bytes that the rank sends.
    rows: rows that the rank checked.
    failed: rows beyond a tolerance.
    failures: lines on some of them.
    digest: of attention over the keys of all ranks, of all tokens; empty on layers without compressed entries.
    """

    kind: str
    compressed_bytes: int
    other_bytes: int
    traffic: Traffic
    rows: int = 0
    failed: int = 0
    failures: tuple[str, ...] = ()
    digest: str = ""


@frozen
class RankReport:
    """One rank. rank: its number. layers: one for each layer type."""

    rank: int
    layers: Sequence[LayerOnRank]


@frozen
class RanksReport:
    """All ranks of a replay.

    size: ranks. interleave: consecutive entries of one rank. ranks: in their order.
    """

    size: int
    interleave: int
    ranks: Sequence[RankReport] = field(factory=tuple)

    @classmethod
    def gather(cls, context: ContextParallel, layers: Sequence[LayerOnRank]) -> RanksReport:
        """The same report on every rank."""
        ownership = context.ownership
        reports = context.gather_objects(RankReport(ownership.rank, layers), "the report")
        return cls(ownership.size, ownership.interleave, reports)

    @property
    def differing(self) -> list[str]:
        """Layer types whose attention is not the same bits on all ranks."""
        layers = enumerate(self.ranks[0].layers)
        return [layer.kind for i, layer in layers if len({rank.layers[i].digest for rank in self.ranks}) > 1]

    @property
    def ok(self) -> bool:
        """Whether no rank has a failed row, and all have the same bits."""
        return not self.differing and not any(layer.failed for rank in self.ranks for layer in rank.layers)


class OutputDigest:
    """Of the attention of all steps of a layer."""

    def __init__(self) -> None:
        """Start with no step."""
        self._hash = hashlib.blake2b(digest_size=16)
        self.steps = 0

    def add(self, out: Tensor) -> None:
        """Add the rows of a step."""
        self._hash.update(out.contiguous().view(torch.uint8).cpu().numpy().data)
        self.steps += 1

    def __str__(self) -> str:
        """Hexadecimal; empty without a step."""
        return self._hash.hexdigest() if self.steps else ""


def selected_over_ranks(context: ContextParallel, local: Tensor) -> list[int]:
    """Entries of all ranks. local: [K] the numbers that this rank gives those of its own, -1 for none."""
    own_entries = context.ownership.entry(local[local != -1]).tolist()
    return sorted(entry for part in context.gather_objects(own_entries, "checks") for entry in part)


class KeyReaderOverRanks(KeyReader):
    """Entries, or index keys, in the caches of all ranks. Every rank reads the same ones at the same time."""

    def __init__(self, context: ContextParallel, keys: KeyReader) -> None:
        """Look at the keys of this rank."""
        self._context, self._own = context, keys

    def read(self, blocks: Sequence[int], numbers: Sequence[int]) -> F64:
        """[n, D] entries. blocks: of this rank."""
        ownership = self._context.ownership
        owned = [e for e in numbers if ownership.owner(e) == ownership.rank]
        own_rows = self._own.read(blocks, [ownership.local(e) for e in owned])
        parts = self._context.gather_objects(dict(zip(owned, own_rows, strict=True)), "checks")
        rows = {e: row for part in parts for e, row in part.items()}
        return np.array([rows[e] for e in numbers]).reshape(len(numbers), own_rows.shape[1])

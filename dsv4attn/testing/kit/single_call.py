"""One attention call made by hand: what `forward_mqa` never hands over, although the contract allows it.

Every index of every row is chosen here (absent, outside the cache, after the length). Keys come from an `OracleCache`.
The same call is put into whatever form of indices and keys a backend takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Any, Literal

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions, IndexForm, KeyForm, Phase
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.testing.case import Bench, dtype_name
from dsv4attn.testing.kit.factories import HEADS, AttentionInput, flash, layout, normal
from dsv4attn.testing.kit.oracle_cache import AFTER_PAGE, OracleCache, PagePlacement
from dsv4attn.testing.kit.strided import StridedTensors, unchanged
from dsv4attn.testing.kit.tolerances import F64, Expected, rounded

I64 = NDArray[np.int64]
GARBAGE = (-1, -7, -(2**31), 2**31 - 1, 0x7FC00000)
"""Indices that name nothing; the last is a NaN's bits."""
Pattern = Literal["plain", "behind", "holes", "outside", "empty", "one", "lone", "loud", "twice", "huge", "mixed"]
LOUD, TIMES = 7, 6.0
"""Keys at the end of a loud row, and how much larger than others they are: to lose one of them is to be wrong."""
LEVEL, SPREAD = 2.5, 0.5
"""Size of the common part of huge keys, and of what differs: with queries of size 2 or 3 and 512 dims, logits of about
113 and 170, or -113 and -170."""


@attrs.frozen(eq=False)
class IndexLists:
    """Index lists of one segment. slots: [T, K], with columns past the lengths. lens: [T]."""

    slots: I64
    lens: I64

    def inside(self, row: int) -> I64:
        """The columns of a row that count."""
        return self.slots[row, : self.lens[row]]


@attrs.frozen(kw_only=True, eq=False, slots=False)
class SingleCall(AttentionInput):
    """Rows of queries over an oracle cache of window keys and, but for window-only layers, one of compressed entries.

    pattern: what columns hold that are no slots of keys. "plain": nothing, and shorter rows are filled up with -1.
    "behind": columns past the lengths hold slots of keys and garbage. "holes", "outside": some columns hold -1, or
    indices outside the cache. "empty": some rows, and some segments of others, have no key. "one": one key a row.
    "lone": in each segment one key among columns of -1, and every third row has none.
    "loud": rows have all their keys, and the last keys of a row outweigh all others.
    "twice": every second column repeats the column before it.
    "huge": all logits of a row and head are above 88, or all below -88, where fp32 has no exponential.
    "mixed": holes, slots listed twice, rows and segments without keys, and rows with all their keys.
    """

    phase: Phase
    placements: tuple[PagePlacement, PagePlacement] = (PagePlacement(64), PagePlacement(16))
    pattern: Pattern = "plain"
    rows: int = 9
    columns: int = 37
    """Of the compressed segment."""
    window_columns: int = 0
    """Of the window; 0 is the layer's window."""
    sinks: Sequence[float] | None = None
    softmax_scale: float | None = None
    """Instead of head_dim ** -0.5."""

    @property
    def layer(self) -> LayerGeometry:
        """The layer's geometry."""
        return attrs.evolve(self.geometry.layer_of_kind(self.kind), softmax_scale=self.softmax_scale)

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """What a backend must be able to do."""
        pairs = zip(self.named_layouts(), self.placements, strict=False)
        facts = [CacheFacts.of(layout, placement.block_size) for layout, placement in pairs]
        topk = 0 if len(facts) == 1 else self.columns
        sink, dtype = self.sinks is not None, dtype_name(self.q_dtype)
        arguments = self.phase.value, self.layer, facts[0], (*facts, None)[1], topk, dtype
        return [Problem(*arguments, sink=sink, lse=lse, window_columns=self.window_columns)]

    @cached_property
    def q(self) -> F64:
        """[T, H, D] queries."""
        numbers = np.arange(self.rows * self.layer.num_heads).reshape(self.rows, -1)
        if self.pattern == "huge":
            # the sign alternates from row to row and from head to head, the size too; fp8 holds all of them
            row, head = np.indices(numbers.shape)
            return np.asarray((-1.0) ** (row + head) * (2 + head // 2 % 2))[..., None] * self._signs
        return rounded(normal((self.seed, 10), numbers, self.layer.head_dim), self.q_dtype)

    @cached_property
    def _signs(self) -> F64:
        """[D] signs of the common part of huge keys."""
        return np.asarray(np.sign(normal((self.seed, 14), np.zeros(1, dtype=np.int64), self.layer.head_dim)[0]))

    @cached_property
    def widths(self) -> list[int]:
        """Columns of each segment."""
        return [self.window_columns or self.layer.window, self.columns][: len(self.named_layouts())]

    @cached_property
    def oracle_caches(self) -> list[OracleCache]:
        """The caches: twice as many slots as a row names, half of them written."""
        caches = []
        for i, (cache_layout, placement, width) in enumerate(
            zip(self.named_layouts(), self.placements, self.widths, strict=False)
        ):
            blocks = -(-2 * max(width, 1) // placement.block_size) if not placement.gap else 3
            slots = self._live(i, width, blocks * placement.block_size)
            oracle_cache = OracleCache.blank(cache_layout, blocks, placement, self.device)
            rows = normal((self.seed, 11, i), slots % 61 if self._loud(i) else slots, self.layer.head_dim)
            if self._loud(i):
                rows[:LOUD] *= TIMES
            if self.pattern == "huge":
                rows = SPREAD * rows + LEVEL * self._signs
            caches.append(oracle_cache.write(slots, rows))
        return caches

    def _live(self, segment: int, width: int, capacity: int) -> I64:
        count = min(max(capacity // 2, width), capacity - 1)
        return np.random.default_rng((self.seed, 12, segment)).permutation(capacity)[:count]

    def _loud(self, segment: int) -> bool:
        return self.pattern == "loud" and segment == len(self.widths) - 1

    @cached_property
    def index_lists(self) -> list[IndexLists]:
        """Index lists of each segment."""
        capacities = [oracle_cache.cache.capacity for oracle_cache in self.oracle_caches]
        return [self._lanes(i, w, c) for i, (w, c) in enumerate(zip(self.widths, capacities, strict=True))]

    def _lanes(self, segment: int, width: int, capacity: int) -> IndexLists:
        rng = np.random.default_rng((self.seed, 13, segment))
        live = self._live(segment, width, capacity)
        dead = np.setdiff1d(np.arange(capacity), live)
        lens = np.array([width, 1, width - 1, *rng.integers(1, width + 2, self.rows)])[: self.rows].clip(1, width)
        slots = np.stack([rng.permutation(live)[np.arange(width) % len(live)] for _ in range(self.rows)])
        hit = rng.random(slots.shape) < 0.4
        if self.pattern == "holes":
            slots[hit] = -1
        elif self.pattern == "outside":
            slots[hit] = rng.choice([*GARBAGE, capacity, capacity + 1], int(hit.sum()))
        elif self.pattern == "empty":
            lens[(segment + 1) :: 3] = 0
            slots[2::3] = -1
        elif self.pattern == "one":
            lens[:] = 1 if segment == len(self.widths) - 1 else 0
        elif self.pattern == "lone":
            slots[np.arange(width) != lens[:, None] // 2] = -1
            slots[2::3] = -1
        elif self.pattern == "twice":
            slots[:, 1::2] = slots[:, : width // 2 * 2 : 2]
        elif self.pattern == "mixed":
            slots[:, 1::5] = slots[:, : len(slots[0, 1::5]) * 5 : 5]
            slots[3:][hit[3:]] = -1
            lens[segment + 3 :: 4] = 0
        elif self._loud(segment):
            lens = width - np.arange(self.rows) % 3
            slots = np.stack([rng.permutation(live[LOUD:])[np.arange(width) % len(live[LOUD:])] for _ in lens])
            for row, length in enumerate(lens):
                slots[row, length - LOUD : length] = live[:LOUD]
        junk = rng.choice([*live[:8], *dead[:8], *GARBAGE, capacity], slots.shape)
        inside = np.arange(width) < lens[:, None]
        return IndexLists(np.where(inside, slots, junk if self.pattern == "behind" else -1), lens)

    def named(self, row: int) -> list[F64]:
        """Keys of a row, window first."""
        keys = []
        for oracle_cache, index_lists in zip(self.oracle_caches, self.index_lists, strict=True):
            slots = index_lists.inside(row)
            keys += [*oracle_cache.values[slots[(slots >= 0) & (slots < oracle_cache.cache.capacity)]]]
        return keys

    @cached_property
    def expected(self) -> Expected:
        """The oracle's answer."""
        answers = Expected.empty(self.rows, self.layer.num_heads, self.layer.head_dim)
        sinks = None if self.sinks is None else np.asarray(self.sinks, dtype=np.float64)
        for row in range(self.rows):
            answers.judge(row, self.q[row], self.named(row), sinks, self.layer.scale)
        return answers

    @cached_property
    def largest(self) -> F64:
        """[T, H] largest scaled logits, -inf for rows without keys."""
        largest = np.full((self.rows, self.layer.num_heads), -np.inf)
        for row in range(self.rows):
            if keys := self.named(row):
                largest[row] = (self.layer.scale * self.q[row] @ np.stack(keys).T).max(-1)
        return largest

    def judge(self, out: Tensor, lse: Tensor | None) -> tuple[float, str]:
        """Return the largest error, in the unit of `budget`, and a sentence about the row that has it."""
        place = f"{self.phase.value} row {{}}, head {{}}".format
        return self.expected.verdict(out, lse, self.budget, self.layout, place)

    def run(
        self,
        bench: Bench,
        index_lists: Sequence[IndexLists] | None = None,
        max_logits: Tensor | None = None,
        empty_lse: float = -inf,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out, lse), both NaN before the call. Raises Wrong if q, a cache or bytes next to rows are changed."""
        backend, capabilities = bench.backend, bench.backend.capabilities
        index_lists = index_lists or self.index_lists
        form = capabilities.decode_indices if self.phase is Phase.DECODE else capabilities.prefill_indices
        if self.phase is Phase.PREFILL and capabilities.prefill_keys is KeyForm.GATHERED:
            gathered, width = self._gathered(index_lists, form, capabilities.index_alignment)
            keys: Sequence[PagedKeys] | GatheredKeys = gathered
        else:
            pairs = zip(self.oracle_caches, index_lists, strict=True)
            keys = tuple(PagedKeys(oracle_cache.cache, self._indices(lists, form)) for oracle_cache, lists in pairs)
            width = sum(self.widths)
        strided = StridedTensors(self.strided)
        q = strided("q", self.tensor(self.q, self.q_dtype))
        sink = None if self.sinks is None else torch.tensor(self.sinks, dtype=torch.float32, device=self.device)
        out = strided("out", torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device))
        nothing = torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=q.device)
        lse = strided("lse", nothing) if bench.lse else None
        workspace = WorkspaceManager(self.device, debug=True)
        specs = backend.scratch(self.phase, self.layer, self.rows, width)
        scratch = workspace.get_simultaneous(*specs, caller=f"{backend.name}.{self.phase.value}")
        call = AttentionCall(self.layer, q, keys, sink, out, lse, scratch, AttentionOptions(max_logits, empty_lse))
        caches = zip(("window", "compressed"), self.oracle_caches, strict=False)
        with unchanged(q=q, **{name: oracle_cache.pages(AFTER_PAGE) for name, oracle_cache in caches}):
            (backend.decode if self.phase is Phase.DECODE else backend.prefill)(call)
        workspace.check_canaries()
        strided.check()
        return out, lse

    def _indices(self, index_lists: IndexLists, form: IndexForm) -> DenseIndices | RaggedIndices:
        if form is IndexForm.DENSE:
            rows, width = index_lists.slots.shape
            # a view of wider rows, as tables of a fixed width are
            wide = self.tensor(np.full((rows, width + 3), 0x7FC00000)).int()
            wide[:, :width] = self.tensor(index_lists.slots)
            return DenseIndices(wide[:, :width], self.tensor(index_lists.lens).int())
        inside = [index_lists.inside(row) for row in range(len(index_lists.lens))]
        flat = np.resize([*GARBAGE, *index_lists.slots[:1, :3].flatten()], index_lists.slots.size)
        ends = np.concatenate([[0], np.cumsum(index_lists.lens)])
        flat[: ends[-1]] = np.concatenate(inside)
        return RaggedIndices(self.tensor(flat).int(), self.tensor(ends).int(), index_lists.slots.shape[1])

    def _gathered(self, index_lists: Sequence[IndexLists], form: IndexForm, alignment: int) -> tuple[GatheredKeys, int]:
        """All segments as rows of one tensor; what names nothing names nothing there either."""
        total = sum(oracle_cache.cache.capacity for oracle_cache in self.oracle_caches)
        width = -(-sum(self.widths) // alignment) * alignment
        base, segments = 0, list[IndexLists]()
        for oracle_cache, lists in zip(self.oracle_caches, index_lists, strict=True):
            capacity = oracle_cache.cache.capacity
            moved = np.where(lists.slots >= capacity, lists.slots - capacity + total, lists.slots + base)
            moved = np.where(lists.slots < 0, lists.slots, moved).clip(-(2**31), 2**31 - 1)
            segments.append(IndexLists(moved, lists.lens))
            base += capacity
        slots, lens = np.full((self.rows, width), -1), np.sum([lists.lens for lists in segments], axis=0)
        for row in range(self.rows):
            inside = [lists.inside(row) for lists in segments]
            columns = np.concatenate([*inside, *(lists.slots[row, lists.lens[row] :] for lists in segments)])
            slots[row, : len(columns)] = columns
        kv = np.concatenate([oracle_cache.values for oracle_cache in self.oracle_caches])
        keys = self.tensor(kv, self.layout.row_dtype)
        return GatheredKeys(keys, self._indices(IndexLists(slots, lens), form)), width


def call(
    phase: Phase,
    pattern: Pattern,
    kind: str = "c4a",
    *,
    heads: int = HEADS,
    cache: str = "ocp",
    **changes: Any,  # noqa: ANN401 - fields of a SingleCall
) -> SingleCall:
    """One call of a backend, made by hand."""
    geometry = flash(kind, heads)
    fields = {"phase": phase, "pattern": pattern, "kind": kind, "geometry": geometry, "layout": layout(cache)}
    return SingleCall(**{**fields, **changes})

"""A backend that passes every call on, times the operations of a layer, and holds what checks compare.

The time of a layer is cut at the calls that core makes of a backend: each call ends an operation, and the time since
the end of the operation before counts for it. So projections, which core multiplies itself, count for what they lead
to, and no time of a layer is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract import RankOps
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, Backend, EntryIndices, Phase, Run
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.op_names import LAYER_OPS
from dsv4attn.core.contract.wrapped import WrappedBackend
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.tools.replay.results import LAYER_OPERATIONS


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has done all work that was launched on it, so that times include that work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Seconds of the operations of one step, each with the work that it has launched on the device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Stand still."""
        self._device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        """Begin a step: all operations at 0."""
        self.seconds = dict.fromkeys(LAYER_OPERATIONS, 0.0)
        wait_for(self._device)
        self._last = time.perf_counter()

    def lap(self, operation: str) -> None:
        """Add the time since the last lap to an operation."""
        wait_for(self._device)
        now = time.perf_counter()
        self.seconds[operation] += now - self._last
        self._last = now


class RecordingBackend(WrappedBackend):
    """A backend that times and keeps what another one does.

    watch: operations of the step.
    rows: numbers of the rows that will be checked. Their out and lse are NaN before attention, so that a row that is
    not written does not pass with values of an earlier step.
    q: [T, H, D] - of the step, normalised and rotated.
    out: [T, H, D] - of the step's attention. lse: [max tokens, H] fp32 of it.
    query: the indexer's queries of the step; None if nothing was scored.
    """

    def __init__(self, backend: Backend, max_tokens: int, heads: int, device: torch.device | str = "cpu") -> None:
        """Wrap a backend for steps of at most `max_tokens` tokens on a device."""
        super().__init__(backend)
        self.watch = Stopwatch(device)
        self.layer_ops = _recording(backend.layer_ops, self)
        self.rank_ops = _recording_merge(backend.rank_ops, self)
        self.rows = torch.empty(0, dtype=torch.int64, device=device)
        self.q = self.out = torch.empty(0, dtype=torch.float32, device=device)
        self._attended: list[range] = []
        self.lse = torch.empty(max_tokens, heads, dtype=torch.float32, device=device)
        self.query: IndexQuery | None = None

    def start(self, rows: Tensor) -> None:
        """Begin a step."""
        self.rows, self.query = rows, None
        self._attended.clear()
        self.watch.start()

    def has_attended(self, row: int) -> bool:
        """Whether this rank attended to a row in the step. If not, others sent the row's output, without an lse."""
        return any(row in rows for rows in self._attended)

    def qnorm_rope_kv_insert(self, q: Tensor, kv: Tensor, cache: PagedKVCache, *rest: Any) -> None:  # noqa: ANN401
        """See `Backend`."""
        self.watch.lap("projections")
        self.wrapped.qnorm_rope_kv_insert(q, kv, cache, *rest)
        self.q = q
        self.watch.lap("insert")

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `Backend`; lse is always computed.

        An lse that core asks for is written too: it is of one rank. `_recording_merge` records that of all ranks.
        """
        tokens = call.q.shape[0]
        return self._recorded(self.wrapped.prepare(phase, evolve(call, lse=self.lse[:tokens])), tokens)

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """As `prepare`."""
        tokens = call.q.shape[0]
        run = self.wrapped.prepare_entries(evolve(call, lse=self.lse[:tokens]), entries)
        return None if run is None else self._recorded(run, tokens)

    def _recorded(self, run: Run, tokens: int) -> Run:
        def recorded(tensors: AttentionTensors) -> None:
            q, out, lse = tensors.q, tensors.out, tensors.lse
            # q is a part of the step's; out may be where it is sent to other ranks
            first = (q.storage_offset() - self.q.storage_offset()) // q.stride(0)
            self._attended.append(range(first, first + tokens))
            row_lse = self.lse[first : first + tokens] if lse is None else lse
            checked = self.rows[(self.rows >= first) & (self.rows < first + tokens)] - first
            out[checked], row_lse[checked] = torch.nan, torch.nan
            run(tensors._replace(lse=row_lse))

        return recorded

    def inv_rope_o_proj(self, o: Tensor, *rest: Any) -> Tensor:  # noqa: ANN401
        """See `Backend`."""
        self.watch.lap("attend")
        self.out = o
        return self.wrapped.inv_rope_o_proj(o, *rest)


def _recording_merge(ops: RankOps, recorder: RecordingBackend) -> RankOps:
    """The ops, with the lse of all ranks kept."""

    def merge_partials(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> None:  # noqa: ANN401
        ops.merge_partials(outs, lses, out, lse, *rest)
        # out is a part of the layer's own tensor, which begins with the first row of the step
        first = out.storage_offset() // out.stride(0)
        recorder.lse[first : first + lse.shape[0]] = lse

    return evolve(ops, merge_partials=merge_partials)


def _recording(ops: LayerOps, recorder: RecordingBackend) -> LayerOps:
    """The ops with a lap of the watch after each, and the queries of the indexer kept."""

    def timed(name: str, operation: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def run(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the op
            result = op(*arguments, **options)
            if isinstance(result, IndexQuery):
                recorder.query = result
            recorder.watch.lap(operation)
            return result

        return run

    changed: dict[str, Any] = {name: timed(name, part) for part, names in _TIMED.items() for name in names}
    return evolve(ops, **changed)


_TIMED = {
    "compressor": LAYER_OPS["compressor"],
    "indexer": ("indexer_q_rope_quant", *LAYER_OPS["selection"]),
}

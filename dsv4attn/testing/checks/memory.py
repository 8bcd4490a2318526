"""Checks of memory cases: the workspace plan is an upper bound, scratch starts as garbage, addresses have 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.testing.case import Bench, Measure, Wrong, worst_of
from dsv4attn.testing.checks.attention import equals_oracle, judged, require_same_bits
from dsv4attn.testing.kit.causes import OFFSETS
from dsv4attn.testing.kit.random_step import StepFixture
from dsv4attn.testing.kit.single_call import SingleCall

FAR = 2**31 + 4608 * 1000
"""Gap that puts the second page past 2^31 bytes and the third page past 2^32."""


def fits_the_plan(*batches: Sequence[tuple[int, int]]) -> Callable[[Bench, StepFixture], Measure]:
    """Batches within the case input's own limits run in a workspace that was planned once and may not grow."""

    def check(bench: Bench, inputs: StepFixture) -> Measure:
        steps = [inputs, *(attrs.evolve(inputs, requests=batch) for batch in batches)]
        limits = Limits(
            max(len(step.requests) for step in steps),
            2 * max(step.limits.max_num_batched_tokens for step in steps),
            max(step.limits.max_model_len for step in steps),
            inputs.num_speculative_tokens,
        )
        workspace, measures = None, []
        for step in steps:
            problem = step.problem(bench.backend, limits=limits)
            workspace = workspace or problem.workspace(bench.backend, debug=False)
            size = workspace.total_bytes
            out, lse = problem.answer(bench, workspace)
            if workspace.total_bytes != size:
                raise Wrong(f"the locked workspace grew from {size} to {workspace.total_bytes} bytes")
            measures.append(judged(step, (out, lse)))
        return worst_of(*measures)

    return check


def scratch_is_bounded(bench: Bench, inputs: StepFixture) -> Measure:
    """`scratch_bound` is an upper bound of `scratch` for every smaller call. Nothing is launched."""
    backend, tokens, width, largest = bench.backend, 257, 2176, 0.0
    for phase in Phase:
        bound = backend.scratch_bound(phase, inputs.layer, tokens, width)
        for t in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, tokens):
            for w in (1, 63, 64, 65, 127, 128, 129, 192, 640, 1023, 1024, 1152, 2048, width):
                needs = simultaneous_bytes(list(backend.scratch(phase, inputs.layer, t, w)))
                if needs > bound:
                    what = f"{phase.value} of {t} tokens and {w} keys needs {needs} bytes"
                    raise Wrong(f"{what}, scratch_bound for {tokens} tokens and {width} keys is {bound}")
                largest = max(largest, needs / bound if bound else 0.0)
    return Measure(largest, 1.0)


def stale(bench: Bench, inputs: StepFixture) -> Measure:
    """Whatever the workspace holds before a step, the bits are the same."""
    problem = inputs.problem(bench.backend)
    result = problem.answer(bench)
    for byte in (0x00, 0xFF, 0x3F, 0x7F):
        workspace = problem.workspace(bench.backend, debug=False)
        for arena in ("decode", "prefill"):
            (everything,) = workspace.get_simultaneous(((workspace.size(arena),), torch.uint8), arena=arena)
            everything.fill_(byte)
        what = f"over a workspace of bytes 0x{byte:02X}"
        require_same_bits(what, problem.answer(bench, workspace), result)
    require_same_bits("a second time", problem.answer(bench), result)
    return judged(inputs, result)


def capped(bench: Bench, inputs: StepFixture) -> Measure:
    """A smaller workspace gives more and smaller chunks, and the same result."""
    small = attrs.evolve(inputs.limits, max_index_elements=1)
    least = plan_workspace(inputs.layer, small, bench.backend, inputs.layout).arenas["prefill"]
    measures = [equals_oracle(bench, inputs)]
    for limits in (small, attrs.evolve(inputs.limits, max_workspace_bytes=least)):
        answer = inputs.problem(bench.backend, limits=limits).answer(bench)
        try:
            measures.append(judged(inputs, answer))
        except Wrong as wrong:
            said = str(wrong).partition("; likely ")[0]  # the whole step is known to be right in one chunk
            raise Wrong(f"{said}; {OFFSETS}", wrong.measure) from None
    return worst_of(*measures)


def _storage(leaf: object) -> list[torch.UntypedStorage]:
    """Storage of a tensor, or the storage itself, which Triton's interpreter makes tensors of; else none."""
    if isinstance(leaf, torch.UntypedStorage):
        return [leaf]
    return [leaf.untyped_storage()] if isinstance(leaf, torch.Tensor) else []


class _Meter(TorchDispatchMode):
    """Peak bytes of the storages that torch allocated since the mode was entered and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        argument_storages = {storage._cdata for leaf in tree_leaves((args, kwargs)) for storage in _storage(leaf)}  # noqa: SLF001
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in argument_storages:  # noqa: SLF001
                storage = tensor.untyped_storage()
                self._storages[key] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def temporaries(bench: Bench, inputs: StepFixture) -> Measure:
    """A step holds no more temporaries of torch's allocator than `transient_bytes` says."""
    problem = inputs.problem(bench.backend)
    allowed = plan_workspace(inputs.layer, problem.limits, bench.backend, inputs.layout).transient_bytes
    workspace = problem.workspace(bench.backend, debug=False)
    meter = _Meter()
    with meter:
        out, lse = problem.run(bench.backend, workspace, with_lse=bench.lse)
    # not counted: the results, which are the caller's, and the small tensors that core makes once a step
    result_bytes = out.nbytes + lse.nbytes + 2**16
    used = max(meter.peak - result_bytes, 0)
    where = f"{used} bytes of temporaries, transient_bytes says {allowed}"
    return _within(used, allowed).hold(where)


def _within(used: int, allowed: int) -> Measure:
    if allowed:
        return Measure(used / allowed, 1.0)
    return Measure(math.inf if used else 0.0, 1.0)


class _Metered:
    """Layer ops whose temporaries are measured."""

    def __init__(self, ops: LayerOps) -> None:
        self._ops, self.used = ops, 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an op
        op, meter = getattr(self._ops, name), _Meter()
        if not callable(op):
            return op

        def run(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - those of any op
            with meter:
                result = op(*args, **options)
            results = attrs.astuple(result, recurse=False) if attrs.has(type(result)) else result
            result_bytes = sum(tensor.nbytes for tensor in tree_leaves(results) if isinstance(tensor, torch.Tensor))
            self.used = max(self.used, meter.peak - result_bytes)
            return result

        return run


def layer_temporaries(tokens: int, *runs: Callable[[Bench, Any], object]) -> Callable[[Bench, Any], Measure]:
    """The layer ops of some runs hold no more temporaries than `transient_bytes(tokens)` of the ops says."""

    def check(bench: Bench, inputs: Any) -> Measure:  # noqa: ANN401 - a CaseInput
        metered, allowed = _Metered(bench.layer_ops), bench.layer_ops.transient_bytes(tokens)
        backend: Any = SimpleNamespace(layer_ops=metered)
        for run in runs:
            run(attrs.evolve(bench, backend=backend), inputs)
        where = f"{metered.used} bytes of temporaries, transient_bytes of the layer ops says {allowed}"
        return _within(metered.used, allowed).hold(where)

    return check


def far(bench: Bench, call: SingleCall) -> Measure:
    """Pages past 2^31 and 2^32 bytes are read at their own addresses."""
    # a copy, so that its gigabytes are freed afterwards
    return equals_oracle(bench, attrs.evolve(call))

"""Subjects of a benchmark: calls that are ready to run, with their results and expected results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.tools.bench.accuracy import attention, normalised, rotated
from dsv4attn.tools.bench.attention_call import prepare_attention
from dsv4attn.tools.bench.cases import ATTENTION, HEAD_DIM, KernelCase
from dsv4attn.tools.bench.forward_step import make_forward_step
from dsv4attn.tools.bench.inputs import LAYOUT, make_inputs, query
from dsv4attn.tools.bench.layer_ops import LayerOpCase
from dsv4attn.tools.bench.records import fill, read, write

__all__ = ["Contender", "Task", "make_task", "returning"]


@frozen(eq=False)
class Contender:
    """A backend or peer on one case.

    name: its name.
    run: the timed call.
    reset: overwrites the results, so that a call that writes nothing is wrong.
    results: returns the results of the last call.
    note: shown with its row.
    expected: expected results, where they are not those of the task.
    """

    name: str
    run: Callable[[], None]
    reset: Callable[[], None]
    results: Callable[[], Sequence[Tensor]]
    note: str = ""
    expected: Sequence[Tensor] | None = field(default=None, repr=False)


@frozen(eq=False)
class Task:
    """A case with its inputs and its expected results.

    case: the case.
    flops: operations of its products.
    bytes: least bytes to move.
    expected: expected results.
    contender: makes a contender from the name of a backend and the backend.
    inputs: inputs that peers get: `Inputs` of attention kernels, others of steps around attention, or None.
    limit: largest error of a right result; None: by the backend's products, see `reference.limit`.
    fp8: whether operands of its products are fp8.
    """

    case: KernelCase | LayerOpCase
    flops: int
    bytes: int
    expected: Sequence[Tensor] = field(repr=False)
    contender: Callable[[str, Backend], Contender] = field(repr=False)
    inputs: object = field(default=None, repr=False)
    limit: float | None = None
    fp8: bool = False


def make_task(case: KernelCase, device: torch.device) -> Task:
    """Make inputs, and compute the expected results."""
    if case.kernel in (*ATTENTION, "step"):
        return _attention(case, device)
    return _gather(case, device) if case.kernel == "gather" else _insert(case, device)


def _attention(case: KernelCase, device: torch.device) -> Task:
    inputs = make_inputs(case, device)
    expected = attention(inputs)

    def contender(name: str, backend: Backend) -> Contender:
        if case.kernel == "step":
            step = make_forward_step(inputs, backend)
            return Contender(name, step.run, lambda: _spoil(step.out), lambda: [step.out])
        out = torch.empty_like(inputs.q)
        return Contender(name, prepare_attention(backend, inputs, out), lambda: _spoil(out), lambda: [out])

    return Task(case, inputs.flops, inputs.bytes, [expected], contender, inputs)


def returning(
    name: str,
    call: Callable[[], Sequence[Tensor]],
    results: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda made: made,
    note: str = "",
    expected: Sequence[Tensor] | None = None,
) -> Contender:
    """A contender whose call returns new tensors. results: makes what is judged of the tensors of the last call."""
    last: list[Tensor] = []

    def run() -> None:
        last[:] = call()

    return Contender(name, run, lambda: _spoil(*last), lambda: results(last), note, expected)


def _spoil(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


def _insert(case: KernelCase, device: torch.device) -> Task:
    """Rows of one request into random slots; `insert` normalises and rotates on the way."""
    generator = torch.Generator(device).manual_seed(case.seed)
    tokens, layer, whole = case.tokens, case.preset.layer, case.kernel == "insert"
    kv = torch.randn(tokens, HEAD_DIM, generator=generator, device=device, dtype=torch.float32).bfloat16()
    cache = PagedKVCache.allocate(LAYOUT, -(-tokens // 64) + 1, 64, device)
    slots = torch.randperm(cache.capacity, generator=generator, device=device)[:tokens]
    positions = torch.arange(tokens, device=device)
    table = cos_sin_cache(layer.rope, tokens, device)
    given = 3 * query(case, device, generator) if whole else kv
    wanted = PagedKVCache.allocate(LAYOUT, cache.num_blocks, 64, device)
    write(wanted, slots, rotated(kv, table).bfloat16() if whole else kv)
    expected = [read(wanted, slots)]
    if whole:
        expected.append(rotated(normalised(given, layer.eps) if layer.q_norm else given, table))

    def contender(name: str, backend: Backend) -> Contender:
        q = given.clone()

        def run() -> None:
            if whole:
                backend.qnorm_rope_kv_insert(q, kv, cache, slots, positions, table, layer.q_eps)
            else:
                backend.quantize_and_insert_k_cache(kv, cache, slots)

        def reset() -> None:
            # 0xFF is NaN as a code, as a bf16 and as a scale
            cache.tensor.fill_(0xFF)
            q.copy_(given)

        return Contender(name, run, reset, lambda: [read(cache, slots), *([q] if whole else [])])

    moved = tokens * (LAYOUT.record_bytes + 2 * HEAD_DIM) + (4 * given.numel() if whole else 0)
    return Task(case, 0, moved, expected, contender)


def _gather(case: KernelCase, device: torch.device) -> Task:
    generator = torch.Generator(device).manual_seed(case.seed)
    page, requests = case.preset.page, len(case.requests)
    lens = torch.tensor([n for n, _ in case.requests], dtype=torch.int32, device=device)
    most = int(lens.max())
    table = torch.randperm(requests * -(-most // page), generator=generator, device=device).int().view(requests, -1)
    cache = PagedKVCache.allocate(LAYOUT, table.numel(), page, device)
    fill(cache, generator)
    record = torch.arange(most, device=device)
    slots = table[:, record // page].long() * page + record % page
    expected = torch.stack([read(cache, row) for row in slots])

    def contender(name: str, backend: Backend) -> Contender:
        out = torch.empty(requests, most, HEAD_DIM, dtype=torch.bfloat16, device=device)

        def run() -> None:
            backend.dequantize_and_gather_k_cache(out, cache, lens, None, table, 0)

        return Contender(name, run, lambda: _spoil(out), lambda: [out])

    return Task(case, 0, requests * most * (LAYOUT.record_bytes + 2 * HEAD_DIM), [expected], contender)

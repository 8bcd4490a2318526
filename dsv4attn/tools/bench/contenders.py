"""Contenders of a benchmark: calls that are ready to run, with their results and expected results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from attrs import field
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.reprs import frozen
from dsv4attn.tools.bench.accuracy import reference
from dsv4attn.tools.bench.attention_call import prepare_attention
from dsv4attn.tools.bench.cases import ATTENTION, HEAD_DIM, PAIRS, KernelCase
from dsv4attn.tools.bench.forward_step import make_forward_step, products
from dsv4attn.tools.bench.inputs import LAYOUT, Inputs, RandomNumbers, fill, make_inputs, query, read_records
from dsv4attn.tools.bench.layer_ops import LayerOpCase


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
    reset: Callable[[], object]
    results: Callable[[], Sequence[Tensor]]
    note: str = ""
    expected: Sequence[Tensor] | None = field(default=None, repr=False)


@frozen(eq=False)
class Task:
    """A case with its inputs and its expected results.

    case: the case.
    flops: operations of its products.
    bytes: least bytes to move.
    contender: makes a contender from a name, a backend and the dtype of results that a call may write in fp32 too.
    inputs: inputs that peers get: `Inputs` of attention kernels, others of layer ops, or None.
    limit: largest error of a right result; None: by the backend's products, see `accuracy.limit`.
    fp8: whether operands of its products are fp8.
    beside: functions that make further contenders, by name. They are timed with the backends, as torch's product is.
    expected: results of the reference backend, in fp32 where the call may write that.
    """

    case: KernelCase | LayerOpCase
    flops: int
    bytes: int
    contender: Callable[[str, Backend, torch.dtype], Contender] = field(repr=False)
    inputs: object = field(default=None, repr=False)
    limit: float | None = None
    fp8: bool = False
    beside: Mapping[str, Callable[[], Contender]] = field(factory=dict, repr=False)
    expected: Sequence[Tensor] = field(repr=False, kw_only=True)

    @expected.default
    def _results_of_the_reference(self) -> Sequence[Tensor]:
        proven = self.contender("reference", reference(), torch.float32)
        proven.reset()
        proven.run()
        return proven.results()


def make_task(case: KernelCase, device: torch.device) -> Task:
    """Make inputs, and compute the expected results."""
    if case.kernel in (*ATTENTION, "step"):
        return _attention(case, device)
    return _gather(case, device) if case.kernel == "gather" else _insert(case, device)


def writing(name: str, run: Callable[[], None], *outputs: Tensor) -> Contender:
    """A contender whose call writes these tensors."""
    return Contender(name, run, lambda: _overwrite(*outputs), lambda: outputs)


def returning(
    name: str,
    call: Callable[[], Sequence[Tensor]],
    results: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda returned: returned,
    note: str = "",
) -> Contender:
    """A contender whose call returns new tensors. results: makes what is judged of the tensors of the last call."""
    last: list[Tensor] = []

    def run() -> None:
        last[:] = call()

    return Contender(name, run, lambda: _overwrite(*last), lambda: results(last), note)


def _overwrite(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


def expected_attention(inputs: Inputs) -> Tensor:
    """[T, H, D] fp32: attention of every token over its own keys, by the reference backend."""
    out = torch.empty_like(inputs.q, dtype=torch.float32)
    prepare_attention(reference(), inputs, out)()
    return out


def _attention(case: KernelCase, device: torch.device) -> Task:
    inputs = make_inputs(case, device)

    def contender(name: str, backend: Backend, dtype: torch.dtype) -> Contender:
        if case.kernel == "step" and dtype is inputs.q.dtype:
            step = make_forward_step(inputs, backend)
            return writing(name, step.run, step.out)
        out = torch.empty_like(inputs.q, dtype=dtype)
        return writing(name, prepare_attention(backend, inputs, out), out)

    beside = {}
    if case.kernel == "step" and case.records in ("", PAIRS[0]):
        # matrix products alone, which compute nothing that could be right
        beside["products"] = partial(Contender, "products", products(inputs), lambda: None, list)
    return Task(case, inputs.flops, inputs.bytes, contender, inputs, beside=beside)


def _insert(case: KernelCase, device: torch.device) -> Task:
    """Rows of one request into random slots; `insert` normalises and rotates on the way."""
    random = RandomNumbers(device, case.seed)
    tokens, layer, with_q = case.tokens, case.preset.layer, case.kernel == "insert"
    kv = random.normal(tokens, HEAD_DIM).bfloat16()
    cache = PagedKVCache.allocate(LAYOUT, -(-tokens // 64) + 1, 64, device)
    slots = random.permutation(cache.capacity)[:tokens]
    positions = torch.arange(tokens, device=device)
    table = cos_sin_cache(layer.rope, tokens, device)
    raw_q = 3 * query(case, random) if with_q else kv

    def contender(name: str, backend: Backend, dtype: torch.dtype) -> Contender:
        q, run = raw_q.to(dtype, copy=True), partial(backend.quantize_and_insert_k_cache, kv, cache, slots)
        if with_q:
            run = partial(backend.qnorm_rope_kv_insert, q, kv, cache, slots, positions, table, layer.q_eps)

        def reset() -> None:
            # 0xFF is NaN as a code, as a bf16 and as a scale
            cache.tensor.fill_(0xFF)
            q.copy_(raw_q)

        return Contender(name, run, reset, lambda: [read_records(cache, slots), *([q] if with_q else [])])

    moved = tokens * (LAYOUT.record_bytes + 2 * HEAD_DIM) + (4 * raw_q.numel() if with_q else 0)
    return Task(case, 0, moved, contender)


def _gather(case: KernelCase, device: torch.device) -> Task:
    random = RandomNumbers(device, case.seed)
    page, requests = case.preset.page, len(case.requests)
    lens = torch.tensor([n for n, _ in case.requests], dtype=torch.int32, device=device)
    longest = int(lens.max())
    table = random.pages(requests, -(-longest // page))
    cache = PagedKVCache.allocate(LAYOUT, table.numel(), page, device)
    fill(cache, random)

    def contender(name: str, backend: Backend, dtype: torch.dtype) -> Contender:
        out = torch.empty(requests, longest, HEAD_DIM, dtype=dtype, device=device)
        return writing(name, lambda: backend.dequantize_and_gather_k_cache(out, cache, lens, None, table, 0), out)

    return Task(case, 0, requests * longest * (LAYOUT.record_bytes + 2 * HEAD_DIM), contender)

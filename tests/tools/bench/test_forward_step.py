"""Whole steps are those of an engine, and each way to call the backend gives the same output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.tools.bench.accuracy import error
from dsv4attn.tools.bench.cases import PAIRS, PRESETS, KernelCase, host_cases
from dsv4attn.tools.bench.contenders import expected_attention
from dsv4attn.tools.bench.forward_step import make_forward_step, products
from dsv4attn.tools.bench.inputs import make_inputs
from dsv4attn.tools.bench.overhead import Overhead, overhead

CPU = torch.device("cpu")
KINDS = ["flash_swa", "flash_c4", "flash_c128"]


class Scratchy(ReferenceBackend):
    """Wants scratch, and counts its attentions."""

    attended = 0

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, width), torch.float32)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return simultaneous_bytes(self.scratch(phase, layer, max_tokens, max_width))

    def decode(self, call: AttentionCall) -> None:
        call.scratch[0].fill_(torch.nan)
        self.attended += 1
        super().decode(call)


@pytest.mark.parametrize("requests", [((300, 1), (90, 1)), ((0, 5),), ((700, 3), (0, 2))])
@pytest.mark.parametrize(
    ("preset", "records"),
    [*((name, "") for name in ("flash_c4", "pro_c128", "flash_swa")), *product(("v41_r1", "v41_r2"), PAIRS)],
)
def test_a_step_computes_what_its_kernels_would(
    preset: str, records: str, requests: tuple[tuple[int, int], ...]
) -> None:
    inputs = make_inputs(KernelCase("step", PRESETS[preset], "", requests, seed=8, records=records), CPU)
    step = make_forward_step(inputs, ReferenceBackend())
    step.out.fill_(torch.nan)
    step.run()

    assert error([(step.out, expected_attention(inputs))]).within(1e-2)
    assert step.workspace.locked


def test_products_multiply_as_many_keys_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(KernelCase("step", PRESETS["flash_c4"], "", ((3000, 20),)), CPU)
    done = []
    monkeypatch.setattr(torch, "bmm", lambda a, _, out: done.append(2 * out.numel() * a.shape[-1]))
    products(inputs)()

    # rows come in tiles of 16, the last one filled up
    assert sum(done) == inputs.flops * 32 // 20


@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("name", KINDS)
def test_each_call_of_the_overhead_but_the_idle_one_gives_the_same_output(name: str, form: str) -> None:
    backend = Scratchy(decode_indices=form)
    step = make_forward_step(make_inputs(KernelCase("host", PRESETS[name], "", ((500, 1),)), CPU), backend)
    step.run()
    expected, backend.attended = step.out.clone(), 0
    outs: list[Tensor] = []

    def note(call: Callable[[], None], device: torch.device) -> float:
        step.out.fill_(torch.nan)
        call()
        outs.append(step.out.clone())
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4attn.tools.bench.overhead.seconds", note)
        values = overhead(step, rounds=4)

    assert [len(times) for times in (values.direct_s, values.plain_s, values.bound_s, values.idle_s)] == [4, 4, 4, 4]
    assert backend.attended == 4 * 5, "three calls and one between rounds, in four rounds and one for warming up"
    for i, out in enumerate(outs):
        assert torch.equal(out, expected) if i % 4 < 3 else bool(out.isnan().all())


def test_shares_of_the_host_follow_from_the_fastest_tenth() -> None:
    slow = [100.0] * 60
    direct, plain, bound = ([2.0 * n] * 40 + slow for n in (1.0, 1.03, 1.2))
    values = Overhead("swa", direct, plain, bound, [1e-5] * 100)

    np.testing.assert_allclose([values.percent("plain"), values.percent("bound"), values.us("idle")], [3.0, 20.0, 10.0])
    assert values.as_json()["bound_us"] == values.us("bound")
    assert "10 us through one whose ops do nothing" in str(values)


def test_the_host_is_measured_on_every_kind_of_layer() -> None:
    assert [case.preset.kind for case in host_cases()] == [*LayerKind]
    assert {case.requests for case in host_cases()} == {((8192, 1),)}

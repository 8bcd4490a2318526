"""Option `prefill=auto` of the sm90 backend: pages or rows for each chunk, in the memory for rows."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import PREFILL_COST_MODEL, PrefillCostModel
from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.forward_mqa import phase_call_of
from dsv4attn.core.attention.gathered import GatheredCall
from dsv4attn.core.attention.paged import PagedCall
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import Engine, launching_nothing
from tests.backends.sm90.calls import measured_lines

FLASH = ModelGeometry.preset("deepseek-v4-flash")


def rows() -> list[tuple[int, str, int, int, float, float]]:
    """Heads, kind of layer, tokens before and of a chunk, microseconds on pages and on rows."""
    return [
        (int(h), kind, int(context), int(n), float(page), float(row))
        for h, kind, context, n, page, row in measured_lines("prefill_h200.txt")
    ]


def regret(row: tuple[int, str, int, int, float, float], costs: Any = PREFILL_COST_MODEL) -> float:
    """Time of the choice between pages and rows, relative to the better one."""
    heads, kind, context, tokens, page, gathered = row
    model = FLASH if heads == 64 else ModelGeometry.preset("deepseek-v4-pro")
    layer = model.layer_of_kind(kind)
    count = layer.entries(context + tokens) + min(context + tokens, tokens + layer.window - 1)
    chosen = page if costs.prefers_pages(layer, [(context, tokens)], count) else gathered
    return chosen / min(page, gathered)


def test_the_choice_is_that_of_the_measured_times() -> None:
    lost = {row[:4]: regret(row) for row in rows()}

    assert len(lost) == 90
    assert max(lost.values()) < 1.03
    assert {row[4] < row[5] for row in rows()} == {True, False}


def few_heads_regret(line: list[str], costs: PrefillCostModel) -> float:
    """Time of the choice between tokens by themselves, groups of them, and rows, relative to the fastest."""
    heads, kind, before, tokens, requests, *times = line
    layer = evolve(FLASH.layer_of_kind(kind), num_heads=int(heads))
    context, count, each = int(before), int(requests), int(tokens) // int(requests)
    alone, groups, gathered = map(float, times)
    widths = [layer.window, max(layer.entries(context + int(tokens)), 1)][: 1 + (kind == "c128a")]
    page = groups if costs.prefers_groups(layer, int(tokens), count, widths) else alone
    rows_of = count * (layer.entries(context + each) + min(context + each, each + layer.window - 1))
    chosen = page if costs.prefers_pages(layer, [(context, each)] * count, rows_of) else gathered
    return chosen / min(alone, groups, gathered)


@pytest.mark.parametrize("change", [{}, {"group": 0.2}, {"group_start": 5}, {"group_tile": 0.1}])
def test_few_heads_are_computed_in_the_fastest_way(change: dict[str, Any]) -> None:
    costs = evolve(PREFILL_COST_MODEL, **change)
    lines = measured_lines("prefill_few_heads_h200.txt")
    lost = {tuple(line[:5]): few_heads_regret(line, costs) for line in lines}

    assert len(lost) == 74
    assert (max(lost.values()) < 1.14 and max(x for key, x in lost.items() if key[0] != "32") <= 1.07) == (not change)


@pytest.mark.parametrize("change", [{"row": 0.1}, {"page": 0.1}, {"gathered": 0.01}, {"least": 4096}])
def test_another_number_chooses_worse(change: dict[str, Any]) -> None:
    costs = evolve(PREFILL_COST_MODEL, **change)

    assert sum(regret(row, costs) > 1.03 for row in rows()) > 1


def test_requests_of_one_length_are_attended_as_one_request_is() -> None:
    layer = FLASH.layer_of_kind("c4a")

    assert PREFILL_COST_MODEL.prefers_pages(layer, [(9000, 64)], 2400)
    assert not PREFILL_COST_MODEL.prefers_pages(layer, [(9000, 64)] * 8, 8 * 2400)


LIMITS = Limits(max_num_reqs=3, max_num_batched_tokens=40, max_model_len=600, max_index_elements=2**14)
STEPS = [[(300, 7)], [(130, 31)], [(500, 1), (260, 9)], [(300, 7), (0, 5)]]
"""In the last the rows of both requests are too many: they are two chunks on rows, and one on pages."""


def outputs(prefill: str, kind: LayerKind, monkeypatch: pytest.MonkeyPatch, pages: list[bool]) -> list[torch.Tensor]:
    """Of three steps. pages: what the rule answers, in turn."""
    answers: list[bool] = []

    class FixedAnswers:
        def prefers_pages(self, *_: object, **__: object) -> bool:
            answers.append(pages[len(answers) % len(pages)])
            return answers[-1]

        def prefers_groups(self, *_: object, **__: object) -> bool:
            return False

    monkeypatch.setattr(launch, "PREFILL_COST_MODEL", FixedAnswers())
    on, rng = Engine(Sm90Backend(prefill=prefill), FLASH, LIMITS, kind, DEVICE), Random(7)
    outputs_of_steps = []
    for requests in STEPS:
        batch = on.load(requests, rng)
        outputs_of_steps.append(on.attend(batch.slot_mapping.shape[0], on.metadata(batch)).clone())
    assert bool(answers) == (prefill == "auto")
    return outputs_of_steps


@pytest.mark.matrix
@pytest.mark.parametrize(
    "kind",
    [LayerKind.SWA, pytest.param(LayerKind.CSA, marks=pytest.mark.matrix)] if INTERPRETED else list(LayerKind),
)
def test_each_chunk_has_the_result_of_pages_or_of_rows(kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a workspace that is locked at the plan of rows."""
    paged, gathered = (outputs(form, kind, monkeypatch, [True]) for form in ("paged", "gathered"))
    on_pages, on_rows, mixed = (
        outputs("auto", kind, monkeypatch, answers) for answers in ([True], [False], [True, False])
    )

    assert all(torch.equal(left, right) for left, right in zip(paged[:3], on_pages, strict=False))
    assert all(torch.equal(left, right) for left, right in zip(gathered, on_rows, strict=True))
    assert torch.equal(mixed[0], paged[0])
    assert torch.equal(mixed[1], gathered[1])
    for actual in (on_pages, on_rows, mixed):
        for left, right in zip(actual, paged, strict=True):
            assert (left.float() - right.float()).norm() <= 4e-3 * right.float().norm()


@pytest.mark.matrix
@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("pair", [False, True])
def test_core_asks_with_the_lengths_of_the_chunk(*, answer: bool, pair: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = []

    class Asked(Sm90Backend):
        def prefers_pages(self, layer: Any, requests: Any, rows: int) -> bool:
            questions.append((requests, rows))
            return answer

    recording = Asked(prefill="auto")
    backend: Any = PhasedBackend(Sm90Backend(), recording) if pair else recording
    limits = evolve(LIMITS, max_index_elements=10 * 198)
    # nothing has to be computed for what is asked
    device = torch.device("meta") if INTERPRETED else DEVICE
    on = Engine(backend, FLASH, limits, LayerKind.CSA, device)
    with launching_nothing():
        metadata = on.metadata(on.load([(500, 1), (260, 20), (10, 6)], Random(1)))
    seen, whole = list[ForwardCall](), ForwardCall.chunks

    def noted(call: ForwardCall) -> Any:
        seen.append(call)
        return whole(call)

    monkeypatch.setattr(ForwardCall, "chunks", noted)
    with launching_nothing():
        on.attend(27, metadata)
    (step,) = seen
    calls = [type(phase_call_of(step, chunk)) for chunk in step.chunks()]

    assert set(calls) == {PagedCall if answer else GatheredCall}
    # the first request is cut: ten of its tokens, with 198 columns each, fill the index matrix
    lengths = [requests for requests, _ in questions[: len(calls)]]
    assert sum(count for requests in lengths for _, count in requests) == 26
    assert [context for requests in lengths for context, _ in requests][:2] == [260, 260 + lengths[0][0][1]]
    assert lengths[-1][-1] == (10, 6)
    assert all(rows > 0 for _, rows in questions)


def test_an_unknown_form_of_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto' or "):
        Sm90Backend(prefill="rows")

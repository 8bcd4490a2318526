"""A wrong result gets no time, whether it is wrong at first or later. What raises is a row, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import AttentionCall, Backend, GatheredKeys
from dsv4attn.errors import UnsupportedError
from dsv4attn.tools.bench.attention_peers import AttentionPeer
from dsv4attn.tools.bench.cases import KERNELS, PAIRS, CaseSizes, cases_of, decodes
from dsv4attn.tools.bench.result import load
from dsv4attn.tools.bench.runner import BEST, FAILED, MEASURED, REFUSED, WRONG, BenchRow, Runner, geomeans, pair_means
from tests.tools.bench.sample_runs import ROOF, row, run

SIZE = CaseSizes((2,), 3, 5, 20, 2)


@pytest.fixture(autouse=True)
def _known_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: ROOF)


def _last_layout(call: AttentionCall) -> KVCacheLayout:
    """The layout of the last segment's cache."""
    assert not isinstance(call.keys, GatheredKeys)
    return call.keys[-1].cache.layout


def runner(backend: Backend, peers: Sequence[Any] = (), name: str = "reference") -> Runner:
    return Runner(torch.device("cpu"), {name: backend}, peers, 2)


def rows(backend: Backend, kernel: str, preset: str = "flash_swa", peers: Sequence[Any] = ()) -> list[BenchRow]:
    (case,) = cases_of([kernel], [preset], SIZE)
    return runner(backend, peers).run(case)


@pytest.mark.matrix
@pytest.mark.in_turn
@pytest.mark.parametrize("keys", ["gathered", "paged"])
@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_every_kernel_is_measured_in_every_form(form: str, keys: str) -> None:
    backend = ReferenceBackend(decode_indices=form, prefill_indices=form, prefill_keys=keys)
    bench_runner = runner(backend)
    for case in cases_of([*KERNELS, "step"], ["flash_c4", "flash_swa"], SIZE):
        values = bench_runner.run(case)[0]
        assert (values.state, values.reason) == (MEASURED, ""), case.name
        assert values.median is not None
        assert values.error is not None
        assert values.error < 3e-3
        assert values.least == ROOF.seconds(values.flops, values.bytes) > 0
        assert values.roofline == values.least / values.median


@pytest.mark.parametrize("pages", [True, False])
def test_a_prefill_takes_pages_or_rows_as_the_backend_prefers(*, pages: bool) -> None:
    forms, questions = set(), []

    class Prefers(ReferenceBackend):
        def prefers_pages(self, layer: Any, requests: Any, rows: int) -> bool:
            questions.append(([*requests], rows))
            return pages

        def prefill(self, call: AttentionCall) -> None:
            forms.add(isinstance(call.keys, GatheredKeys))
            super().prefill(call)

    (case,) = cases_of(["prefill"], ["flash_c4"], SIZE)
    values = runner(Prefers()).run(case)[0]

    assert values.state == MEASURED, values.reason
    assert forms == {not pages}
    assert [requests for requests, _ in questions] == [[*case.requests]] * len(questions)
    assert all(rows > 0 for _, rows in questions)


@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("kernel", ["decode", "prefill", "prefill-rows"])
def test_a_backend_gets_the_scratch_it_asks_for(kernel: str, form: str) -> None:
    class Scratchy(ReferenceBackend):
        def scratch(self, phase: Any, layer: Any, tokens: int, width: int) -> Any:
            return [((tokens, width), torch.float32)]

        def check(self, call: AttentionCall) -> None:
            (view,) = call.scratch
            assert view.shape == (call.q.shape[0], 128)
            view.fill_(torch.nan)

        def decode(self, call: AttentionCall) -> None:
            self.check(call)
            super().decode(call)

        def prefill(self, call: AttentionCall) -> None:
            self.check(call)
            super().prefill(call)

    (values,) = rows(Scratchy(decode_indices=form, prefill_indices=form), kernel)
    assert (values.state, values.reason) == (MEASURED, "")


def test_a_c128a_layer_is_measured_too() -> None:
    (case,) = cases_of(["decode"], ["flash_c128"], SIZE)
    assert runner(ReferenceBackend()).run(case)[0].state == MEASURED


class BecomesWrong(ReferenceBackend):
    """Right for `after` calls, and then spoilt."""

    def __init__(self, spoil: Callable[[AttentionCall], None], after: int = 0) -> None:
        super().__init__()
        self.spoil, self.left, self.calls = spoil, after, 0

    def decode(self, call: AttentionCall) -> None:
        super().decode(call)
        self.calls += 1
        self.left -= 1
        if self.left < 0:
            self.spoil(call)


def forget_sinks(call: AttentionCall) -> None:
    call.out.mul_(1.5)


def one_row(call: AttentionCall) -> None:
    call.out[1, 3] = -call.out[1, 3]


def one_nan(call: AttentionCall) -> None:
    call.out[0, 0, 0] = torch.nan


@pytest.mark.parametrize("spoil", [forget_sinks, one_row, one_nan])
def test_what_is_wrong_gets_no_time_and_is_not_timed(spoil: Callable[[AttentionCall], None]) -> None:
    backend = BecomesWrong(spoil)
    (values,) = rows(backend, "decode")

    assert values.state == WRONG
    assert values.median is values.p10 is values.p90 is values.tflops is values.roofline is None
    assert values.error is not None
    assert backend.calls == 1, "it ran once, to be judged"


def test_what_becomes_wrong_while_it_is_timed_gets_no_time() -> None:
    (values,) = rows(BecomesWrong(one_nan, after=4), "decode")

    assert values.state == WRONG
    assert values.median is None
    assert values.reason.startswith("after 2 calls")


def test_what_writes_nothing_is_wrong() -> None:
    class Idle(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:
            pass

        def prefill(self, call: AttentionCall) -> None:
            pass

        def dequantize_and_gather_k_cache(self, *_: Any) -> None:
            pass

        def quantize_and_insert_k_cache(self, *_: Any) -> None:
            pass

        def qnorm_rope_kv_insert(self, *_: Any) -> None:
            pass

    assert {kernel: rows(Idle(), kernel)[0].state for kernel in KERNELS} == dict.fromkeys(KERNELS, WRONG)


def test_what_does_its_work_only_once_is_wrong() -> None:
    class Lazy(ReferenceBackend):
        done = False

        def quantize_and_insert_k_cache(self, *arguments: Any) -> None:
            if not self.done:
                super().quantize_and_insert_k_cache(*arguments)
            self.done = True

    assert rows(Lazy(), "quantize")[0].state == WRONG


def test_what_raises_is_a_row_with_its_reason() -> None:
    class Broken(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:
            raise RuntimeError("no kernel image\nsecond line")

    (values,) = rows(Broken(), "decode")
    assert (values.state, values.reason, values.median) == (FAILED, "RuntimeError: no kernel image", None)


def test_what_raises_while_it_is_timed_is_a_row_and_the_others_are_timed() -> None:
    def give_up(_: AttentionCall) -> None:
        raise RuntimeError("out of barriers")

    ours, theirs = rows(BecomesWrong(give_up, after=3), "decode", peers=[Peer(right)])
    assert (ours.state, ours.reason, ours.median) == (FAILED, "while it was timed: RuntimeError: out of barriers", None)
    assert theirs.state == MEASURED
    assert theirs.median is not None


def test_what_raises_while_it_is_prepared_is_a_row() -> None:
    class Broken(ReferenceBackend):
        def scratch(self, *_: Any) -> Any:
            raise ValueError("no such width")

    (values,) = rows(Broken(), "prefill-rows")
    assert (values.state, values.reason) == (FAILED, "ValueError: no such width")


def test_a_backend_that_says_no_is_asked_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [SimpleNamespace(name="reference", lines=["HEADS  64, needs 8"])]
    monkeypatch.setattr(
        "dsv4attn.tools.bench.runner.explain", lambda *_, **__: SimpleNamespace(chosen=None, trace=values)
    )
    backend = BecomesWrong(one_nan)
    (row_,) = rows(backend, "decode")

    assert (row_.state, row_.reason, backend.calls) == (REFUSED, "HEADS 64, needs 8", 0)


def test_inputs_that_do_not_fit_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr("dsv4attn.tools.bench.runner.make_task", full)
    (values,) = rows(ReferenceBackend(), "decode")
    assert values.state == REFUSED
    assert "do not fit this machine" in values.reason


class Peer(AttentionPeer):
    """Another library, which answers with `answer`."""

    name = "other"

    def __init__(self, answer: Callable[[Any], torch.Tensor], *, missing: str | None = None) -> None:
        self.answer, self.missing = answer, missing

    def available(self) -> str | None:
        return self.missing

    def decode(self, inputs: Any) -> Callable[[], torch.Tensor]:
        return lambda: self.answer(inputs)

    def prefill(self, inputs: Any, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self.answer(inputs) + 0 * rows[inputs.combined.indices[0, 0].long()].sum()


def right(inputs: Any) -> torch.Tensor:
    from dsv4attn.tools.bench.contenders import expected_attention

    return expected_attention(inputs).bfloat16()


def test_ratios_are_speeds_by_the_peers_in_the_same_run() -> None:
    ours, theirs = rows(ReferenceBackend(), "decode", peers=[Peer(right)])

    assert (theirs.by, theirs.is_peer, theirs.state) == ("other", True, MEASURED)
    assert ours.median is not None
    assert theirs.median is not None
    assert ours.vs == {"other": theirs.median / ours.median}
    assert theirs.vs == {}


def test_a_prefill_of_a_peer_without_pages_gathers_first() -> None:
    ours, theirs = rows(ReferenceBackend(), "prefill", peers=[Peer(right)])

    assert theirs.by == "other + gather"
    assert theirs.state == MEASURED, "NaN without a gather"
    assert theirs.reason == "rows gathered by reference"
    assert set(ours.vs) == {"other"}


def test_a_peer_that_is_wrong_or_breaks_is_a_row_and_nothing_is_compared_with_it() -> None:
    def breaks(_: Any) -> torch.Tensor:
        raise RuntimeError("needs SM100")

    ours, wrong = rows(ReferenceBackend(), "decode", peers=[Peer(lambda inputs: 2 * right(inputs))])
    assert (ours.vs, wrong.state, wrong.median) == ({}, WRONG, None)
    ours, broken = rows(ReferenceBackend(), "decode", peers=[Peer(breaks)])
    assert (ours.state, broken.state, broken.reason) == (MEASURED, FAILED, "RuntimeError: needs SM100")


def test_a_peer_that_refuses_a_case_is_a_row() -> None:
    class Choosy(Peer):
        def decode(self, inputs: Any) -> Any:
            raise UnsupportedError("heads", expected="128", actual=64)

    _, values = rows(ReferenceBackend(), "decode", peers=[Choosy(right)])
    assert (values.state, values.reason) == (REFUSED, "heads: expected 128, got 64")


def test_a_peer_that_is_not_here_says_why_once() -> None:
    bench_runner = runner(ReferenceBackend(), [Peer(right, missing="other is not installed")])
    assert bench_runner.unavailable == {"other": "other is not installed"}
    assert bench_runner.peers == []


def test_peers_run_attention_only() -> None:
    assert [row.by for row in rows(ReferenceBackend(), "quantize", peers=[Peer(right)])] == ["reference"]


def test_a_step_is_compared_with_its_bare_products() -> None:
    case = cases_of(["step"], ["flash_swa"], SIZE)[0]
    ours, products = runner(ReferenceBackend()).run(case)
    assert (products.by, products.is_peer, products.error) == ("products", True, None)
    assert set(ours.vs) == {"products"}


def test_geometric_means_are_by_kernel_and_peer() -> None:
    values = geomeans([row(vs={"p": 2.0}), row("decode x b=1", vs={"p": 8.0}), row("prefill x t=1", vs={"p": 3.0})])
    assert values == {("decode", "ours", "p"): pytest.approx(4.0), ("prefill", "ours", "p"): pytest.approx(3.0)}


def test_of_several_peers_the_fastest_of_each_case_is_named(tmp_path: Path) -> None:
    first, second = row("select a", vs={"p": 2.0, "q": 8.0}), row("select b", vs={"p": 2.0, "q": 0.5})
    rows_of_p = [row("index a", vs={"p": 3.0}), row("mhc a")]

    assert [(r.best_peer, r.vs_best) for r in (first, second, *rows_of_p)] == [
        ("p", 2.0),
        ("q", 0.5),
        ("p", 3.0),
        (None, None),
    ]
    means = geomeans([first, second, *rows_of_p])
    assert means["select", "ours", BEST] == pytest.approx(1.0)
    assert ("index", "ours", BEST) not in means, "there is one peer"
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run([first, second]).as_json()))
    assert [saved["best_peer"] for saved in json.loads(file.read_text())["rows"]] == ["p", "q"]
    assert load(file, "--from").rows == (first, second)


def test_decodes_of_one_token_are_decodes() -> None:
    from dsv4attn.tools.bench.attention_call import problem_of
    from dsv4attn.tools.bench.cases import PRESETS, KernelCase

    preset = PRESETS["flash_c4"]
    phases = [problem_of(KernelCase("step", preset, "", r)).phase for r in (decodes(preset, 3), ((10, 7),))]
    assert phases == ["decode", "prefill"]


def test_the_roofline_is_measured_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_runner = runner(ReferenceBackend())
    faster = type(ROOF)(ROOF.bytes_s, 2 * ROOF.flops_s, ROOF.dtype)
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: faster)
    roof, (values,) = bench_runner.settled([row(flops=10**12, bytes=1)])

    assert roof == faster
    assert values.least == 1e12 / faster.flops_s


def test_an_fp8_row_is_judged_by_the_fp8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_runner, roof = (
        runner(ReferenceBackend()),
        type(ROOF)(ROOF.bytes_s, ROOF.flops_s, ROOF.dtype, 4 * ROOF.flops_s),
    )
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: roof)
    _, (plain, fp8) = bench_runner.settled([row(flops=10**12, bytes=1), row(flops=10**12, bytes=1, fp8=True)])

    assert plain.least == 4 * fp8.least == 1e12 / ROOF.flops_s


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_pairs_of_records_run_in_turn_and_have_their_speed_by_584(kernel: str) -> None:
    order: list[int] = []

    class NotesRecords(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:  # prefills on pages call it too
            order.append(_last_layout(call).record_bytes)
            super().decode(call)

    cases = cases_of([kernel], ["v41_r2"], SIZE)
    values = runner(NotesRecords(prefill_keys="paged"), [Peer(right)]).run(*cases)
    ours = [row for row in values if not row.is_peer]

    assert order[:3] == [584, 528, 288], "each is judged once"
    assert [*dict.fromkeys(order[3:])] == [584, 528, 288]
    assert [(row.state, row.records) for row in ours] == [(MEASURED, pair) for pair in PAIRS]
    medians = [row.median or 0.0 for row in ours]
    assert [row.vs_584 for row in ours] == [None, medians[0] / medians[1], medians[0] / medians[2]]
    peers = [(row.state, row.records, row.vs_584) for row in values if row.is_peer]
    assert peers == [(MEASURED, PAIRS[0], None), *((REFUSED, pair, None) for pair in PAIRS[1:])]
    assert [bool(row.vs) for row in ours] == [True, False, False]
    assert ours[1].bytes < ours[0].bytes > ours[2].bytes


def test_a_wrong_result_on_one_pair_leaves_the_others_their_times() -> None:
    def on_288(call: AttentionCall) -> None:
        if _last_layout(call).name == "v41_fp4":
            call.out[0, 0] = 7.0

    values = runner(BecomesWrong(on_288)).run(*cases_of(["decode"], ["v41_r1"], SIZE))
    assert [row.state for row in values] == [MEASURED, MEASURED, WRONG]
    assert values[1].vs_584
    assert values[2].vs_584 is None


def test_without_a_time_on_584_nothing_is_compared_with_it() -> None:
    def on_584(call: AttentionCall) -> None:
        if _last_layout(call).name == "fp8_ds_mla":
            call.out[0, 0] = 7.0

    values = runner(BecomesWrong(on_584)).run(*cases_of(["decode"], ["v41_r1"], SIZE))
    assert [(row.state, row.vs_584) for row in values] == [(WRONG, None), (MEASURED, None), (MEASURED, None)]


def test_queries_of_v41_are_rotated_without_a_norm() -> None:
    (values,) = runner(ReferenceBackend()).run(*cases_of(["insert"], ["v41_r1"], SIZE))
    assert (values.state, values.reason) == (MEASURED, "")


def test_means_relative_to_584_are_by_kernel_and_records() -> None:
    pairs = [("a", "528/528", 1.0), ("b", "528/528", 4.0), ("a", "528/288", 3.0)]
    values = pair_means([row(), *(row(f"decode {name}", records=pair, vs_584=x) for name, pair, x in pairs)])
    assert values == {
        ("decode", "ours", "528/528"): pytest.approx(2.0),
        ("decode", "ours", "528/288"): pytest.approx(3.0),
    }


def test_files_from_before_v41_are_still_read(tmp_path: Path) -> None:
    saved = run([row()]).as_json()
    for saved_row in saved["rows"]:
        del saved_row["records"], saved_row["vs_584"]
    (tmp_path / "old.json").write_text(json.dumps(saved), encoding="utf-8")

    (values,) = load(tmp_path / "old.json", "--from").rows
    assert (values.records, values.vs_584) == ("", None)

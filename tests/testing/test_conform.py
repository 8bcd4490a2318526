"""Running the kit: what counts, what does not, and what the certificate says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import attrs
import pytest
import torch

import dsv4attn
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.backend import API_VERSION, AttentionCall
from dsv4attn.core.contract.problem import Problem
from dsv4attn.errors import ArgumentError, UnknownNameError
from dsv4attn.testing.case import Area, Bench, Case, Measure, SkipCase, Wrong, chosen
from dsv4attn.testing.cases.table import CASES, GROUPS
from dsv4attn.testing.conform import (
    SCHEMA,
    BrokenSupportError,
    Certificate,
    Outcome,
    Subject,
    certificates_of,
    conform,
    outcomes_of,
    parse_request,
    run_case,
)
from dsv4attn.testing.processes import outcomes_in_processes
from tests.testing.own_cases import case_of, raising

FEW = chosen(CASES, "lse-*,quantise-ocp-*,sink-none-*")
REFERENCE = Subject.named("reference")


def refusing(*reasons: str, when: Callable[[Problem], bool] = lambda _: True) -> Subject:
    def refusals(problems: Sequence[Problem]) -> list[str]:
        return [*reasons] if any(when(problem) for problem in problems) else []

    return attrs.evolve(REFERENCE, refusals=refusals)


# the reference


FORMS = {
    "gathered-dense": ({}, None),
    "gathered-ragged": ({"prefill_indices": "ragged", "decode_indices": "ragged"}, "decode,prefill"),
    "paged-dense": ({"prefill_keys": "paged"}, "prefill,memory"),
    "paged-ragged": ({"prefill_keys": "paged", "prefill_indices": "ragged"}, "prefill,memory"),
}


# more rows, keys or requests than kernels may take for granted: the reference has no such limits, and a tile of it is a
# tile in every form, so that one form shows that the cases are right
LARGE = ("requests-*", "keys-*", "million*", "*-1031", "gather-long", "gather-requests")


def large(case: Case) -> bool:
    return any(fnmatchcase(case.name, pattern) for pattern in LARGE)


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_the_reference_keeps_the_contract_in_every_form(form: str) -> None:
    options, patterns = FORMS[form]
    cases = [case for case in chosen(CASES, patterns) if not patterns or not large(case)]
    certificate = conform(Subject.named("reference", options=options), cases, chosen=patterns)

    assert [(o.case.name, o.message) for o in certificate.of("failed")] == []
    assert certificate.of("refused") == []
    assert {o.message.partition(":")[0] for o in certificate.of("skipped")} == {"does not apply"}
    assert certificate.ok
    worst = certificate.worst
    assert worst is not None
    assert worst.measure is not None
    assert 0.1 < worst.measure.fraction < 0.8, "budgets are neither loose nor nearly spent"


# outcomes


def test_a_case_that_is_refused_is_not_run_and_keeps_its_reasons() -> None:
    subject = refusing("HEADS: 8, needs 64", "PAGE_SIZE: 64, needs 256")

    outcome = run_case(subject, case_of(raising(AssertionError("was run"))))

    assert (outcome.state, outcome.reasons) == ("refused", ("HEADS: 8, needs 64", "PAGE_SIZE: 64, needs 256"))
    assert outcome.measure is None
    assert outcome.message == "HEADS: 8, needs 64; PAGE_SIZE: 64, needs 256"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no kernel\nimage"), SystemExit(3), TypeError("x"), ArgumentError("q", expected="a", actual=1)],
)
def test_whatever_a_backend_raises_is_a_failed_case_and_the_run_goes_on(error: BaseException) -> None:
    seen: list[Outcome] = []
    cases = [case_of(raising(error)), case_of(lambda *_: Measure(), name="other")]

    certificate = conform(REFERENCE, cases, progress=seen.append)

    assert [o.state for o in certificate.outcomes] == ["failed", "passed"]
    assert seen == list(certificate.outcomes)
    first = certificate.outcomes[0]
    assert first.message.startswith(f"raised {type(error).__name__}: {str(error).splitlines()[0]}")
    assert "(in check, own_cases.py:" in first.message
    assert "/" not in first.message, "a certificate is sent to others"
    assert "Traceback" in first.trace
    assert not certificate.ok


def test_a_support_that_raises_is_a_failure_and_not_a_refusal() -> None:
    def refusals(problems: Sequence[Problem]) -> list[str]:
        raise BrokenSupportError("its support raised KeyError: 'x'")

    certificate = conform(attrs.evolve(REFERENCE, refusals=refusals), FEW)

    assert {o.state for o in certificate.outcomes} == {"failed"}
    assert certificate.outcomes[0].message == "its support raised KeyError: 'x'"


def test_a_skipped_case_says_why() -> None:
    outcome = run_case(REFERENCE, case_of(raising(SkipCase("6.4 GiB of memory cannot be had on cpu"))))

    assert (outcome.state, outcome.message) == ("skipped", "6.4 GiB of memory cannot be had on cpu")


def test_a_wrong_answer_keeps_its_number() -> None:
    outcome = run_case(REFERENCE, case_of(lambda *_: Measure(3.0, 2.0).hold("row 7 is off")))

    assert (outcome.state, outcome.message, outcome.measure) == ("failed", "row 7 is off", Measure(3.0, 2.0))


@pytest.mark.parametrize("cases", [[], FEW], ids=["none", "all-refused"])
def test_zero_executed_cases_is_a_failure(cases: list[Case]) -> None:
    certificate = conform(refusing("DEVICE: cpu, needs sm_90"), cases)

    assert certificate.executed == 0
    assert not certificate.ok
    assert certificate.verdict == f"reference proves nothing: none of {len(cases)} cases was executed"
    assert certificate.as_json()["ok"] is False


def test_a_backend_without_lse_is_judged_by_its_outputs() -> None:
    class Silent(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:
            assert call.lse is None
            super().decode(call)

    subject = attrs.evolve(refusing("LSE: asked for, needs none", when=lambda p: p.lse), backend=Silent())
    certificate = conform(subject, FEW)

    states = {o.case.name: o.state for o in certificate.outcomes}
    assert {states["lse-decode"], states["lse-absent-prefill"]} == {"refused"}
    assert states["sink-none-decode"] == "passed"
    assert [o.without_lse for o in certificate.of("passed") if o.case.area is Area.DECODE] == [True]
    assert certificate.ok


# measures


@pytest.mark.parametrize(
    ("measure", "fraction", "shown"),
    [
        (Measure(), 0.0, "same"),
        (Measure(1.0, 4.0), 0.25, "0.25"),
        (Measure(0.0, 4.0), 0.0, "0.00"),
        (Measure(1e-9, 0.0), math.inf, ">9999"),
        (Measure(200.0, 4.0), 50.0, "50"),
        (Measure(4e9, 4.0), 1e9, ">9999"),
    ],
)
def test_a_measure_is_a_fraction_of_its_budget(measure: Measure, fraction: float, shown: str) -> None:
    assert (measure.fraction, measure.shown) == (fraction, shown)


@pytest.mark.parametrize("measure", [Measure(math.nan, 1.0), Measure(math.inf, 1.0), Measure(1.01, 1.0), Measure(1e-9)])
def test_a_measure_beyond_its_budget_or_not_a_number_does_not_hold(measure: Measure) -> None:
    with pytest.raises(Wrong, match="here"):
        measure.hold("here")
    assert Measure(1.0, 1.0).hold("here") == Measure(1.0, 1.0)


# what is chosen


def test_cases_are_chosen_by_clause_letter_area_and_name() -> None:
    assert all("P" in {clause[0] for clause in case.clauses} for case in chosen(CASES, "P"))
    assert all("A1" in case.clauses for case in chosen(CASES, "A1"))
    assert {case.area for case in chosen(CASES, "memory")} == {Area.MEMORY}
    assert [case.name for case in chosen(CASES, "far-*, ragged")] == [
        "verify-ragged", "far-decode", "far-compressed-decode", "far-prefill", "far-compressed-prefill", "far-insert",
        "far-insert-fused", "far-gather",
    ]  # fmt: skip
    assert chosen(CASES, None) == list(CASES)
    assert "sink-none-decode" in {case.name for case in chosen(CASES, "sink")}


def test_a_pattern_after_an_exclamation_mark_leaves_cases_out() -> None:
    names = [case.name for case in chosen(CASES, "!requests-*, !memory")]
    expected = [c.name for c in CASES if c.area is not Area.MEMORY and not c.name.startswith("requests-")]
    assert names == expected
    both = {case.name for case in chosen(CASES, "L2,!decode")}
    assert both == {case.name for case in CASES if "L2" in case.clauses and case.area is not Area.DECODE}
    with pytest.raises(ArgumentError, match=r"expected patterns that leave a case, got 'A6,!call-plain-\*'"):
        chosen(CASES, "A6,!call-plain-*")
    with pytest.raises(ArgumentError, match="'millio', which none has"):
        chosen(CASES, "!millio")


def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ArgumentError, match=r"'millio'.*did you mean 'million'"):
        chosen(CASES, "S1,millio")


# subjects


def test_a_subject_knows_who_brings_it_and_where_it_runs() -> None:
    subject = Subject.named("reference", options={"prefill_keys": "paged"})

    assert subject.label == "reference:prefill_keys=paged"
    assert (subject.distribution, subject.version) == ("dsv4attn", dsv4attn.__version__)
    assert subject.device == "cpu"
    assert subject.facts.arch == "cpu"
    assert subject.refusals(CASES[0].inputs.problems()) == []
    captured = [attrs.evolve(problem, capture=True) for problem in CASES[0].inputs.problems()]
    assert subject.refusals(captured)[0].startswith("CAPTURE: ")


def test_a_backend_that_is_not_registered_is_never_refused() -> None:
    backend = ReferenceBackend()
    backend.name = "own"

    subject = Subject.of(backend)

    assert (subject.name, subject.distribution, subject.refusals(CASES[0].inputs.problems())) == ("own", "", [])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Subject.named("referen"), UnknownNameError),
        (lambda: Subject.named("reference", device="cuda:99"), ArgumentError),
        (lambda: Subject.named("reference", options={"fast": "1"}), ArgumentError),
        (lambda: Subject.of("reference,paged"), ArgumentError),
    ],
)
def test_what_cannot_be_tried_is_an_error_at_once(make: Callable[[], Subject], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_a_request_is_a_name_and_its_options() -> None:
    assert parse_request("acme") == ("acme", {})
    assert parse_request("acme, a=1 ,b=x=y") == ("acme", {"a": "1", "b": "x=y"})
    assert parse_request("acme:a=1", ":") == ("acme", {"a": "1"})


# the certificate


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    def broken(*_: object) -> Measure:
        raise Wrong("not a number", Measure(math.nan, 1.0))

    refused = case_of(
        lambda *_: Measure(), name="refused", inputs=next(c.inputs for c in CASES if c.name == "heads-3-decode")
    )
    subject = refusing("HEADS: 3, needs a multiple of 8", when=lambda p: p.layer.num_heads == 3)
    return conform(subject, [*FEW, case_of(broken, name="broken"), refused], chosen="some")


def test_the_certificate_is_plain_json(certificate: Certificate) -> None:
    values = json.loads(json.dumps(certificate.as_json(), allow_nan=False))

    assert values["ok"] is False
    assert values["schema"] == SCHEMA
    assert values["backend"] == "reference"
    assert values["contract"] == API_VERSION
    assert values["device"]["arch"] == values["device"]["torch_device"] == "cpu"
    assert values["versions"]["torch"] == torch.__version__
    assert set(values["versions"]) == {"python", "dsv4attn", "torch", "triton", "numpy"}
    assert "fp8_ds_mla/1:e4m3fn:nope448:rope64:bf16:ue8m0x64:scales8:split" in values["layouts"]
    assert values["filter"] == "some"
    assert values["counts"] == {"executed": len(FEW) + 1, "passed": len(FEW), "failed": 1, "refused": 1, "skipped": 0}
    assert values["clauses"]["F1"] == {"passed": 0, "failed": 1, "refused": 1, "skipped": 0}
    assert [clause[0] for clause in values["clauses"]] == sorted(
        (clause[0] for clause in values["clauses"]), key=[*GROUPS].index
    )
    assert values["date"].endswith("+00:00")
    assert values["seconds"] >= 0
    assert {"options", "distribution", "version", "environment", "verdict", "worst"} <= set(values)


def test_the_certificate_tells_each_case(certificate: Certificate) -> None:
    values = {case["name"]: case for case in certificate.as_json()["cases"]}

    assert list(values) == [*(case.name for case in FEW), "broken", "refused"]
    passed, broken, refused = values["lse-decode"], values["broken"], values["refused"]
    assert (passed["state"], passed["clauses"]) == ("passed", ["L1", "L2", "B1"])
    assert passed["fraction"] == pytest.approx(passed["error"] / passed["budget"])
    assert (broken["state"], broken["error"], broken["budget"], broken["fraction"]) == ("failed", None, 1.0, None)
    assert broken["message"] == "not a number"
    assert refused["reasons"] == ["HEADS: 3, needs a multiple of 8"]
    assert values["quantise-ocp-64"]["budget"] == 0


def test_the_certificate_holds_no_path_of_the_machine(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/somebody/cache")
    monkeypatch.setenv("DSV4ATTN_CONFIG", "/home/somebody/dsv4attn.toml")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    values = certificate.as_json()

    assert values["environment"]["TRITON_INTERPRET"] == "1"
    assert "somebody" not in json.dumps(values)


def test_verdicts_say_what_was_proven(certificate: Certificate) -> None:
    assert certificate.verdict == f"reference breaks the contract: 1 of {len(FEW) + 1} cases failed"
    good = conform(REFERENCE, FEW)
    assert good.verdict == f"reference keeps the contract: all {len(FEW)} cases passed"
    some = conform(REFERENCE, FEW, chosen="S")
    assert some.verdict == f"reference keeps the contract: all {len(FEW)} cases of the filter 'S' passed"


# equal failures, and runs that end early


def test_equal_failures_are_one_group_named_by_its_first_case() -> None:
    says = {
        "a": "row 3: error of 12 budgets",
        "b": "other",
        "c": "row 31: error of 1.5e+04 budgets",
        "d": "row 1: error of inf budgets",
    }
    cases = [case_of(raising(Wrong(text)), name=name) for name, text in says.items()]

    groups = conform(REFERENCE, cases).as_json()["failures"]

    assert groups == [
        {"message": says["a"], "count": 3, "first": "a", "cases": ["a", "c", "d"]},
        {"message": "other", "count": 1, "first": "b", "cases": ["b"]},
    ]


@pytest.mark.parametrize("failing", [False, True])
def test_g22_a_run_that_is_interrupted_keeps_what_it_has_and_never_passes(*, failing: bool) -> None:
    first = raising(Wrong("so")) if failing else lambda *_: Measure()
    cases = [
        case_of(first, name="one"),
        case_of(raising(KeyboardInterrupt()), name="two"),
        case_of(first, name="three"),
    ]
    seen: list[str] = []

    certificate = conform(REFERENCE, cases, progress=lambda outcome: seen.append(outcome.case.name))

    assert seen == [outcome.case.name for outcome in certificate.outcomes] == ["one"]
    assert not certificate.ok
    assert certificate.interrupted
    values = "1 failed" if failing else "none of them failed"
    assert certificate.verdict == f"reference: interrupted, which proves nothing: 1 of 3 cases ran, {values}"
    assert json.loads(json.dumps(certificate.as_json()))["complete"] is False


# how it ends early, and where it runs


def test_the_first_failure_ends_a_run_that_is_asked_to_stop_there() -> None:
    def broken(bench: Bench, inputs: object) -> Measure:
        raise Wrong("it is not")

    cases = [FEW[0], case_of(broken, name="broken"), *FEW[1:]]
    certificate = conform(REFERENCE, cases, fail_fast=True)
    values = certificate.as_json()

    assert [(outcome.case.name, outcome.state) for outcome in certificate.outcomes] == [
        (FEW[0].name, "passed"),
        ("broken", "failed"),
    ]
    assert (values["ok"], values["complete"], values["asked"]) == (False, False, len(cases))
    assert certificate.verdict == (
        f"reference breaks the contract: 1 of 2 cases failed; the run ended there, after 2 of {len(cases)} cases"
    )
    assert conform(REFERENCE, FEW, fail_fast=True).as_json()["complete"], "nothing failed"
    assert conform(REFERENCE, [*FEW[:1], cases[1]], fail_fast=True).complete, "no case was left"


def test_processes_give_the_outcomes_of_one_process_in_the_same_order() -> None:
    cases = chosen(CASES, "lse-decode,max-logits-decode,quantise-ocp-1,gather-ocp-2")
    subjects = [Subject.named("reference", options={"prefill_keys": "paged"}), REFERENCE]

    def without_times(certificate: Certificate) -> list[Outcome]:
        return [attrs.evolve(outcome, seconds=0.0) for outcome in certificate.outcomes]

    seen: list[Outcome] = []
    in_two = certificates_of(subjects, cases, outcomes_in_processes(subjects, cases, 2), progress=seen.append)
    in_one = certificates_of(subjects, cases, outcomes_of(subjects, cases))
    assert [*map(without_times, in_two)] == [*map(without_times, in_one)]
    states = [[outcome.state for outcome in certificate.outcomes] for certificate in in_two]
    assert states == [["passed", "passed", "passed", "skipped"], ["passed"] * 4]
    assert seen == [outcome for pair in zip(*(c.outcomes for c in in_two), strict=True) for outcome in pair]

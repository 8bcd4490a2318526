"""The decision and its trace (promises G1, G6 and G9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dsv4attn.config import Setting, Settings
from dsv4attn.core.contract.backend import BackendInfo, Rank
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem, Reason
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import AmbiguousBackendError, ArgumentError, BrokenBackendError, NoBackendError
from dsv4attn.plugins import PluginFailure, PluginRegistry, Registered
from dsv4attn.selection import Selection, decide, explain

FLASH = ModelGeometry.preset("flash")
DECODE, PREFILL = Problem.of(FLASH, "c4a", "decode"), Problem.of(FLASH, "c4a", "prefill")
AUTO = Setting("auto", "default")
CPU, SM90, XPU = (DeviceFacts.named(name) for name in ("cpu", "h200", "b580"))
HEADS = Reason("HEADS", 24, "64 or 128", "pad q")


def answering(*reasons: Reason) -> Callable[[DeviceFacts, Problem], Sequence[Reason]]:
    return lambda _device, _problem: list(reasons)


def backend(
    name: str,
    *native: str,
    rank: Rank = Rank.VENDOR,
    support: Callable[[DeviceFacts, Problem], Sequence[Reason]] | None = None,
    **others: Any,
) -> Registered:
    info = BackendInfo(
        name=name,
        api="1.0",
        factory="a:b",
        support=support or answering(),
        summary="",
        native=native,
        rank=rank,
        **others,
    )
    return Registered(info, f"dsv4attn-{name}", "0.2")


REFERENCE = backend("reference", "cpu", rank=Rank.REFERENCE)


def choose(device: DeviceFacts, *backends: Registered, request: str = "auto", **others: Any) -> Selection:
    by_name = {entry.info.name: entry for entry in (*backends, REFERENCE)}
    setting = AUTO if request == "auto" else Setting(request, "argument")
    return decide(device, by_name, others.pop("problem", DECODE), setting, **others)


def rows(selection: Selection) -> dict[str, str]:
    return {name: "\n".join(lines) for name, lines in selection.rows}


def test_a_vendor_goes_before_generic_on_its_own_device() -> None:
    generic, vendor = backend("generic", "cuda", rank=Rank.GENERIC), backend("acme", "sm_9*")
    selection = choose(SM90, generic, vendor)

    assert selection.require() is vendor
    assert selection.verdict == "acme: the vendor backend of 2 native to sm_90"
    assert rows(selection)["generic"] == "supports this call"
    assert choose(DeviceFacts.named("sm80"), generic, vendor).require() is generic


def test_a_vendor_that_refuses_leaves_the_call_to_generic() -> None:
    generic, vendor = backend("generic", "cuda", rank=Rank.GENERIC), backend("acme", "sm_90", support=answering(HEADS))
    selection = choose(SM90, generic, vendor)

    assert selection.require() is generic
    assert selection.verdict == "generic: the only backend native to sm_90 that can run this call"
    assert rows(selection)["acme"] == "HEADS  24, needs 64 or 128 -> pad q"


def test_g9_the_reference_is_automatic_on_the_cpu_only() -> None:
    assert choose(CPU).require() is REFERENCE
    for device in (SM90, XPU):
        selection = choose(device)

        assert selection.chosen is None
        note = f"supports this call; never automatic on {device.arch} -> ask for it by name"
        assert rows(selection)["reference"] == note


def test_without_a_native_backend_the_verdict_names_those_to_ask_for() -> None:
    acme, bolt = backend("acme", "xpu"), backend("bolt", "hip")

    assert choose(SM90, acme, bolt).verdict == (
        "no backend native to sm_90 can run this call -> ask for acme or bolt or reference by name"
    )
    only = {"acme": backend("acme", "cuda", support=answering(HEADS))}
    assert decide(SM90, only, DECODE, AUTO).verdict == "no backend can run this call"
    assert decide(SM90, {}, DECODE, AUTO).verdict == "no backend can run this call"


def test_a_backend_is_not_chosen_where_it_runs_but_is_not_native() -> None:
    triton = backend("triton", "cuda", "hip", rank=Rank.GENERIC, runs_on=("*",))

    assert choose(CPU, triton).require() is REFERENCE
    assert choose(CPU, triton, request="triton").require() is triton


def test_g9_a_tie_is_an_error_that_names_both_distributions() -> None:
    selection = choose(SM90, backend("bolt", "sm_90"), backend("acme", "cuda"))

    with pytest.raises(AmbiguousBackendError) as caught:
        selection.require()
    assert str(caught.value).startswith(
        "acme (dsv4attn-acme 0.2) and bolt (dsv4attn-bolt 0.2) have equal rank on sm_90"
    )
    assert choose(SM90, backend("bolt", "sm_90"), backend("acme", "cuda"), request="bolt").require().info.name == "bolt"


def test_a_backend_that_refuses_makes_no_tie() -> None:
    acme = backend("acme", "cuda")

    assert choose(SM90, backend("bolt", "sm_90", support=answering(HEADS)), acme).require() is acme


def test_the_order_of_registration_decides_nothing() -> None:
    entries = [backend("a", "cuda", rank=Rank.GENERIC), backend("b", "sm_90"), backend("c", "xpu"), REFERENCE]
    traces = {
        str(decide(SM90, {entry.info.name: entry for entry in order}, DECODE, AUTO))
        for order in itertools.permutations(entries)
    }

    assert len(traces) == 1


def test_one_backend_is_chosen_for_several_problems_of_a_phase() -> None:
    def only_c4a(_: DeviceFacts, problem: Problem) -> list[Reason]:
        return [] if problem.layer.kind is LayerKind.CSA else [Reason("LAYER", problem.layer.kind.value, "c4a")]

    vendor, generic = backend("acme", "sm_90", support=only_c4a), backend("generic", "cuda", rank=Rank.GENERIC)
    problems = [Problem.of(FLASH, kind) for kind in FLASH.kinds]
    selection = choose(SM90, vendor, generic, problem=problems)

    assert choose(SM90, vendor, generic).require() is vendor
    assert selection.require() is generic
    assert rows(selection)["acme"].splitlines() == ["LAYER  swa, needs c4a", "LAYER  c128a, needs c4a"]
    assert len(rows(selection)["call"].splitlines()) == 3


def test_a_reason_that_all_problems_share_is_one_line() -> None:
    vendor = backend("acme", "sm_90", support=answering(HEADS))
    selection = choose(SM90, vendor, problem=[Problem.of(FLASH, kind) for kind in FLASH.kinds])

    assert len(rows(selection)["acme"].splitlines()) == 1


@pytest.mark.parametrize("problems", [[], [DECODE, PREFILL]])
def test_problems_of_one_decision_are_of_one_phase(problems: list[Problem]) -> None:
    with pytest.raises(ArgumentError, match=r"^problems: expected one or more, all of one phase"):
        decide(CPU, {"reference": REFERENCE}, problems, AUTO)


# explicit


def test_g9_an_explicit_choice_never_falls_back() -> None:
    selection = choose(CPU, backend("acme", "cpu", support=answering(HEADS)), request="acme")

    with pytest.raises(NoBackendError) as caught:
        selection.require()
    assert type(caught.value) is NoBackendError
    assert str(caught.value).splitlines()[0] == "backend 'acme' cannot run this call"
    assert rows(selection)["reference"] == "not asked for; supports this call"


def test_g9_the_error_shows_the_call_the_device_the_request_and_every_candidate() -> None:
    failure = PluginFailure(
        "acme-kernels", "lib", "load", "ImportError: libacme.so", "repair it", "Traceback ...", "0.3"
    )
    selection = choose(
        XPU,
        backend("rocm", "hip", runs_on=("hip",)),
        backend("xpu", "xpu", support=answering(Reason("PAGE_SIZE", 48, "a multiple of 16", "use 64"), HEADS)),
        request="xpu",
        failures=[failure],
    )
    cure = "repair it; `dsv4attn doctor` shows the traceback"
    versions = str(XPU).partition('"  ')[2]

    assert str(selection) == "\n".join(
        [
            "backend 'xpu' cannot run this call",
            f"  call       {DECODE}",
            f'  device     xpu "Intel GPU"  {versions}',
            '  request    "xpu"  (argument)',
            "  reference  not asked for; supports this call",
            "  rocm       not asked for; would be refused: DEVICE  xpu, needs hip",
            "  xpu        PAGE_SIZE  48, needs a multiple of 16 -> use 64",
            "             HEADS      24, needs 64 or 128 -> pad q",
            f"  lib        failed to load: ImportError: libacme.so (acme-kernels 0.3) -> {cure}",
        ]
    )


def test_the_trace_is_aligned_to_the_longest_name() -> None:
    name = "acme-with-a-long-name"
    lines = str(choose(CPU, backend(name, "cpu"))).splitlines()[1:]
    start = 2 + len(name) + 2

    assert [line[start - 2 : start] for line in lines] == ["  "] * len(lines)
    assert all(line[start] != " " and line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("refernz", "; did you mean 'reference'?"),
        ("quantum", ""),
        ("acme", "; did you mean 'acme-fast' or 'acme-safe'?"),
    ],
)
def test_g9_an_unknown_name_is_an_error_with_a_suggestion(name: str, suggestion: str) -> None:
    selection = choose(CPU, backend("acme-fast", "sm_90"), backend("acme-safe", "sm_90"), request=name)

    assert selection.verdict == f"backend {name!r} cannot be used: no backend has this name{suggestion}"
    with pytest.raises(NoBackendError):
        selection.require()


def test_a_name_may_be_the_beginning_of_another() -> None:
    acme = backend("acme", "sm_90")

    assert choose(SM90, acme, backend("acme-fast", "xpu"), request="acme").require() is acme


def test_the_verdict_for_a_backend_whose_plugin_failed_is_the_failure() -> None:
    failure = PluginFailure("dsv4attn-acme", "acme", "load", "ImportError: no", version="0.2")
    selection = choose(CPU, request="acme", failures=[failure])

    assert selection.verdict == ("backend 'acme' cannot be used: failed to load: ImportError: no (dsv4attn-acme 0.2)")


# support that is broken


def raising(_device: DeviceFacts, _problem: Problem) -> Sequence[Reason]:
    raise KeyError("boom")


def test_g9_support_that_raises_is_broken_with_its_cause() -> None:
    selection = choose(CPU, backend("acme", "cpu", support=raising), request="acme")

    assert selection.verdict == "backend 'acme' is broken"
    cure = "report it to its authors, or leave it out: DSV4ATTN_PLUGINS_DENY=dsv4attn-acme"
    assert rows(selection)["acme"] == f"is broken: its support raised KeyError: 'boom' (dsv4attn-acme 0.2) -> {cure}"
    with pytest.raises(BrokenBackendError) as caught:
        selection.require()
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_automatic_choice_passes_over_a_broken_backend() -> None:
    assert choose(CPU, backend("acme", "cpu", support=raising)).require() is REFERENCE
    with pytest.raises(NoBackendError) as caught:
        choose(SM90, backend("acme", "cuda", support=raising)).require()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("answer", [None, True, "", {}, ["no"], [None], iter(())])
def test_an_answer_of_a_wrong_type_is_broken_and_never_a_yes(answer: Any) -> None:
    selection = choose(CPU, backend("acme", "cpu", support=lambda _d, _p: answer), request="acme")

    assert selection.error is BrokenBackendError
    assert "its support raised TypeError: support returned" in rows(selection)["acme"]


@pytest.mark.parametrize("answer", [[], ()])
def test_an_empty_list_or_tuple_is_a_yes(answer: Any) -> None:
    assert choose(CPU, backend("acme", "cpu", support=lambda _d, _p: answer)).chosen is not None


@pytest.mark.parametrize("raised", [SystemExit(3), GeneratorExit(), type("Panic", (BaseException,), {})("rust")])
def test_a_backend_is_broken_whatever_its_support_raises(raised: BaseException) -> None:
    def panic(_device: DeviceFacts, _problem: Problem) -> Sequence[Reason]:
        raise raised

    selection = choose(CPU, backend("acme", "cpu", support=panic))

    assert selection.chosen is REFERENCE
    assert selection.trace[0].state == "broken"


def test_ctrl_c_in_support_is_not_caught() -> None:
    def stop(_device: DeviceFacts, _problem: Problem) -> Sequence[Reason]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choose(CPU, backend("acme", "cpu", support=stop))


# facts


def test_a_missing_package_is_a_reason_with_a_cure() -> None:
    acme = backend("acme", "cpu", packages=("acme-runtime",))

    assert choose(CPU, acme).require() is acme
    selection = choose(CPU, acme, installed={"acme-runtime": None})
    assert rows(selection)["acme"] == (
        "PACKAGE  acme-runtime is not installed, needs acme-runtime -> pip install acme-runtime"
    )


def test_packages_of_a_device_that_is_described_count_as_installed() -> None:
    registry = PluginRegistry({"acme": backend("acme", "sm_90", packages=("no-such-package",))})

    assert explain(DECODE, device=SM90, settings=Settings(), registry=registry).chosen is not None
    selection = explain(DECODE, device="cpu", backend="acme", settings=Settings(), registry=registry)
    assert [reason.code for reason in selection.trace[0].reasons] == ["PACKAGE"]


def test_without_torch_the_reference_is_refused() -> None:
    reference = PluginRegistry.load(entry_points=[]).backends["reference"]
    cpu = DeviceFacts("cpu", "cpu", "CPU")
    selection = decide(cpu, {"reference": reference}, DECODE, Setting("auto", "default"), installed={"torch": None})

    assert selection.chosen is None
    assert [reason.code for reason in selection.trace[0].reasons] == ["PACKAGE"]
    assert "pip install torch" in str(selection)


# how the chosen backend would serve


def test_only_the_notes_of_the_chosen_backend_are_shown_each_line_once() -> None:
    def notes(_: DeviceFacts, problem: Problem) -> Sequence[str]:
        return ["by the fast kernel", f"in {problem.phase}"]

    def never(_: DeviceFacts, __: Problem) -> Sequence[str]:
        raise AssertionError("asked a backend that was not chosen")

    both = [DECODE, Problem.of(FLASH, "swa", "decode")]
    selection = choose(SM90, backend("acme", "sm_90", notes=notes), backend("bolt", "xpu", notes=never), problem=both)

    assert rows(selection)["acme"] == "chosen\nby the fast kernel\nin decode"
    assert [candidate.ways for candidate in selection.trace if candidate.name != "acme"] == [(), ()]


def test_notes_that_raise_are_a_line_and_change_no_choice() -> None:
    def notes(_: DeviceFacts, __: Problem) -> Sequence[str]:
        raise KeyError("boom")

    selection = choose(SM90, backend("acme", "sm_90", notes=notes))

    assert selection.require().info.name == "acme"
    assert rows(selection)["acme"] == "chosen\nits notes raised KeyError: 'boom'"

"""The parts of a layer are all of it, and kernels belong to the part that launched them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from attrs import asdict, evolve
from rich.console import Console

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.tools.bench.clock import Clock
from dsv4attn.tools.bench.layer_parts import LayerPart, Marks, measured, of_trace
from dsv4attn.tools.bench.report import layer_tables
from dsv4attn.tools.bench.whole_layer import LayerCase, LayerTime, _parts, _prepared_layer, layer_cases

CPU = torch.device("cpu")
PREFIX = "dsv4attn layer: "


def spend(ms: float) -> None:
    time.sleep(1e-3 * ms)


def test_parts_follow_each_other_and_come_back() -> None:
    marks = Marks(CPU)

    def run() -> None:
        marks.start("before")
        spend(1)
        marks.around("inner", spend)(4)
        spend(1)
        marks.around("last", spend, "behind")(1)
        spend(1)
        marks.to()
        spend(30)

    parts = measured(run, marks, Clock(CPU), 3)

    assert [part.name for part in parts] == ["before", "inner", "last", "behind"]
    assert [part.launches for part in parts] == [None] * 4
    by_name = {part.name: part.seconds for part in parts}
    assert by_name["inner"] > by_name["last"] >= 1e-3
    assert by_name["before"] >= 2e-3
    assert sum(by_name.values()) >= 8e-3


def test_a_step_that_raises_ends_its_part() -> None:
    marks = Marks(CPU)
    marks.start("before")
    with pytest.raises(ZeroDivisionError):
        marks.around("inner", lambda: 1 // 0)()
    marks.to()

    assert [*marks.seconds] == ["before", "inner"]


def event(cat: str, name: str, ts: float, dur: float, **arguments: int) -> dict[str, Any]:
    named = {"External id" if key == "external" else key: value for key, value in arguments.items()}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": named}


def test_kernels_belong_to_the_part_in_which_they_were_launched() -> None:
    events = [
        {"ph": "M", "name": "process_name", "args": {}},
        event("user_annotation", PREFIX + "one", 10, 10, external=1),
        event("user_annotation", PREFIX + "two", 20, 10, external=2),
        event("user_annotation", "somebody else's", 5, 100, external=3),
        event("gpu_user_annotation", PREFIX + "one", 500, 10, external=1),
        event("cpu_op", "aten::mm", 12, 3, external=7),
        event("cuda_runtime", "cudaLaunchKernel", 13, 1, correlation=41, external=7),
        event("cuda_driver", "cuLaunchKernelEx", 22, 1, correlation=42),
        event("cuda_runtime", "cudaMemsetAsync", 29, 1, correlation=43),
        event("cuda_runtime", "cudaLaunchKernel", 31, 1, correlation=44),
        # all of them long after their launches, when the host is elsewhere
        event("kernel", "gemm", 100, 4.0, correlation=41, external=7),
        event("kernel", "ours", 110, 2.0, correlation=42),
        event("gpu_memset", "Memset", 120, 1.0, correlation=43),
        event("kernel", "a flush", 130, 50.0, correlation=44),
        event("kernel", "whose launch is not in the trace", 140, 6.0, correlation=99, external=7),
        event("kernel", "of which nothing is known", 150, 7.0),
    ]

    assert of_trace(events, 2) == [
        LayerPart("one", pytest.approx(5e-6), 1.0),  # type: ignore[arg-type]
        LayerPart("two", pytest.approx(1.5e-6), 1.0),  # type: ignore[arg-type]
    ]


def test_a_part_without_kernels_is_listed_and_a_trace_without_any_has_no_parts() -> None:
    ranges = [event("user_annotation", PREFIX + name, 10 * i, 5) for i, name in enumerate(("one", "two"))]
    launched = [event("cuda_runtime", "launch", 12, 1, correlation=1), event("kernel", "k", 50, 1, correlation=1)]

    assert [(part.name, part.launches) for part in of_trace(ranges + launched, 1)] == [("one", 0.0), ("two", 1.0)]
    assert of_trace(ranges, 1) == []


def test_a_trace_of_this_torch_has_the_parts() -> None:
    from dsv4attn.tools.bench.layer_parts import _trace

    marks, x = Marks(torch.device("cuda")), torch.ones(3)

    def run() -> None:
        marks.start("one")
        x.add(1)
        marks.to("two")
        marks.to()

    events = [*_trace(run, Clock(CPU), 2)]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names == [PREFIX + "one", PREFIX + "two"] * 2
    (first, _) = [event for event in events if event.get("name") == "aten::add"]
    launched = event("cuda_driver", "cuLaunchKernelEx", first["ts"], 0.1, correlation=5)
    assert [part.launches for part in of_trace([*events, launched, event("kernel", "k", 0, 3, correlation=5)], 2)] == [
        0.5,
        0.0,
    ]


AROUND_ATTENTION = (
    ["mHC pre", "projections", "norm + rope + insert"],
    ["attention", "output projection", "mHC post + pre"],
)
OF_KIND = {
    LayerKind.SWA: [],
    LayerKind.HCA: ["save states", "compress + store"],
    LayerKind.CSA: ["save states", "compress + store", "index q", "score + select"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", LayerKind)
def test_every_part_of_a_layer_is_there(kind: LayerKind) -> None:
    # more entries than a token selects
    with torch.inference_mode():
        parts = _parts(LayerCase(kind, 1, 1, 2100), ReferenceBackend(), Clock(CPU), 1)

    first, last = AROUND_ATTENTION
    assert [part.name for part in parts] == [*first, *OF_KIND[kind], *last]
    assert all(part.seconds > 0 for part in parts)


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize("small", [True, False])
def test_a_decode_completes_the_share_of_entries_that_it_does_in_service(kind: LayerKind, small: bool) -> None:
    [decode] = [case for case in layer_cases(small=small) if case.kind is kind and case.tokens == 1]
    ratio = {LayerKind.SWA: 0, LayerKind.CSA: 4, LayerKind.HCA: 128}[kind]
    ends = [context for context in decode.contexts if ratio and (context + 1) % ratio == 0]

    assert len(decode.contexts) == decode.requests
    assert decode.completing == len(ends) == (max(decode.requests // ratio, 1) if ratio else 0)
    # a token sees more entries than a c4a layer selects
    assert min(decode.contexts) // 4 > 512


def test_a_layer_of_a_rank_has_the_heads_and_output_groups_of_the_rank() -> None:
    assert {case.kind for case in layer_cases(presets=["pro_c128", "flash_c4"], small=True)} == {LayerKind.CSA}
    cases = layer_cases([8, 64], small=True)
    whole = layer_cases(small=True)

    assert [case for case in cases if case.heads == 64] == whole
    assert len(cases) == 2 * len(whole)
    with torch.inference_mode():
        layer = _prepared_layer(evolve(cases[0], context=16), ReferenceBackend(), CPU).geometry
    assert (layer.num_heads, layer.o_groups) == (8, 1)


@pytest.mark.matrix
def test_the_step_that_is_timed_stores_the_entries_that_its_legend_names(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LayerCase(LayerKind.CSA, 9, 1, 16)
    stored: list[int] = []
    right = LayerOps().compress_norm_rope_store

    def counted(*arguments: Any, **options: Any) -> None:
        stored.append(int((arguments[3] >= 0).sum()))
        right(*arguments, **options)

    backend = ReferenceBackend()
    vars(backend)["layer_ops"] = evolve(LayerOps(), compress_norm_rope_store=counted)
    with torch.inference_mode():
        _prepared_layer(case, backend, CPU).run()

    assert case.contexts == tuple(range(7, 16))
    assert stored == [case.completing] * 2 == [3, 3], "of the layer and of its indexer"


def test_the_legend_says_how_many_sequences_of_a_decode_complete_an_entry() -> None:
    parts = (LayerPart("attention", 70e-6, 1.5),)
    lines = shown(
        LayerTime("swa", "a", 1.0, None, "decode", "64 sequences", parts),
        LayerTime("c4a", "b", 1.0, None, "decode", "64 sequences", parts, 16),
        LayerTime("c128a", "c", 1.0, None, "decode", "64 sequences", parts, 1),
        LayerTime("c128a", "d", 1.0, None, "prompt", "1 sequence", parts, 1),
    )

    assert "decode: 64 sequences; sequences that complete an entry: 16 on c4a, 1 on c128a" in lines
    assert "prompt: 1 sequence" in lines


def shown(*times: LayerTime, width: int = 120) -> list[str]:
    out = Console(width=width, no_color=True)
    with out.capture() as captured:
        for table in layer_tables([{"by": "ours", **asdict(time)} for time in times]):
            out.print(table, crop=False)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def test_tables_have_time_share_and_launches() -> None:
    decode = (LayerPart("projections", 30e-6, 4.0), LayerPart("attention", 70e-6, 1.5))
    prompt = (LayerPart("projections", 1.5e-3, 1200.0),)
    times = (
        LayerTime("c4a", "layer c4a, 1 sequence", 1.0, None, "decode", "1 sequence", decode),
        LayerTime("c4a", "layer c4a, 2 sequences", 1.0, None, "prompt", "2 sequences", prompt),
    )
    lines = shown(*times)

    assert lines[0] == "parts of layer c4a, ours"
    assert lines[1].split() == ["part", *["decode", "us", "share", "launches"], *["prompt", "us", "share", "launches"]]
    assert lines[3].split() == ["projections", "30.0", "30.0%", "4", "1,500.0", "100.0%", "1,200"]
    assert lines[4].split() == ["attention", "70.0", "70.0%", "1.5"]
    assert lines[5].split() == ["sum", "100.0", "100.0%", "5.5", "1,500.0", "100.0%", "1,200"]
    assert "time of kernels" in lines[6]
    assert lines[7:] == ["decode: 1 sequence", "prompt: 2 sequences"]
    assert shown(*times, width=40)[:6] == lines[:6], "nothing is cut off"


def test_on_a_cpu_there_are_no_launches() -> None:
    lines = shown(LayerTime("swa", "a", 1.0, None, "decode", "1 sequence", (LayerPart("attention", 1e-3),)))

    assert "launches" not in " ".join(lines)
    assert any("the host's time" in line for line in lines)


def test_a_layer_whose_kernels_cannot_be_seen_is_named() -> None:
    assert shown(LayerTime("swa", "layer swa", 1.0, None, "decode", "1 sequence")) == [
        "no parts of layer swa, ours: the profiler sees no kernels here"
    ]
    assert [*layer_tables([{"by": "ours", "layer": "swa", "case": "from an older file"}])] == []

"""`dsv4attn bench-memory`: what it runs, and that the memory of selections does not follow the context."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from attrs import asdict, evolve
from click.testing import CliRunner

from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.selection import load_backend
from dsv4attn.tools.bench import selection_memory
from dsv4attn.tools.bench.selection_memory import Growth, growing_calls, measure, runs
from dsv4attn.tools.cli import bench_memory, main
from tests.backends.built_in import triton_backends

NAMES = triton_backends(DeviceFacts.here())


def test_calls_grow_to_the_last_entry() -> None:
    for calls in growing_calls(small=True):
        seen: list[int] = []

        def op(*arguments: Any, seen: list[int] = seen) -> None:
            seen.append(arguments[-1])
            assert set(arguments[2].visible_lens.tolist()) == {arguments[-1]}

        brought: dict[str, Any] = {calls.op: op}
        ops = evolve(LayerOps(), **brought)
        assert len([*runs(ops, calls, torch.device("cpu"))]) == calls.steps + 1
        assert seen == [512, 1024]
        assert calls.op in calls.name


@pytest.mark.skipif(DeviceFacts.here().kind != "cpu", reason="there is an accelerator")
def test_a_cpu_is_refused() -> None:
    result = CliRunner().invoke(main, ["bench-memory"])

    assert result.exit_code == 2
    assert "an accelerator, whose allocator counts" in result.output


@pytest.mark.parametrize(("grown", "code"), [(30, 0), (31, 1)])
def test_growth_beyond_the_plan_is_a_failure(grown: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Growth("decodes", planned=30, peak=5, reserved=10), Growth("a prompt", 20, 5, grown - 10)]
    monkeypatch.setattr(bench_memory, "device_named", lambda _: torch.device("cuda"))
    monkeypatch.setattr(selection_memory, "growing_calls", lambda *, small: [] if small else lines)
    monkeypatch.setattr(selection_memory, "measure", lambda _, line, __: line)

    shown = CliRunner().invoke(main, ["bench-memory", "--backend", "reference"])
    printed = CliRunner().invoke(main, ["bench-memory", "--backend", "reference", "--json"])

    assert (shown.exit_code, printed.exit_code) == (code, code)
    assert shown.stdout.splitlines()[0] == "decodes: plan 0 MiB, peak 0, growth 0"
    assert json.loads(printed.stdout) == {"ok": not code, "lines": [asdict(line) for line in lines]}


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator that counts its memory")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_memory_grows_by_no_more_than_the_plan(name: str, deterministic: bool) -> None:
    torch.cuda.empty_cache()
    ops = load_backend(name, deterministic=deterministic).layer_ops
    lines = [measure(ops, calls, torch.device("cuda")) for calls in growing_calls(small=False)]

    assert all(line.peak <= line.planned for line in lines)
    assert sum(line.reserved for line in lines) <= min(line.planned for line in lines)

"""Launching again what was launched before: exactly what Triton would pass, and Triton's own road where in doubt.

Launches are recorded in a process of its own, since kernels are interpreted here, and by a driver without a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching import launch_cache
from dsv4attn.backends._triton.launching.launch_cache import Constants
from tests.backends._triton.launching.fake_drivers import cpu_args, rows_of
from tests.backends._triton.launching.kernels_small import rows
from tests.programs import told_by

CONSTANTS = dict(rows_of().constants)
NEW, KNOWN, ALWAYS = ["triton", "ready", "same"], ["ready", "ready", "same"], ["triton", "triton", "same"]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = str(Path(__file__).with_name("launches.py"))
    return told_by("-W", "error", program, cache=tmp_path_factory.mktemp("cache"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("form", "compiled"),
    [
        ("plain", 1),
        ("unaligned", 2),
        ("dtype", 3),
        ("given", 4),
        ("constant", 5),
        ("type", 6),
        ("warps", 7),
        ("unfused", 8),
        ("registers", 9),
    ],
)
def test_a_new_form_is_triton_s_and_its_next_launch_passes_the_same(
    facts: dict[str, Any], form: str, compiled: int
) -> None:
    assert facts["forms"][form] == [*NEW, compiled]


@pytest.mark.parametrize("form", ["numbers", "again", "parameter", "careless"])
def test_what_compiles_nothing_makes_no_form(facts: dict[str, Any], form: str) -> None:
    # other tensors and numbers, beyond 32 bits too; alignment of a pointer whose alignment the kernel ignores
    assert facts["forms"][form] == [*KNOWN, 7]


def test_constants_known_by_identity_compile_nothing_anew(facts: dict[str, Any]) -> None:
    assert facts["forms"]["identity"] == [*NEW, 9]


@pytest.mark.parametrize(("numbers", "path"), [("plain", NEW), ("ones", KNOWN), ("multiples", KNOWN), ("wide", KNOWN)])
def test_numbers_in_a_named_tuple_compile_one_form(facts: dict[str, Any], numbers: str, path: list[str]) -> None:
    # Triton itself would compile 1 in, and compile anew for multiples of 16 and beyond 32 bits
    assert facts["tuples"][numbers] == [*path, 1]


def test_a_form_with_named_tuples_is_foreseen(facts: dict[str, Any]) -> None:
    assert facts["tuples"]["foreseen"]


def test_a_profiler_sees_every_launch(facts: dict[str, Any]) -> None:
    paths = facts["other_roads"]

    assert paths["before"] == NEW
    assert paths["hook"] == [*ALWAYS, True]
    assert paths["pre_run"] == ALWAYS
    assert paths["after"] == KNOWN


def test_kernels_that_compile_for_values_and_tensors_of_other_kinds_are_always_triton_s(facts: dict[str, Any]) -> None:
    assert facts["other_roads"]["values"] == ALWAYS
    assert facts["other_roads"]["multiples"] == ALWAYS
    assert facts["other_roads"]["subclass"] == ALWAYS


def test_gluon_s_kernels_are_launched_likewise(facts: dict[str, Any]) -> None:
    assert facts["other_roads"]["gluon"] == NEW


def test_observers_see_launches_of_either_road(facts: dict[str, Any]) -> None:
    assert facts["other_roads"]["observed"] == [*KNOWN, 2]


def test_another_driver_gets_nothing_that_was_compiled_for_the_first(facts: dict[str, Any]) -> None:
    assert facts["other_roads"]["driver"] == NEW


def test_far_memory_is_a_form_of_its_own_and_is_passed_as_it_is(facts: dict[str, Any]) -> None:
    assert facts["other_roads"]["far"] == [True, False, True]


def test_who_launches_one_form_again_and_again_passes_what_triton_passes(facts: dict[str, Any]) -> None:
    paths = facts["again"]

    assert paths["first"] == ["triton", "same"]
    assert paths["next"] == paths["other memory"] == paths["after"] == ["bound", "same"]


def test_the_shortest_road_is_left_for_whoever_watches_or_wants_to_look_at_tensors(facts: dict[str, Any]) -> None:
    paths = facts["again"]

    assert paths["hook"] == paths["pre_run"] == ["triton", "same"]
    assert paths["observed"] == ["ready", "same", 1]
    assert "bound" not in paths["far"]


def test_the_shortest_road_ends_where_the_device_or_the_driver_is_another(facts: dict[str, Any]) -> None:
    assert facts["again"]["elsewhere"] is False
    assert facts["again"]["driver"] == [["triton", "same"], ["bound", "same"]]


@pytest.mark.parametrize(("device", "name"), [("cpu", "the CPU"), ("meta", "the meta device")])
def test_tensors_that_no_kernel_can_read_are_refused_where_the_form_is_compiled(
    facts: dict[str, Any], device: str, name: str
) -> None:
    error, launched = facts["undriven"][device]

    assert name in error
    assert launched == 0


def test_the_driver_is_handed_what_triton_s_own_launchers_hand_it(facts: dict[str, Any]) -> None:
    same_arguments = facts["launchers"]

    assert same_arguments["CudaLauncher"] == same_arguments["HIPLauncher"] == same_arguments["Spread"] == [True, True]
    assert all(same for past, same in same_arguments.values() if past)


def test_a_kernel_that_needs_memory_for_each_program_is_left_to_its_launcher(facts: dict[str, Any]) -> None:
    same_arguments = facts["launchers"]

    assert same_arguments["CudaLauncher global_scratch_size"] == [False, True]
    assert same_arguments["CudaLauncher profile_scratch_size"] == [False, True]
    assert same_arguments["HIPLauncher profile_scratch_size"] == [False, True]


def test_every_kernel_of_a_backend_can_be_launched_again(facts: dict[str, Any]) -> None:
    assert facts["slow"] == []


def test_equal_numbers_of_different_types_are_different_forms() -> None:
    assert launch_cache.typed({"A": 1}) != launch_cache.typed({"A": True}) != launch_cache.typed({"A": 1.0})
    assert launch_cache.typed({"A": 1}) == launch_cache.typed({"A": 1})


def test_constants_are_equal_to_themselves_alone() -> None:
    first, second = Constants(CONSTANTS), Constants(CONSTANTS)

    assert first != second
    assert first in {first: 0, second: 1}
    assert len({first, second}) == 2
    assert dict(first) == dict(second)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted here")
def test_an_interpreted_kernel_has_no_form() -> None:
    assert launch_cache.launch_key(rows, cpu_args(), CONSTANTS, 0) is None


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED, reason="needs an accelerator")
def test_both_roads_write_the_same_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.backends._triton.launching.runtime import launch

    device = torch.accelerator.current_accelerator()
    x = torch.arange(512, dtype=torch.float32, device=device).bfloat16()
    idx, outs = torch.tensor([3, 1], dtype=torch.int32, device=device), [torch.zeros_like(x) for _ in range(3)]
    for i, out in enumerate(outs):
        if i == 2:
            monkeypatch.setattr(launch_cache, "find_launch", lambda _: None)
        launch(rows, (2,), [x, idx, None, out, 64, 64, 1.0], CONSTANTS)

    assert outs[0].any()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])

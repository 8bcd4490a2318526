"""Cross-compilation and warm-up of small kernels, in a process that does not interpret kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl

from dsv4attn.backends._triton.compiling.aot import Resources, compile_all, cross_compile, distinctions
from dsv4attn.backends._triton.compiling.targets import TARGETS, Target
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching import warmup
from dsv4attn.backends._triton.launching.runtime import launch, observed, stable_kernel
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.errors import ArgumentError, UnknownNameError
from tests.backends._triton.launching.fake_drivers import attend_of, cpu_args, rows_of
from tests.backends._triton.launching.kernels_small import rows
from tests.programs import told_by

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted here")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = str(Path(__file__).with_name("compiles.py"))
    return told_by("-W", "error", program, "attributes", "warmed", "errors", cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def long_facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Facts about kernels that take long to compile."""
    program, names = str(Path(__file__).with_name("compiles.py")), ("every_target", "too_much", "second_opinion")
    return told_by("-W", "error", program, *names, cache=tmp_path_factory.mktemp("cache"))


@pytest.mark.matrix
@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_compiles_for_every_target_without_a_driver(long_facts: dict[str, Any], name: str) -> None:
    needed = long_facts["every_target"][name]

    assert 0 < needed["registers"] < 32
    assert needed["threads"] == 4 * TARGETS[name].warp_size
    assert needed["spill_stores"] == needed["spill_loads"] == needed["stack"] == needed["shared"] == 0
    assert needed["occupancy"] == min(4 * TARGETS[name].warps_per_part // 4, TARGETS[name].blocks_per_unit)
    assert needed["wave"] == (64 if name.startswith("gfx9") else 32)
    assert needed["matrix"] == needed["products"] == 0


@pytest.mark.matrix
def test_limits_that_the_compiler_does_not_enforce_are_found(long_facts: dict[str, Any]) -> None:
    limits = long_facts["too_much"]

    assert limits["sm_90"]["codes"] == ["SPILLS", "SERIALISED"]
    assert limits["sm_90"]["spill_stores"] > 1000
    assert limits["sm_90"]["serialised"][0].startswith("wgmma.mma_async instructions are serialized")
    assert limits["sm_120"]["codes"] == ["SHARED_MEMORY"]
    assert limits["sm_120"]["occupancy"] == 0
    assert limits["gfx942"]["codes"] == ["SPILLS"]
    assert limits["gfx942"]["stack"] > 1000
    assert limits["gfx950"]["codes"] == []


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["sm_90", "sm_120", "gfx942", "gfx950"])
def test_matrix_instructions_are_found_wherever_products_are(long_facts: dict[str, Any], name: str) -> None:
    assert long_facts["too_much"][name]["products"] == 2
    assert long_facts["too_much"][name]["matrix"] >= 8
    assert "MATRIX" not in long_facts["too_much"][name]["codes"]


@pytest.mark.parametrize(
    ("assembly", "element", "matrix", "codes"),
    [
        ("\tv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1]\n\tv_mfma_f32_32x32x8_f16 a[0:3], v[0:1]", "bf16", 2, []),
        ("\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:11]\n\tv_smfmac_f32_16x16x32_bf16 v[0:3]", "f16", 2, []),
        ("\tv_fmac_f32 v0, v1 ; not v_mfma_f32_16x16x16_bf16", "bf16", 0, ["MATRIX"]),
        ("\tv_fmac_f32 v0, v1", "f32", 0, []),
    ],
)
def test_products_of_16_bits_on_ordinary_units_are_told(
    assembly: str, element: str, matrix: int, codes: list[str]
) -> None:
    product = f"%z = tt.dot %q, %k, %acc : tensor<16x64x{element}> * tensor<64x16x{element}> -> tensor<16x16xf32>"
    asm = {"amdgcn": f"{assembly}\n    .vgpr_count: 32\n    .wavefront_size: 64\n", "ttir": f"  {product} loc(#loc1)"}
    kernel = SimpleNamespace(asm=asm, metadata=SimpleNamespace(shared=0, num_warps=4))
    needed = Resources.of(kernel, TARGETS["gfx942"])

    assert needed.matrix == matrix
    assert [reason.code for reason in needed.reasons(TARGETS["gfx942"])] == codes


def test_waves_of_another_width_are_told() -> None:
    asm = {"amdgcn": "    .wavefront_size: 32\n", "ttir": ""}
    needed = Resources.of(SimpleNamespace(asm=asm, metadata=SimpleNamespace(shared=0, num_warps=4)), TARGETS["gfx942"])

    assert (needed.wave, needed.threads) == (32, 128)
    assert [str(reason) for reason in needed.reasons(TARGETS["gfx942"])] == ["WAVE  32 threads in a wave, needs 64"]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1201"])
def test_another_tool_reads_the_same_off_the_binary(long_facts: dict[str, Any], name: str) -> None:
    # NVIDIA: cuobjdump on registers and stack. AMD: the compiler's own estimate of waves.
    assert long_facts["second_opinion"][name]["ours"] == long_facts["second_opinion"][name]["theirs"]


def test_alignment_and_two_gigabytes_reach_the_compiler(facts: dict[str, Any]) -> None:
    # `idx` is not specialised on alignment, and `scale` is absent.
    assert facts["attributes"] == {"aligned": [2, 0], "unaligned": [1, 0], "near": [2, 3], "far": [2, 0]}


@pytest.mark.parametrize(("name", "forms"), [("sm_90", 1), ("gfx942", 2)])
def test_g18_after_warm_up_nothing_compiles(facts: dict[str, Any], name: str, forms: int) -> None:
    warmed = facts["warmed"][name]

    assert warmed["count"] == len(warmed["first"]) == 2 * forms
    assert warmed["loaded"] == 2 * forms + 1
    assert warmed["again"] == warmed["inside"] == []
    assert warmed["launched"] == forms + 1
    (line,), (beside,) = warmed["log"], warmed["beside"]
    assert f"acme is warm: {2 * forms} kernels on xpu, of which {forms} were compiled now (rows) in 1 process, " in line
    assert ", of which 0 were compiled now, " in beside


@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_a_form_that_was_not_foreseen_is_counted(facts: dict[str, Any], name: str) -> None:
    assert [kernel for kernel, _ in facts["warmed"][name]["outside"]] == ["rows"]


@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_what_is_cross_compiled_is_what_a_launch_looks_up(facts: dict[str, Any], name: str) -> None:
    # but for the one launch that was not foreseen.
    assert (facts["warmed"][name]["unforeseen"], facts["warmed"][name]["unused"]) == (1, 0)


def test_a_kernel_that_compiles_for_values_is_refused(facts: dict[str, Any]) -> None:
    assert facts["errors"]["specialised"] == (
        "parameter n of kernel careless: expected an integer with a width, not specialised, got one that is "
        "specialised -> annotate it as tl.int32 or tl.int64, and list it in @triton.jit(do_not_specialize=['n'])"
    )


def test_a_kernel_that_does_not_compile_stops_no_other(facts: dict[str, Any]) -> None:
    (reason,), fine = facts["errors"]["outcomes"]

    # not where it was called from, which is what the error itself shows.
    assert reason.startswith("COMPILER  ")
    assert reason.endswith("Error: arange's range must be a power of 2, needs a kernel that compiles")
    assert fine == []


def test_the_cpu_is_refused_where_kernels_are_compiled(facts: dict[str, Any]) -> None:
    assert "TRITON_INTERPRET=1" in facts["errors"]["cpu"]


@interpreted
def test_interpreted_kernels_cannot_be_compiled() -> None:
    with pytest.raises(ArgumentError, match="TRITON_INTERPRET: expected unset when Python starts"):
        cross_compile(rows_of(), TARGETS["sm_90"])
    with pytest.raises(ArgumentError, match="TRITON_INTERPRET"):
        compile_all([rows_of()], TARGETS["sm_90"])


@interpreted
def test_interpreted_kernels_are_only_counted() -> None:
    with warmup.compiled() as seen:
        assert warmup.warm([rows_of(), rows_of(), rows_of(x="*fp32")], torch.device("cpu")) == 2
        launch(rows, (2,), cpu_args(), dict(rows_of().constants))

    assert seen == []


@interpreted
def test_what_is_launched_is_what_was_foreseen() -> None:
    with observed() as seen:
        launch(rows, (2,), cpu_args(), {"BLOCK": 64, "DT": tl.bfloat16})
        launch(rows, (2,), cpu_args(unaligned=True), {"BLOCK": 64, "DT": tl.bfloat16})
        launch(rows, (0,), cpu_args(), {"BLOCK": 64, "DT": tl.bfloat16})

    assert seen == [rows_of(), rows_of(x="*bf16:1")]


def test_variants_are_equal_when_the_compiler_cannot_tell_them_apart() -> None:
    plain = rows_of()

    assert len({plain, rows_of(idx="*i32:1"), rows_of(n="i64"), rows_of(n="int")}) == 1
    assert Variant(rows, reversed(plain.types), reversed(plain.constants)) == plain
    different = [rows_of(x="*bf16:1"), rows_of(scale="*fp32"), Variant(rows, plain.types, plain.constants, 8)]
    different.append(Variant(rows, plain.types, plain.constants, fp_fusion=False))
    assert len({plain, *different}) == 5


def test_variants_are_told_apart_in_few_words() -> None:
    variants = [rows_of(), rows_of(scale="*fp32"), rows_of(x="*bf16:1"), attend_of(64, 32, 4)]
    variants.append(Variant(rows, variants[0].types, {"DT": tl.float32, "BLOCK": 64}, 8))

    # the type and the number of warps change together.
    labels = distinctions(variants)
    assert [labels[variant] for variant in variants] == [
        "x:*bf16 scale:none DT=bf16",
        "x:*bf16 scale:*fp32 DT=bf16",
        "x:*bf16 unaligned scale:none DT=bf16",
        "",
        "x:*bf16 scale:none DT=fp32",
    ]


def test_kernels_of_one_name_are_told_apart() -> None:
    plain, fp32 = rows_of(), rows_of(x="*fp32")
    namesake = Variant(stable_kernel(rows.fn), fp32.types, fp32.constants)

    assert namesake.kernel is not plain.kernel
    assert distinctions([plain, namesake]) == {plain: "x:*bf16", namesake: "x:*fp32"}


@pytest.mark.parametrize(
    ("name", "registers", "shared", "warps", "blocks"),
    [
        ("sm_90", 96, 73_728, 4, 3),
        ("sm_90", 255, 0, 4, 2),
        ("sm_90", 32, 0, 4, 16),
        ("sm_90", 16, 0, 1, 32),
        ("sm_90", 168, 232_448, 12, 1),
        ("sm_90", 168, 232_449, 12, 0),
        ("sm_120", 64, 101_376, 8, 1),
        ("sm_120", 64, 49_152, 8, 2),
        ("sm_80", 128, 0, 8, 2),
        ("gfx942", 128, 16_384, 4, 4),
        ("gfx942", 144, 24_576, 4, 2),
        ("gfx942", 512, 0, 4, 1),
        ("gfx950", 64, 40_960, 4, 4),
        ("gfx1201", 96, 0, 8, 8),
    ],
)
def test_occupancy_is_what_calculators_say(name: str, registers: int, shared: int, warps: int, blocks: int) -> None:
    assert TARGETS[name].occupancy(registers, shared, warps) == blocks


def test_every_broken_limit_is_told() -> None:
    needed = Resources(300, 8, 4, 16, 300_000, 2048, 0, 64, 0, 2, ("wgmma is serialised",))
    messages = [str(reason) for reason in needed.reasons(TARGETS["sm_90"])]

    assert (
        messages[0]
        == "SHARED_MEMORY  300,000 bytes, needs at most 232,448 in a block -> smaller tiles, or fewer stages"
    )
    codes = ["SHARED_MEMORY", "THREADS", "REGISTERS", "SPILLS", "WAVE", "MATRIX", "SERIALISED"]
    assert [line.split()[0] for line in messages] == codes
    assert Resources(64, 0, 0, 0, 0, 128, 8, 32).reasons(TARGETS["sm_90"]) == []
    spilling = Resources(64, 60, 40, 64, 0, 128, 8, 32)
    assert spilling.reasons(TARGETS["sm_90"], spills=100) == []
    assert [reason.allowed for reason in spilling.reasons(TARGETS["sm_90"], spills=99)] == ["at most 99 in all"]
    assert Resources(64, 0, 0, 0, 0, 128, 8, 32, 24, 2).reasons(TARGETS["sm_90"]) == []
    assert [r.code for r in Resources(255, 0, 0, 0, 0, 512, 0, 32).reasons(TARGETS["sm_90"])] == ["OCCUPANCY"]
    assert [r.code for r in Resources(64, 0, 0, 16, 0, 256, 4, 64).reasons(TARGETS["gfx942"])] == ["SCRATCH"]


def test_targets_are_found_by_any_spelling_of_an_arch() -> None:
    assert [Target.named(name).name for name in ("sm90", "SM_90", " gfx942 ")] == ["sm_90", "sm_90", "gfx942"]
    with pytest.raises(UnknownNameError, match="unknown target 'sm_91'; did you mean"):
        Target.named("sm_91")


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_devices_by_the_same_name(name: str) -> None:
    facts = DeviceFacts.named(name)

    assert facts.arch == name
    assert facts.kind == ("cuda" if TARGETS[name].is_cuda else "hip")


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED, reason="needs an accelerator")
def test_g18_on_this_device_a_warm_kernel_does_not_compile_again() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    with warmup.compiled() as first:
        warmup.warm([rows_of()], device)
    with warmup.compiled() as inside:
        args = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in cpu_args()]
        launch(rows, (2,), args, dict(rows_of().constants))
    with warmup.compiled() as outside:
        launch(rows, (2,), [*args[:2], torch.ones(64, device=device), *args[3:]], dict(rows_of().constants))

    assert [name for name, _ in first] == ["rows"]
    assert inside == []
    assert [name for name, _ in outside] == ["rows"]

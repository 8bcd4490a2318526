"""The output projection in fp8 on Hopper: bits of its own kernels, the choice of a form, calls of the shared kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from triton.runtime.jit import JITCallable

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.compiling import variant
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors, observed
from dsv4attn.backends._triton.layer.projections import output as shared
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.output import launch as output
from dsv4attn.backends.sm90.output.launch import FEW, MANY, Few, Many
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from tests.backends._triton.cache.caches import DEVICE, seeded
from tests.backends._triton.layer.fp8_projections import Call
from tests.core.model.scaled import FNUZ, OCP
from tests.programs import told_by

FLASH, PRO = 8 * 1024, 16 * 1024
H100 = 132
FORMS = *FEW, *MANY, None
MEASURED: dict[tuple[int, int], tuple[float | None, ...]] = {
    (1, 1): (8.04, 10.49, None, None, None, None, None, 9.51),
    (8, 1): (8.51, 10.4, 9.24, None, None, None, None, 9.69),
    (64, 1): (8.25, 10.1, 9.18, 9.17, 10.9, None, None, 13.05),
    (128, 1): (8.42, 10.1, 9.18, 9.1, 10.84, 17.28, 29.38, 12.82),
    (192, 1): (16.37, 9.92, 8.96, 8.89, 10.59, 17.09, 31.27, 13.94),
    (512, 1): (34.15, 20.76, 19.33, 9.38, 10.64, 17.24, 31.0, 18.48),
    (640, 1): (42.7, 30.48, 27.86, 18.14, 10.76, 17.28, 32.79, 18.38),
    (1024, 1): (67.61, 41.3, 37.69, 18.89, 11.34, 17.31, 30.77, 14.39),
    (1100, 1): (None, 50.9, 46.61, 29.27, 22.1, 17.62, 35.02, 20.15),
    (2048, 1): (None, 83.53, 77.04, 37.66, 22.74, 18.29, 31.96, 19.72),
    (64, 2): (8.59, 10.1, 9.2, 9.07, 10.83, None, None, 12.95),
    (128, 2): (16.69, 11.3, 9.27, 8.24, 10.1, 16.73, 29.48, 12.09),
    (256, 2): (35.07, 21.08, 19.75, 9.8, 10.79, 17.66, 32.18, 18.77),
    (512, 2): (67.55, 41.87, 38.11, 18.79, 11.36, 17.43, 31.47, 19.05),
    (700, 2): (None, 61.35, 56.01, 28.06, 21.93, 19.52, 32.0, 19.35),
    (1024, 2): (None, 85.02, 77.29, 38.59, 23.24, 19.18, 32.38, 20.7),
    (16, 4): (8.64, 10.13, 9.68, 12.68, 10.57, None, None, 10.43),
    (32, 4): (10.72, 10.11, 9.44, 10.6, 10.31, None, None, 15.37),
    (48, 4): (16.23, 11.61, 12.04, 8.71, 10.27, None, None, 13.09),
    (128, 4): (34.97, 22.21, 20.34, 10.85, 11.75, 17.74, 30.63, 13.31),
    (192, 4): (51.09, 32.13, 28.92, 18.12, 11.19, 20.34, 31.33, 19.38),
    (300, 4): (None, 51.84, 50.13, 29.43, 22.69, 21.09, 45.07, 20.32),
    (384, 4): (None, 64.69, 58.49, 29.72, 23.11, 19.0, 38.3, 21.0),
    (512, 4): (None, 85.32, 77.39, 39.73, 24.72, 20.19, 33.43, 23.01),
    (1, 8): (12.72, 11.43, None, None, None, None, None, 12.58),
    (16, 8): (12.37, 11.84, 13.47, 15.87, 14.63, None, None, 16.81),
    (32, 8): (20.66, 13.87, 13.41, 14.54, 14.26, None, None, 18.17),
    (48, 8): (28.79, 22.17, 24.05, 13.72, 15.83, None, None, 15.9),
    (64, 8): (36.57, 23.63, 22.61, 12.86, 15.7, None, None, 14.99),
    (128, 8): (69.09, 44.71, 40.63, 21.84, 16.74, 19.61, 33.01, 19.3),
    (192, 8): (None, 65.89, 59.43, 31.29, 24.81, 24.87, 33.42, 22.78),
    (256, 8): (None, 85.59, 77.81, 41.14, 26.56, 20.99, 33.67, 25.01),
    (512, 8): (None, None, None, 77.22, 47.21, 36.51, 34.99, 41.88),
    (1024, 8): (None, None, None, None, None, 76.4, 69.9, 91.8),
    (2048, 8): (None, None, None, None, None, 173.8, 137, 175),
    (8192, 8): (None, None, None, None, None, 558.2, 534, 655),
    (8, 16): (25.52, 20.29, 27.52, None, None, None, None, 20.98),
    (32, 16): (39.29, 28.01, 26.9, 28.33, 20.89, None, None, 24.59),
    (64, 16): (69.67, 46.02, 42.01, 26.03, 21.58, None, None, 23.49),
    (80, 16): (None, 56.2, 60.59, 52.41, 33.59, 24.16, 45.05, 46.5),
    (128, 16): (None, 86.82, 78.57, 43.01, 31.94, 24.87, 45.73, 35.66),
    (256, 16): (None, None, None, 77.92, 49.3, 37.65, 38.21, 45.64),
    (2048, 16): (None, None, None, None, None, 293.0, 264.0, 351.4),
}
"""Microseconds of tokens and groups of 1,024 ranks, in the order of FORMS: docs/kernel-notes.md has the conditions."""
on_hopper = pytest.mark.skipif(INTERPRETED or architecture() != "sm_90", reason="needs a Hopper GPU")


class Product:
    """Random codes and scales of outputs and of weights. Rows lie apart, with NaN between them."""

    def __init__(self, tokens: int, groups: int, rank: int, width: int, *, exponents: bool = False) -> None:
        g = seeded(tokens + width)
        self.codes, self.scales = apart(random_codes(g, tokens, groups, width)), powers(g, tokens, groups, width // 128)
        w_scales = powers(g, groups * rank // 128, width // 128)
        if exponents:
            self.scales, w_scales = exponents_of(self.scales), exponents_of(w_scales)
        self.scales = apart(self.scales)
        self.wo_a = BlockScaledWeight(apart(random_codes(g, groups * rank, width)), w_scales)
        self.groups, self.rank = groups, rank

    def empty(self) -> Tensor:
        return torch.empty(len(self.codes), self.groups, self.rank, dtype=torch.bfloat16, device=DEVICE)

    def shared(self) -> Tensor:
        """What the shared kernel writes."""
        out = self.empty()
        shared.multiply_codes(self.codes, self.scales, self.wo_a, out)
        return out

    def check(self, form: Few | Many, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool = False) -> None:
        """Fail unless a form writes the bits of the shared kernel, and nothing after them."""
        expected = self.shared()
        torch.accelerator.synchronize()
        guarded = torch.full((len(expected) + 1, *expected.shape[1:]), 77.0, dtype=torch.bfloat16, device=DEVICE)
        monkeypatch.setattr(output, "form_of", lambda *_: form)
        with observed() as seen:
            output.multiply_codes(self.codes, self.scales, self.wo_a, guarded[:-1], deterministic=deterministic)

        assert [variant.name for variant in seen] == [output.kernel_of(form).fn.__name__]
        assert torch.equal(guarded[:-1].isnan(), expected.isnan())
        assert torch.equal(guarded[:-1].nan_to_num(7.0), expected.nan_to_num(7.0))
        assert (guarded[-1] == 77).all()


def random_codes(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g).to(OCP).to(DEVICE)


def powers(g: torch.Generator, *shape: int) -> Tensor:
    return torch.exp2(torch.randint(-9, 4, shape, generator=g).float()).to(DEVICE)


def exponents_of(scales: Tensor) -> Tensor:
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def apart(values: Tensor) -> Tensor:
    """The same values in rows with NaN, or the largest byte, between them."""
    raw = values.view(torch.uint8) if values.dtype == OCP else values
    nan = torch.nan if raw.dtype == torch.float32 else 0x7F
    wide = torch.full((*raw.shape[:-1], raw.shape[-1] + 16), nan, dtype=raw.dtype, device=DEVICE)
    wide[..., :-16] = raw
    return wide.view(values.dtype)[..., :-16]


@pytest.mark.device
@on_hopper
class TestOnDevice:
    @pytest.mark.parametrize(
        ("form", "tokens"),
        [
            *((form, tokens) for form in FEW for tokens in (1, 2, 9, 16, 17, 33, 64, 65, 200)),
            *((form, tokens) for form in MANY for tokens in (1, 65, 127, 128, 129, 256, 300, 513, 1000)),
        ],
    )
    @pytest.mark.parametrize(("groups", "rank", "width"), [(2, 256, 1024), (8, 1024, 4096)])
    def test_bits_are_those_of_the_shared_kernel(
        self, form: Few | Many, tokens: int, groups: int, rank: int, width: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for exponents in (False, True):
            Product(tokens, groups, rank, width, exponents=exponents).check(form, monkeypatch)

    @pytest.mark.parametrize(
        ("form", "width"),
        [*((form, width) for form in FEW for width in (128, 256, 1152, 8192)), (MANY[0], 768), (MANY[1], 1152)],
    )
    def test_widths_and_single_groups(self, form: Few | Many, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for groups, rank in ((1, 128), (3, 384)):
            Product(min(form.tokens, 200), groups, rank, width).check(form, monkeypatch)

    @pytest.mark.parametrize("form", [*FEW, *MANY])
    def test_a_nan_reaches_what_it_is_multiplied_into(self, form: Few | Many, monkeypatch: pytest.MonkeyPatch) -> None:
        call = Product(form.tokens, 2, 256, 1024)
        call.codes.view(torch.uint8)[2, 1, 77] = 0x7F
        call.wo_a.weight.view(torch.uint8)[3, 130] = 0xFF
        call.scales[5, 0, 1] = torch.nan
        call.check(form, monkeypatch)
        wrong = torch.zeros_like(call.shared(), dtype=torch.bool)
        wrong[2, 1], wrong[:, 0, 3], wrong[5, 0] = True, True, True

        assert torch.equal(call.shared().isnan(), wrong)

    @pytest.mark.parametrize("form", [*FEW, *MANY])
    def test_other_scales_are_found(self, form: Few | Many, monkeypatch: pytest.MonkeyPatch) -> None:
        """A planted bug: what is compared would differ."""
        call = Product(form.tokens, 2, 256, 1024)
        expected = call.shared()
        call.wo_a = BlockScaledWeight(call.wo_a.weight, call.wo_a.scale.roll(1, 1).contiguous())
        monkeypatch.setattr(call, "shared", lambda: expected)
        with pytest.raises(AssertionError):
            call.check(form, monkeypatch)

    @pytest.mark.parametrize("tokens", [8, 64, 300, 700])
    def test_the_backend_projects_as_the_shared_kernels_do(self, tokens: int) -> None:
        """In a graph too, with outputs that change; and for rows of larger batches, if calls are deterministic."""
        g, backend = seeded(tokens), Sm90Backend(projection="fp8", deterministic=True)
        wo_a = BlockScaledWeight(random_codes(g, FLASH, 4096), powers(g, FLASH // 128, 32))
        table = torch.randn(4096, 64, generator=g).to(DEVICE)
        positions = torch.randint(0, 4096, (tokens,), generator=g).to(DEVICE)
        o = torch.randn(tokens, 64, 512, generator=g).bfloat16().to(DEVICE)
        torch.accelerator.synchronize()
        with observed() as seen:
            z = backend.inv_rope_o_proj(o, positions, table, wo_a, 8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = backend.inv_rope_o_proj(o, positions, table, wo_a, 8)

        form = output.form_of(tokens, FLASH, 4096, multiprocessors())
        assert form is not None
        assert seen[-1].name == output.kernel_of(form).fn.__name__
        assert torch.equal(z, shared.project_fp8(o, positions, table, wo_a, 8))
        for part in (slice(0, 1), slice(tokens // 3, tokens)):
            assert torch.equal(backend.inv_rope_o_proj(o[part], positions[part], table, wo_a, 8), z[part])
        for _ in range(20):
            o.copy_(torch.randn(tokens, 64, 512, generator=g).bfloat16())
            graph.replay()
            assert torch.equal(replayed, shared.project_fp8(o, positions, table, wo_a, 8))

    @pytest.mark.parametrize("tokens", [8, 64])
    def test_weights_that_the_kernel_before_has_written_are_read(self, tokens: int) -> None:
        """Their copies begin while the quantisation runs, and so after that kernel has ended."""
        g, backend = seeded(tokens), Sm90Backend(projection="fp8")
        wo_a = BlockScaledWeight(random_codes(g, FLASH, 4096), powers(g, FLASH // 128, 32))
        weight = wo_a.weight.view(torch.uint8)
        others = [random_codes(g, FLASH, 4096).view(torch.uint8) for _ in range(2)]
        o = torch.randn(tokens, 64, 512, generator=g).bfloat16().to(DEVICE)
        rest = torch.arange(tokens, device=DEVICE), torch.randn(4096, 64, generator=g).to(DEVICE), wo_a, 8
        expected = []
        for other in others:
            torch.add(other, 0, out=weight)  # a kernel, not a copy
            expected.append(shared.project_fp8(o, *rest))
        for turn in range(20):
            torch.add(others[turn % 2], 0, out=weight)
            assert torch.equal(backend.inv_rope_o_proj(o, *rest), expected[turn % 2])
        graph, replayed = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for other in others:
                torch.add(other, 0, out=weight)  # a kernel, not a copy
                replayed.append(backend.inv_rope_o_proj(o, *rest))
        for _ in range(20):
            graph.replay()
            assert all(map(torch.equal, replayed, expected))


def test_a_form_is_chosen_that_was_among_the_fastest() -> None:
    for (tokens, groups), measured in MEASURED.items():
        times = {form: time for form, time in zip(FORMS, measured, strict=True) if time is not None}
        chosen = times[output.form_of(tokens, 1024 * groups, 4096, H100)]
        assert chosen <= 1.02 * min(times.values()), (tokens, groups)


def test_forms_follow_tokens_ranks_and_columns() -> None:
    def chosen(ranks: int, *counts: int, width: int = 4096) -> list[Few | Many | None]:
        return [output.form_of(tokens, ranks, width, H100) for tokens in counts]

    low, wide, half, square, tall = FEW
    small, large = MANY
    assert chosen(FLASH, 1, 16, 17, 32) == [wide, wide, half, half]
    assert chosen(FLASH, 33, 64, 65, 128, 129, 192) == [square, square, tall, tall, None, None]
    # three small tiles take less time than two large ones, two small ones more than one large one
    assert chosen(FLASH, 193, 256, 257, 512, 513, 768, 769) == [small, small, large, large, small, small, large]
    assert chosen(PRO, 16, 17, 64, 65, 128, 129, 256) == [wide, tall, tall, small, small, large, large]
    # shares of a model's groups
    assert chosen(1024, 1, 128, 129, 512, 513, 1024, 1025) == [low, low, square, square, tall, tall, small]
    assert chosen(2048, 64, 65, 256, 257, 512, 513) == [low, square, square, tall, tall, small]
    assert chosen(4096, 16, 17, 32, 33, 128) == [low, half, half, square, square]
    assert chosen(4096, 129, 256, 257, 383, 384) == [tall, tall, None, None, small]
    assert chosen(896, 1, 128, 129, 2000) == [None, None, None, small]
    assert chosen(FLASH, 1, 64, 256, 1024, width=8192) == [wide, square, small, large]
    assert chosen(FLASH, 1, 64, width=8320) == [None, None]
    assert chosen(FLASH, 1, 64, width=896) == chosen(FLASH, 1, 64, width=2048) == [wide, square]
    # a rest after whole rounds
    assert chosen(FLASH, 1, 64, width=1152) == chosen(FLASH, 1, 64, width=2560) == [None, None]
    assert chosen(FLASH, 256, 1024, width=640) == [None, None]
    # an odd number of steps
    assert chosen(FLASH, 256, 1024, width=1152) == [large, large]


@pytest.mark.parametrize("programs", [78, H100])
def test_every_form_that_may_be_chosen_is_compiled_before(programs: int) -> None:
    for ranks in (896, 1024, 2048, 4096, FLASH, PRO):
        for width in (128, 640, 768, 1152, 2560, 4096, 8192, 8320):
            counts = [*range(1, 1100, 3), 2048, 5000, 10_000]
            found = {output.form_of(tokens, ranks, width, programs) for tokens in counts}
            assert found - {None} == {*output.forms(ranks, width, programs)}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls as on Hopper, where nothing may be launched."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(output, "INTERPRETED", False)
    monkeypatch.setattr(output, "architecture", lambda: "sm_90")
    monkeypatch.setattr(output, "multiprocessors", lambda: H100)
    monkeypatch.setattr(output, "FEWEST_RANKS", 0)
    monkeypatch.setattr(output, "launch", refuse)


@pytest.mark.usefixtures("served")
def test_a_call_is_served() -> None:
    call = Call(3)
    with pytest.raises(NotImplementedError):
        call.project(multiply=output.multiply_codes)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backend_calls_them(deterministic: bool) -> None:
    call, backend = Call(3), Sm90Backend(projection="fp8", deterministic=deterministic)
    with pytest.raises(NotImplementedError):
        backend.inv_rope_o_proj(call.o, call.positions, call.table, call.wo_a, call.groups)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("form", [*FEW, *MANY])
def test_a_launch_has_the_strides_of_its_tensors_and_as_many_programs_as_run(
    form: Few | Many, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[str, Any] = {}

    def note(kernel: Any, grid: tuple[int, ...], args: Any, constants: Any, **_: Any) -> None:
        names = [name for name in inspect.signature(kernel.fn).parameters if name not in constants]
        launched.update(zip(names, args, strict=True), grid=grid, RANK=constants["RANK"], K=constants["K"])
        launched["tile"] = constants.get("BLOCK_M", constants.get("TOKENS")), constants.get("RANKS", output.STEP)

    programs: list[int] = []

    def chosen(*sizes: int) -> Few | Many:
        programs.append(sizes[-1])
        return form

    monkeypatch.setattr(output, "launch", note)
    monkeypatch.setattr(output, "multiprocessors", lambda: 3)
    monkeypatch.setattr(output, "form_of", chosen)
    tokens = min(form.tokens, 300)
    call = Product(tokens, 2, 256, 1024)
    out = torch.empty(tokens, 2, 264, dtype=torch.bfloat16, device=DEVICE)[..., :256]
    output.multiply_codes(call.codes, call.scales, call.wo_a, out)
    tensors = [call.codes, call.scales, call.wo_a.weight, call.wo_a.scale, out]
    places = [launched.pop(name).data_ptr() for name in ("CODES", "SCALES", "W", "W_SCALES", "OUT")]

    assert places == [tensor.data_ptr() for tensor in tensors]
    assert launched.pop("tiles", 4) == 4
    assert launched == {
        "grid": (3 if isinstance(form, Many) else 512 // form.ranks,),
        "tile": (form.tokens, form.ranks),
        "RANK": 256,
        "K": 1024,
        "tokens": tokens,
        "token_stride": 2 * 1040,
        "group_stride": 1040,
        "scale_stride": 2 * 24,
        "scale_group_stride": 24,
        "w_stride": 1040,
        "w_scale_stride": 8,
        "w_scale_step": 1,
        "out_stride": 2 * 264,
        "out_group_stride": 264,
    }
    assert programs == [3]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("case", ["fp32", "blocks", "FNUZ", "rank", "no tokens", "arch", "interpreted", "ranks"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_they_do_not_serve_is_left_to_the_shared_kernel(
    case: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(
        0 if case == "rank" else 3,
        dtype=torch.float32 if case == "fp32" else torch.bfloat16,
        dialect=FNUZ if case == "FNUZ" else OCP,
        tokens=0 if case == "no tokens" else 5,
        block=32 if case == "blocks" else 128,
    )
    if case == "arch":
        monkeypatch.setattr(output, "architecture", lambda: "sm_120")
    elif case == "interpreted":
        monkeypatch.setattr(output, "INTERPRETED", True)
    elif case == "ranks":
        monkeypatch.setattr(output, "FEWEST_RANKS", 1024)
    z = call.project(multiply=output.multiply_codes, deterministic=deterministic)

    assert torch.equal(z, call.project(deterministic=deterministic))


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    "case",
    ["", "weight", "codes", "scales", "groups of scales", "rows of weight", "rows of codes", "rows of out", "columns"],
)
def test_strides_that_they_do_not_take(case: str) -> None:
    def meta(dtype: torch.dtype, size: tuple[int, ...], row: int) -> Tensor:
        strides = (row, size[-1], 1)[-len(size) :] if len(size) == 3 else (row, 1)
        return torch.empty_strided(size, strides, dtype=dtype, device="meta")

    width = 4160 if case == "columns" else 4096
    codes = meta(OCP, (512, 8, width), {"codes": 2**22, "rows of codes": 8 * width + 8}.get(case, 8 * width))
    scales = meta(torch.float32, (512, 8, 32), 2**22 if case == "scales" else 256)
    if case == "groups of scales":
        scales = torch.empty_strided((512, 8, 32), (32, 2**28, 1), device="meta")
    weight = meta(OCP, (FLASH, width), {"weight": 2**22, "rows of weight": width + 8}.get(case, width))
    wo_a = BlockScaledWeight(weight, torch.empty(64, -(-width // 128), device="meta"))
    out = meta(torch.bfloat16, (512, 8, 1024), 8196 if case == "rows of out" else 8192)

    assert output.serves(codes, scales, wo_a, out) == (not case)


def facts_of(form: Variant) -> tuple[Any, ...]:
    """What tells forms of these kernels apart without a key of their source."""
    return form.name, form.types, form.constants, form.num_warps, form.extra


@pytest.mark.skipif(not INTERPRETED, reason="the kernel that is launched here reads nothing")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scale", [torch.float32, torch.float8_e8m0fnu])
def test_warm_up_foresees_the_variants_that_are_launched(
    deterministic: bool, scale: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[int, tuple[Variant, tuple[int, ...]]] = {}

    def note(kernel: Any, grid: tuple[int, ...], args: Any, constants: Any, **options: Any) -> None:
        launched[args[5]] = Variant.of(kernel, args, constants, options.pop("num_warps"), 1, **options), grid

    monkeypatch.setattr(output, "INTERPRETED", False)
    monkeypatch.setattr(output, "architecture", lambda: "sm_90")
    monkeypatch.setattr(output, "multiprocessors", lambda: H100)
    monkeypatch.setattr(output, "launch", note)
    # the kernels call others that are interpreted, and so have no key
    monkeypatch.setattr(variant, "settle_key", lambda _: None)
    monkeypatch.setattr(JITCallable, "__hash__", object.__hash__)
    wo_a = BlockScaledWeight(torch.zeros(FLASH, 4096, dtype=OCP), torch.ones(64, 32).to(scale))
    backend = Sm90Backend(projection="fp8", deterministic=deterministic)
    for tokens in (1, 32, 64, 128, 256, 300):
        codes, scales = torch.zeros(tokens, 8, 4096, dtype=OCP), torch.ones(tokens, 8, 32)
        out = torch.empty(tokens, 8, 1024, dtype=torch.bfloat16)
        backend.multiply_codes(codes, scales, wo_a, out, deterministic=deterministic)
    bounds = WarmupSpec.of(ModelGeometry.preset("flash"), Limits(4, 64, 4096))
    monkeypatch.setattr(output, "launch", launch)
    foreseen = [facts_of(form) for form in output.variants(bounds, bounds.layers[0])]
    known = [facts_of(form) for form, _ in launched.values()]

    assert [grid for _, grid in launched.values()] == [(64,), *[(128,)] * 5]
    of_scale = "*fp32" if scale == torch.float32 else "*u8"
    assert known == [form for form in foreseen if dict(form[1])["W_SCALES"] == of_scale]
    assert len(foreseen) == 12


@pytest.mark.parametrize("case", ["", "bf16", "sm_120", "fp32", "blocks", "rank"])
def test_warm_up_compiles_nothing_that_no_call_needs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "INTERPRETED", False)
    # the kernels call others that are interpreted, and so have no key
    monkeypatch.setattr(variant, "settle_key", lambda _: None)
    monkeypatch.setattr(JITCallable, "__hash__", object.__hash__)
    bounds = evolve(WarmupSpec.of(ModelGeometry.preset("flash"), Limits(4, 64, 4096)), model=None)
    if case == "fp32":
        bounds = evolve(bounds, q_dtype=torch.float32)
    elif case == "blocks":
        bounds = evolve(bounds, wo_a_blocks=(32,))
    elif case == "rank":
        bounds = evolve(bounds, o_lora_rank=1088)
    backend = Sm90Backend(projection="bf16" if case == "bf16" else "fp8")
    monkeypatch.setattr(TritonBackend, "_launch_within", lambda *_: None)
    bounds = evolve(bounds, layers=bounds.layers[:1])
    foreseen = backend.kernel_variants(bounds, DeviceFacts.named("sm_120" if case == "sm_120" else "sm_90"))
    own = [form for form in foreseen if form.name in {"project_few_kernel", "project_many_kernel"}]

    assert len(own) == (0 if case else 12)


def walk(stages: int, later: int, *, pairs: bool) -> Iterator[str]:
    """Why two roles that multiply 50 copies, and the one that copies them, would wait for each other forever."""
    copied, announced, done, waiting = 0, 0, [0, 0], True
    while min(done) < 50 and waiting:
        waiting = False
        if copied < 50 and copied < stages + min(done):
            copied, waiting = copied + 1, True
            announced = max(announced, copied - later)
        elif copied == 50 and announced < 50:
            announced, waiting = 50, True
        for role in (0, 1):
            # two products are begun before the first stage is released
            if done[role] < 50 and announced >= done[role] + (2 if pairs else 1):
                done[role], waiting = done[role] + (2 if pairs else 1), True
    if min(done) < 50:
        yield f"{copied} copied, {announced} announced, {done} multiplied"


def test_roles_never_wait_for_each_other() -> None:
    for form in MANY:
        assert list(walk(form.stages, form.later, pairs=form.tokens == 128)) == []
    # a barrier of `multiplied` tells a phase from the next one only, so codes are not further ahead than weights
    assert all(form.stages <= form.w_stages for form in FEW)
    # a planted bug: no stage is free for the copies that come before an announcement
    assert list(walk(4, 4, pairs=False))
    assert list(walk(6, 5, pairs=True))


@pytest.mark.matrix
def test_all_of_its_forms_keep_every_limit() -> None:
    check_compiled(told_by("-m", "tests.backends.sm90.output.compiles"), 28)


def check_compiled(forms: list[dict[str, Any]], count: int) -> None:
    """Fail unless so many forms break no limit, and wait where a role reads results of others."""
    assert len(forms) == count
    for form in forms:
        assert form["reasons"] == [], form
        few = form["name"] == "project_few_kernel"
        assert (form["waits"], form["lets"], form["lets_before_it_waits"]) == (2 if few else 3, 1, False), form
        assert not form["copies_before_it_waits"], form
        assert form["early_releases"] == 0 < form["without_barriers"], form


@pytest.mark.mutation
def test_too_few_registers_are_found() -> None:
    assert [form["reasons"] for form in told_by("-m", "tests.backends.sm90.output.compiles", "planted")] == [["SPILLS"]]

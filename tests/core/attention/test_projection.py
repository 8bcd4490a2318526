"""The output projection: every form of weights, the sum over ranks, and errors before any output is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention import projection
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.attention.projection import o_proj, output_projection
from dsv4attn.core.contract.backend import Backend, Capabilities
from dsv4attn.core.model import quantized_weight as weights
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, Weight, dense_weight
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.kit.tolerances import F64
from tests.core.attention.projections import (
    GROUPS,
    HIDDEN,
    LAYER,
    RANK,
    TOKENS,
    WO_A,
    WO_B,
    ProjectionArgs,
    add_rows,
    project,
    project_share,
    rows_of_rank,
)
from tests.core.model.scaled import CPU, OCP, Scaled, each_dialect, each_form
from tests.harness import LIMITS
from tests.ranks import gloo_group, run_ranks

BF16, F32 = torch.bfloat16, torch.float32
META = torch.device("meta")


class Recording(ReferenceBackend):
    """Keeps what it is given as wo_a."""

    name = "recording"

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def inv_rope_o_proj(self, o: Tensor, positions: Tensor, table: Tensor, wo_a: Any, num_groups: int) -> Tensor:
        self.given.append(wo_a)
        return super().inv_rope_o_proj(o, positions, table, wo_a, num_groups)


def run(args: ProjectionArgs, backend: Any = None, **options: Any) -> Tensor:
    rest = args.o, args.positions, args.table, args.wo_a, args.wo_b, GROUPS
    return output_projection(backend or ReferenceBackend(), *rest, layer=LAYER, **options)


def scaled(seed: int, shape: tuple[int, int], dialect: torch.dtype = OCP, form: str = "fp32") -> Scaled:
    """A block-scaled weight on the CPU."""
    return Scaled.draw(seed, *shape, dialect, form, CPU)


def off(actual: Tensor, expected: F64) -> float:
    """Largest difference, relative to the largest value."""
    return float(np.abs(actual.detach().double().numpy() - expected).max() / np.abs(expected).max())


# weights


def in_every_form(shape: tuple[int, int], dialect: torch.dtype, form: str) -> list[tuple[Weight, F64]]:
    drawn = scaled(31, shape, dialect, form)
    return [(weight, drawn.values) for weight in (drawn.pair(), drawn.module(), drawn.module("weight_scale"))]


@each_dialect
@each_form
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_both_weights_may_be_block_scaled_fp8(dialect: torch.dtype, form: str, dtype: torch.dtype) -> None:
    plain = ProjectionArgs.draw(dtype)
    seconds = in_every_form(WO_B, dialect, form)
    for (wo_a, a), (wo_b, b) in zip(in_every_form(WO_A, dialect, form), seconds, strict=True):
        args = attrs.evolve(plain, wo_a=wo_a, wo_b=wo_b)

        assert off(run(args), args.answer(a, b)) < (1e-5 if dtype == F32 else 0.02)


@pytest.mark.parametrize(("o", "a", "b"), [(F32, BF16, BF16), (BF16, F32, BF16), (BF16, BF16, F32), (F32, F32, BF16)])
def test_dtypes_may_differ_and_the_result_has_that_of_o(o: torch.dtype, a: torch.dtype, b: torch.dtype) -> None:
    drawn = ProjectionArgs.draw(F32)
    args = attrs.evolve(drawn, o=drawn.o.to(o), wo_a=drawn.wo_a.to(a), wo_b=drawn.wo_b.to(b))
    y = run(args)

    assert (y.dtype, y.shape) == (o, (TOKENS, HIDDEN))
    assert off(y, args.answer()) < (1e-5 if o == F32 else 0.01)


def test_a_linear_module_is_a_weight() -> None:
    args, module = ProjectionArgs.draw(F32), nn.Linear(WO_B[1], HIDDEN, bias=False)

    y = run(attrs.evolve(args, wo_b=module))

    assert torch.equal(y, run(attrs.evolve(args, wo_b=module.weight)))


def test_no_tokens_give_no_rows() -> None:
    assert run(ProjectionArgs.draw(BF16, tokens=0)).shape == (0, HIDDEN)


def test_a_backend_receives_the_same_bf16_tensor_in_every_call() -> None:
    backend, drawn_scales = Recording(), scaled(32, WO_A)
    wo_a, drawn = drawn_scales.pair(), ProjectionArgs.draw(BF16)
    called: list[Callable[[], Tensor]] = [
        lambda: run(attrs.evolve(drawn, wo_a=wo_a), backend),
        lambda: o_proj(backend, drawn.o, drawn.positions, drawn.table, wo_a, GROUPS, layer=LAYER),
        lambda: bound(backend, drawn.table).o_proj(drawn.o, drawn.positions, wo_a, GROUPS),
    ]
    for call in called:
        call()

    assert all(weight is dense_weight(wo_a) for weight in backend.given)
    assert len(backend.given) == len(called)
    assert backend.given[0].dtype == BF16


def test_a_plain_weight_reaches_the_backend_as_it_is() -> None:
    backend, args = Recording(), ProjectionArgs.draw(BF16)
    run(args, backend)

    assert backend.given == [args.wo_a]


@pytest.mark.parametrize("inside", [True, False])
def test_the_first_call_may_be_in_inference_mode(inside: bool) -> None:
    args = attrs.evolve(ProjectionArgs.draw(BF16), wo_a=scaled(34, WO_A).pair(), wo_b=scaled(35, WO_B).module())
    with torch.inference_mode(inside):
        first = run(args).clone()
    with torch.inference_mode(not inside):
        assert torch.equal(run(args), first)


def test_another_matrix_product_gets_both_operands_in_one_dtype() -> None:
    seen: list[tuple[Any, ...]] = []

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((x.shape, x.dtype, weight.shape, weight.dtype))
        return (x.double() @ weight.double().mT).to(x.dtype)

    for dtype in (F32, BF16):
        args = attrs.evolve(ProjectionArgs.draw(BF16), wo_b=ProjectionArgs.draw(dtype).wo_b)
        assert off(run(args, linear=linear), args.answer()) < 0.01
        assert seen[-1] == ((TOKENS, GROUPS * RANK), dtype, WO_B, dtype)


@pytest.mark.filterwarnings("ignore:.*lru_cache")
def test_compiled_code_takes_tensors_and_says_how_fp8_weights_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    args, fp8 = ProjectionArgs.draw(F32), scaled(38, WO_A)
    rest, backend = (args.positions, args.table, args.wo_a, args.wo_b, GROUPS), ReferenceBackend()
    compiled = torch.compile(
        lambda o: output_projection(backend, o * 1, *rest, layer=LAYER), fullgraph=True, backend="aot_eager"
    )

    assert torch.equal(compiled(args.o), run(args))
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    with pytest.raises(
        ArgumentError, match=r"^wo_a\.weight: .*compiled code, got float8_e4m3fn -> pass dense_weight\("
    ):
        run(attrs.evolve(args, wo_a=fp8.pair()))


# backends that take fp8 as it is


class Fp8(Recording):
    """Says that it takes codes and scales; converts them, so that there is a result."""

    projects_fp8 = True


def test_a_backend_that_projects_fp8_receives_codes_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_weight, drawn, backend = scaled(39, WO_A), ProjectionArgs.draw(BF16), Fp8()
    pair, module = scaled_weight.pair(), scaled_weight.module("weight_scale")
    results = []
    for wo_a in (pair, module):
        results.append(run(attrs.evolve(drawn, wo_a=wo_a), backend))
        o_proj(backend, drawn.o, drawn.positions, drawn.table, wo_a, GROUPS, layer=LAYER)
        bound(backend, drawn.table).o_proj(drawn.o, drawn.positions, wo_a, GROUPS)

    assert torch.equal(*results)
    assert all(weight is pair for weight in backend.given[:3])
    for weight in backend.given[3:]:
        assert (weight.weight, weight.scale) == (module.weight, module.weight_scale)
    run(drawn, backend)
    assert backend.given[-1] is drawn.wo_a


class Bare(Backend):
    """Brings the projection alone, and takes codes and scales."""

    name, capabilities, projects_fp8 = "bare", Capabilities(), True

    def __init__(self) -> None:
        self.given: list[Any] = []

    def inv_rope_o_proj(self, o: Tensor, positions: Tensor, table: Tensor, wo_a: Any, num_groups: int) -> Tensor:
        self.given.append(wo_a)
        return torch.zeros(o.shape[0], num_groups, RANK, dtype=o.dtype)


def test_nothing_is_converted_for_it_nor_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_product", lambda *_: pytest.fail("converted"))
    monkeypatch.setattr(weights, "_alike", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(weights, "is_capturing", lambda _: True)
    scaled_weight, drawn, backend = scaled(40, WO_A), ProjectionArgs.draw(BF16), Bare()
    once, same = scaled_weight.pair(), scaled_weight.module()
    same.weight_scale = same.weight_scale_inv
    for wo_a in (once, same):
        run(attrs.evolve(drawn, wo_a=wo_a), backend)

    assert backend.given[0] is once
    assert backend.given[1].scale is same.weight_scale_inv
    twice = scaled_weight.module(weight_scale=scaled_weight.scale.clone())
    with pytest.raises(ArgumentError, match=r"^wo_a\.weight_scale: expected the tensor of wo_a\.weight_scale_inv, or"):
        run(attrs.evolve(drawn, wo_a=twice), backend)


# ranks


@pytest.mark.matrix
def test_two_ranks_add_up_to_one(tmp_path: Path) -> None:
    run_ranks(project, 2, str(tmp_path), size=2)

    for dtype, close in ((F32, 1e-5), (BF16, 0.02)):
        args = ProjectionArgs.draw(dtype)
        shares = [torch.load(tmp_path / f"{dtype}-{rank}.pt") for rank in range(2)]
        assert torch.equal(*shares)
        assert off(shares[0], args.answer()) < close
        assert off(shares[0], run(args).double().numpy()) < close
        parts = [project_share(args, rank, 2) for rank in range(2)]
        assert off(shares[0], (parts[0].double() + parts[1].double()).numpy()) < close
        assert off(parts[0], args.answer()) > 0.1


@pytest.mark.matrix
def test_rows_are_added_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Of three ranks, as two numbers have one sum: the same bits on all ranks, for all rows at once and for some."""
    run_ranks(add_rows, 3, str(tmp_path), size=3)

    results = [torch.load(tmp_path / f"sum-{rank}.pt") for rank in range(3)]
    for dtype in (F32, BF16):
        first, second, third = (rows_of_rank(rank).to(dtype).float() for rank in range(3))
        expected = ((first + second) + third).to(dtype)
        if dtype is F32:
            assert not torch.equal(expected, first + (second + third))
        for rank in range(3):
            assert all(torch.equal(found, expected) for found in results[rank][dtype])


def test_a_deterministic_backend_sums_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    args, group = ProjectionArgs.draw(F32), object()
    summed: list[tuple[Tensor, object]] = []

    def summed_over_ranks(x: Tensor, group: object) -> Tensor:
        summed.append((x, group))
        return x

    monkeypatch.setattr(projection, "check_group", lambda *_, **__: None)
    monkeypatch.setattr(projection, "sum_over_ranks", summed_over_ranks)
    monkeypatch.setattr(distributed, "all_reduce", lambda *_, **__: pytest.fail("the library sums"))

    y = run(args, ReferenceBackend(deterministic=True), process_group=group)

    [given] = summed
    assert given[0] is y
    assert given[1] is group


def test_a_group_of_one_rank_changes_no_bit(tmp_path: Path) -> None:
    with gloo_group(0, 1, tmp_path) as group:
        args = ProjectionArgs.draw(F32)
        y = run(args, process_group=group, linear=lambda x, w: nn.functional.linear(w, x).mT)

    assert torch.equal(y, nn.functional.linear(args.wo_b, z_of(args)).mT)


def z_of(args: ProjectionArgs) -> Tensor:
    rest = args.o, args.positions, args.table, args.wo_a, GROUPS
    return o_proj(ReferenceBackend(), *rest, layer=LAYER).flatten(1)


# bad input


class Untouchable(ReferenceBackend):
    """Fails the test when it is called."""

    def inv_rope_o_proj(self, o: Tensor, positions: Tensor, table: Tensor, wo_a: Any, num_groups: int) -> Tensor:
        pytest.fail("launched")


def bound(backend: Any, table: Tensor) -> DeepseekV4MLAAttention:
    limits = attrs.evolve(LIMITS, max_model_len=table.shape[0])
    return DeepseekV4MLAAttention("l", LAYER, limits, backend, attn_sink=None, cos_sin_cache=table)


FP8_A, FP8_B = scaled(36, WO_A), scaled(37, WO_B)
GOOD = attrs.evolve(ProjectionArgs.draw(BF16), wo_a=FP8_A.pair(), wo_b=FP8_B.pair())


def resized() -> BlockScaledWeight:
    """A weight whose memory was replaced by that of another shape, after it was made."""
    weight = FP8_A.pair()
    weight.weight.data = FP8_B.weight()
    return weight


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "o of other heads": ({"o": GOOD.o[:, :6]}, r"o: expected \[T, H, D\] bfloat16 or float32 with H=8"),
    "o in fp16": ({"o": GOOD.o.half()}, "o: expected .* float16 -> pass o.to"),
    "positions in int32": ({"positions": GOOD.positions.int()}, "positions: expected"),
    "a position behind the table": ({"positions": GOOD.positions + 23}, r"positions: expected values in \[0, 23\), .*"),
    "a negative position": (
        {"positions": GOOD.positions - 23},
        r"positions: expected .*, for tokens that are not padding, got -",
    ),
    "a table in bf16": ({"table": GOOD.table.bfloat16()}, "cos_sin_cache: expected"),
    "wo_a of other scales": (
        {"wo_a": FP8_A.module(weight_scale_inv=torch.ones(2, 2))},
        r"wo_a.weight_scale_inv: .*\[2, 3\]",
    ),
    "wo_a that changed": (
        {"wo_a": resized()},
        r"wo_a.scale: expected \[1, 2\] .*, got \[2, 3\] float32 -> every block",
    ),
    "wo_a of other groups": ({"wo_a": scaled(1, (139, 320)).pair()}, r"wo_a.weight: expected \[2 \* rank, 320\]"),
    "wo_a of other heads": ({"wo_a": scaled(1, (140, 640)).module()}, r"wo_a.weight: expected \[2 \* rank, 320\]"),
    "wo_a in fp16": ({"wo_a": torch.zeros(WO_A).half()}, "wo_a: expected .* bfloat16 or float32, .*float16 -> pass"),
    "wo_a elsewhere": (
        {"wo_a": torch.zeros(WO_A, device=META)},
        "wo_a: expected a tensor on cpu, like q, got one on meta",
    ),
    "no wo_b": (
        {"wo_b": None},
        "wo_b: expected a tensor, a BlockScaledWeight, or a module with a weight, got NoneType",
    ),
    "wo_b of other columns": (
        {"wo_b": torch.zeros(HIDDEN, 139)},
        r"wo_b: expected \[hidden, 140\], a column .*, got \[50, 139\]",
    ),
    "wo_b turned round": ({"wo_b": torch.zeros(140, HIDDEN)}, r"wo_b: expected \[hidden, 140\], .*, got \[140, 50\]"),
    "wo_b of one dim": ({"wo_b": torch.zeros(140)}, r"wo_b: expected \[_, _\] .*, got \[140\]"),
    "wo_b of other scales": (
        {"wo_b": FP8_B.module("weight_scale", weight_scale=torch.ones(2, 1))},
        "wo_b.weight_scale: ",
    ),
    "wo_b in fp16": ({"wo_b": torch.zeros(WO_B).half()}, "wo_b: expected"),
    "wo_b with gaps": ({"wo_b": torch.zeros(HIDDEN, 280)[:, ::2]}, "wo_b: expected stride 1 in the last dimension"),
    "wo_b elsewhere": (
        {"wo_b": torch.zeros(WO_B, device=META)},
        "wo_b: expected a tensor on cpu, like o, got one on meta",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_is_an_error_before_anything_is_converted_or_launched(
    case: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, said = case
    args = attrs.evolve(GOOD, **changes)
    monkeypatch.setattr(weights, "_product", lambda *_: pytest.fail("converted"))
    with pytest.raises(ArgumentError, match=f"^{said}"):
        run(args, Untouchable(), linear=lambda *_: pytest.fail("multiplied"))
    if "wo_b" not in changes:
        with pytest.raises(ArgumentError, match=f"^{said}"):
            o_proj(Untouchable(), args.o, args.positions, args.table, args.wo_a, GROUPS, layer=LAYER)
    if not {"wo_b", "table"} & {*changes}:
        with pytest.raises(ArgumentError, match=f"^{said}"):
            bound(Untouchable(), args.table).o_proj(args.o, args.positions, args.wo_a, GROUPS)


PARTS: list[tuple[dict[str, Any], str]] = [
    ({"backend": "reference"}, "backend: expected a backend, got 'reference' -> pass what load_backend"),
    ({"layer": None}, "layer: expected a LayerGeometry, got None"),
    ({"num_groups": 3}, "num_groups: expected a divisor of 8 heads, got 3"),
    ({"process_group": "tp"}, "process_group: expected a ProcessGroup of torch.distributed .*, got 'tp' -> pass torch"),
    # what new_group returns on a rank outside of the group
    ({"process_group": distributed.GroupMember.NON_GROUP_MEMBER}, "process_group: expected .* that has this rank"),
]


@pytest.mark.parametrize(("changes", "said"), PARTS, ids=[said[:30] for _, said in PARTS])
def test_other_parts_are_refused_by_name_too(changes: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {
        "backend": Untouchable(), "o": GOOD.o, "positions": GOOD.positions, "cos_sin_cache": GOOD.table,
        "wo_a": GOOD.wo_a, "wo_b": GOOD.wo_b, "num_groups": GROUPS, "layer": LAYER,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=f"^{said}"):
        output_projection(**{**arguments, **changes})


def test_the_good_input_of_these_cases_is_good() -> None:
    assert off(run(GOOD), GOOD.answer(FP8_A.values, FP8_B.values)) < 0.02

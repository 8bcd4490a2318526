"""FlashMLA's interface passes the cases of FlashMLA's tests with every backend that takes the case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.compat.direct import forget_choices
from dsv4attn.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import NoBackendError
from dsv4attn.selection import backend_names
from tests.backends.built_in import launching_alike
from tests.compat.flash_mla_cases import (
    BIG_DECODE,
    BIG_PREFILL,
    SMALL_DECODE,
    SMALL_PREFILL,
    DecodeCase,
    Definition,
    Paged,
    PrefillCase,
    Rows,
    generator_of,
    sinks,
    spread,
)
from tests.harness import same_memory_on
from tests.marks import pairwise

# every backend there is, and the reference in every form of keys and indices
RAGGED = {"decode_indices": "ragged", "prefill_indices": "ragged"}
TARGETS: dict[str, tuple[str, Mapping[str, str]]] = {
    **{name: (name, {}) for name in backend_names()},
    "reference-ragged": ("reference", RAGGED),
    "reference-paged": ("reference", {"prefill_keys": "paged"}),
    "reference-paged-ragged": ("reference", {**RAGGED, "prefill_keys": "paged"}),
}
DECODE_TARGETS = [target for target in TARGETS if "paged" not in target]
TWINS = launching_alike(ModelGeometry.preset("flash")) if find_spec("triton") else []
"""Backends that launch, on a CPU, the generic backend's kernels and no others."""


def ours(targets: Iterable[str]) -> pytest.MarkDecorator:
    """All targets; a twin's are slow ones."""
    params = [pytest.param(target, marks=pytest.mark.slow if target in TWINS else ()) for target in targets]
    return pytest.mark.parametrize("target", params, indirect=True)


prefill_targets, decode_targets = ours(TARGETS), ours(DECODE_TARGETS)


INTERPRETED = not torch.accelerator.is_available()
KERNELS = [target for target in TARGETS if TARGETS[target][0] != "reference" and target not in TWINS]
"""Backends whose kernels are interpreted where there is no accelerator."""


def in_turn(cases: Sequence[DecodeCase], target: str) -> tuple[list[DecodeCase], list[DecodeCase]]:
    """Cases that a target takes, and its slow ones: targets of interpreted kernels take half of the cases in turn.

    They all take a number of heads that only one case has.
    """
    if target in TWINS:
        return [], [*cases]
    if not INTERPRETED or target not in KERNELS:
        return [*cases], []
    heads, at = Counter(case.heads for case in cases), KERNELS.index(target)
    # of two neighbours, which differ in one thing, now the first and now the second
    mine = [heads[case.heads] == 1 or (i + i // 2 + at) % 2 == 0 for i, case in enumerate(cases)]
    return [*compress(cases, mine)], [*compress(cases, map(not_, mine))]


def few(case: DecodeCase | PrefillCase) -> bool:
    """Whether a case has so few query rows that kernels can be interpreted; a hundred rows take some seconds."""
    return (case.batch if isinstance(case, DecodeCase) else 1) * case.s_q <= 100


def decode_in_turn() -> list[Any]:
    """Cases of few rows on all targets, as parameters of a test."""
    cases = [case for case in SMALL_DECODE if few(case)]
    taken = [(case, target) for target in DECODE_TARGETS for case in in_turn(cases, target)[0]]
    slow = [(case, target) for target in DECODE_TARGETS for case in in_turn(cases, target)[1]]
    targets = [target for _, target in taken]
    # every pair of fields on some target, and every target
    default = {*pairwise([attrs.astuple(case, recurse=False) for case, _ in taken]), *map(targets.index, targets)}
    marked = [
        *((one, () if number in default else pytest.mark.slow) for number, one in enumerate(taken)),
        *((one, pytest.mark.slow) for one in slow),
    ]
    return [pytest.param(*one, id=f"{one[0]}-{one[1]}", marks=marks) for one, marks in marked]


def patient(targets: Iterable[str]) -> pytest.MarkDecorator:
    """Backends for cases of many rows: slow ones where kernels are interpreted."""
    kernels = [target for target in targets if INTERPRETED and TARGETS[target][0] != "reference"]
    params = [pytest.param(target, marks=pytest.mark.slow if target in kernels else ()) for target in targets]
    return pytest.mark.parametrize("target", params, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a backend, which is built with the options of its target; big cases only run when asked for."""
    asked = "slow" in request.config.option.markexpr
    if request.node.get_closest_marker("slow") and not asked:
        pytest.skip("minutes each: run them with -m slow")
    name, options = TARGETS[request.param]
    config = tmp_path / "dsv4attn.toml"
    lines = [f'{key} = "{value}"' for key, value in options.items()]
    config.write_text("\n".join([f"[options.{name}]", *lines]), encoding="utf-8")
    monkeypatch.setenv("DSV4ATTN_CONFIG", str(config))
    forget_choices()
    yield name
    forget_choices()


def device_of(name: str) -> torch.device:
    """Where a backend is tried: on the accelerator, if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None or name == "reference" else accelerator


def assert_close(name: str, got: Tensor, want: Tensor, *, absolute: float, relative: float, cosine: float) -> None:
    """The bound of FlashMLA's tests: each element by one of two errors, all together by direction, infinities equal."""
    got = got.double().cpu()
    assert got.shape == want.shape, name
    assert torch.equal(got.isinf(), want.isinf()), f"{name}: other infinities"
    assert torch.equal(got.sign()[got.isinf()], want.sign()[want.isinf()]), f"{name}: infinities of another sign"
    got, want = (x.masked_fill(x.isinf(), 0) for x in (got, want))
    error = (got - want).abs()
    wrong = ~((error < absolute) | (error / (want.abs() + 1e-6) < relative))
    assert not wrong.any(), f"{name}: {int(wrong.sum())} wrong, by {float(error[wrong].max()):.3g}"
    size = float((got**2 + want**2).sum())
    assert size < 1e-12 or 1 - 2 * float((got * want).sum()) / size < cosine, f"{name}: another direction"


def run_decode(case: DecodeCase, name: str) -> None:
    g = generator_of(case)
    q = torch.randn(case.batch, case.s_q, case.heads, 512, generator=g).clamp_(-1, 1).bfloat16()
    main, sink = Paged.make(case.main, case, g), sinks(case.heads, g) if case.sink else None
    extra = Paged.make(case.extra, case, g) if case.extra else None
    device = device_of(name)
    tensors = [main.indices, sink]
    tensors += [extra.cache, extra.indices] if extra else [None, None]
    tensors += [main.lengths, extra.lengths if extra else None]
    moved: list[Any] = [t if t is None else same_memory_on(t, device) for t in tensors]
    meta, _ = get_mla_metadata()
    first = same_memory_on(spread(q), device), same_memory_on(main.cache, device)
    start = (*first, None, None, 512, meta, None, case.scale, False, True)
    try:
        out, lse = flash_mla_with_kvcache(*start, *moved, backend=name)
    except NoBackendError as error:
        if name == "reference":
            raise
        pytest.skip(str(error))
    seconds = extra.keys_of if extra else [torch.zeros(0, 512)] * len(main.keys_of)
    keys_of = [[a, b] for a, b in zip(main.keys_of, seconds, strict=True)]
    expected = Definition(q.flatten(0, 1), keys_of, case.scale, sink)

    assert out.dtype is torch.bfloat16
    assert lse.dtype is torch.float32
    assert_close("out", out, expected.out.view(q.shape), absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
    wanted_lse = expected.lse.view(q.shape[:3]).transpose(1, 2)
    assert_close("lse", lse, wanted_lse, absolute=1e-6, relative=8.01 / 65536, cosine=1e-6)


def run_prefill(case: PrefillCase, name: str) -> None:
    g = generator_of(case)
    shift = float(torch.rand((), generator=g) - 0.5) / 10
    q = (torch.randn(case.s_q, case.heads, 512, generator=g) / 10 + shift).bfloat16()
    rows, sink = Rows.make(case, g), sinks(case.heads, g) if case.sink else None
    device = device_of(name)
    attn_sink, lengths = (t if t is None else same_memory_on(t, device) for t in (sink, rows.lengths))
    q_there, kv, indices = (same_memory_on(t, device) for t in (spread(q), rows.kv, rows.indices))
    try:
        out, top, lse = flash_mla_sparse_fwd(q_there, kv, indices, case.scale, 512, attn_sink, lengths, backend=name)
    except NoBackendError as error:
        if name == "reference":
            raise
        pytest.skip(str(error))
    expected = Definition(q, [[keys] for keys in rows.keys_of], case.scale, sink)

    assert [t.dtype for t in (out, top, lse)] == [torch.bfloat16, torch.float32, torch.float32]
    assert_close("out", out, expected.out, absolute=8e-4, relative=3.01 / 128, cosine=7e-6)
    assert_close("max_logits", top, expected.top, absolute=1e-6, relative=2.01 / 65536, cosine=1e-6)
    assert_close("lse", lse, expected.lse, absolute=1e-6, relative=2.01 / 65536, cosine=1e-6)


@pytest.mark.parametrize(("case", "target"), decode_in_turn(), indirect=["target"])
def test_decode_of_small_cases_is_right(case: DecodeCase, target: str) -> None:
    run_decode(case, target)


@pytest.mark.in_turn
@prefill_targets
@pytest.mark.parametrize("case", [case for case in SMALL_PREFILL if few(case)], ids=str)
def test_prefill_of_small_cases_is_right(case: PrefillCase, target: str) -> None:
    run_prefill(case, target)


@pytest.mark.matrix
@patient(DECODE_TARGETS)
@pytest.mark.parametrize("case", [case for case in SMALL_DECODE if not few(case)], ids=str)
def test_decode_of_many_rows_is_right(case: DecodeCase, target: str) -> None:
    run_decode(case, target)


@patient(TARGETS)
@pytest.mark.parametrize("case", [case for case in SMALL_PREFILL if not few(case)], ids=str)
def test_prefill_of_many_rows_is_right(case: PrefillCase, target: str) -> None:
    run_prefill(case, target)


@pytest.mark.slow
@decode_targets
@pytest.mark.parametrize("case", BIG_DECODE, ids=str)
def test_decode_of_big_cases_is_right(case: DecodeCase, target: str) -> None:
    run_decode(case, target)


@pytest.mark.slow
@prefill_targets
@pytest.mark.parametrize("case", BIG_PREFILL, ids=str)
def test_prefill_of_big_cases_is_right(case: PrefillCase, target: str) -> None:
    run_prefill(case, target)


def test_the_cases_reach_every_size_they_are_for() -> None:
    decode = [*SMALL_DECODE, *BIG_DECODE]
    scopes = [scope for case in SMALL_DECODE for scope in (case.main, case.extra) if scope]

    assert {2, 53, 61, 64, 69, 576} <= {scope.page for scope in scopes}
    assert {64, 576, 2048} <= {scope.topk for scope in scopes}
    assert {1, 4, 74, 321} <= {case.batch for case in SMALL_DECODE}
    assert {64, 128} <= {case.heads for case in SMALL_DECODE}
    assert len({str(case) for case in decode}) == len(decode)


def test_every_lane_meets_every_shape_and_every_flag_and_every_case_some_kernels() -> None:
    cases = [case for case in SMALL_DECODE if few(case)]
    quick = {target: in_turn(cases, target)[0] for target in KERNELS}

    for target, taken in quick.items():
        assert features(taken) == features(cases), target
    assert not KERNELS or {str(case) for taken in quick.values() for case in taken} == {*map(str, cases)}


def features(cases: Iterable[DecodeCase]) -> set[object]:
    """What cases have, each thing by itself, and the flags of a corner together."""
    found: set[object] = set()
    for case in cases:
        for scope in filter(None, (case.main, case.extra)):
            found |= {("page", scope.page), ("topk", scope.topk), ("lengths", scope.lengths)}
        found |= {("flags", case.zero_lengths, case.all_invalid, case.sink, case.extra is None)}
        found |= {("heads", case.heads), ("s_q", case.s_q), ("many", case.batch > 4)}
    return found

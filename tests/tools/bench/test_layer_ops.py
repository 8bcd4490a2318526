"""Ops around attention: right ones get times, wrong ones do not, and sizes are those of the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.layer_ops import StatePages, TokenMap
from dsv4attn.tools.bench.cases import LAYER_OPS, PRESETS
from dsv4attn.tools.bench.index_ops import index_task, select_task, selection_bounds
from dsv4attn.tools.bench.layer_ops import LayerOpCase, layer_op_cases, selections
from dsv4attn.tools.bench.runner import MEASURED, WRONG, BenchRow, Runner
from tests.layer_ops import TorchOps
from tests.tools.bench.sample_runs import ROOF

CPU = torch.device("cpu")
SMALL = [
    LayerOpCase("index", "paged", "a", 3, 2, 128),
    LayerOpCase("index", "gathered", "a", 1, 5, 100),
    LayerOpCase("select", "paged", "a", 2, 2, 704),
    *(LayerOpCase("compress", f"save {name}", "b", 4) for name in ("c4a", "index", "c128a")),
    *(LayerOpCase("compress", f"store {name}", "b", 4) for name in ("c4a", "index", "c128a")),
    *(LayerOpCase("compress", f"store {name}", "t", 1, 140) for name in ("c4a", "index", "c128a")),
    LayerOpCase("compress", "query index", "t", 1, 7),
    *(LayerOpCase("mhc", step, "t", 1, 5, hidden=96) for step in ("pre", "post", "post+pre", "head")),
    LayerOpCase("products", "wkv", "t", 1, 5, hidden=96, columns=40),
]
OpBug = tuple[str, str, Callable[..., Any]]


@pytest.fixture(autouse=True)
def _known_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: ROOF)


def judge(case: LayerOpCase, **instead: Callable[..., Any]) -> BenchRow:
    """The row of torch's steps, with others instead of some of them; they get torch's step first."""
    backend = ReferenceBackend()
    steps = TorchOps()
    for name, bug in instead.items():
        right = getattr(steps, name)
        setattr(steps, name, lambda *a, bug=bug, right=right, **k: bug(right, *a, **k))
    vars(backend)["layer_ops"] = steps.table()
    (row,) = [row for row in Runner(CPU, {"reference": backend}, [], 1).run(case) if not row.is_peer]
    return row


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_torch_steps_are_right_and_measured(case: LayerOpCase) -> None:
    row = judge(case)

    assert (row.state, row.reason) == (MEASURED, "")
    assert row.error is not None
    assert row.error < 3e-3
    assert row.median is not None
    assert row.bytes > 0
    assert row.fp8 is (case.kernel in ("index", "select"))
    assert (row.flops > 0) is (case.kernel != "compress" and case.step != "post")


STEP_OF = {
    "save": "save_partial_states",
    "store": "compress_norm_rope_store",
    "query": "indexer_q_rope_quant",
    "paged": "fp8_paged_mqa_logits",
    "gathered": "fp8_mqa_logits",
    "pre": "mhc_pre",
    "post": "mhc_post",
    "post+pre": "mhc_fused_post_pre",
    "head": "hc_head",
    "wkv": "linear",
}


@pytest.mark.parametrize("case", [c for c in SMALL if c.kernel == "select" or c.step[:4] in ("save", "stor")], ids=str)
def test_a_step_that_writes_nothing_is_wrong(case: LayerOpCase) -> None:
    step = "select_topk" if case.kernel == "select" else STEP_OF[case.step.split()[0]]

    assert judge(case, **{step: lambda *_, **__: None}).state == WRONG


def as_before() -> Callable[..., Any]:
    """A step that returns what it returned first."""
    first: list[Any] = []

    def step(right: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not first:
            first.append(right(*arguments, **options))
        return first[0]

    return step


@pytest.mark.parametrize(
    "case", [c for c in SMALL if c.kernel in ("index", "mhc", "products") or c.step == "query index"], ids=str
)
def test_a_step_that_returns_what_it_once_made_is_wrong(case: LayerOpCase) -> None:
    row = judge(case, **{STEP_OF[case.step.split()[0]]: as_before()})

    assert row.state == WRONG
    assert row.median is None


def swapped(right: Callable[..., Any], q: Any, cache: Any, weights: Any, *rest: Any) -> Any:
    return right(q, cache, weights.roll(1, -1), *rest)


def truncated(right: Callable[..., Any], q: Any, cache: Any, weights: Any, lens: Any, *rest: Any) -> Any:
    return right(q, cache, weights, lens - 1, *rest)


def last_page_twice(right: Callable[..., Any], query: Any, cache: Any, token_map: TokenMap, *rest: Any) -> Any:
    table = torch.cat([token_map.block_table[:, 1:2], token_map.block_table[:, 1:]], 1)
    return right(query, cache, evolve(token_map, block_table=table), *rest)


def unequal(right: Callable[..., Any], *arguments: Any) -> None:
    right(*arguments)
    arguments[-2][0, 3] = arguments[-2][0, 4]


def one_absent(right: Callable[..., Any], *arguments: Any) -> None:
    right(*arguments)
    arguments[-2][1, -1] = -1


def no_bias(right: Callable[..., Any], kv: Any, score: Any, ape: Any, *rest: Any) -> None:
    right(kv, score, 0 * ape, *rest)


def next_position(right: Callable[..., Any], *arguments: Any, overlap: bool) -> None:
    """Entries are rotated by one position too many."""
    norm = evolve(arguments[4], cos_sin_cache=arguments[4].cos_sin_cache.roll(-1, 0))
    right(*arguments[:4], norm, *arguments[5:], overlap=overlap)


def half_a_window(right: Callable[..., Any], states: StatePages, *arguments: Any, overlap: bool) -> None:
    """Tokens of every second page do not count."""
    table = states.block_table.clone()
    table[:, ::2] = -1
    right(evolve(states, block_table=table), *arguments, overlap=overlap)


def unturned(right: Callable[..., Any], q: Any, weights: Any, positions: Any, *rest: Any) -> Any:
    return right(q, weights, 0 * positions, *rest)


def transposed(right: Callable[..., Any], x: Any, residual: Any, post: Any, comb: Any, *rest: Any) -> Any:
    return right(x, residual, post, comb.mT, *rest)


def fewer_iterations(right: Callable[..., Any], residual: Any, weights: Any) -> Any:
    return right(residual, evolve(weights, sinkhorn_repeat=2))


BUGS: list[OpBug] = [
    ("index paged", "fp8_paged_mqa_logits", swapped),
    ("index paged", "fp8_paged_mqa_logits", truncated),
    ("select paged", "select_topk", last_page_twice),
    ("select paged", "select_topk", unequal),
    ("select paged", "select_topk", one_absent),
    ("compress save", "save_partial_states", no_bias),
    ("compress store", "compress_norm_rope_store", next_position),
    ("compress store", "compress_norm_rope_store", half_a_window),
    ("compress query", "indexer_q_rope_quant", unturned),
    ("mhc post", "mhc_post", transposed),
    ("mhc pre", "mhc_pre", fewer_iterations),
]


@pytest.mark.parametrize(("where", "step", "bug"), BUGS, ids=lambda part: getattr(part, "__name__", part))
def test_a_bug_gets_no_time(where: str, step: str, bug: Callable[..., Any]) -> None:
    for case in SMALL:
        if case.name.startswith(where) and not case.name.startswith("mhc post+pre"):
            row = judge(case, **{step: bug})
            assert row.state == WRONG, case.name
            assert row.median is None


def test_names_are_unique_and_cpu_cases_are_few() -> None:
    for small in (True, False):
        names = [case.name for case in layer_op_cases(LAYER_OPS, small=small)]
        assert len({*names}) == len(names)
    paged = [(c.requests, c.keys, c.tokens) for c in layer_op_cases(["index"], small=False) if c.step == "paged"]
    assert (1, 262144, 1) in paged
    assert (64, 32768, 2) in paged
    assert max(case.count * max(case.keys, 1) for case in layer_op_cases(LAYER_OPS, small=True)) <= 32 * 1024


def test_selections_of_a_layer_are_prompts_and_decodes_at_several_lengths() -> None:
    assert [name for name, preset in PRESETS.items() if preset.selects] == ["flash_c4", "pro_c4"]
    cases = selections([512, 1024], None, 2048, small=False)

    assert len({case.name for case in cases}) == len(cases)
    lengths = [8192, 32768, 131072, 262144]
    for topk in (512, 1024):
        shapes = [(case.requests, case.tokens, case.keys) for case in cases if case.topk == topk]
        decodes = [(requests, 1, keys) for requests in (1, 8, 64) for keys in lengths]
        assert shapes == [*((1, 2048, keys) for keys in lengths), *decodes]
    short = {case.name: case for case in layer_op_cases(["select"], small=False)}
    assert all(short.get(case.name, case) == case for case in cases), "one name, one case"
    assert "select paged b=1 t=2048 k=8192" in short
    assert {case.requests for case in selections([512], (3,), 5, small=True)} == {1, 3}
    assert selections([], None, 5, small=True) == []


def test_work_is_counted_by_hand() -> None:
    case = LayerOpCase("index", "paged", "a", 3, 2, 128)
    logits, chosen = index_task(case, CPU), select_task(evolve(case, kernel="select", keys=704), CPU)
    read = 3 * 128 * 132 + 3 * 2 * 4 + 6 * 64 * (128 + 4)

    assert logits.flops == 2 * 6 * 128 * 64 * 128
    assert logits.bytes == read + 6 * 128 * 4
    assert chosen.bytes == 3 * 704 * 132 + 3 * 11 * 4 + 6 * 64 * (128 + 4) + 6 * 512 * 4


def test_any_512_of_equal_scores_are_a_right_selection_and_others_are_not() -> None:
    inputs: Any = select_task(LayerOpCase("select", "paged", "a", 1, 1, 704), CPU).inputs
    scores = torch.arange(704.0).flip(0)[None]
    scores[0, 511:520] = scores[0, 511].clone()
    inputs = evolve(inputs, logits=scores)
    right = torch.arange(512)[None]
    ties = right.clone()
    ties[0, 511] = 519
    late, early = right.clone(), right.clone()
    late[0, 511] = 600
    early[0, 0] = 515

    for chosen in (right, ties, ties.flip(1)):
        (result,) = selection_bounds(inputs, chosen)
        assert result.tolist() == [[scores[0, 511].item()] * 2]
    assert selection_bounds(inputs, late)[0][0, 0] < scores[0, 511]
    assert selection_bounds(inputs, early)[0][0, 1] == scores[0, 0]
    twice = right.clone()
    twice[0, 0] = 1
    beyond = right.clone()
    beyond[0, 0] = 704
    for wrong in (twice, beyond):
        assert selection_bounds(inputs, wrong)[0].isnan().all()

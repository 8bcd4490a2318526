"""Inputs are what an engine would pass, and the reference is right about them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import Products
from dsv4attn.core.contract.problem import CacheFacts
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.request_rows import check_request_rows
from dsv4attn.errors import UnknownNameError
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.tools.bench.accuracy import Error, error, limit
from dsv4attn.tools.bench.attention_call import problem_of, request_rows
from dsv4attn.tools.bench.cases import (
    KERNELS,
    PAIRS,
    PRESETS,
    CaseSizes,
    KernelCase,
    cases_of,
    decodes,
    named,
    together,
)
from dsv4attn.tools.bench.contenders import expected_attention
from dsv4attn.tools.bench.inputs import LAYOUT, Inputs, RandomNumbers, fill, make_inputs, read_records

CPU = torch.device("cpu")
RAGGED = ((0, 17), (500, 1), (300, 2))


def small(name: str) -> KernelCase:
    """A prefill of three requests, with two heads and few keys."""
    preset = PRESETS[name]
    ratio = {LayerKind.HCA: 16}.get(preset.kind, preset.ratio)
    return KernelCase("prefill", evolve(preset, heads=2, ratio=ratio, topk=preset.topk and 24), "toy", RAGGED, seed=5)


def visible(case: KernelCase) -> list[tuple[list[int], list[int]]]:
    """Positions and entries that each token may see, from the oracle."""
    preset = case.preset
    places = [context + i for context, count in case.requests for i in range(count)]
    ratio = None if preset.kind is LayerKind.SWA else preset.ratio
    return [oracle.visible_keys(place, 128, ratio, None) for place in places]


@pytest.mark.parametrize("name", PRESETS)
def test_each_token_names_the_records_of_its_own_request(name: str) -> None:
    case = small(name)
    inputs = make_inputs(case, CPU)
    request = [r for r, (_, count) in enumerate(case.requests) for _ in range(count)]

    total = 0
    for token, (window, entries) in enumerate(visible(case)):
        for segment, expected in zip(inputs.segments, (window, entries), strict=False):
            page, n = segment.cache.block_size, int(segment.slots.lens[token])
            slots, local = segment.slots.indices[token], segment.local[token]
            assert n == min(len(expected), 128 if segment is inputs.segments[0] else case.preset.topk)
            assert bool((slots[n:] == -1).all())
            first = int(segment.seq_lens[request[token]] - segment.gather_lens[request[token]])
            numbers = (local[:n] + first).tolist()
            assert len({*numbers}) == n
            assert {*numbers} <= {*expected}
            pages = segment.table[request[token]][torch.tensor(numbers, dtype=torch.int64) // page]
            assert bool((pages >= 0).all())
            assert slots[:n].tolist() == (pages * page + torch.tensor(numbers).long() % page).tolist()
            total += n
    assert inputs.keys == total
    assert inputs.flops == 4 * 2 * 512 * total


def test_filling_leaves_no_slot_out() -> None:
    cache = PagedKVCache.allocate(LAYOUT, 5, 3)
    fill(cache, RandomNumbers(CPU, 0))

    keys = read_records(cache, torch.arange(15))
    assert bool((keys.abs().amax(1) > 1).all())
    assert keys.unique(dim=0).shape[0] == 15


def test_no_page_belongs_to_two_requests() -> None:
    for segment in make_inputs(small("flash_c4"), CPU).segments:
        pages = segment.table[segment.table >= 0]
        assert pages.unique().numel() == pages.numel() == segment.cache.num_blocks


@pytest.mark.parametrize("name", PRESETS)
def test_combined_rows_are_the_records_of_the_pages(name: str) -> None:
    inputs = make_inputs(small(name), CPU)
    assert inputs.rows is not None
    assert inputs.combined is not None
    rows = inputs.rows.flatten(0, 1)
    for token in range(inputs.q.shape[0]):
        n = int(inputs.combined.lens[token])
        assert bool((inputs.combined.indices[token, n:] == -1).all())
        paged = [read_records(s.cache, s.slots.indices[token, : int(s.slots.lens[token])]) for s in inputs.segments]
        assert torch.equal(rows[inputs.combined.indices[token, :n].long()].float(), torch.cat(paged))


def expected(inputs: Inputs, token: int) -> np.ndarray:
    """Attention of one token by the oracle."""
    keys = [read_records(s.cache, s.slots.indices[token, : int(s.slots.lens[token])]) for s in inputs.segments]
    stacked = torch.cat(keys).double().numpy()
    sink = inputs.sink.double().numpy()
    return oracle.attend_row(inputs.q[token].double().numpy(), stacked, sink, 512**-0.5)[0]


@pytest.mark.parametrize(("name", "records"), [*product(PRESETS, [""]), *product(["v41_r2"], PAIRS)])
def test_the_reference_agrees_with_the_oracle(name: str, records: str) -> None:
    inputs = make_inputs(evolve(small(name), records=records), CPU)
    out = expected_attention(inputs)

    for token in range(inputs.q.shape[0]):
        np.testing.assert_allclose(out[token].double().numpy(), expected(inputs, token), atol=2e-5)


def test_a_decode_counts_bytes_once_for_each_key() -> None:
    case = KernelCase("decode", PRESETS["flash_c4"], "b=2", decodes(PRESETS["flash_c4"], 2))
    inputs = make_inputs(case, CPU)

    assert inputs.keys == 2 * (128 + 512)
    assert inputs.bytes == inputs.keys * (LAYOUT.record_bytes + 4) + 2 * 2 * 64 * 512 * 2
    assert inputs.rows is None


def test_a_prefill_counts_every_record_once() -> None:
    case = evolve(small("flash_c4"), requests=((100, 60),))
    inputs = make_inputs(case, CPU)

    assert inputs.records == 160 + 40 < inputs.keys
    assert evolve(inputs, case=evolve(case, kernel="prefill-rows")).bytes - inputs.bytes == 200 * (1024 - 584)


class TestErrors:
    """What is wrong is far off, however little of it is wrong."""

    x = torch.randn(40, 4, 64, generator=torch.Generator().manual_seed(2))

    def off(self, change: torch.Tensor) -> Error:
        return error([(change, self.x)])

    def test_nothing_is_nothing(self) -> None:
        assert self.off(self.x) == Error(0.0, 0.0)
        assert self.off(self.x).within(1e-9)

    def test_it_is_relative_to_the_size_of_all(self) -> None:
        np.testing.assert_allclose(self.off(self.x * 1.005).total, 0.005, rtol=1e-3)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_one_value_that_is_no_number_is_wrong(self, value: float) -> None:
        broken = self.x.clone()
        broken[7, 3, 5] = value
        assert not self.off(broken).within(1.0)

    def test_one_row_that_is_zero_is_wrong(self) -> None:
        big = torch.randn(4096, 4, 64, generator=torch.Generator().manual_seed(2))
        broken = big.clone()
        broken[2000, 1] = 0.0
        result = error([(broken, big)])
        assert result.total < 1e-2
        assert not result.within(1e-2)

    def test_a_row_that_should_be_zero_is_judged_by_the_others(self) -> None:
        expected = self.x.clone()
        expected[0, 0] = 0.0
        assert error([(expected, expected)]).within(1e-9)
        assert not error([(self.x, expected)]).within(1e-2)

    def test_the_worst_of_several_counts(self) -> None:
        assert error([(self.x, self.x), (2 * self.x, self.x)]).total == pytest.approx(1.0)
        for order in (1, -1):
            assert not error([(self.x, self.x), (self.x * torch.nan, self.x)][::order]).within(1.0)

    def test_fp8_products_may_be_further_off(self) -> None:
        assert limit(Products.BF16) == 1e-2 < limit(Products.FP8)


SIZE = CaseSizes((8, 64), 100, 200, 300, 5)


def test_cases_are_named_once_and_repeat_nothing() -> None:
    cases = cases_of(KERNELS, list(PRESETS), SIZE)

    assert len({case.name for case in cases}) == len(cases)
    counts = {kernel: sum(case.kernel == kernel for case in cases) for kernel in KERNELS}
    assert counts == {"decode": 22, "prefill": 11, "prefill-rows": 5, "insert": 3, "quantize": 1, "gather": 2}


def test_v41_cases_have_three_pairs_of_records_that_are_timed_in_turn() -> None:
    cases = cases_of(["decode", "prefill-rows"], ["flash_c4", "v41_r2"], SIZE)

    assert [case.name for case in cases[2:5]] == [f"decode v41_r2 b=8 {pair}" for pair in PAIRS]
    assert [len(group) for group in together(cases)] == [1, 1, 3, 3, 1]
    assert [case.name for group in together(cases) for case in group] == [case.name for case in cases]


@pytest.mark.parametrize(
    ("pair", "record"), [("584/584", (584, 584)), ("528/528", (528, 528)), ("528/288", (528, 288))]
)
def test_the_pair_says_the_records_of_both_caches(pair: str, record: tuple[int, int]) -> None:
    inputs = make_inputs(KernelCase("decode", PRESETS["v41_r1"], "b=2", ((2047, 1), (300, 1)), records=pair), CPU)

    assert tuple(segment.cache.layout.record_bytes for segment in inputs.segments) == record
    assert not inputs.layer.q_norm
    assert inputs.keys == inputs.records == 2 * 128 + 512 + 301
    assert inputs.stored == 256 * record[0] + 813 * record[1]
    problem = problem_of(inputs.case)
    result = [CacheFacts.of(segment.cache.layout, segment.cache.block_size) for segment in inputs.segments]
    assert [problem.swa, problem.compressed] == result


def test_requests_are_the_same_in_every_run_and_ragged_where_they_should_be() -> None:
    first, second = (decodes(PRESETS["flash_c128"], 64) for _ in range(2))
    assert first == second
    assert len({*first}) > 32
    assert len({*decodes(PRESETS["flash_c4"], 64)}) == 1


def test_names_are_guessed_at() -> None:
    assert named("case", "pro_c4,flash_c4,pro_c4", list(PRESETS), []) == ["pro_c4", "flash_c4"]
    with pytest.raises(UnknownNameError, match="did you mean 'flash_c4'"):
        named("case", "flash_c5", list(PRESETS), [])


@pytest.mark.parametrize("name", ["flash_c128", "flash_swa"])
def test_decodes_with_drafts_have_requests_of_several_tokens_that_share_keys(name: str) -> None:
    sizes = CaseSizes((2,), 8, 8, 8, 1, drafts=3)
    (case,) = cases_of(["decode"], [name], sizes)
    case = evolve(case, preset=evolve(case.preset, heads=2, topk=case.preset.topk and 24))

    assert case.name == f"decode {name} b=2 drafts=3"
    assert [count for _, count in case.requests] == [4, 4]
    inputs, rows = make_inputs(case, CPU), request_rows(case, CPU)
    assert rows is not None
    assert (rows.token_to_req.tolist(), rows.query_start_loc.tolist(), rows.max_tokens) == (
        [0] * 4 + [1] * 4,
        [0, 4, 8],
        4,
    )
    check_request_rows(rows, *(segment.slots for segment in inputs.segments))
    assert request_rows(evolve(case, requests=((5, 1), (9, 1))), CPU) is None

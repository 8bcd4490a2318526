"""Random inputs: the same number for the same token, and rows of the kind that a model and its indexer make."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.serving.request import Request
from dsv4attn.tools.replay.random_weights import LOUDEST
from dsv4attn.tools.replay.workload import _STRIDES, Tokens, Workload
from tests.tools.replay.small import GEOMETRY, requests_of

C4A = LayerKind.CSA
FLASH = ModelGeometry.preset("flash")


def workload_of(
    *requests: Request, geometry: ModelGeometry = GEOMETRY, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Workload:
    return Workload(geometry, requests or requests_of((2000, 2000)), seed, dtype)


def at(workload: Workload, row: int, first: int, count: int) -> Tokens:
    return workload.tokens(np.full(count, row), np.arange(first, first + count))


def everything(workload: Workload, tokens: Tokens) -> list[torch.Tensor]:
    made = []
    for kind in LayerKind:
        made += [workload.q_rows(workload.q_numbers(kind, tokens)), workload.sink(kind)]
        made += [workload.key_rows(n(kind, tokens)) for n in (workload.kv_numbers, workload.entry_numbers)]
    return [*made, workload.topk(C4A, tokens)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# what a row depends on


def test_everything_is_a_function_of_the_seed() -> None:
    made = [everything(w, at(w, 0, 0, 40)) for w in (workload_of(), workload_of(), workload_of(seed=1))]

    assert equal(made[0], made[1])
    assert not any(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))
    assert torch.equal(workload_of().projection(), workload_of().projection())


def test_a_row_does_not_depend_on_the_step_it_is_asked_for_in() -> None:
    workload = workload_of(*requests_of((50, 9), (60, 9)))
    alone = everything(workload, at(workload, 1, 30, 1))
    rows, positions = np.array([0, 1, 1, 0]), np.array([3, 29, 30, 30])
    together = everything(workload, workload.tokens(rows, positions))

    assert equal(alone, [x if x.shape == y.shape else x[2:3] for x, y in zip(together, alone, strict=True)])


def test_layer_types_heads_and_positions_get_rows_of_their_own() -> None:
    workload = workload_of()
    tokens = at(workload, 0, 0, 3)
    q = [workload.q_rows(workload.q_numbers(kind, tokens)) for kind in LayerKind]
    keys = [workload.key_rows(workload.kv_numbers(kind, tokens)) for kind in LayerKind]
    entries = [workload.key_rows(workload.entry_numbers(kind, tokens)) for kind in LayerKind]

    assert torch.cat([x.flatten(0, 1) for x in q]).unique(dim=0).shape[0] == 3 * 3 * 4
    assert torch.cat([*keys, *entries]).unique(dim=0).shape[0] == 6 * 3


def test_requests_with_equal_prefix_blocks_hold_equal_tokens_there_and_nowhere_else() -> None:
    lengths = (1100, 40), (700, 40), (1100, 40)
    workload = workload_of(*requests_of(*lengths, hash_ids=[(7, 8, 9), (7, 20), (7, 8, 10)]))
    ids = [workload.tokens(np.full(1100, row), np.arange(1100)).ids for row in range(3)]

    assert (ids[0][:512] == ids[1][:512]).all()
    assert not (ids[0][512:] == ids[1][512:]).any()
    assert (ids[0][:1024] == ids[2][:1024]).all()
    assert not (ids[0][1024:] == ids[2][1024:]).any()


def test_outputs_belong_to_their_request_even_in_a_shared_block() -> None:
    workload = workload_of(*requests_of((20, 40), (20, 40), hash_ids=[(3,), (3,)]))
    ids = [workload.tokens(np.full(60, row), np.arange(60)).ids for row in range(2)]

    assert (ids[0][:20] == ids[1][:20]).all()
    assert not (ids[0][20:] == ids[1][20:]).any()


def test_a_prompt_with_fewer_ids_than_blocks_shares_only_those() -> None:
    workload = workload_of(*requests_of((2000, 2), (2000, 2), hash_ids=[(3,), (3,)]))
    ids = [workload.tokens(np.full(2000, row), np.arange(2000)).ids for row in range(2)]

    assert (ids[0] == ids[1]).sum() == 512


def test_requests_are_found_by_their_index() -> None:
    requests = [evolve(request, index=10 * request.index + 5) for request in requests_of((3, 1), (4, 1))]

    assert workload_of(*requests).row_of == {5: 0, 15: 1}


# magnitudes


def test_queries_are_normal_and_keys_have_unit_rms_but_for_a_few_loud_channels() -> None:
    workload = workload_of(geometry=FLASH)
    tokens = at(workload, 0, 0, 2000)
    q = workload.q_rows(workload.q_numbers(C4A, tokens))
    keys = workload.key_rows(workload.kv_numbers(C4A, tokens))
    channels = keys.square().mean(0).sqrt()

    assert abs(float(q.mean())) < 1e-2
    assert float(q.std()) == pytest.approx(1, abs=1e-2)
    assert float(channels.median()) == pytest.approx(1, abs=0.1)
    assert int((channels > 0.9 * LOUDEST).sum()) == pytest.approx(512 // 64, abs=3)
    assert float(channels.max()) < 1.1 * LOUDEST
    assert float(workload.sink(C4A).std()) == pytest.approx(1, abs=0.3)


def test_scales_of_a_cache_have_something_to_do() -> None:
    workload = workload_of(geometry=FLASH, dtype=torch.bfloat16)
    keys = workload.key_rows(workload.kv_numbers(C4A, at(workload, 0, 0, 500)))[:, :448].float()
    exponents = (keys.unflatten(1, (7, 64)).abs().amax(-1) / 448).log2().ceil()

    assert all(exponents[:, group].unique().numel() > 1 for group in range(7))
    assert exponents.median(0).values.unique().numel() > 1


def test_the_projection_keeps_magnitudes() -> None:
    weight = workload_of().projection()

    assert weight.shape == (2 * 16, 2 * 32)
    assert float(weight.square().sum(1).mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_in_the_type_asked_for(dtype: torch.dtype) -> None:
    workload = workload_of(dtype=dtype)
    tokens = at(workload, 0, 0, 5)
    buffer = torch.full((5, 4, 32), torch.nan, dtype=dtype)
    numbers = workload.q_numbers(C4A, tokens)

    assert workload.key_rows(workload.kv_numbers(C4A, tokens)).dtype == dtype
    assert torch.equal(workload.q_rows(numbers, out=buffer), workload.q_rows(numbers))
    assert not buffer.isnan().any()


# selected entries


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20), st.integers(0, 5))
def test_selected_entries_are_what_an_indexer_leaves(positions: list[int], seed: int) -> None:
    workload = workload_of(seed=seed)
    rows = workload.topk(C4A, workload.tokens(np.zeros(len(positions), np.int64), np.array(positions)))

    assert rows.dtype == torch.int32
    assert rows.shape == (len(positions), 6)
    for position, row in zip(positions, rows.tolist(), strict=True):
        visible = (position + 1) // 4
        count = min(visible, 6)
        assert row[count:] == [-1] * (6 - count)
        assert len(set(row[:count])) == count
        assert all(0 <= entry < visible for entry in row[:count])


def test_selected_entries_are_in_no_order_and_lie_anywhere() -> None:
    workload = workload_of(geometry=FLASH)
    rows = workload.topk(C4A, at(workload, 0, 2400, 800)).double()
    steps = rows.diff(dim=1)

    assert ((steps > 0).any(1) & (steps < 0).any(1)).double().mean() > 0.95
    # relative to what is visible, uniform: mean 1/2 and deviation 1/sqrt(12)
    relative = rows / ((torch.arange(2400, 3200) + 1) // 4)[:, None]
    assert float(relative.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(relative.std()) == pytest.approx(12**-0.5, abs=0.01)


def test_strides_are_primes_that_no_count_of_entries_can_reach() -> None:
    for stride in _STRIDES.tolist():
        assert stride > 1 << 20
        assert all(stride % n for n in range(2, math.isqrt(stride) + 1))


def test_a_step_of_real_size_is_made_in_a_blink() -> None:
    workload = workload_of(geometry=FLASH, dtype=torch.bfloat16)
    tokens, buffer = at(workload, 0, 0, 2000), torch.empty(2000, 64, 512, dtype=torch.bfloat16)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        workload.q_rows(workload.q_numbers(C4A, tokens), out=buffer)
        workload.topk(C4A, tokens)
        workload.key_rows(workload.kv_numbers(C4A, tokens))
        seconds.append(time.perf_counter() - start)

    # drawing 65 million normals takes more than half a second
    assert min(seconds) < 0.3

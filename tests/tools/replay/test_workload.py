"""Random inputs: the same numbers for the same token."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve

from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.serving.request import Request
from dsv4attn.tools.replay.workload import Tokens, Workload
from tests.tools.replay.small import GEOMETRY, requests_of


def workload_of(*requests: Request, seed: int = 0, dtype: torch.dtype = torch.float32) -> Workload:
    return Workload(GEOMETRY, requests or requests_of((2000, 2000)), seed, dtype)


def at(workload: Workload, row: int, first: int, count: int) -> Tokens:
    return workload.tokens(np.full(count, row), np.arange(first, first + count))


def everything(workload: Workload, tokens: Tokens) -> list[torch.Tensor]:
    return [row for kind in LayerKind for row in (workload.hidden_states(kind, tokens), workload.sink(kind))]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# what a row depends on


def test_everything_is_a_function_of_the_seed() -> None:
    made = [everything(w, at(w, 0, 0, 40)) for w in (workload_of(), workload_of(), workload_of(seed=1))]

    assert equal(made[0], made[1])
    assert not any(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))


def test_a_row_does_not_depend_on_the_step_it_is_asked_for_in() -> None:
    workload = workload_of(*requests_of((50, 9), (60, 9)))
    alone = everything(workload, at(workload, 1, 30, 1))
    rows, positions = np.array([0, 1, 1, 0]), np.array([3, 29, 30, 30])
    together = everything(workload, workload.tokens(rows, positions))

    assert equal(alone, [x if x.shape == y.shape else x[2:3] for x, y in zip(together, alone, strict=True)])


def test_layer_types_and_positions_get_rows_of_their_own_of_unit_rms_in_the_type_asked_for() -> None:
    workload = workload_of(dtype=torch.bfloat16)
    hidden = torch.cat([workload.hidden_states(kind, at(workload, 0, 0, 5)) for kind in LayerKind])

    assert hidden.dtype == torch.bfloat16
    assert hidden.unique(dim=0).shape == (3 * 5, GEOMETRY.hidden_size)
    assert hidden.float().square().mean(1).sqrt().sub(1).abs().max() < 1e-2


def test_requests_with_equal_prefix_blocks_hold_equal_tokens_there_and_nowhere_else() -> None:
    lengths = (1100, 40), (700, 40), (1100, 40)
    workload = workload_of(*requests_of(*lengths, hash_ids=[(7, 8, 9), (7, 20), (7, 8, 10)]))
    ids = [workload.tokens(np.full(1100, row), np.arange(1100)).ids for row in range(3)]

    assert (ids[0][:512] == ids[1][:512]).all()
    assert not (ids[0][512:] == ids[1][512:]).any()
    assert (ids[0][:1024] == ids[2][:1024]).all()
    assert not (ids[0][1024:] == ids[2][1024:]).any()


def test_blocks_have_the_tokens_that_their_trace_says() -> None:
    requests = [Request(i, 0.0, 50, 2, ids, 16) for i, ids in enumerate([(7, 8, 9, 3), (7, 8, 10, 3)])]
    workload = workload_of(*requests)
    ids = [workload.tokens(np.full(50, row), np.arange(50)).ids for row in range(2)]

    assert [bool(equal) for equal in ids[0] == ids[1]] == [True] * 32 + [False] * 16 + [True] * 2


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

"""Calls of the ops that make ragged lists, on lengths and rows made to be misread."""

from __future__ import annotations

from random import Random

import torch

from tests.backends._triton.index_ops.index_trials import INT, LONG, NUMBERS, Trial, loose, numbers, spoiled, table_of


def pack(rng: Random) -> Trial:
    """Dense rows, some longer than their columns, of which many, few or no entries exist."""
    rows, width = rng.choice([0, 1, 4, 9, 12, 20]), rng.choice([0, 1, 5, 8, 21])
    dense = numbers(rng, (rows, width), lambda: spoiled(rng, 12, NUMBERS))
    lens = numbers(rng, (rows,), lambda: rng.choice([-1, -(2**31), 0, width, 2**31 - 1, rng.randint(0, width + 2)]))
    outs = ((rows * width + rng.randint(0, 2),), INT), ((rows + 1,), INT)
    return Trial("build_ragged_indices_from_dense", (dense, lens, rng.choice([0, 3, 9, 2**31])), outs)


def translate_ragged(rng: Random) -> Trial:
    """The same as `translate`, for up to three rounds of rows. Some show their entries in their last columns alone."""
    rows, width, requests = rng.choice([0, 1, 4, 9, 12, 20]), rng.choice([0, 1, 5, 8, 21]), rng.choice([0, 1, 2, 3, 3])
    table, size = table_of(rng, requests)
    usual, others = [1, 2, 3, width], [0, width + 2, 40, *NUMBERS]
    seen = numbers(rng, (rows,), lambda: rng.choice(usual if rng.random() < 0.7 else others))
    chosen = [row_of_entries(rng, width) for _ in range(rows)]
    topk = loose(torch.tensor(chosen, dtype=LONG).view(rows, width).to(INT), rng)
    no_request = [-1, requests, 2**31 - 1]
    request = numbers(
        rng, (rows,), lambda: rng.randrange(requests) if requests and rng.random() < 0.9 else rng.choice(no_request)
    )
    outs = ((rows * width + rng.randint(0, 2),), INT), ((rows + 1,), INT)
    return Trial("compute_global_topk_ragged_indices_and_indptr", (topk, seen, request, table, size), outs)


def row_of_entries(rng: Random, width: int) -> list[int]:
    """Entry numbers: any, one many times over, or distinct ones after columns that name nothing."""
    kind = rng.choice(["any", "repeated", "behind", "behind"])
    if kind == "any":
        return [spoiled(rng, 40, NUMBERS) for _ in range(width)]
    if kind == "repeated":
        return [spoiled(rng, 2, NUMBERS) for _ in range(width)]
    few = rng.sample(range(max(width, 1)), min(rng.randint(0, 4), width))
    return [rng.choice(NUMBERS) for _ in range(width - len(few))] + few

"""What goes wrong in mutants of DeepSeek-V4.1's steps."""

from __future__ import annotations

from math import inf
from typing import Any

import attrs
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.torch_ops.selection import ENTRIES, score_entries
from dsv4attn.core.torch_ops.tiles import PLAIN


def own_pre(given: dict[str, Any]) -> Tensor:
    """The weights that the streams themselves have, as in V4."""
    rest = {**given, "previous_pre": None}
    return ReferenceBackend().layer_ops.mhc_pre_delayed(**rest)[0]


def own_pre_at_first(given: dict[str, Any]) -> Tensor:
    found = given["previous_pre"]
    return own_pre(given) if found is None else torch.as_tensor(found)


def mean_at_first(given: dict[str, Any]) -> Tensor:
    residual, found = given["residual"], given["previous_pre"]
    return torch.full(residual.shape[:2], 1 / residual.shape[1]) if found is None else torch.as_tensor(found)


def given_pre(made: tuple[Tensor, ...], given: dict[str, Any]) -> tuple[Tensor, ...]:
    return made if given["previous_pre"] is None else (given["previous_pre"], *made[1:])


def not_forced(_: None, given: dict[str, Any]) -> None:
    """The blocks with the largest scores, the newest one only if it is one of them."""
    query, size, out = given["query"], given["block_size"], given["out"]
    found = [
        score_entries(query, given["cache"], given["token_map"], start, PLAIN)[0]
        for start in range(0, given["max_entries"], ENTRIES)
    ]
    largest = torch.cat(found, 1).unflatten(-1, (-1, size)).amax(-1)
    score, block = largest.topk(min(out.shape[1], largest.shape[1]))
    out.fill_(-1)[:, : block.shape[1]] = block.masked_fill(score == -inf, -1)


def cut_to_one(_: None, given: dict[str, Any]) -> None:
    """Only the last block is written twice."""
    given["out"][:, :2] = given["out"][:, :1]


def without_states(given: dict[str, Any]) -> dict[str, Any]:
    """No block of a ring exists."""
    states = given["states"]
    if states is None:
        return given
    return {**given, "states": attrs.evolve(states, block_table=states.block_table * 0 - 1)}


def number_of_the_entry(given: dict[str, Any]) -> Tensor:
    """The table of angles, so that the number of an entry is found at its first position."""
    angles: Tensor = given["norm"].cos_sin_cache
    return angles.repeat_interleave(given["ratio"], 0)


def shifted(given: dict[str, Any]) -> Tensor:
    found = given["candidates"]
    return torch.as_tensor(found.where(found < 0, found - 1))

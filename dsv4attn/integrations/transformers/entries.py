"""`replay_entries`: a model of transformers attends to entries that were recorded, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch as replaced

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import check_type, shown
from dsv4attn.core.layer.entries import check_entries
from dsv4attn.errors import ArgumentError, UnsupportedError


@contextmanager
def replay_entries(model: Any, entries: Sequence[Mapping[int, Tensor]]) -> Iterator[None]:  # noqa: ANN401
    """Let the c4a layers of a model of transformers attend to recorded entries, as in training on sampled tokens.

    Calls inside are transformers' own in everything else, and gradients flow as ever; indexers get none, since they do
    not score. With activation checkpointing call `backward` inside too: it runs layers again. A row of a call holds
    tokens of one sequence by their `position_ids`, without padding before them; the mask is not read. Give padding
    after them rows of -1.

    model: a model that is not patched.
    entries: for each row of a call, [tokens, K] of each c4a layer, by number: what `EntryRecords.of` returned.

    Raises UnsupportedError for a patched model or one without c4a layers, ArgumentError if a layer has no entries, or
    others than a token sees, such as the -2 of a token that the engine did not record. A call raises ArgumentError if a
    row or a position has no entries, for padding before the tokens of a row, and for a row of several sequences.
    """
    indexers = {}
    if not hasattr(model, "dsv4attn"):
        for layer in getattr(getattr(model, "model", model), "layers", ()):
            indexer = getattr(getattr(getattr(layer, "self_attn", None), "compressor", None), "indexer", None)
            if indexer is not None:
                indexers[layer.self_attn.layer_idx] = indexer
    if not indexers:
        hint = "call unpatch(model) first" if hasattr(model, "dsv4attn") else ""
        expected, actual = "a DeepSeek-V4 model with c4a layers, not patched", shown(model)
        raise UnsupportedError("model", expected=expected, actual=actual, hint=hint)
    for row, by_layer in enumerate(entries):
        missing = sorted(indexers.keys() - by_layer.keys())
        if missing:
            expected = f"entries of layers {sorted(indexers)}"
            raise ArgumentError(f"entries[{row}]", expected=expected, actual=f"none of layer {missing[0]}")
        for index, indexer in indexers.items():
            name, of_layer = f"entries[{row}][{index}]", by_layer[index]
            check_type(name, of_layer, Tensor, cure="give what EntryRecords.of returned")
            shape, dtype = list(of_layer.shape), str(of_layer.dtype).removeprefix("torch.")
            if len(shape) != 2 or shape[1] != indexer.index_topk or dtype not in ("int32", "int64"):
                expected = f"[tokens, {indexer.index_topk}] int32"
                raise ArgumentError(name, expected=expected, actual=f"{shape} {dtype}")
            seen = torch.arange(1, shape[0] + 1, device=of_layer.device) // indexer.compress_rate
            check_entries(name, of_layer, seen)
    with ExitStack() as stack:
        for index, indexer in indexers.items():
            recorded = [by_layer[index] for by_layer in entries]
            stack.enter_context(replaced.object(indexer, "forward", _indexer(index, recorded)))
        yield


def _indexer(layer: int, entries: Sequence[Tensor]) -> Callable[..., Tensor]:
    """What replaces the forward of an indexer: [N, S, K] int64, -1 for none."""

    def forward(hidden_states: Tensor, _: Tensor, position_ids: Tensor, *__: object, **___: object) -> Tensor:
        rows = hidden_states.shape[0]
        if rows != len(entries):
            raise ArgumentError("entries", expected=f"a mapping for each of {rows} rows", actual=len(entries))
        selected = []
        for row, (positions, of_row) in enumerate(zip(position_ids.expand(rows, -1), entries, strict=True)):
            steps, (first, last) = positions.diff(), (int(end) for end in positions.aminmax())
            breaks = steps != 1
            # padding after the tokens stays at one position, or goes on
            odd = (breaks.cumsum(0) > breaks) & (steps != 0)
            odd[:1] |= breaks[:1]
            if first < 0 or odd.any():
                # transformers counts padding among the tokens of entries
                expected = "positions of one sequence that ascend by 1: no padding before the tokens"
                at = int(breaks.int().argmax()) if len(breaks) else 0
                actual = f"{positions[at : at + 2].tolist()} ..."
                raise ArgumentError(f"position_ids[{row}]", expected=expected, actual=actual)
            if last >= len(of_row):
                expected = f"entries of position {last} for layer {layer}"
                raise ArgumentError(f"entries[{row}]", expected=expected, actual=f"{len(of_row)} positions")
            selected.append(of_row.to(hidden_states.device, torch.int64)[positions])
        return torch.stack(selected)

    return forward

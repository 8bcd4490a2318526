"""Backends whose ops around attention compute something else; the sound parts are the definitions."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages, TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.selection import select_topk
from tests.layer_ops import TorchOps


class Steps(TorchOps):
    """The definitions, with the arguments of the compressor's store by name."""

    def compress_norm_rope_store(
        self,
        states: StatePages,
        token_to_req: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        norm: EntryNorm,
        ratio: int,
        cache: PagedKVCache,
        *,
        overlap: bool,
    ) -> None:
        names = locals()
        self.store(**{name: value for name, value in names.items() if name not in ("self", "__class__")})

    def store(self, **given: Any) -> None:
        overlap = given.pop("overlap")
        super().compress_norm_rope_store(*given.values(), overlap=overlap)


class BiasOfTheNextToken(Steps):
    def save_partial_states(
        self, kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, cache: PagedKVCache, slots: Tensor
    ) -> None:
        TorchOps.save_partial_states(kv, score, ape.roll(1, 0), positions, cache, slots)


class LastStateNotSaved(Steps):
    def save_partial_states(
        self, kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, cache: PagedKVCache, slots: Tensor
    ) -> None:
        TorchOps.save_partial_states(kv, score, ape, positions, cache, slots[:-1])


class TurnedToTheLastToken(Steps):
    """Entries are rotated to the position that completes them."""

    def store(self, **given: Any) -> None:
        table = given["norm"].cos_sin_cache.roll(1 - given["ratio"], 0)
        super().store(**{**given, "norm": evolve(given["norm"], cos_sin_cache=table)})


class NormWithoutWeight(Steps):
    def store(self, **given: Any) -> None:
        norm = given["norm"]
        super().store(**{**given, "norm": evolve(norm, weight=torch.ones_like(norm.weight))})


class NeighboursStates(Steps):
    def store(self, **given: Any) -> None:
        states = given["states"]
        super().store(**{**given, "states": evolve(states, block_table=states.block_table.roll(1, 0))})


class PreviousWindowForgotten(Steps):
    """Entries with overlap cover their own window only."""

    def store(self, **given: Any) -> None:
        if not given["overlap"]:
            super().store(**given)
            return
        for i, position in enumerate(given["positions"].tolist()):
            own, table = slice(i, i + 1), given["states"].block_table.clone()
            table[:, : position // given["ratio"]] = -1
            parts = {name: given[name][own] for name in ("token_to_req", "positions", "slot_mapping")}
            super().store(**{**given, **parts, "states": evolve(given["states"], block_table=table)})


class NotStored(Steps):
    def store(self, **given: Any) -> None:
        pass


class IndexKeysNotStored(Steps):
    def store(self, **given: Any) -> None:
        if given["cache"].layout.name != "index_fp8":
            super().store(**given)


class IndexScalesDoubled(Steps):
    def store(self, **given: Any) -> None:
        super().store(**given)
        if given["cache"].layout.name == "index_fp8":
            slots = given["slot_mapping"][given["slot_mapping"] >= 0]
            size = given["cache"].block_size
            given["cache"].region("scale")[slots // size, slots % size] *= 2


class QueriesNotTurned(Steps):
    def indexer_q_rope_quant(self, q: Tensor, weights: Tensor, positions: Tensor, *rest: Any) -> IndexQuery:
        return TorchOps.indexer_q_rope_quant(q, weights, torch.zeros_like(positions), *rest)


class WeightsOfTheNextHead(Steps):
    def indexer_q_rope_quant(self, q: Tensor, weights: Tensor, *rest: Any) -> IndexQuery:
        return TorchOps.indexer_q_rope_quant(q, weights.roll(1, 1), *rest)


class Selecting(Steps):
    """Changes what is selected from, or what was selected."""

    def select_topk(
        self, query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, out: Tensor, max_entries: int
    ) -> None:
        query, lens = self.before(query, token_map.visible_lens)
        select_topk(query, cache, evolve(token_map, visible_lens=lens), out, max_entries)
        self.after(out, lens)

    def before(self, query: IndexQuery, lens: Tensor) -> tuple[IndexQuery, Tensor]:
        return query, lens

    def after(self, out: Tensor, lens: Tensor) -> None:
        pass


class Worst(Selecting):
    def before(self, query: IndexQuery, lens: Tensor) -> tuple[IndexQuery, Tensor]:
        return evolve(query, weights=-query.weights), lens


class OneHeadLess(Selecting):
    def before(self, query: IndexQuery, lens: Tensor) -> tuple[IndexQuery, Tensor]:
        weights = query.weights.clone()
        weights[:, 0] = 0
        return evolve(query, weights=weights), lens


class NewestLeftOut(Selecting):
    def before(self, query: IndexQuery, lens: Tensor) -> tuple[IndexQuery, Tensor]:
        return query, lens - 1


class OneTwice(Selecting):
    def after(self, out: Tensor, lens: Tensor) -> None:
        out[:, 1] = out[:, 0]


class LengthsOfTheLastToken(Selecting):
    """Tokens see entries of later tokens of the step."""

    def before(self, query: IndexQuery, lens: Tensor) -> tuple[IndexQuery, Tensor]:
        return query, lens.max().expand_as(lens).contiguous()


class NotSelected(Selecting):
    def select_topk(self, *_: Any) -> None:
        pass


class ScoresWithoutKeyScales(Selecting):
    def select_topk(self, query: IndexQuery, cache: PagedKVCache, *rest: Any) -> None:
        scales = cache.region("scale")
        real = scales.clone()
        # a power of two that differs from key to key
        scales *= torch.exp2(torch.arange(scales.numel()).reshape(scales.shape) % 3)
        select_topk(query, cache, *rest)
        scales.copy_(real)


def backend_with(steps: type[Steps]) -> ReferenceBackend:
    """The reference with other steps."""

    class Changed(ReferenceBackend):
        @cached_property
        def layer_ops(self) -> LayerOps:
            return steps().table()

    return Changed()

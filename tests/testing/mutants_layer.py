"""Layer steps with one thing wrong each: more mutants for the kit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache import fp4, key_codecs
from dsv4attn.core.cache import index_records as records
from dsv4attn.core.cache.layout import Arrangement, PagedKVCache
from dsv4attn.core.torch_ops import compressor, indexer
from dsv4attn.core.torch_ops.arguments import MixWeights, StatePages
from tests.layer_ops import TorchOps

Change = Callable[[dict[str, Any]], dict[str, Any]]

STEPS: dict[str, tuple[str, ...]] = {
    "norm_q_kv": ("q", "kv", "q_weight", "kv_weight", "eps", "dtype"),
    "save_partial_states": ("kv", "score", "ape", "positions", "cache", "slot_mapping"),
    "compress_norm_rope_store": (
        "states", "token_to_req", "positions", "slot_mapping", "norm", "ratio", "cache",
    ),
    "indexer_q_rope_quant": ("q", "weights", "positions", "cos_sin_cache", "layout"),
    "select_topk": ("query", "cache", "token_map", "out", "max_entries"),
    "mhc_pre": ("residual", "weights"),
    "mhc_post": ("x", "residual", "post", "comb"),
    "mhc_pre_delayed": ("residual", "previous_pre", "weights"),
    "mhc_collapse": ("streams", "pre"),
    "compress_latents": ("kv", "score", "positions", "token_to_req", "norm_weight", "eps", "ratio", "states"),
    "select_candidates": ("query", "cache", "token_map", "out", "block_size", "max_entries"),
    "select_topk_of_candidates": ("query", "cache", "token_map", "candidates", "block_size", "out", "max_entries"),
    "norm_rope_store": ("x", "positions", "slot_mapping", "norm", "ratio", "cache"),
    "hc_head": ("streams", "hc_fn", "hc_scale", "hc_base", "rms_eps", "hc_eps"),
}  # fmt: skip
"""Names of the arguments of each step."""


class Slipping(TorchOps):
    """Torch's ops, one of which is changed. The fused ones are made of the others, so that they have the same bug."""

    def mhc_fused_post_pre(
        self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, weights: MixWeights
    ) -> tuple[Tensor, ...]:
        residual = self.mhc_post(x, residual, post, comb)
        return residual, *self.mhc_pre(residual, weights)

    def mhc_fused_post_pre_delayed(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        previous_pre: Tensor | None,
        weights: MixWeights,
    ) -> tuple[Tensor, ...]:
        residual = self.mhc_post(x, residual, post, comb)
        return residual, *self.mhc_pre_delayed(residual, previous_pre, weights)


def slip(
    step: str,
    change: Change | None = None,
    *,
    behind: Callable[[Any, dict[str, Any]], Any] | None = None,
    patched: tuple[tuple[Any, str, Any], ...] = (),
) -> Callable[[], Any]:
    """A backend with a wrong step.

    change: of its arguments, by name. behind: of its result, by the arguments. patched: (module, name, replacement)
    while it runs.
    """

    def make() -> Any:
        backend: Any = ReferenceBackend()
        steps: Any = Slipping()
        right = getattr(steps, step)

        def wrong(*args: Any, **options: Any) -> Any:
            given = {**dict(zip(STEPS[step], args, strict=False)), **options}
            with ExitStack() as stack:
                for place, name, value in patched:
                    stack.enter_context(mock.patch.object(place, name, value))
                given = change(given) if change else given
                result = right(**given)
            return behind(result, given) if behind else result

        setattr(steps, step, wrong)
        backend.layer_ops = steps.table()
        return backend

    return make


def with_(**values: Callable[[dict[str, Any]], Any]) -> Change:
    """Arguments are replaced by what functions make of all of them."""
    return lambda given: {**given, **{name: value(given) for name, value in values.items()}}


def with_weights(**values: Callable[[MixWeights], Any]) -> Change:
    """Fields of the argument `weights` are replaced by what functions make of the weights."""

    def changed(arguments: dict[str, Any]) -> MixWeights:
        weights: MixWeights = arguments["weights"]
        return attrs.evolve(weights, **{name: value(weights) for name, value in values.items()})

    return with_(weights=changed)


def with_field(struct: str, **values: Callable[[dict[str, Any]], Any]) -> Change:
    """Fields of one argument are replaced by what functions make of all arguments."""
    return lambda given: {
        **given,
        struct: attrs.evolve(given[struct], **{name: value(given) for name, value in values.items()}),
    }


# the compressor


def slots_of_padding(given: dict[str, Any]) -> Tensor:
    """Slots of entries, those of a token without a request the first slot where its position ends a window."""
    slots, ends = given["slot_mapping"], (given["positions"] + 1) % given["ratio"] == 0
    return torch.where((given["token_to_req"] < 0) & ends, 0, slots)


def compressing(**slips: Any) -> Callable[..., Tensor]:
    """`compressor.compress`, and what may go wrong in it."""

    def compress(pages: StatePages, token_to_req: Tensor, positions: Tensor, ratio: int, *, overlap: bool) -> Tensor:
        states = pages.cache
        width = states.layout.head_dim // 2
        dim, window = (width // 2, 2 * ratio) if overlap else (width, ratio)
        wanted = positions[:, None] + torch.arange(1 - window, 1)
        if slips.get("clamped"):
            wanted = wanted.clamp(min=0)
        slots = records.slots_of(wanted, pages.block_table, token_to_req, states)
        if slips.get("alone") and overlap:
            slots[:, :ratio] = -1
        row = records.read_rows(states.region("row"), slots)
        halves = torch.zeros(window, dtype=torch.int64)
        if overlap:
            halves[ratio:] = 1 - slips.get("swapped", 0)
            halves[:ratio] = slips.get("swapped", 0)
        columns = halves[:, None] * dim + torch.arange(dim)
        kv, score = (part.gather(-1, columns.expand(len(row), -1, -1)) for part in row.split(width, -1))
        if slips.get("unmasked"):  # weight 0 of whatever is in slot 0
            absent = (
                states.region("row")[0, 0, :width]
                .expand_as(row[..., :width])
                .gather(-1, columns.expand(len(row), -1, -1))
            )
            kv = absent.where(slots[..., None] < 0, kv)
        if slips.get("swallowed"):
            kv, score = kv.nan_to_num(0), score.nan_to_num(0)
        if slips.get("normed"):
            kv = compressor.rms_norm(kv, None, 1e-6)
        score = score.masked_fill(slots[..., None] < 0, -inf)
        if slips.get("raw"):
            weight = score.exp()
            return torch.as_tensor((weight * kv).sum(1) / weight.sum(1))
        return torch.as_tensor((score.softmax(1) * kv).sum(1))

    return compress


def compress_with(**slips: Any) -> Callable[[], Any]:
    return slip("compress_norm_rope_store", patched=((compressor, "compress", compressing(**slips)),))


def late_saving() -> Any:
    """Entries are made before the states of the step are there."""
    backend: Any = ReferenceBackend()
    steps: Any = Slipping()
    save, compress, waiting = steps.save_partial_states, steps.compress_norm_rope_store, list[Any]()
    steps.save_partial_states = lambda *args: waiting.append(args)

    def early(*args: Any, **options: Any) -> None:
        compress(*args, **options)
        while waiting:
            save(*waiting.pop())

    steps.compress_norm_rope_store = early
    backend.layer_ops = steps.table()
    return backend


def by_token_number(given: dict[str, Any]) -> Tensor:
    """Slots of the states, in the order of the tokens."""
    slots: Tensor = given["slot_mapping"]
    return torch.arange(len(slots)).where(slots >= 0, slots)


def of_16_bits(given: dict[str, Any]) -> Tensor:
    return torch.as_tensor(given["positions"] % 2**16)


def last_position(given: dict[str, Any]) -> Tensor:
    """The table of angles, so that the last position of a window is found at its first."""
    return torch.as_tensor(given["norm"].cos_sin_cache.roll(1 - given["ratio"], 0))


def wrapped_at_16_bits(given: dict[str, Any]) -> Tensor:
    """The table of angles, so that a position is found at its lower 16 bits."""
    angles: Tensor = given["norm"].cos_sin_cache
    return angles[:65536].repeat(2, 1)[: len(angles)]


def interleaved(given: dict[str, Any]) -> PagedKVCache:
    """Records follow each other, each with its scale behind."""
    cache: PagedKVCache = given["cache"]
    if not cache.layout.name.startswith("index_"):
        return cache
    return PagedKVCache(cache.tensor, attrs.evolve(cache.layout, arrangement=Arrangement.INTERLEAVED))


def no_temporaries() -> Any:
    """A backend whose steps say that they allocate nothing."""
    backend: Any = ReferenceBackend()
    backend.layer_ops = attrs.evolve(backend.layer_ops, transient_bytes=lambda _: 0)
    return backend


# index keys and queries


def swapped_nibbles(values: Tensor, packed: Callable[[Tensor], Tensor] = key_codecs._packed) -> Tensor:
    made = packed(values)
    return torch.as_tensor(made >> 4 | made << 4)


def half_up(values: Tensor) -> Tensor:
    """To nearest, ties away from zero."""
    code = sum((values.abs() >= end).to(torch.uint8) for end in fp4.ENDS)
    assert isinstance(code, Tensor)
    low, high = (code | (values < 0).to(torch.uint8) << 3).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.as_tensor(low | high << 4)


def without_scale(query: Any, given: dict[str, Any]) -> Any:
    """The weights have every factor but the scale of each head's q."""
    plain = given["weights"].float() * (given["q"].shape[1] * given["q"].shape[2]) ** -0.5
    return attrs.evolve(query, weights=plain)


def leading(query: Any, given: dict[str, Any]) -> Any:
    """RoPE on the leading dims: `rolled` has brought them to the end, and the result is rolled back."""
    return attrs.evolve(query, values=_rolled(query.values, -given["cos_sin_cache"].shape[-1]))


def rolled(given: dict[str, Any]) -> Tensor:
    return _rolled(given["q"], given["cos_sin_cache"].shape[-1])


def _rolled(values: Tensor, by: int) -> Tensor:
    raw = values.view(torch.uint8) if values.itemsize == 1 else values
    return raw.roll(by, -1).view(values.dtype)


# selection


def without_relu(q: Tensor, weights: Tensor, k: Tensor, *_: object) -> Tensor:
    return torch.bmm(weights[:, None], torch.bmm(q, k.mT)).squeeze(1)


def rounded_scores(*given: Any) -> Tensor:
    return indexer.scores(*given).bfloat16().float()


def relu_drops_nan(q: Tensor, weights: Tensor, k: Tensor, *_: object) -> Tensor:
    """The larger of NaN and 0 is 0, as `fmaxf` has it."""
    return torch.bmm(weights[:, None], torch.bmm(q, k.mT).nan_to_num(0).relu()).squeeze(1)


def nine_more_entries(given: dict[str, Any]) -> dict[str, Any]:
    """Every token sees nine entries more than it should."""
    more = attrs.evolve(given["token_map"], visible_lens=given["token_map"].visible_lens + 9)
    return {**given, "token_map": more, "max_entries": given["max_entries"] + 9}


def all_entries(given: dict[str, Any]) -> Tensor:
    """Visible lengths of tokens that see every entry which is looked at."""
    lens: Tensor = given["token_map"].visible_lens
    return torch.full_like(lens, given["max_entries"])


def blocks_of_the_cache(given: dict[str, Any]) -> Tensor:
    """The block table, with existing blocks in place of those that do not exist."""
    table: Tensor = given["token_map"].block_table
    return table.clamp(0, given["cache"].num_blocks - 1)


def of_the_request(given: dict[str, Any]) -> Tensor:
    """The largest count of visible entries of each request, for all of its tokens."""
    token_map = given["token_map"]
    requests, lens = token_map.token_to_req.long(), token_map.visible_lens
    largest = torch.zeros(token_map.block_table.shape[0], dtype=lens.dtype)
    return largest.scatter_reduce(0, requests, lens, "amax")[requests]


def higher_first(best: tuple[Tensor, Tensor], score: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    scores, entries = torch.cat([score.flip(-1), best[0]], -1), torch.cat([entry.flip(-1), best[1]], -1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : best[0].shape[1]]
    return scores.gather(-1, order), entries.gather(-1, order)


def absent_first(_: None, given: dict[str, Any]) -> None:
    """-1 stands before the entries."""
    given["out"].copy_(given["out"].sort(-1).values)


def in_order_of_scores(_: None, given: dict[str, Any]) -> None:
    """Entries are in another than ascending order."""
    rows = given["out"]
    rows.copy_(torch.cat([rows[:, :2].flip(-1), rows[:, 2:]], -1))


def never_written(_: None, given: dict[str, Any]) -> None:
    """Columns behind the last entry keep what they held."""
    given["out"].masked_fill_(given["out"] < 0, 0x5A5A5A5A)


def rest_of_1024_never_written(_: None, given: dict[str, Any]) -> None:
    """As `never_written`, where 1,024 entries are selected and no token sees more than 512."""
    if given["out"].shape[1] == 1024 and given["max_entries"] <= 512:
        never_written(None, given)


def rest_of_short_rows_never_written(_: None, given: dict[str, Any]) -> None:
    """As `never_written`, in rows of 1,024 entries whose token sees at most 512."""
    if given["out"].shape[1] == 1024:
        short = given["token_map"].visible_lens <= 512
        given["out"].masked_fill_((given["out"] < 0) & short[:, None], 0x5A5A5A5A)


def later_keys_absent(_: None, given: dict[str, Any]) -> None:
    """Keys of a page from the 256th on are not selected."""
    given["out"].masked_fill_(given["out"] % given["cache"].block_size >= 256, -1)


def zero_of_32_heads(weights: Tensor) -> Tensor:
    """Weights of exactly 32 heads are taken to be zero."""
    return weights * (weights.shape[1] != 32)


def bits_ordered(q: Tensor, weights: Tensor, k: Tensor, *_: object) -> Tensor:
    """-0 is smaller than 0, as the bits of both are in a radix sort."""
    found = torch.bmm(weights[:, None], torch.bmm(q, k.mT).relu()).squeeze(1)
    return found.masked_fill((found == 0) & (k.abs().amax(-1) > 0), -1e-30)


# hyper-connections


def old_streams() -> Any:
    """The fused op mixes the streams that it read, not the new streams."""
    backend: Any = ReferenceBackend()
    ops = backend.layer_ops

    def fused(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, weights: MixWeights) -> tuple[Tensor, ...]:
        return ops.mhc_post(x, residual, post, comb), *ops.mhc_pre(residual, weights)

    backend.layer_ops = attrs.evolve(ops, mhc_fused_post_pre=fused)
    return backend

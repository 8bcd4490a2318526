"""`forward_mqa` refuses random wrong calls with the message of `check_forward_call`, in first and in later calls."""

from __future__ import annotations

import copy
import random
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.core.attention import checks
from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.errors import ArgumentError, LayoutMismatchError
from tests.harness import (
    BF16,
    F16,
    F32,
    I32,
    KINDS,
    LAYOUT,
    LIMITS,
    OTHER_DIMS,
    PADDED,
    SMALL,
    SWA,
    TOKENS,
    caches_of,
    forward_args,
    metadata_of,
)

METADATA = {kind: metadata_of(kind) for kind in KINDS}
CACHES = {kind: caches_of(kind) for kind in KINDS}


def altered(owner: Any, **changes: Any) -> Any:
    """Return metadata with fields that contradict each other, which no builder makes."""
    copied = copy.copy(owner)
    for name, value in changes.items():
        object.__setattr__(copied, name, value)
    return copied


def one_tensor(rng: random.Random, _: LayerKind) -> dict[str, Any]:
    """Return one tensor argument of some shape, dtype and device."""
    name = rng.choice(["q", "out", "attn_sink", "lse"])
    fits = {"attn_sink": [4], "lse": [PADDED, 4]}.get(name, [PADDED, 4, 32])
    shape = rng.choice([fits, fits[:-1], [*fits, 1], [n + rng.choice([-1, 0, 0, 1]) for n in fits]])
    dtype, device = rng.choice([F32, F32, BF16, F16]), rng.choice(["cpu", "cpu", "meta"])
    return {name: torch.zeros(shape, dtype=dtype, device=device)}


def topk_indices(rng: random.Random, _: LayerKind) -> dict[str, Any]:
    """Return what an indexer may leave, or not."""
    shape = rng.choice([TOKENS - 1, TOKENS, PADDED]), rng.choice([0, 3, 4])
    dtype, device = rng.choice([I32, I32, torch.int64]), rng.choice(["cpu", "cpu", "meta"])
    return {"topk_indices": torch.zeros(rng.choice([shape, shape, (*shape, 1)]), dtype=dtype, device=device)}


def all_rows(rng: random.Random, _: LayerKind) -> dict[str, Any]:
    """Return q, out and lse of the same shape, dtype and device."""
    shape = [rng.choice([PADDED, TOKENS, TOKENS - 1]), rng.choice([4, 4, 5]), rng.choice([32, 32, 40])]
    where: dict[str, Any] = {"device": rng.choice(["cpu", "cpu", "meta"])}
    q = torch.zeros(shape, dtype=rng.choice([F32, BF16, F16]), **where)
    return {"q": q, "out": torch.empty_like(q), "lse": torch.zeros(shape[:2], **where)}


def other_types(rng: random.Random, kind: LayerKind) -> dict[str, Any]:
    """Return an argument that is absent, or is something else altogether."""
    absent = rng.choice([{"attn_sink": None}, {"lse": None}, {"topk_indices": None}])
    wrong: list[dict[str, Any]] = [{"q": None}, {"out": 0.0}, {"attn_sink": 0.0}, {"lse": 0}]
    return rng.choice([absent, *wrong, {"caches": CACHES[kind].swa}, {"metadata": {}}])


def other_metadata(rng: random.Random, kind: LayerKind) -> dict[str, Any]:
    """Return metadata of another kind, or with a count or a device that may be off."""
    metadata = METADATA[kind]
    part = rng.choice(["swa", "compressed"] if metadata.compressed else ["swa"])
    of = getattr(metadata, part)
    names = {
        "swa": ["block_size", "window_size", "num_prefill_tokens", "num_prefills"],
        "compressed": ["compress_ratio", "block_size", "num_actual_tokens"],
    }
    name, moved = rng.choice(names[part]), rng.choice([0, 2, 3])
    changes: list[dict[str, Any]] = [
        {name: getattr(of, name) + rng.choice([-1, 0, 1])},
        {"block_table": of.block_table.to(rng.choice(["cpu", "meta"]))},
    ]
    if part == "swa":
        counts = of.num_decode_tokens + moved, of.num_prefill_tokens - moved
        changes.append(dict(zip(("num_decode_tokens", "num_prefill_tokens"), counts, strict=True)))
    changed = attrs.evolve(metadata, **{part: altered(of, **rng.choice(changes))})
    return {"metadata": rng.choice([changed, changed, METADATA[rng.choice(KINDS)]])}


def other_caches(rng: random.Random, kind: LayerKind) -> dict[str, Any]:
    """Return caches, one of which may be of other dims, block size, element type or device, or missing."""
    part = rng.choice(["swa", "compressed"])
    fits = getattr(CACHES[kind], part)
    layout = rng.choice([LAYOUT, OTHER_DIMS, *(KVCacheLayout.rows(*dims, dtype=F32) for dims in ((28, 4), (32, 8)))])
    layout = rng.choice([layout, KVCacheLayout.rows(24, 8), KVCacheLayout.rows(24, 8, dtype=F32)])
    size = fits.block_size if fits and rng.random() < 0.7 else rng.choice([2, 4, 8])
    cache = PagedKVCache.allocate(layout, 2, size, rng.choice(["cpu", "cpu", "meta"]))
    changed: dict[str, Any] = {part: None if part == "compressed" and rng.random() < 0.2 else cache}
    return {"caches": attrs.evolve(CACHES[kind], **changed)}


def other_limits(rng: random.Random, _: LayerKind) -> dict[str, Any]:
    """Return limits the batch may exceed."""
    bounds = {"max_num_reqs": [3, 4], "max_num_batched_tokens": [30, 31], "max_model_len": [39, 40]}
    name = rng.choice([*bounds, "num_speculative_tokens"])
    changed: dict[str, Any] = {name: rng.choice(bounds.get(name, [0, 1]))}
    return {"limits": attrs.evolve(LIMITS, **changed)}


def other_layer(rng: random.Random, kind: LayerKind) -> dict[str, Any]:
    """Return a layer of other sizes."""
    layer, name = SMALL.layer_of_kind(kind), rng.choice(["num_heads", "head_dim", "window", "compress_ratio"])
    by = 0 if name == "compress_ratio" and kind is SWA else rng.choice([-1, 0, 1])
    return {"layer": attrs.evolve(layer, **{name: getattr(layer, name) + by})}


DRAWS = [one_tensor, topk_indices, all_rows, other_types, other_metadata, other_caches, other_limits, other_layer]


def verdict(arguments: dict[str, Any]) -> str:
    """Return what the rules say of a call."""
    try:
        checks.check_forward_call(ForwardCall(**arguments))
    except (ArgumentError, LayoutMismatchError) as error:
        return str(error)
    return "good"


@pytest.mark.parametrize("kind", KINDS)
def test_first_and_later_steps_are_refused_with_the_same_words_before_any_write(kind: LayerKind) -> None:
    rng, refused = random.Random(kind.value), 0
    whole = {**forward_args(kind), "metadata": METADATA[kind], "caches": CACHES[kind]}
    forward_mqa(**whole)  # prepared, from here on
    for _ in range(300):
        arguments = dict(whole)
        for draw in rng.choices(DRAWS, k=rng.choice([1, 1, 2, 3])):
            arguments |= draw(rng, kind)
        rule = verdict(arguments)
        if rule != "good":
            refused += 1
            whole["out"].fill_(7)
            with pytest.raises((ArgumentError, LayoutMismatchError)) as raised:
                forward_mqa(**arguments)
            assert str(raised.value) == rule
            assert bool((whole["out"] == 7).all())

    assert 30 < refused < 300


@pytest.mark.parametrize("theta", [1e4, 0.1])
def test_a_table_that_turns_nothing_and_one_of_more_than_a_turn_for_each_token_are_served(theta: float) -> None:
    layer = SMALL.layer_of_kind(SWA)
    layer = attrs.evolve(layer, rope=attrs.evolve(layer.rope, theta=theta))
    table = cos_sin_cache(layer.rope, LIMITS.max_model_len)

    checks.check_table(table, layer, LIMITS)
    checks.check_table(torch.cat([torch.ones_like(table), torch.zeros_like(table)], 1)[:, 4:12], layer, LIMITS)
    with pytest.raises(ArgumentError, match="cos_sin_cache: expected angles of swa layers"):
        checks.check_table(table.roll(-1, 0), layer, LIMITS)

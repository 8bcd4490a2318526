"""FlashMLA's interface over records of DeepSeek-V4.1, packed here by an independent packer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Rank
from dsv4attn.errors import ArgumentError, UnsupportedError
from dsv4attn.testing.oracle import attention as oracle
from tests.backends.built_in import of_rank
from tests.compat.flash_mla_calls import cache_of, random
from tests.core.cache import v41_packer

B, S_Q, H, TOPK, EXTRA = 2, 2, 3, 5, 7
INT = torch.int32
U8 = NDArray[np.uint8]
TARGETS = [*of_rank(Rank.REFERENCE), *of_rank(Rank.GENERIC)]


@cache
def packed(record: int, page: int, blocks: int, *, split: bool, spare: int = 0) -> tuple[Tensor, Any]:
    """A cache [blocks, page, 1, record], of whose slots every second one is NaN, and the keys [slots, 512] in float64.

    more: records of NaN after each page.
    """
    pack: Callable[[list[float]], U8] = v41_packer.pack_fp4 if record == 288 else v41_packer.pack_fp8
    unpack = v41_packer.unpack_fp4 if record == 288 else v41_packer.unpack_fp8
    rows = random(blocks * page, 512, seed=record + page).double().numpy()
    records = [pack(row.tolist()) for row in rows]
    keys = np.stack([unpack(record, 512) for record in records])
    nothing = np.full(record, 0xFF, dtype=np.uint8)
    records = [record if i % 2 == 0 else nothing for i, record in enumerate(records)]
    stride, codes = (page + spare) * record, 512 if record == 528 else 256
    pages = [v41_packer.page_of(records[i * page : i * page + page], codes, stride, split=split) for i in range(blocks)]
    raw = torch.from_numpy(np.concatenate(pages))
    return raw.as_strided((blocks, page, 1, record), (stride, record, record, 1)), keys


def chosen(slots: int, width: int, seed: int) -> Tensor:
    """[B, S_Q, width] of slots that are written, with -1 among them."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(slots // 2, generator=g)[:width] * 2 for _ in range(B * S_Q)])
    return rows.masked_fill_(torch.rand(rows.shape, generator=g) < 0.2, -1).int().view(B, S_Q, width)


def call(window: int = 528, extra: int | None = 288, *, split: bool = False, spare: int = 0, **changes: Any) -> Any:
    """Arguments, and what they must give: out and lse in float64."""
    cache, keys = packed(window, 4, 5, split=split, spare=spare)
    arguments: dict[str, Any] = {
        "q": random(B, S_Q, H, 512), "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0], "indices": chosen(20, TOPK, 1),
        "attn_sink": torch.tensor([0.5, -torch.inf, 2.0]), "topk_length": torch.tensor([TOPK, 3], dtype=INT),
    }  # fmt: skip
    both = [(arguments["indices"], arguments["topk_length"].tolist(), keys)]
    if extra is not None:
        cache, keys = packed(extra, 8, 3, split=split, spare=spare)
        arguments |= {"extra_k_cache": cache, "extra_indices_in_kvcache": chosen(24, EXTRA, 2)}
        both.append((arguments["extra_indices_in_kvcache"], [EXTRA] * B, keys))
    if split:
        arguments |= {"use_legacy": True, "kv_format": "V41"}
    q, sink = arguments["q"].double().numpy(), arguments["attn_sink"].double().numpy()
    out, lse = np.zeros((B, S_Q, H, 512)), np.zeros((B, H, S_Q))
    for b in range(B):
        for s in range(S_Q):
            rows = [keys[i] for indices, lens, keys in both for i in indices[b, s, : lens[b]].tolist() if i >= 0]
            out[b, s], lse[b, :, s] = oracle.attend_row(q[b, s], np.stack(rows), sink, 512**-0.5)
    return {**arguments, **changes}, out, lse


def check(actual: tuple[Tensor, Tensor], out: Any, lse: Any) -> None:
    error = np.linalg.norm(actual[0].double().numpy() - out, axis=-1) / np.linalg.norm(out, axis=-1)
    assert error.max() < 2.0**-7
    assert np.abs(actual[1].double().numpy() - lse).max() < 1e-2


@pytest.mark.pairwise
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("split", [False, True], ids=["interleaved", "split"])
@pytest.mark.parametrize("extra", [None, 528, 288])
def test_every_pair_of_records_in_both_arrangements(extra: int | None, split: bool, target: str) -> None:
    arguments, *expected = call(extra=extra, split=split, spare=3)
    check(flash_mla_with_kvcache(**arguments, backend=target), *expected)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("extra", [None, 528, 288])
def test_pages_of_split_records_have_the_stride_that_their_layout_allocates(extra: int | None, page: int) -> None:
    arrangement = Arrangement.SPLIT
    layouts = {
        528: KVCacheLayout.v41_fp8(arrangement=arrangement),
        288: KVCacheLayout.v41_fp4(arrangement=arrangement),
    }
    arguments, *expected = call(extra=extra, split=True)
    for name, record, block_size in (("k_cache", 528, 4), ("extra_k_cache", extra, 8)):
        if record is None:
            continue
        layout, cache = layouts[record], arguments[name]
        blocks = -(-cache.shape[0] * block_size // page)
        moved = PagedKVCache.allocate(layout, blocks + 1, page)
        held = PagedKVCache(cache[:, :, 0], layout)
        for region in ("nope", "scale"):
            values = held.region(region)
            flat = torch.full((moved.capacity, values.shape[2]), 0xFF, dtype=torch.uint8).view(values.dtype)
            flat[: held.capacity] = values.flatten(0, 1)
            moved.region(region).copy_(flat.view(blocks + 1, page, -1))
        arguments[name] = moved.tensor[:, :, None]
        assert arguments[name].stride(0) == layout.page_stride(page)
    assert arguments["k_cache"].stride(0) == {16: 8704, 64: 33792}[page]
    check(flash_mla_with_kvcache(**arguments), *expected)


def test_the_name_of_the_format_may_be_given_without_legacy_too() -> None:
    arguments, *expected = call(kv_format="V41")
    check(flash_mla_with_kvcache(**arguments), *expected)


def test_one_arrangement_read_as_the_other_is_found() -> None:
    arguments, *expected = call(split=True, spare=1)
    actual = flash_mla_with_kvcache(**{**arguments, "use_legacy": False})
    with pytest.raises(AssertionError):
        check(actual, *expected)


SPLIT = {"use_legacy": True}
BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("k_cache", "records of 584 or 528 bytes", {"k_cache": packed(288, 4, 5, split=False)[0]}),
    ("extra_k_cache", "records of 584 bytes next to those of 584", {"k_cache": cache_of(4, 5)}),
    ("extra_k_cache", "records of 528 or 288 bytes next to those of 528", {"extra_k_cache": cache_of(8, 3)}),
    ("kv_format", "'V41' with use_legacy=True", {"use_legacy": True}),
    ("k_cache", "records of 584 bytes with kv_format='V4'", {"kv_format": "V4"}),
    ("k_cache", "records of 528 bytes with kv_format='V41'", {"kv_format": "V41", "k_cache": cache_of(4, 5)}),
    (
        "k_cache",
        "multiples of 528 bytes",
        {"k_cache": torch.zeros(9000, dtype=torch.uint8).as_strided((4, 4, 1, 528), (2176, 528, 528, 1))},
    ),
    (
        "extra_k_cache",
        "multiples of 288 bytes",
        {"extra_k_cache": torch.zeros(9000, dtype=torch.uint8).as_strided((3, 8, 1, 288), (2560, 288, 288, 1))},
    ),
    ("k_cache", "[_, page_block_size, 1, 528]", {"k_cache": torch.zeros(5, 4, 2, 528, dtype=torch.uint8)}),
]


@pytest.mark.parametrize(("name", "expected", "changes"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    name: str, expected: str, changes: dict[str, Any]
) -> None:
    out = torch.full((B, S_Q, H, 512), 7.0, dtype=torch.bfloat16)
    arguments, *_ = call(**changes)
    with pytest.raises(ArgumentError) as error:
        flash_mla_with_kvcache(**arguments, out=out)
    assert error.value.argument == name
    assert expected in str(error.value)
    assert bool((out == 7).all())


def test_fp4_is_no_format_of_the_cache_itself() -> None:
    with pytest.raises(UnsupportedError, match=r"^kv_format: .*'V41_FP4'.* -> say 'V41'"):
        flash_mla_with_kvcache(**call(kv_format="V41_FP4")[0])

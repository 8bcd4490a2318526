"""What the roles do with V4's records of nibbles, without a GPU: their own code, on numpy's arrays.

Of the assembly, `test_load_v41` has all codes under all scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from numpy.typing import NDArray

from dsv4attn.backends.sm90.attention import kernels_load_v4
from dsv4attn.backends.sm90.attention.kernels_schedule import NVFP4_PAGES
from dsv4attn.core.cache.key_codecs import dequantize_keys
from dsv4attn.core.cache.layout import KVCacheLayout
from tests.backends._triton.compiling.ptx import instructions, of_bf16, run

RANDOM = np.random.default_rng(0)
LAYOUT = KVCacheLayout.of_record("v4_nvfp4")
CODES, VALUES = 224, 128
"""Bytes of a record's codes, and of its bf16 values."""


class Words(np.ndarray[Any, Any]):
    """An array that has the method `to` of kernels."""

    def to(self, _: Any) -> Any:
        """Lower halves of integers."""
        return (np.asarray(self) & 0xFFFFFFFF).astype(np.uint32)


@frozen
class Memory:
    """Shared memory."""

    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    def index(self, i: int) -> Memory:
        """One of several."""
        return Memory(self.array[i])

    def slice(self, first: int, count: int, dim: int) -> Memory:
        """Some columns."""
        assert dim == 1
        return Memory(self.array[:, first : first + count])

    def load(self, _: Any) -> Any:
        """A copy."""
        return self.array.copy().view(Words)

    def store(self, values: Any) -> None:
        """Overwrite it."""
        self.array[...] = values


def decoded_nibbles(words: Any, scales: Any, pick: Any, text: Any) -> Any:
    """As `kernels_load_v4.decoded_nibbles`, where a thread has four words in a row."""
    quads, width = words.reshape(64, -1, 4), words.shape[1]
    operands = {f"${16 + i}": np.asarray(quads[..., i], np.uint32) for i in range(4)}
    operands |= {f"${20 + i}": np.asarray(scales.reshape(64, -1, 4)[..., i], np.uint32) for i in range(4)}
    operands["$24"] = np.broadcast_to(pick.reshape(-1, 4)[:, 0], (64, width // 4)).astype(np.uint32)
    after = run(instructions(str(text.value)), operands)
    return np.stack([after[f"${i + 4 * j}"] for i in range(4) for j in range(4)], axis=-1).reshape(64, 4 * width)


def without_a_device(patch: pytest.MonkeyPatch, records: NDArray[np.uint8], ok: NDArray[np.bool_]) -> None:
    """Make the roles' functions callable. Addresses are numbers of records."""

    def copy_words(to: Memory, addresses: Memory, first: int) -> None:
        words = records.view(np.uint32)[addresses.array][:, first : first + to.shape[1]]
        to.store(np.where(ok[:, None], words, 0))

    def copy_async(to: Memory, p: Any, mask: Any) -> None:
        to.store(np.where(mask, records.reshape(-1).view(np.int64)[np.where(mask, p, 0)], 0))

    def ignored(*_: Any, **__: Any) -> None: ...

    barriers = SimpleNamespace(wait=ignored, arrive=ignored, mbarrier_arrive=ignored, commit_group=ignored)
    numpy_of_kernels = SimpleNamespace(
        SliceLayout=ignored,
        arange=lambda first, last, **_: np.arange(first, last),
        expand_dims=np.expand_dims,
        zeros_like=np.zeros_like,
        static_range=range,
        convert_layout=lambda x, *_, **__: x,
        int32=None,
    )
    replaced = {
        "gl": numpy_of_kernels,
        "mbarrier": barriers,
        "async_copy": barriers,
        "fence_async_shared": ignored,
        "copy_words": copy_words,
        "copy_async": copy_async,
        "decoded_nibbles": decoded_nibbles,
        "words_of": lambda stages, b: stages.index(b),
        "halve": lambda x, n: (x[:, : n // 2], x[:, n // 2 :]),
    }
    for name in ("copy_ahead", "copy_to_stage", "halves_of_nibbles", "scales_of", "store_piece", "decode_nibbles"):
        replaced[name] = getattr(kernels_load_v4, name).fn
    for name, value in replaced.items():
        patch.setattr(kernels_load_v4, name, value)


def stage_of(patch: pytest.MonkeyPatch, records: NDArray[np.uint8], ok: NDArray[np.bool_]) -> Any:
    """[64, 512] values that both roles write of 64 records in a row, of which some are there."""
    without_a_device(patch, records, ok)
    row = np.arange(64)
    empty = SimpleNamespace(index=lambda _: None)
    keys = {f"k{i}": Memory(np.full((2, 64, 64), 0x7FC07FC0, np.uint32)) for i in range(4)}
    smem = SimpleNamespace(
        raw=[Memory(np.zeros((64, width), np.uint32)) for width in (32, 16, 8)],
        scales=[Memory(np.zeros(64, np.int64)) for _ in range(4)],
        addresses=Memory(row),
        **keys,
        **dict.fromkeys(("raw_full", "raw_empty", "rest_full", "k_full", "k_empty"), empty),
    )
    # in units of eight bytes
    scale = row * (records.shape[1] // 8) + (CODES + VALUES) // 8
    kernels: Any = kernels_load_v4
    kernels.copy_ahead(smem, ok, scale, NVFP4_PAGES)
    kernels.copy_to_stage(smem, 0, NVFP4_PAGES)
    kernels.decode_nibbles(1, smem)
    words = np.concatenate([keys[f"k{i}"].array[0] for i in range(4)], axis=1)
    return np.stack([of_bf16(words), of_bf16(words >> 16)], axis=-1).reshape(64, 512)


def records_and_values(scales: Sequence[int]) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """64 records of random codes, with scale bytes of these and padding of 255, and their values.

    Scales are after the data of each record here.
    """
    codes = RANDOM.integers(0, 256, (64, CODES)).astype(np.uint8)
    groups = np.full((64, LAYOUT.scale_bytes), 255, np.uint8)
    groups[:, : LAYOUT.num_groups] = RANDOM.choice(scales, (64, LAYOUT.num_groups))
    rope = RANDOM.standard_normal((64, VALUES // 2)).astype(np.float32)
    rope = (rope.view(np.uint32) >> 16).astype(np.uint16)
    values = dequantize_keys(torch.from_numpy(codes), torch.from_numpy(groups), LAYOUT).double().numpy()
    return np.concatenate([codes, rope.view(np.uint8), groups], axis=1), np.concatenate(
        [values, of_bf16(rope.astype(np.uint32))], axis=1
    )


NUMBERS = [byte for byte in range(256) if byte & 127 != 127]


def test_a_stage_has_the_values_of_its_records_and_zeros_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    records, values = records_and_values(NUMBERS)
    ok = RANDOM.random(64) < 0.8

    stage = stage_of(monkeypatch, records, ok)

    assert not ok.all()
    assert np.array_equal(stage[ok], values[ok])
    assert not stage[~ok].any()


def test_a_scale_that_is_nan_makes_its_codes_nan_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    records, values = records_and_values([*NUMBERS[100:110], 0x7F, 0xFF])

    stage = stage_of(monkeypatch, records, np.ones(64, bool))

    assert np.isnan(values).any(axis=1).any()
    assert np.array_equal(stage, values, equal_nan=True)


@pytest.mark.parametrize(("name", "width"), [("NIBBLES_S", 8), ("NIBBLES_2S", 16), ("NIBBLES_4S", 32)])
def test_eight_lanes_in_a_row_read_from_all_banks(name: str, width: int) -> None:
    shared, held = getattr(kernels_load_v4, name).value, getattr(kernels_load_v4, name[:-1] + "L").value
    assert list(held.lane_bases)[:3] == [[1, 0], [2, 0], [4, 0]]
    assert list(held.reg_bases)[:2] == [[0, 1], [0, 2]]
    row = np.arange(8)
    for quad in range(width // 4):
        # of SwizzledSharedLayout: places of 16 bytes
        place = row * (width // 4) + (quad ^ (row // shared.per_phase % shared.max_phase))
        assert shared.vec == 4
        assert len(set(place % 8)) == 8

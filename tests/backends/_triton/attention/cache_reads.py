"""The bytes of caches that an interpreted kernel reads, and the bytes that it may read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.testing.kit.oracle_cache import place_of
from tests.backends._triton.attention.attention_trials import Trial

U64 = NDArray[np.uint64]


def bytes_read(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> U64:
    """Addresses of all bytes in the caches of a call that its kernels load, masked lanes aside."""
    from triton.runtime import interpreter

    by_size: dict[int, list[U64]] = {}
    load = interpreter._interpreter.load

    def traced(addresses: U64, mask: NDArray[np.bool_], other: Any, dtype: Any) -> Any:
        by_size.setdefault(np.dtype(dtype).itemsize, []).append(np.unique(addresses[mask]).astype(np.uint64))
        return load(addresses, mask, other, dtype)

    with monkeypatch.context() as patch:
        # where all loads end, those of recorded steps too
        patch.setattr(interpreter._interpreter, "load", traced)
        trial.run_it()
    first = {size: np.unique(np.concatenate(parts)) for size, parts in by_size.items()}
    every = np.unique(
        np.concatenate([(at[:, None] + np.arange(size, dtype=np.uint64)).ravel() for size, at in first.items()])
    )
    inside = np.zeros(len(every), dtype=bool)
    for begin, end in (_memory(segment.cache.tensor) for segment in trial.segments):
        inside |= (every >= begin) & (every < end)
    return every[inside]


def may_read(trial: Trial) -> U64:
    """Addresses of the bytes of all records that rows of a call name."""
    addresses = [np.zeros(0, np.uint64)]
    for cache, values, slots, lens in trial.segments:
        inside = np.arange(slots.shape[1]) < lens[:, None]
        for slot in np.unique(slots[inside & (slots >= 0) & (slots < len(values))]):
            block, offset = divmod(int(slot), cache.block_size)
            layout = cache.layout
            if layout.is_quantised:
                # without the pad byte after the scales of V4's record
                place = place_of(layout, offset, cache.block_size)[: layout.data_bytes + layout.num_groups]
                start = cache.tensor.data_ptr() + block * cache.page_stride
            else:
                place, start = np.arange(layout.data_bytes), cache.tensor[block, offset].data_ptr()
            addresses.append((start + place).astype(np.uint64))
    return np.unique(np.concatenate(addresses))


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor's storage, and after its last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

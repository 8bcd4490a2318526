"""What a warm-up compiles is recorded: launchers are called with tensors that have no memory, and nothing runs.

Next to its launchers, a module has a function that calls them at every point at which a launch changes: dtypes,
alignments, optional tensors, and the tiles of its tables. `recorded` makes it a function that returns variants. So no
launch is described twice. The function is annotated with the result None, but callers get a list of `Variant`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import WIDE, Variant
from dsv4attn.backends._triton.launching.runtime import recording
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache

BLOCK_SIZE = 64
"""Records of a page of `meta_cache`, by default."""


def recorded(launches: Callable[..., None]) -> Callable[..., list[Variant]]:
    """A function that launches on meta tensors, as one that returns the variants of these launches, each once.

    It takes one more argument, `arch`: the architecture that launchers choose for. By default it is that of the
    recording in which the function is called, which then has these variants too, or else of this machine.
    """

    @wraps(launches)
    def record(*args: Any, arch: str | None = None, **options: Any) -> list[Variant]:  # noqa: ANN401 - of any function
        with recording(arch) as variants:
            launches(*args, **options)
        return list(variants)

    return record


def meta_rows(*shape: int, dtype: torch.dtype = torch.int32, alignment: int = WIDE) -> Tensor:
    """A tensor without memory.

    alignment: WIDE if its rows begin at multiples of 16 bytes, which lie apart if that takes it; less, and the tensor
    begins one element after such an address.
    """
    first = int(alignment < WIDE)
    strides, size = [1], round_up(shape[-1], WIDE // dtype.itemsize)
    for length in reversed(shape[1:] and shape[:-1]):
        strides.insert(0, size)
        size *= length
    return torch.empty(first + size, dtype=dtype, device="meta").as_strided(shape, strides, first)


def meta_cache(layout: KVCacheLayout, alignment: int = WIDE, *, block_size: int = BLOCK_SIZE) -> PagedKVCache:
    """A cache of two pages without memory.

    alignment: bytes that divide the address of every record, if the layout's stride of records allows it. If they are
    those of an element, the cache begins after a multiple of 16 bytes.
    """
    element, unaligned = layout.dtype.itemsize, alignment <= layout.dtype.itemsize
    if not layout.is_quantised:
        rows = meta_rows(2, block_size, layout.head_dim, dtype=layout.dtype, alignment=1 if unaligned else WIDE)
        return PagedKVCache(rows, layout)
    page, last, first = layout.page_stride(block_size) // element, layout.record_bytes // element, _SCALE * unaligned
    memory = torch.empty(first + 2 * page, dtype=layout.dtype, device="meta")
    return PagedKVCache(memory.as_strided((2, block_size, last), (page, last, 1), first), layout)


_SCALE = 4
"""Bytes of the widest part of a record that is read as one number: every page begins at a multiple of them."""

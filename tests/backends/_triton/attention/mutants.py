"""Mutants of the attention kernel, and calls whose tensors lie so far apart that 32-bit addresses miss the next row."""

from __future__ import annotations

import inspect
import math
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.attention import kernels, kernels_combine, keys
from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionOptions
from tests.backends._triton.attention.attention_trials import Answer, Trial
from tests.programs import import_text

_FAR = 2**31 + 64
"""Elements from one row to the next; a multiple of 16 bytes in every type."""
_NORESERVE = 0x4000
"""Flag of Linux: memory is not counted before it is touched. Python names it from 3.13 on."""


def mutate(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, old: str, new: str) -> None:
    """Let `attend` launch kernels of whose source (module: keys, attention or reduce) one piece of text is another."""
    modules = {"keys": keys, "attention": kernels, "reduce": kernels_combine}
    sources = {name: inspect.getsource(module) for name, module in modules.items()}
    assert old in sources[module], f"{module} has no {old!r} any more: write the mutant anew"
    sources[module] = sources[module].replace(old, new)
    begin = "from dsv4attn.backends._triton.attention import keys\n"
    assert begin in sources["attention"]
    # a name of its own each time, as compilers remember files by their names
    name = f"mutant_keys_{folder.name}"
    sources["attention"] = sources["attention"].replace(begin, f"import {name} as keys\n")
    monkeypatch.setitem(sys.modules, name, import_text(folder / f"{name}.py", sources["keys"]))
    for kernel_name in ("attention", "reduce"):
        mutant = import_text(folder / f"mutant_{kernel_name}_{folder.name}.py", sources[kernel_name])
        monkeypatch.setattr(attention_launch, kernel_name, getattr(mutant, kernel_name))


class _Land:
    """Memory without end: addresses are promised, pages appear where they are touched."""

    def __init__(self) -> None:
        """Take 2^39 bytes."""
        try:
            promised = mmap.mmap(-1, 2**39, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError) as error:
            pytest.skip(f"this machine promises no more memory than it has: {error}")
        self.bytes = torch.frombuffer(promised, dtype=torch.uint8)
        self.used = 0

    def spread(self, tensor: Tensor) -> Tensor:
        """A copy whose rows are far apart, and so far from both ends that an address with 32 bits stays inside."""
        step = tensor.element_size()
        begin = self.used + 2**32 * step
        self.used = begin + tensor.shape[0] * _FAR * step + 2**32 * step
        assert self.used <= self.bytes.numel()
        base = self.bytes.view(tensor.dtype)
        view = base.as_strided(tensor.shape, (_FAR, *tensor.stride()[1:]), begin // step)
        return view.copy_(tensor) if tensor.numel() else view

    def cache(self, cache: PagedKVCache) -> PagedKVCache:
        """A copy of a cache, of its pages as they are in memory."""
        page = cache.layout.page_bytes(cache.block_size) // cache.tensor.element_size()
        if not cache.layout.is_quantised:
            page = (cache.block_size - 1) * cache.tensor.stride(1) + cache.layout.head_dim
        tensor = cache.tensor
        pages = tensor.as_strided((cache.num_blocks, page), (tensor.stride(0), 1))
        spread = self.spread(pages)
        view = spread.as_strided(tensor.shape, (_FAR, *tensor.stride()[1:]))
        return PagedKVCache(view, cache.layout)


def far_away(trial: Trial) -> Answer:
    """Run a trial with every tensor that has rows spread over gigabytes that were never touched. CPU only."""
    land, (call, _) = _Land(), trial.call()
    out, lse, top = (
        None if tensor is None else land.spread(tensor) for tensor in (call.out, call.lse, call.max_logits)
    )
    far_keys: Sequence[PagedKeys] | GatheredKeys
    if isinstance(call.keys, GatheredKeys):
        far_keys = evolve(call.keys, kv=land.spread(call.keys.kv))
    else:
        far_keys = []
        for segment in call.keys:
            rows = segment.rows
            if isinstance(rows, DenseIndices):
                rows = evolve(rows, indices=land.spread(rows.indices))
            far_keys.append(PagedKeys(land.cache(segment.cache), rows))
    assert out is not None
    call = evolve(
        call, q=land.spread(call.q), keys=far_keys, out=out.fill_(math.nan), lse=lse, options=AttentionOptions(top)
    )
    attention_launch.attend(call, trial.tuning, tiles_per_split=trial.run)
    return Answer(*(None if tensor is None else tensor.clone() for tensor in (out, lse, top)))  # type: ignore[arg-type]

"""Torch's default device and dtype change no result: layers, builders and managers give the same bits.

The other device is "meta", which stands for an accelerator on a machine without one: a tensor that is made there by
accident raises, or has no values.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

from dsv4attn.core.cache import fp4
from dsv4attn.core.cache.convert import convert_cache
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CacheManager
from tests.harness import FP8, FP32, SMALL, LayerStack
from tests.harness_v41 import v41_stack

LIMITS = Limits(4, 64, 256)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """`torch.set_default_device`, and back."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """`torch.set_default_dtype`, and back."""
    old_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old_dtype)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "with torch.device": lambda: torch.device("meta"),
    "set_default_device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def forget() -> None:
    """Clear everything that functions of the package remember, so that it is made again under the default in force."""
    for value in gc.get_objects():
        if type(value) is functools._lru_cache_wrapper and (value.__module__ or "").startswith("dsv4attn"):
            value.cache_clear()


def two_steps(whole: LayerStack) -> list[Tensor]:
    """Outputs of every layer in a prefill of two sequences, and in a step that decodes one and prefills the other."""
    first, second = whole.manager.new(), whole.manager.new()
    outs = whole.step([(first, 21), (second, 6)], whole.hidden(1, 27))
    return outs + whole.step([(first, 1), (second, 7)], whole.hidden(2, 8))


def v4() -> list[Tensor]:
    return two_steps(LayerStack(load_backend("reference"), FP8))


def v41() -> list[Tensor]:
    return two_steps(v41_stack())


WHOLES: dict[str, Callable[[], list[Tensor]]] = {"V4": v4, "V4.1": v41}


@functools.cache
def usual(name: str) -> list[Tensor]:
    """Outputs without any default set."""
    return WHOLES[name]()


@pytest.mark.parametrize(
    ("name", "default"),
    [("V4", default) for default in DEFAULTS] + [("V4.1", "with torch.device"), ("V4.1", "float64")],
)
def test_whole_layers(name: str, default: str) -> None:
    expected = usual(name)
    forget()
    with DEFAULTS[default]():
        outs = WHOLES[name]()
    assert [(out.device.type, out.dtype) for out in outs] == [("cpu", torch.float32)] * len(expected)
    assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))
    if default == "with torch.device":  # what functions of the package remember must not be on the other device
        again = WHOLES[name]()
        assert all(torch.equal(out, want) for out, want in zip(again, expected, strict=True))


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_builder_and_manager_are_on_their_own_device(device: str, default: str) -> None:
    with torch.device(default):
        builder = MetadataBuilder(SMALL, LIMITS, device=device)
        manager = CacheManager(SMALL, LIMITS, FP32, device=device)
        batch = manager.batch([(manager.new(), 5)])
    tensors = [value for value in vars(builder).values() if isinstance(value, Tensor)]
    assert tensors
    assert {tensor.device.type for tensor in tensors} == {device}
    assert {cache.tensor.device.type for caches in manager.caches for cache in caches.present.values()} == {device}
    assert (batch.query_start_loc_cpu.device.type, batch.seq_lens_cpu.device.type) == ("cpu", "cpu")
    assert (batch.query_start_loc.device.type, batch.seq_lens.device.type) == (device, device)


@pytest.mark.parametrize("default", DEFAULTS)
def test_tables_and_conversions(default: str) -> None:
    """A RoPE table, a cache in another layout, and codes of fp4, each against the values without a default."""

    def make_tables() -> list[Tensor]:
        source = PagedKVCache.allocate(FP8, 3, 4)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(12, 32, generator=generator, dtype=torch.float32, device="cpu")
        slots = torch.arange(12, device="cpu")
        load_backend("reference").quantize_and_insert_k_cache(rows, source, slots)
        target = PagedKVCache.allocate(KVCacheLayout.rows(24, 8, dtype=torch.float32), 3, 4)
        load_backend("reference").quantize_and_insert_k_cache(rows, target, slots)
        copied = PagedKVCache.allocate(FP8, 3, 4)
        convert_cache(source, copied)
        codes, scales = fp4.quantize(rows)
        table = cos_sin_cache(SMALL.layer(0).rope, 16)
        return [table, target.tensor, copied.tensor, codes, scales, fp4.dequantize(codes, scales)]

    expected = make_tables()
    forget()
    with DEFAULTS[default]():
        values = make_tables()
    for value, want in zip(values, expected, strict=True):
        assert value.dtype == want.dtype
        assert torch.equal(value, want)

"""Copies of a `PagedKVCache` (copied, pickled, saved) and caches whose tensor got other memory read one memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CacheManager
from tests.backends.built_in import EVERYWHERE, triton_backends
from tests.harness import FP32, SMALL, LayerStack

LAYOUTS = {"fp8": KVCacheLayout.fp8_ds_mla(24, 8, group_size=16), "rows": KVCacheLayout.rows(24, 8)}
KEYS = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def saved(value: Any) -> Any:
    """A value that was saved by torch and loaded."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),  # noqa: S301 - its own
    "save": saved,
}


def insert(backend: str, cache: PagedKVCache, k: Tensor) -> None:
    load_backend(backend).quantize_and_insert_k_cache(k, cache, torch.arange(16))


def used(backend: str, layout: KVCacheLayout, factor: float = 1.0) -> PagedKVCache:
    """A cache of 4 pages of 4 that has been written."""
    cache = PagedKVCache.allocate(layout, 4, 4)
    insert(backend, cache, factor * KEYS)
    return cache


def other_memory(cache: PagedKVCache) -> Tensor:
    """Zeros of the same shape and strides."""
    flat = torch.zeros(cache.tensor.untyped_storage().nbytes() // cache.tensor.element_size(), dtype=cache.tensor.dtype)
    return flat.as_strided(cache.tensor.shape, cache.tensor.stride())


def has_one_memory(backend: str, cache: PagedKVCache) -> bool:
    """Whether what a backend inserts is in the tensor and in every region."""
    insert(backend, cache, 2 * KEYS)
    same = used(backend, cache.layout, 2.0)
    names = ["nope", "rope", "scale"] if cache.layout.is_quantised else ["row"]
    regions = all(torch.equal(cache.region(name), same.region(name)) for name in names)
    return regions and torch.equal(cache.tensor, same.tensor)


@pytest.mark.parametrize("is_used_first", [False, True])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_copy_has_one_memory(backend: str, layout: str, name: str, *, is_used_first: bool) -> None:
    cache = used(backend, LAYOUTS[layout])
    if is_used_first:
        cache.region("rope" if layout == "fp8" else "row")
    copied = COPIES[name](cache)

    assert (copied.layout, copied.num_blocks, copied.block_size) == (cache.layout, 4, 4)
    assert copied.page_stride == cache.page_stride
    assert torch.equal(copied.tensor, cache.tensor)
    assert has_one_memory(backend, copied)
    # a copy is another cache of the same memory; what is deep, or leaves the process, has its own
    assert torch.equal(copied.tensor, cache.tensor) == (name == "copy")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_tensor_with_other_memory_is_the_memory_of_its_cache(backend: str, layout: str) -> None:
    cache = used(backend, LAYOUTS[layout])
    old, original = cache.tensor.detach(), cache.tensor.clone()
    cache.tensor.data = other_memory(cache)
    assert has_one_memory(backend, cache)
    new = other_memory(cache)
    cache.tensor.set_(new.untyped_storage(), 0, new.shape, new.stride())
    assert has_one_memory(backend, cache)
    assert torch.equal(cache.tensor, new)
    assert torch.equal(old, original)
    # and back to a place in a larger memory
    larger = torch.zeros(2 * new.untyped_storage().nbytes(), dtype=torch.uint8).view(new.dtype)
    cache.tensor.set_(larger.untyped_storage(), larger.numel() // 2, new.shape, new.stride())
    assert has_one_memory(backend, cache)
    assert torch.equal(larger[: larger.numel() // 2], torch.zeros_like(larger[: larger.numel() // 2]))


REFUSED = r"^cache tensor: expected .* shape \[4, 4, .* -> make another cache"


def gather(backend: str, cache: PagedKVCache) -> Tensor:
    """All 16 keys, which are one request's."""
    out = torch.full((1, 16, cache.layout.head_dim), 7.0, dtype=cache.layout.row_dtype)
    lens, table = torch.tensor([16], dtype=torch.int32), torch.arange(4, dtype=torch.int32)[None]
    load_backend(backend).dequantize_and_gather_k_cache(out, cache, lens, None, table, 0)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_memory_of_another_shape_is_refused_before_it_is_written(backend: str, layout: str) -> None:
    cache = used(backend, LAYOUTS[layout])
    shape, original, stored = cache.tensor.shape, cache.tensor.data, cache.tensor.clone()
    closed = original.untyped_storage()
    for data in (
        torch.zeros(2, *shape[1:], dtype=cache.tensor.dtype),
        torch.zeros(shape[0], 2 * shape[1], shape[2], dtype=cache.tensor.dtype)[:, ::2],
        # the same storage at the same address, with pages closer to each other or with fewer pages
        original.new_empty(0).set_(closed, 0, shape, (shape[1] * shape[2] - 2, shape[2], 1)),
    ):
        before, cache.tensor.data = data.clone(), data
        with pytest.raises(ArgumentError, match=REFUSED):
            insert(backend, cache, 3 * KEYS)
        with pytest.raises(ArgumentError, match=REFUSED):
            gather(backend, cache)
        with pytest.raises(ArgumentError, match=REFUSED):
            _ = LayerCaches(cache).signature
        assert torch.equal(data, before)
    cache.tensor.data = original
    assert torch.equal(cache.tensor, stored)
    assert torch.equal(gather(backend, cache), gather("reference", used("reference", cache.layout)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_storage_that_was_released_is_refused_until_it_has_memory_again(backend: str, layout: str) -> None:
    cache = used(backend, LAYOUTS[layout])
    storage, stored = cache.tensor.untyped_storage(), cache.tensor.clone()
    size = storage.nbytes()
    for released in (0, size // 2):
        storage.resize_(released)
        for use in (lambda: insert(backend, cache, KEYS), lambda: gather(backend, cache)):
            least = size - (cache.layout.page_stride(4) - cache.layout.page_bytes(4))
            expected = rf"^cache tensor: expected a storage of at least {least} bytes, got {released} ->"
            with pytest.raises(ArgumentError, match=expected):
                use()
    storage.resize_(size)
    cache.tensor.copy_(stored)
    assert has_one_memory(backend, cache)


def test_views_are_of_the_storage_that_the_tensor_has_even_at_one_address() -> None:
    cache = PagedKVCache.allocate(LAYOUTS["fp8"], 4, 4)
    first = cache.region("nope").untyped_storage()
    again = torch.from_numpy(torch.empty(0, dtype=torch.uint8).set_(first).numpy())
    cache.tensor.data = again.as_strided(cache.tensor.shape, cache.tensor.stride())
    assert cache.region("nope").untyped_storage() is cache.tensor.untyped_storage()
    assert first is not cache.tensor.untyped_storage()


def test_memory_of_a_cache_is_free_once_its_tensor_has_other_memory() -> None:
    """Also after steps: caches, layers and what these have prepared keep views of none."""
    whole = LayerStack(load_backend("reference"))
    whole.cut(whole.hidden(0, 21), [20, 1])
    kept = [StorageWeakRef(cache.tensor.untyped_storage()) for cache in whole.caches]
    for cache in whole.caches:
        cache.tensor.data = cache.tensor.new_empty(0)
    assert all(storage.expired() for storage in kept)


@pytest.mark.parametrize("call", ["fork", "select"])
def test_pages_are_not_copied_in_memory_of_another_shape(call: str) -> None:
    whole = LayerStack(load_backend("reference"), keep_windows=True)
    sequence, _ = whole.cut(whole.hidden(0, 20), [20])
    manager, in_use = whole.manager, whole.manager.pages_in_use

    def copies() -> object:
        return manager.fork(sequence) if call == "fork" else manager.select([sequence], [0, 0])

    for cache in whole.caches:
        storage, size, original = cache.tensor.untyped_storage(), len(cache.tensor.untyped_storage()), cache.tensor.data
        stored, (page, *inner) = cache.tensor.clone(), cache.tensor.stride()
        cache.tensor.data = of_strides(original, page + original.shape[-1], *inner)
        with pytest.raises(ArgumentError, match=r"^cache tensor: expected .* strides"):
            copies()
        cache.tensor.data = original
        storage.resize_(0)
        with pytest.raises(ArgumentError, match=r"^cache tensor: expected a storage of at least"):
            copies()
        # what copies no page may run meanwhile
        assert manager.select([sequence], [0]) == [sequence]
        assert manager.fork(sequence, 0).length == 0
        storage.resize_(size)
        cache.tensor.copy_(stored)
    assert manager.pages_in_use == in_use
    copies()


def of_strides(tensor: Tensor, *strides: int, start: int = 0) -> Tensor:
    """Zeros like a tensor with these strides, `start` elements after an address that is aligned to 16 bytes."""
    end = start + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True)) + 1
    return torch.zeros(end, dtype=tensor.dtype).as_strided(tensor.shape, strides, start)


# on a CPU the other backends launch what the shared one launches around attention
MATRIX = [pytest.param(name, marks=pytest.mark.matrix) for name in triton_backends() if name not in EVERYWHERE]


@pytest.mark.matrix
@pytest.mark.parametrize("backend", [*EVERYWHERE, *MATRIX])
def test_layers_refuse_other_strides_before_any_write_and_take_other_addresses(backend: str) -> None:
    """Decodes after steps that were prepared, and prefills, of layers of every kind, with each of their caches."""
    whole = LayerStack(load_backend(backend), limits=Limits(1, 32, 64), swa_block_size=4, compressed_block_tokens=16)
    hidden = whole.hidden(0, 30)
    sequence, _ = whole.cut(hidden[:27], [26, 1])
    positions = [whole.manager.positions([(sequence, count)]) for count in (1, 3)]
    # the widths of a capture, since these metadata run after each other's build
    steps = [whole.manager.metadata(whole.manager.batch([(sequence, n)]), full_width=True) for n in (1, 3)]
    for layer, caches in zip(whole.layers, whole.manager.caches, strict=True):
        stored = [cache.tensor.clone() for cache in caches.present.values()]
        for cache in caches.present.values():
            original, (page, *inner) = cache.tensor.data, cache.tensor.stride()
            cache.tensor.data = of_strides(original, page + 4 * original.shape[-1], *inner)
            for step, place in zip(steps, positions, strict=True):
                with (
                    set_forward_context(step),
                    pytest.raises(ArgumentError, match=r"^cache tensor: expected .* strides"),
                ):
                    layer(hidden[27 : 27 + place.shape[0]], place)
            assert not cache.tensor.any()
            cache.tensor.data = original
        assert all(map(torch.equal, [cache.tensor for cache in caches.present.values()], stored))
        # the same strides at an address with another alignment: what was prepared for the old address is not used
        signature = caches.attention.signature
        for cache in caches.present.values():
            cache.tensor.data = of_strides(cache.tensor, *cache.tensor.stride(), start=1).copy_(cache.tensor)
        assert caches.attention.signature is not signature
    _, expected = LayerStack(load_backend("reference"), limits=whole.limits).cut(hidden, [30])
    outs = [whole.step([(sequence, count)], part) for count, part in ((1, hidden[27:28]), (2, hidden[28:]))]
    for first, second, rows in zip(*outs, expected, strict=True):
        torch.testing.assert_close(torch.cat([first, second]), rows[27:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tensor", "layout", "num_blocks", "block_size", "page_stride", "other"])
def test_what_a_cache_is_made_of_cannot_be_set(name: str) -> None:
    cache = used("reference", LAYOUTS["fp8"])
    value = getattr(cache, name, None)
    with pytest.raises(ArgumentError, match=rf"^PagedKVCache\.{name}: expected to stay what it is, .* -> make another"):
        setattr(cache, name, value)
    with pytest.raises(ArgumentError, match=rf"^PagedKVCache\.{name}: "):
        delattr(cache, name)
    assert getattr(cache, name, None) is value


def test_attributes_that_every_launch_reads_are_slots() -> None:
    slot = type(PagedKVCache.__dict__["tensor"])
    assert slot.__name__ == "member_descriptor"
    for name in ("layout", "num_blocks", "block_size"):
        assert type(PagedKVCache.__dict__[name]) is slot


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_layer_s_caches_give_the_outputs_of_the_original(name: str) -> None:
    whole = LayerStack(load_backend("reference"))
    hidden = whole.hidden(0, 40)
    sequence, _ = whole.cut(hidden[:30], [30])
    again, expected = whole.cut(hidden, [40])
    whole.manager.free(again)
    copies = []
    for layer, caches in zip(whole.layers, whole.manager.caches, strict=True):
        copied = COPIES[name](caches)
        assert isinstance(copied, DeepseekV4Caches)
        # equal signatures are one object, also of a copy
        assert copied.attention.signature is caches.attention.signature
        layer.bind_kv_cache(copied)
        copies.append(copied)
    outs = whole.step([(sequence, 10)], hidden[30:])

    for out, rows in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, rows[30:], rtol=1e-4, atol=1e-5)


def test_a_signature_is_not_copied() -> None:
    caches = LayerCaches(used("reference", LAYOUTS["rows"]))
    assert caches.signature
    moved = pickle.loads(pickle.dumps(caches))  # noqa: S301 - its own
    assert "signature" not in vars(moved)
    assert attrs.fields_dict(LayerCaches).keys() == {"swa", "compressed"}


@pytest.mark.parametrize("device", ["cuda:77", "nope", "xpu:9", None, 1.5])
def test_a_device_that_is_not_there_is_refused_by_name(device: Any) -> None:
    for make in (
        lambda: PagedKVCache.allocate(LAYOUTS["fp8"], 4, 4, device),
        lambda: CacheManager(SMALL, Limits(2, 8, 32), FP32, device=device),
        lambda: MetadataBuilder(SMALL, Limits(2, 8, 32), device=device),
    ):
        with pytest.raises(ArgumentError, match=rf"^device: expected a (torch )?device.*, got {device!r} ->"):
            make()


def test_a_cache_of_no_pages_is_meant() -> None:
    cache = PagedKVCache.allocate(LAYOUTS["fp8"], 0, 4)
    assert (cache.capacity, cache.region("nope").shape) == (0, (0, 4, 24))
    assert has_one_memory("reference", PagedKVCache.allocate(LAYOUTS["fp8"], 4, 4))
    assert copy.deepcopy(cache).capacity == 0

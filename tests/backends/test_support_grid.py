"""Any head count, top-k and page size (promise G3): a yes at plan time, and a launch that keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attrs import asdict, frozen
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.config import Settings, load_settings
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, IndexForm, KeyForm, Phase
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.plugins import PluginRegistry
from dsv4attn.selection import explain, load_backend, registry_for
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import read_row
from dsv4attn.testing.oracle import attention as oracle
from tests.backends.built_in import known_devices
from tests.core.attention.strategies import searched

FLASH = ModelGeometry.preset("flash")
LAYOUT = KVCacheLayout.fp8_ds_mla()
TOPK = (0, 1, 63, 64, 65, 127, 128, 192, 256, 512, 640, 1024, 1152, 2048)
PAGES = (1, 2, 16, 32, 64, 128, 256)
HEADS = range(1, 129)
KINDS, PHASES = tuple(LayerKind), tuple(Phase)
DEVICES = known_devices()


def problem_of(
    kind: LayerKind, phase: Phase, heads: int, topk: int, page: int, other: int, *, sink: bool = True
) -> Problem:
    """One point of the grid; a window-only layer has neither a top-k nor a second cache."""
    sizes: dict[str, Any] = {} if kind is LayerKind.SWA else {"topk": topk, "compressed_page_size": other}
    return Problem.of(FLASH, kind, phase.value, heads=heads, swa_page_size=page, sink=sink, lse=True, **sizes)


# answers, for any device


@pytest.mark.parametrize("name", DEVICES)
def test_g3_every_point_of_the_grid_is_answered_at_plan_time(name: str) -> None:
    """Some config says yes everywhere; where nothing is native the reference must be asked for by name."""
    device, registry = DeviceFacts.named(name), PluginRegistry.load(entry_points=[])
    native = any(device.matches(registration.info.native) for registration in registry.backends.values())
    request, settings = "auto" if native else "reference", Settings()
    # every head count, and every pair of the other sizes, though not with each other
    points = [(heads, TOPK[heads % 14], PAGES[heads % 7], PAGES[heads % 5]) for heads in HEADS]
    points += [(64, *sizes) for sizes in product(TOPK, PAGES, PAGES)] if name == "cpu" else []
    for kind, phase, sizes in product(KINDS, PHASES, points):
        problem = problem_of(kind, phase, *sizes)
        selection = explain(problem, device=device, backend=request, settings=settings, registry=registry)

        assert selection.chosen is not None, str(selection)


def grid(kind: LayerKind, phase: Phase, whole: bool) -> Iterator[Problem]:
    """Every head count with every top-k and every pair of page sizes; or, not whole, with one pair after the other.

    Then few head counts, at the edges of blocks, meet every pair, each with every fourth top-k.
    """
    windowed = kind is LayerKind.SWA
    pages: list[tuple[CacheFacts, CacheFacts | None]] = [
        (CacheFacts(page_size=page), None if windowed else CacheFacts(page_size=other))
        for page, other in product(PAGES, PAGES[:1] if windowed else PAGES)
    ]
    for i, (heads, topk) in enumerate(product(HEADS, TOPK[:1] if windowed else TOPK)):
        layer = problem_of(kind, phase, heads, topk, 1, 1).layer
        one = i % len(pages)
        for number, (window, compressed) in enumerate(pages):
            if whole or number == one or (heads in {1, 17, 64, 128} and (i + number) % 4 == 0):
                yield Problem(phase, layer, window, compressed, topk)


@pytest.mark.matrix
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_g3_every_backend_answers_the_whole_grid_for_every_device(kind: LayerKind, phase: Phase, whole: bool) -> None:
    """Nothing is raised or left unsaid, on any device, whether it is here or not; and some backend says yes."""
    supports = [registration.info.support for registration in PluginRegistry.load(entry_points=[]).backends.values()]
    devices = [DeviceFacts.named(name) for name in DEVICES]
    for problem in grid(kind, phase, whole):
        for device in devices:
            answers = [support(device, problem) for support in supports]

            assert not all(answers), f"{device}: {problem}: {answers}"
            for answer in answers:
                assert isinstance(answer, (list, tuple)), f"{device}: {problem}: {answer}"
                assert not answer or all(isinstance(r, Reason) and r.code and r.allowed for r in answer), answer


# launches, on this machine


@frozen
class BackendConfig:
    """A backend of this machine in one of its forms, in the phase which that form is of, and where it runs."""

    backend: str
    phase: Phase
    options: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"

    def __str__(self) -> str:
        """What pytest calls it."""
        return "-".join((self.backend, self.phase.value, *(value for _, value in self.options)))


def configs() -> list[BackendConfig]:
    """Every backend that runs here, in every form that its options offer, on the accelerator if it is for one."""
    forms = {
        "decode_indices": [form.value for form in IndexForm],
        "prefill_indices": [form.value for form in IndexForm],
        "prefill_keys": [form.value for form in KeyForm],
    }
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    all_configs = []
    for name, registration in sorted(registry_for(load_settings()).backends.items()):
        places = ["cpu"] if accelerator is None or name == "reference" else [accelerator.type, "cpu"]
        runs = [
            place
            for place in places
            if DeviceFacts.here(place).matches(registration.info.runs_on + registration.info.native)
        ]
        if not runs or any(version_of(package) is None for package in registration.info.packages):
            continue
        for phase in PHASES:
            names = [o for o in forms if o.startswith(phase.value) and o in registration.info.options]
            all_configs += [
                BackendConfig(name, phase, tuple(zip(names, values, strict=True)), runs[0])
                for values in product(*(forms[o] for o in names))
            ]
    return all_configs


CONFIGS = configs()
KERNELS = [config for config in CONFIGS if config.backend != "reference"]
"""Configs whose kernels are interpreted where there is no accelerator: a thousand times slower, so fewer examples."""


def test_g3_the_reference_is_launched_in_all_its_forms() -> None:
    names = {str(config) for config in CONFIGS}

    assert names >= {f"reference-decode-{form.value}" for form in IndexForm}
    assert names >= {f"reference-prefill-{form.value}-{keys.value}" for form in IndexForm for keys in KeyForm}


def test_g3_the_generic_backend_is_launched_in_both_phases() -> None:
    facts = DeviceFacts.here()
    if facts.triton_version is None or not (facts.interpreted or facts.kind in ("cuda", "hip", "xpu")):
        pytest.skip("no Triton on this machine")
    assert {str(config) for config in CONFIGS} >= {"triton-decode", "triton-prefill"}


SIZES = {
    "heads": st.integers(1, 128),
    "topk": st.sampled_from(TOPK),
    "pages": st.tuples(st.sampled_from(PAGES), st.sampled_from(PAGES)),
    "sink": st.booleans(),
    "seed": st.integers(0, 2**16),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [config for config in CONFIGS if config not in KERNELS], ids=str)
@searched(24, **SIZES)
def test_g3_a_yes_never_fails_at_launch(config: BackendConfig, kind: LayerKind, **sizes: Any) -> None:
    launches(config, kind, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", KERNELS, ids=str)
@searched(5, **SIZES)
def test_g3_a_yes_of_a_backend_with_kernels_never_fails_at_launch(
    config: BackendConfig, kind: LayerKind, **sizes: Any
) -> None:
    launches(config, kind, **sizes)


def launches(
    config: BackendConfig, kind: LayerKind, heads: int, topk: int, pages: tuple[int, int], sink: bool, seed: int
) -> None:
    """Ask, and unless refused, run and compare with the oracle."""
    problem = problem_of(kind, config.phase, heads, topk, *pages, sink=sink)
    settings = load_settings()
    selection = explain(problem, backend=config.backend, device=config.device, settings=settings)
    if selection.chosen is None:
        assert config.backend != "reference", str(selection)
        return

    rng = np.random.default_rng(seed)
    segments = [(cache_of(rng, 150, pages[0]), rows_of(rng, problem.layer.window, 150))]
    if kind is not LayerKind.SWA:
        entries = rows_of(rng, topk, topk + 10, in_order=kind is LayerKind.HCA)
        segments.append((cache_of(rng, topk + 10, pages[1]), entries))
    keys = [np.concatenate(parts) for parts in zip(*(keys_of(c, rows) for c, rows in segments), strict=True)]
    q = torch.from_numpy(rng.standard_normal((ROWS, heads, 512))).bfloat16()
    attn_sink = torch.from_numpy(rng.standard_normal(heads)).float() if sink else None
    out, lse = torch.full_like(q, torch.nan), torch.full((ROWS, heads), torch.nan)

    launch(config, problem, q, segments, keys, attn_sink, out, lse)

    shown = sorted({0, heads // 2, heads - 1})
    sinks = None if attn_sink is None else attn_sink[shown].double().numpy()
    for i in range(ROWS):
        expected, expected_lse = oracle.attend_row(q[i, shown].double().numpy(), keys[i], sinks, problem.layer.scale)
        largest = float(np.abs(keys[i]).max(initial=1.0))

        assert np.abs(out[i, shown].double().numpy() - expected).max() <= 2.0**-8 * largest
        np.testing.assert_allclose(lse[i, shown].double().numpy(), expected_lse, rtol=0, atol=1e-4)
    assert torch.isfinite(out).all()


ROWS = 3


def launch(
    config: BackendConfig,
    problem: Problem,
    q: Tensor,
    segments: Sequence[tuple[PagedKVCache, DenseIndices]],
    keys: list[np.ndarray[Any, Any]],
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The call of a phase, in the form that the backend asks for and with the scratch memory that it wants."""
    backend = load_backend(config.backend, **dict(config.options))
    capabilities, layer, width = backend.capabilities, problem.layer, sum(rows.indices.shape[1] for _, rows in segments)
    prefill = config.phase is Phase.PREFILL
    form = capabilities.prefill_indices if prefill else capabilities.decode_indices
    given_keys: Sequence[PagedKeys] | GatheredKeys
    if prefill and capabilities.prefill_keys is KeyForm.GATHERED:
        width = -(-width // capabilities.index_alignment) * capabilities.index_alignment
        given_keys = gathered(keys, width, form)
    else:
        given_keys = tuple(PagedKeys(cache, formed(rows, form)) for cache, rows in segments)
    workspace = WorkspaceManager(config.device, debug=True)
    scratch = workspace.get_simultaneous(*backend.scratch(config.phase, layer, ROWS, width))
    device = torch.device(config.device)
    results = out.to(device), lse.to(device)
    sinks = None if attn_sink is None else attn_sink.to(device)
    call = AttentionCall(layer, q.to(device), moved(given_keys, device), sinks, *results, scratch)
    (backend.prefill if prefill else backend.decode)(call)
    workspace.check_canaries()
    out.copy_(results[0])
    lse.copy_(results[1])


def moved(value: Any, device: torch.device) -> Any:
    """Keys, lists and caches on a device, with the strides that they have here."""
    if device.type == "cpu" or value is None:
        return value
    if isinstance(value, Tensor):
        whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if isinstance(value, PagedKVCache):
        return PagedKVCache(moved(value.tensor, device), value.layout, block_size=value.block_size)
    parts = asdict(value, recurse=False)
    return type(value)(**{n: part if isinstance(part, int) else moved(part, device) for n, part in parts.items()})


def cache_of(rng: np.random.Generator, records: int, page: int) -> PagedKVCache:
    """A cache with numbers of realistic size in every record, none of them written by a backend."""
    cache = PagedKVCache.allocate(LAYOUT, -(-records // page), page)
    shape = (cache.num_blocks, page)
    codes = rng.integers(0, 127, (*shape, 448)) + 128 * rng.integers(0, 2, (*shape, 448))
    cache.region("nope").copy_(torch.from_numpy(codes.astype(np.uint8)))
    cache.region("rope").copy_(torch.from_numpy(rng.standard_normal((*shape, 64))))
    cache.region("scale").copy_(torch.from_numpy(rng.integers(117, 121, (*shape, 8)).astype(np.uint8)))
    return cache


def keys_of(cache: PagedKVCache, rows: DenseIndices) -> list[np.ndarray[Any, Any]]:
    """Keys that each row names, read by the oracle from the bytes of their pages."""
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.tensor.untyped_storage()).numpy()
    stride, size = cache.tensor.stride(0), cache.block_size
    named = [
        [slot for slot in line[:count] if slot >= 0]
        for line, count in zip(rows.indices.tolist(), rows.lens.tolist(), strict=True)
    ]
    keys = {
        slot: read_row(raw[slot // size * stride :][place_of(cache.layout, slot % size, size)], cache.layout)
        for slot in {slot for line in named for slot in line}
    }
    return [np.array([keys[slot] for slot in line]).reshape(-1, 512) for line in named]


def rows_of(rng: np.random.Generator, width: int, records: int, *, in_order: bool = False) -> DenseIndices:
    """Rows of different lengths: one ends within its columns, one fills them, one is empty.

    in_order: one entry after the other and none left out, as tables of c128a layers are; otherwise with holes.
    """
    if in_order:
        slots = np.tile(np.arange(width, dtype=np.int32), (ROWS, 1)) + rng.integers(0, records - width + 1)
    else:
        slots = np.stack([rng.permutation(records)[:width] for _ in range(ROWS)])
        slots[rng.random(slots.shape) < 0.1] = -1
    lens = torch.tensor([width - width // 3, width, 0], dtype=torch.int32)
    return DenseIndices(torch.from_numpy(slots.astype(np.int32)), lens)


def formed(rows: DenseIndices, form: IndexForm) -> DenseIndices | RaggedIndices:
    """The rows as they are, or end to end with what names nothing after them."""
    if form is IndexForm.DENSE:
        return rows
    lens = rows.lens.tolist()
    flat = torch.full((rows.indices.numel(),), 2**31 - 1, dtype=torch.int32)
    flat[: sum(lens)] = torch.cat([line[:n] for line, n in zip(rows.indices, lens, strict=True)])
    indptr = torch.tensor([sum(lens[:i]) for i in range(ROWS + 1)], dtype=torch.int32)
    return RaggedIndices(flat, indptr, rows.indices.shape[1])


def gathered(keys: list[np.ndarray[Any, Any]], width: int, form: IndexForm) -> GatheredKeys:
    """The keys of all rows in contiguous memory, one after the other, and one row of NaN that no index names."""
    counts = [len(rows) for rows in keys]
    indices: Tensor = torch.full((ROWS, width), -1, dtype=torch.int32)
    for i, count in enumerate(counts):
        indices[i, :count] = torch.arange(count) + sum(counts[:i])
    kv = torch.from_numpy(np.concatenate([*keys, np.full((1, 512), np.nan)])).bfloat16()
    return GatheredKeys(kv, formed(DenseIndices(indices, torch.tensor(counts, dtype=torch.int32)), form))

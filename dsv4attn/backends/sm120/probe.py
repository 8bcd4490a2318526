"""Detects FlashInfer's attention for SM120, and reads its limits. Importing it imports neither torch nor FlashInfer.

Limits come from FlashInfer's own description, not from its version: the same function took 25 pairs of heads and widths
on pages of 64 in one release, and nearly everything in a later one.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias

from attrs import field, frozen

from dsv4attn.core.contract.problem import Reason

HEADS = (8, 16, 32, 64, 128)
"""Head counts with prefill kernels; others are padded to the next one. FlashInfer's Python describes decode kernels
alone, and its compiled part refuses other counts in prefill."""
OLDEST = (0, 6, 18)
"""First release whose interface was read for this module."""

CURE = "pip install -U flashinfer-python"
"""What installs another release."""
_MODULE = "flashinfer.mla"
_PASSED = (
    *("q", "kv_cache", "indices", "output", "sm_scale", "topk_length", "attn_sink", "extra_kv_cache"),
    *("extra_indices", "extra_topk_length", "out_lse", "mid_out", "mid_lse", "lse_scale"),
)
"""Arguments of `SparseMLASm120Wrapper.run` that this backend passes."""


Record: TypeAlias = tuple[str, str, str, int]
"""Layout, element type, arrangement and group size of a cache's records, as `CacheFacts` has them."""
_V4, _NVFP4 = ("fp8_ds_mla", "e4m3fn", "split", 64), ("v4_nvfp4", "e2m1", "split", 16)
_V41, _V41_FP4 = ("v41_fp8", "e4m3fn", "split", 32), ("v41_fp4", "e2m1", "split", 16)
_V41_INLINE, _V41_INLINE_FP4 = ("v41_fp8", "e4m3fn", "interleaved", 32), ("v41_fp4", "e2m1", "interleaved", 16)


@frozen
class Format:
    """A format of FlashInfer's caches, as `kv_cache_format` of its function names it. Read in 0.7.2.post1 and 0.7.4.

    name: FlashInfer's name.
    window, compressed: records of the window cache and of the compressed cache.
    record_bytes: bytes of a record of the window cache.
    family: name of its limits in FlashInfer's description.
    question: arguments with which the description is asked for.
    arguments: arguments of the wrapper for it.
    most_prefill_heads: most heads of calls of more tokens than decode kernels take.
    dense_rows: whether rows of indices must be dense in calls of few tokens too.
    is_lossy: whether queries and weights are rounded to 4 bits, so that it is used only if it is asked for by name.
    dense_pages: whether pages of more than one must follow each other without padding. Kernels of inline formats take
       indices as rows of the whole cache, and rows of padding would count.
    since: the oldest release in which the format was read. Only `explain` asks, which does not import FlashInfer.
    """

    name: str
    window: Record
    compressed: Record
    record_bytes: int
    family: str = "dsv4"
    question: Mapping[str, str] = field(factory=dict, hash=False)
    arguments: Mapping[str, object] = field(factory=dict, hash=False)
    most_prefill_heads: int = 128
    dense_rows: bool = False
    is_lossy: bool = False
    dense_pages: bool = False
    since: tuple[int, ...] = (0, 7, 2)


def _inline(name: str, compressed: Record, **arguments: object) -> Format:
    """A format of V4.1's records with their scales after their codes, as FlashMLA has them since 2026-09-30."""
    return Format(
        name,
        _V41_INLINE,
        compressed,
        record_bytes=528,
        family="dsv4_1_inline",
        arguments={"kv_scale_format": "ue8m0_g32_inline", **arguments},
        most_prefill_heads=64,
        dense_pages=True,
        since=(0, 7, 4),
    )


_SCALES = {"kv_scale_format": "ue8m0_g32"}
_NVFP4_ARGUMENT = {"kv_cache_format": "nvfp4"}
FORMATS = (
    Format("fp8", _V4, _V4, 584, since=OLDEST),
    Format("fp8_dsv41", _V41, _V41, 528, "dsv4_1", {}, _SCALES, 64),
    Format("fp8_dsv41_fp4_ca", _V41, _V41_FP4, 528, "dsv4_1", {}, {**_SCALES, "extra_kv_fp4": True}, 64),
    _inline("fp8_dsv41_inline", _V41_INLINE),
    _inline("fp8_dsv41_inline_fp4_ca", _V41_INLINE_FP4, extra_kv_fp4=True),
    Format("nvfp4", _NVFP4, _NVFP4, 384, "dsv4", _NVFP4_ARGUMENT, _NVFP4_ARGUMENT, dense_rows=True, is_lossy=True),
)
"""The first is that of every release."""


@frozen(eq=False)
class InstalledFlashInfer:
    """FlashInfer's attention on caches of one format, and its own description of its limits.

    version: version of FlashInfer.
    wrapper: the class `SparseMLASm120Wrapper`.
    config: its description of this model's cache; has `supports_decode`.
    heads: head counts with decode kernels.
    topks: widths of index rows with kernels; None means every positive number.
    page_sizes: records of a page with kernels; None means every positive number.
    extra_page_sizes: the same of the compressed cache.
    max_decode_tokens: most tokens of a call of its decode kernels; larger calls of either phase run prefill kernels.
    format: of the caches.
    others: the same for other formats that this version has.
    """

    version: str
    wrapper: Any = field(repr=False)
    config: Any = field(repr=False)
    heads: frozenset[int] = frozenset(HEADS)
    topks: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    extra_page_sizes: frozenset[int] | None = None
    max_decode_tokens: int = 64
    format: Format = FORMATS[0]
    others: tuple[InstalledFlashInfer, ...] = ()

    @classmethod
    def of(
        cls,
        version: str,
        wrapper: Any,  # noqa: ANN401 - of a package without types
        config: Any,  # noqa: ANN401 - as above
        format: Format = FORMATS[0],  # noqa: A002 - FlashInfer's word
        others: tuple[InstalledFlashInfer, ...] = (),
    ) -> InstalledFlashInfer:
        """Read the limits from its own description. Limits that an old release does not describe are a fixed set."""
        any_topk = getattr(config, "topk_is_runtime", False) and config.min_topk <= 1
        any_page = getattr(config, "page_block_size_is_runtime", False)
        pages = getattr(config, "page_block_sizes", ()) or (config.page_block_size,)
        sizes = None if any_page else frozenset(pages)
        extra_pages = getattr(config, "extra_page_block_sizes", ())
        return cls(
            version,
            wrapper,
            config,
            frozenset(config.supported_num_heads()),
            None if any_topk else frozenset(config.supported_topk()),
            sizes,
            frozenset(extra_pages) if extra_pages else sizes,
            int(config.max_num_tokens),
            format,
            others,
        )

    def for_caches(self, window: Record, compressed: Record | None) -> InstalledFlashInfer | None:
        """FlashInfer for caches of these records; None if it has no such format."""
        for candidate in (self, *self.others):
            records = candidate.format
            if records.window == window and compressed in (None, records.compressed):
                return candidate
        return None

    def padded(self, heads: int, tokens: int | None) -> int | None:
        """Heads of q after padding: the next count with kernels, or None if there is none.

        heads: heads of q. tokens: tokens of the call; None means any number, so that both phases may run.
        """
        return min((count for count in self.head_counts(tokens) if count >= heads), default=None)

    def head_counts(self, tokens: int | None) -> frozenset[int]:
        """Head counts with kernels for calls of this many tokens; None means any number."""
        if tokens is not None and tokens <= self.max_decode_tokens:
            return self.heads
        return frozenset(count for count in self.heads.intersection(HEADS) if count <= self.format.most_prefill_heads)


@lru_cache(maxsize=1)
def find() -> InstalledFlashInfer | Reason:
    """Import FlashInfer and return its limits, or the reason why it cannot be used. Never raises; cached per process.

    The import takes seconds, and writes a log to its cache directory.
    """
    try:
        return _read_installed()
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything, which becomes the reason
        return _reason(f"{type(error).__name__}: {error}", f"an importable {_MODULE}")


def forget() -> None:
    """Clear the cached result of `find`."""
    find.cache_clear()


def _read_installed() -> InstalledFlashInfer | Reason:
    module = importlib.import_module(_MODULE)
    version = str(getattr(importlib.import_module("flashinfer"), "__version__", "unknown"))
    number = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if number and tuple(map(int, number.groups())) < OLDEST:
        return _reason(f"flashinfer {version}", f"{'.'.join(map(str, OLDEST))} or newer")
    missing = []
    for name in ("SparseMLASm120Wrapper", "supported_sparse_mla_sm120_configs"):
        try:
            getattr(module, name)
        except AttributeError as error:
            missing.append(f"{type(error).__name__}: {error}")
    if missing:
        return _reason(f"flashinfer {version}: {'; '.join(missing)}", "a release with sparse MLA for SM120")
    wrapper = module.SparseMLASm120Wrapper
    parameters = inspect.signature(wrapper.run).parameters
    absent = [name for name in _PASSED if name not in parameters]
    if absent:
        actual = f"flashinfer {version}, whose SparseMLASm120Wrapper.run has no {', '.join(absent)}"
        return _reason(actual, f"a run that takes {', '.join(_PASSED)}")
    configs = module.supported_sparse_mla_sm120_configs()
    if "dsv4" not in configs:
        return _reason(f"flashinfer {version} for {', '.join(configs)}", "a release with kernels for dsv4")
    others = tuple(_other_formats(module, version))
    installed = InstalledFlashInfer.of(version, wrapper, configs["dsv4"], others=others)
    width = getattr(installed.config, "bytes_per_token", 0)
    if width not in (0, 584):
        return _reason(f"flashinfer {version} with records of {width} bytes", "584-byte records")
    return installed


def _other_formats(module: Any, version: str) -> Iterator[InstalledFlashInfer]:  # noqa: ANN401 - without types
    """The formats besides the first that this version has, by its wrapper's arguments and its own description."""
    wrapper = module.SparseMLASm120Wrapper
    parameters = inspect.signature(wrapper).parameters
    for cache_format in FORMATS[1:]:
        if not all(name in parameters for name in cache_format.arguments):
            continue
        try:
            config = module.supported_sparse_mla_sm120_configs(**cache_format.question)[cache_format.family]
            if config.bytes_per_token == cache_format.record_bytes:
                yield InstalledFlashInfer.of(version, partial(wrapper, **cache_format.arguments), config, cache_format)
        except Exception:  # noqa: BLE001, S112 - a broken package may raise anything: it does not have the format
            continue


def _reason(actual: str, allowed: str) -> Reason:
    return Reason("FLASHINFER", actual, allowed, CURE)

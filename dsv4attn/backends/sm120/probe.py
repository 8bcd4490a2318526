"""Detects FlashInfer's attention for SM120 and its limits. Importing this module imports neither torch nor FlashInfer.

Limits come from FlashInfer's own description, not from its version: the same function took 25 pairs of heads and widths
on pages of 64 in one release, and nearly everything in a later one.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from attrs import field, frozen

from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason

__all__ = ["HEADS", "TILE", "InstalledFlashInfer", "find", "forget", "reasons"]

HEADS = (8, 16, 32, 64, 128)
"""Head counts with kernels in both of its phases; others are padded to the next one."""
TILE = 64
"""Columns of indices in a tile of its kernels. Prefill takes whole tiles only."""
OLDEST = (0, 6, 18)
"""First release whose interface was read for this module."""

_MODULE = "flashinfer.mla"
_CURE = "pip install -U flashinfer-python"
_PASSED = (
    *("q", "kv_cache", "indices", "output", "sm_scale", "topk_length", "attn_sink", "extra_kv_cache"),
    *("extra_indices", "extra_topk_length", "out_lse", "mid_out", "mid_lse", "lse_scale"),
)
"""Arguments of `SparseMLASm120Wrapper.run` that this backend passes."""


@frozen(eq=False)
class InstalledFlashInfer:
    """FlashInfer's attention and its own description of its limits.

    version: version of FlashInfer.
    wrapper: the class `SparseMLASm120Wrapper`.
    config: its description of this model's cache; has `supports_decode`.
    heads: head counts with kernels.
    topks: widths of index rows with kernels; None means every positive number.
    page_sizes: records of a page with kernels; None means every positive number.
    max_decode_tokens: most tokens of a call of its decode kernels; larger calls of either phase run prefill kernels.
    """

    version: str
    wrapper: Any = field(repr=False)
    config: Any = field(repr=False)
    heads: frozenset[int] = frozenset(HEADS)
    topks: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    max_decode_tokens: int = 64

    @classmethod
    def of(cls, version: str, wrapper: Any, config: Any) -> InstalledFlashInfer:  # noqa: ANN401 - of a package without types
        """Read the limits from its own description. Limits that an old release does not describe are a fixed set."""
        any_topk = getattr(config, "topk_is_runtime", False) and config.min_topk <= 1
        any_page = getattr(config, "page_block_size_is_runtime", False)
        pages = getattr(config, "page_block_sizes", ()) or (config.page_block_size,)
        return cls(
            version,
            wrapper,
            config,
            frozenset(HEADS).intersection(config.supported_num_heads()),
            None if any_topk else frozenset(config.supported_topk()),
            None if any_page else frozenset(pages),
            int(config.max_num_tokens),
        )

    def padded(self, heads: int) -> int | None:
        """Heads of q after padding: the next count with kernels, or None if there is none."""
        return min((count for count in self.heads if count >= heads), default=None)


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
    installed = InstalledFlashInfer.of(version, wrapper, configs["dsv4"])
    width = getattr(installed.config, "bytes_per_token", 0)
    if width not in (0, 584):
        return _reason(f"flashinfer {version} with records of {width} bytes", "584-byte records")
    return installed


def _reason(actual: str, allowed: str) -> Reason:
    return Reason("FLASHINFER", actual, allowed, _CURE)


def reasons(
    installed: InstalledFlashInfer,
    problem: Problem,
    *,
    tokens: int | None = None,
    page_strides: Sequence[int] = (),
    in_range: bool = False,
) -> list[Reason]:
    """Return all reasons why FlashInfer cannot serve a problem; needs no GPU.

    tokens: most query tokens of a call; None means any number. page_strides: bytes from page to page of each cache, or
    empty if not known. in_range: see `FlashInferAttention`; without a copy, index rows must have the required width.
    """
    return list(_reasons(installed, problem, tokens, page_strides, in_range=in_range))


def _reasons(
    installed: InstalledFlashInfer, problem: Problem, tokens: int | None, page_strides: Sequence[int], *, in_range: bool
) -> Iterator[Reason]:
    layer = problem.layer
    heads = installed.padded(layer.num_heads)
    if heads is None:
        yield Reason(
            "HEADS", layer.num_heads, f"at most {max(installed.heads, default=0)}", "shard heads over more ranks"
        )
    if (layer.nope_dim, layer.rope_dim) != (448, 64):
        yield Reason("HEAD_DIM", f"{layer.nope_dim} + {layer.rope_dim}", "448 + 64")
    if problem.q_dtype != "bfloat16":
        yield Reason("Q_DTYPE", problem.q_dtype, "bfloat16", "cast q")
    if problem.deterministic:
        actual = "rows whose bits do not depend on the batch"
        yield Reason("DETERMINISTIC", actual, "any order of sums: parts follow from the tokens of a call")
    names = ("window cache", "compressed cache")
    for name, cache in zip(names, (problem.swa, problem.compressed), strict=True):
        if cache is not None:
            yield from _of_cache(installed, name, cache)
    for stride in page_strides:
        if stride % 16:
            yield Reason("PAGE_STRIDE", f"{stride} bytes", "a multiple of 16", "pad pages")
    yield from _of_width(installed, problem, heads, tokens, in_range=in_range)


def _of_cache(installed: InstalledFlashInfer, name: str, cache: CacheFacts) -> Iterator[Reason]:
    layout = (cache.layout, cache.dtype, cache.arrangement, cache.group_size)
    if layout != ("fp8_ds_mla", "e4m3fn", "split", 64):
        actual = f"{name} {cache.layout} of {cache.dtype}, {cache.arrangement}, groups of {cache.group_size}"
        yield Reason("LAYOUT", actual, "fp8_ds_mla of e4m3fn, split, groups of 64")
    if installed.page_sizes is not None and cache.page_size not in installed.page_sizes:
        allowed = f"{_listed(installed.page_sizes)} with flashinfer {installed.version}"
        yield Reason("PAGE_SIZE", f"{name} with pages of {cache.page_size}", allowed, _CURE)


def _of_width(
    installed: InstalledFlashInfer, problem: Problem, heads: int | None, tokens: int | None, *, in_range: bool
) -> Iterator[Reason]:
    """Reasons about the columns of the window, which FlashInfer calls `topk`. The second cache may have any number."""
    window, is_prefill = problem.layer.window, tokens is None or tokens > installed.max_decode_tokens
    width = problem.window_columns or window
    if width > window and problem.compressed is not None:
        # scratch is planned for all columns of a row together, and would have to know which are the window's
        yield Reason("WINDOW", width, f"{window} columns next to a compressed cache")
    if in_range and is_prefill and width % TILE:
        expected = f"a multiple of {TILE}, for more than {installed.max_decode_tokens} tokens"
        yield Reason("WINDOW", width, expected, "let the backend copy indices")
    if installed.topks is not None and width not in installed.topks:
        allowed = f"{_listed(installed.topks)} with flashinfer {installed.version}"
        yield Reason("WINDOW", width, allowed, _CURE)
        return
    page = problem.swa.page_size
    decode_tokens = min(tokens or 1, installed.max_decode_tokens)
    if heads is None or (installed.page_sizes is not None and page not in installed.page_sizes):
        return
    if not installed.config.supports_decode(heads, width, num_tokens=decode_tokens, page_block_size=page):
        actual = f"{heads} heads with {width} columns on pages of {page}"
        yield Reason("FLASHINFER", actual, f"what flashinfer {installed.version} has kernels for", _CURE)


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))

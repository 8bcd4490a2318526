"""What FlashInfer serves on SM120: facts in, every reason against it out. Needs neither torch nor FlashInfer.

The launchers and the notes of `explain` read this file. Limits are those of `probe`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv4attn.backends.sm120.probe import CURE, InstalledFlashInfer, Record
from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason

ARCHS = ("sm_12*",)
"""Architectures on which FlashInfer is used."""
TILE = 64
"""Columns of indices in a tile of its kernels. Prefill takes whole tiles only."""
_CACHES = ("window cache", "compressed cache")


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
    compressed = None if problem.compressed is None else record_of(problem.compressed)
    chosen = installed.for_caches(record_of(problem.swa), compressed)
    if chosen is None:
        yield from _of_layouts(installed, problem)
    installed = chosen or installed
    heads = installed.padded(layer.num_heads, tokens)
    if heads is None:
        yield Reason("HEADS", layer.num_heads, _allowed_heads(installed, tokens), "shard heads over more ranks")
    if (layer.nope_dim, layer.rope_dim) != (448, 64):
        yield Reason("HEAD_DIM", f"{layer.nope_dim} + {layer.rope_dim}", "448 + 64")
    if problem.q_dtype != "bfloat16":
        yield Reason("Q_DTYPE", problem.q_dtype, "bfloat16", "cast q")
    if problem.deterministic:
        actual = "rows whose bits do not depend on the batch"
        yield Reason("DETERMINISTIC", actual, "any order of sums: parts follow from the tokens of a call")
    yield from _of_pages(installed, problem)
    for stride in page_strides:
        if stride % 16:
            yield Reason("PAGE_STRIDE", f"{stride} bytes", "a multiple of 16", "pad pages")
    yield from _of_width(installed, problem, heads, tokens, in_range=in_range)


def _allowed_heads(installed: InstalledFlashInfer, tokens: int | None) -> str:
    most, most_of_few = (max(counts, default=0) for counts in (installed.head_counts(tokens), installed.heads))
    of_many = f" for more than {installed.max_decode_tokens} tokens of {installed.format.name}"
    return f"at most {most}{of_many if most < most_of_few else ''}"


def _of_pages(installed: InstalledFlashInfer, problem: Problem) -> Iterator[Reason]:
    sizes = installed.page_sizes, installed.extra_page_sizes
    for name, cache, allowed_sizes in zip(_CACHES, (problem.swa, problem.compressed), sizes, strict=True):
        if cache is not None and allowed_sizes is not None and cache.page_size not in allowed_sizes:
            allowed = f"{_listed(allowed_sizes)} with flashinfer {installed.version}"
            yield Reason("PAGE_SIZE", f"{name} with pages of {cache.page_size}", allowed, CURE)


def record_of(cache: CacheFacts) -> Record:
    """The records of a cache."""
    return cache.layout, cache.dtype, cache.arrangement, cache.group_size


def _of_layouts(installed: InstalledFlashInfer, problem: Problem) -> Iterator[Reason]:
    """Reasons against records of which FlashInfer has no format, or not in this pair."""
    formats = [candidate.format for candidate in (installed, *installed.others)]
    allowed = " or ".join(dict.fromkeys(_described(cache_format.window) for cache_format in formats))
    named = False
    for name, cache in zip(_CACHES, (problem.swa, problem.compressed), strict=True):
        known = [cache_format.window if name == _CACHES[0] else cache_format.compressed for cache_format in formats]
        if cache is not None and record_of(cache) not in known:
            named = True
            yield Reason("LAYOUT", f"{name} {_described(record_of(cache))}", allowed)
    if not named:
        pair = " with ".join(_described(record_of(cache)) for cache in (problem.swa, problem.compressed) if cache)
        yield Reason("LAYOUT", pair, "a pair of records that one of FlashInfer's formats has")


def _described(record: Record) -> str:
    layout, dtype, arrangement, group = record
    return f"{layout} of {dtype}, {arrangement}, groups of {group}"


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
        yield Reason("WINDOW", width, allowed, CURE)
        return
    page = problem.swa.page_size
    decode_tokens = min(tokens or 1, installed.max_decode_tokens)
    if heads is None or (installed.page_sizes is not None and page not in installed.page_sizes):
        return
    if not installed.config.supports_decode(heads, width, num_tokens=decode_tokens, page_block_size=page):
        actual = f"{heads} heads with {width} columns on pages of {page}"
        yield Reason("FLASHINFER", actual, f"what flashinfer {installed.version} has kernels for", CURE)


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))

"""Notes of the sm90 backend for `dsv4attn explain`: which kernel serves a problem. No device is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dsv4attn.backends._triton.support import notes_of_sums
from dsv4attn.backends.sm90.served import MOST_TOPK, against
from dsv4attn.backends.sm90.tuning import (
    LONGEST_BY_GROUPS,
    MOST_BY_GROUPS,
    PREFILL_COST_MODEL,
    REQUESTS_BY_GROUPS,
    by_groups,
    few_heads_costs,
    in_one_launch,
)
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.layer_geometry import LayerGeometry, LayerKind

UNITS = 132
"""Multiprocessors of an H100 and an H200 with SXM."""


def notes(device: DeviceFacts, problem: Problem) -> Sequence[str]:
    """The attention kernel, the choices of `prefill=auto`, and the kernels of the indexer's scores and of selection."""
    return [
        _attention_note(problem),
        *_prefill_notes(problem),
        *notes_of_sums(device, problem),
        *_selection_notes(problem),
    ]


def _selection_notes(problem: Problem) -> Iterator[str]:
    """When selection is by groups, or in one launch. With deterministic or exact sums it takes two steps."""
    if problem.layer.kind is not LayerKind.CSA or problem.deterministic or problem.topk > MOST_TOPK:
        return
    served = "for 64 index heads, fp8 index keys and index_sums=fp8; in two steps otherwise"
    if problem.phase == "decode" and problem.query_len == 1:
        longest = f"{LONGEST_BY_GROUPS:,} for {REQUESTS_BY_GROUPS} requests or more"
        yield f"selection: by groups of entries with {MOST_BY_GROUPS:,} index keys at most, {longest}, {served}"
        return
    # decodes of several tokens are chosen for like prompts
    tokens, requests, who = 2048, 1, "2,048 tokens"
    if problem.phase == "decode":
        tokens, requests, who = 64 * problem.query_len, 64, f"64 requests of {problem.query_len} tokens"
    lengths = [8192 * 2**i for i in range(6)]
    together = [n for n in lengths if in_one_launch(tokens, requests, n, problem.topk, UNITS)]
    longest = max(n for n in lengths if n not in together and by_groups(tokens, requests, n))
    launch = f", in one launch with {together[0]:,} or more (by its model, {UNITS} multiprocessors)" if together else ""
    yield f"selection: {who} by groups of entries with {longest:,} index keys at most{launch}, {served}"


def _prefill_notes(problem: Problem) -> Iterator[str]:
    """From which prompt length on `prefill=auto` gathers keys, and takes raw q. Only for prefill from records.

    Deterministic prefill reads pages.
    """
    if problem.phase != "prefill" or problem.swa.layout == "rows" or against(problem) or problem.deterministic:
        return
    layer = problem.layer

    def gathers_keys(context: int, tokens: int) -> bool:
        return not PREFILL_COST_MODEL.prefers_pages(layer, [(context, tokens)], _gathered_rows(layer, context, tokens))

    def takes_raw_q(context: int, tokens: int) -> bool:
        chunk = [(context, tokens)], _gathered_rows(layer, context, tokens)
        return PREFILL_COST_MODEL.prefers_raw_q(layer, [chunk])

    yield f"prefill=auto gathers a prompt's keys from {_smallest_prompts(gathers_keys)} (by its model)"
    if layer.q_norm:
        yield f"layers with raw_q have q's norm and rotation in that kernel from {_smallest_prompts(takes_raw_q)}"


def _smallest_prompts(chosen: Callable[[int, int], bool]) -> str:
    """Smallest prompt length at which `chosen` is true, for contexts of 0, 8K and 64K tokens.

    chosen: called with the length of the context and the length of the prompt, in tokens.
    """
    lengths = [2**i for i in range(7, 15)]
    smallest = [next((n for n in lengths if chosen(context, n)), 0) for context in (0, 8192, 65536)]
    return f"{', '.join(f'{n:,}' if n else 'none' for n in smallest)} tokens on, after contexts of 0, 8,192, 65,536"


def _gathered_rows(layer: LayerGeometry, context: int, tokens: int) -> int:
    """Number of rows that are gathered for `tokens` tokens of one request after `context` tokens."""
    return layer.entries(context + tokens) + min(context, layer.window - 1) + tokens


def _attention_note(problem: Problem) -> str:
    """The kernel that serves the problem. If it is the shared kernel: every reason."""
    obstacles = against(problem)
    if obstacles:
        return f"the shared Triton kernel: {'; '.join(obstacles)}"
    for_few_tokens = "; the same in both phases, and no row is split" if problem.deterministic else ""
    if problem.phase == "decode" and not problem.deterministic:
        has_tiles = problem.swa.layout in ("fp8_ds_mla", "v41_fp8")
        kernel = "its kernels of one tile" if has_tiles else "the shared Triton kernel"
        for_few_tokens = f"; {kernel} for few tokens"
    if few_heads_costs(problem.layer.num_heads) and problem.swa.layout == "fp8_ds_mla" and not problem.deterministic:
        for_few_tokens += "; its kernel for few heads where that is faster"
    return f"the Gluon kernel for Hopper, where q, out and pages begin at multiples of 16 bytes{for_few_tokens}"

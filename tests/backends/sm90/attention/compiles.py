"""Every form of the Gluon kernel, compiled for Hopper: limits it breaks, registers of its roles, widths of accesses.

A program of its own, since a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dsv4attn.backends._triton.compiling.aot import compile_all, compile_near, cross_compile, distinctions
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends.sm90.attention import few_heads, small_decode
from dsv4attn.backends.sm90.attention.kernels_schedule import CODE_PAGES, NIBBLE_PAGES
from dsv4attn.backends.sm90.attention.key_format import FP8_RECORDS, ROWS, V4_RECORDS, KeyFormat
from dsv4attn.backends.sm90.launch import variants

HEADS = (16, 64, 100, 128)
TARGET = TARGETS["sm_90"]
CODED = [KeyFormat(number.value, interleaved) for number in (CODE_PAGES, NIBBLE_PAGES) for interleaved in (False, True)]
V4 = [(2, kind) for kind in V4_RECORDS.values()]
"""Key formats of V4's records, in two segments."""


def with_largest(form: Variant) -> Variant:
    """The same, asked for the largest logits too, as front doors do."""
    types = {**dict(form.types), "max_logits": "*fp32", "part_max": "*fp32"}
    return Variant(form.kernel, types, form.constants, num_warps=form.num_warps)


def forms(heads: int, coded: Sequence[KeyFormat] = CODED) -> list[Variant]:
    """With the largest logits where lse is asked for, as no call has them alone. coded: records of V4.1 among them."""
    all_forms = []
    for segments, kind in ((1, FP8_RECORDS), *V4, (1, ROWS), (1, CODED[0]), *((2, kind) for kind in coded)):
        for raw in (False, True) if kind == ROWS else (False,):
            for form in variants(segments, kind, heads, sinks=(True, False), lses=(False, True), raw=raw):
                has_lse = dict(form.types)["lse"] != "none"
                all_forms.append(with_largest(form) if has_lse else form)
    return list(dict.fromkeys(all_forms))


def fullest(heads: int) -> list[Variant]:
    """Of these, those that tell every result: they need the most. Of V4.1's, those with scales within records."""
    return [
        form for form in forms(heads, CODED[1::2]) if "none" not in (dict(form.types)["lse"], dict(form.types)["sink"])
    ]


def barest(heads: int) -> list[Variant]:
    """Without sinks, and telling no result but the output: kinds of keys of both kernels, V4's with all its forms."""
    kinds = *V4, (1, ROWS), (2, CODED[-1])
    bare_forms = [
        form for segments, kind in kinds for form in variants(segments, kind, heads, sinks=(False,), lses=(False,))
    ]
    return list(dict.fromkeys(bare_forms))


def grouped(heads: int) -> list[Variant]:
    """Forms for rows of one request that are computed together, on V4's fp8 records."""
    return list(variants(2, FP8_RECORDS, heads, sinks=(True,), lses=(True,), group=min(64 // heads, 8)))


def planted(keys: str) -> list[str]:
    """Of the kernel of such keys: codes of the limits that a form breaks whose second role has few registers."""
    forms = [form for form in fullest(64) if form.name == "attention" and dict(form.types)["window_keys"] == keys]
    spoiled = Variant(forms[0].kernel, forms[0].types, {**dict(forms[0].constants), "VALUES": 160})
    return [reason.code for reason in compile_near(spoiled, TARGET).reasons]


def factors(text: str) -> list[int]:
    """Of each block of instructions that multiplies sums unless factors of a thread are 1: how many factors it has."""
    counts = []
    for block in re.findall(r"// begin inline asm(.*?)// end inline asm", text, re.DOTALL):
        operands = re.findall(r"setp\.neu\.f32 \w+, (%\w+), 0f3F800000;", block)
        if operands:
            counts.append(len({*operands, *re.findall(r"mul\.f32 %\w+, %\w+, (%\w+);", block)}))
    return counts


def unfenced(text: str) -> int:
    """How often a role announces copies, without a fence between them and what the matrix unit reads."""
    steps: list[str] = re.findall(
        r"cp\.async\.(?:wait_group|mbarrier\.arrive)|fence\.proxy\.async|mbarrier\.arrive\.shared", text
    )
    pairs = pairwise([*steps, ""])
    waits = [first == "cp.async.wait_group" and second != "fence.proxy.async" for first, second in pairs]
    return sum(waits) + steps.count("cp.async.mbarrier.arrive")


def announced(text: str) -> int:
    """Fences after which a role arrives at once, with no store to shared memory, copy or wait between."""
    steps = re.findall(r"cp\.async\.|st\.shared|mbarrier\.try_wait|fence\.proxy\.async|mbarrier\.arrive\.shared", text)
    return sum(pair == ("fence.proxy.async", "mbarrier.arrive.shared") for pair in pairwise(steps))


def all_forms(heads: Sequence[int], chosen: Callable[[int], list[Variant]] = forms) -> dict[str, Any]:
    """What each form needs and does."""
    variants = [form for number in heads for form in chosen(number)]
    names, facts = distinctions(variants), {}
    for outcome in compile_all(variants, TARGET):
        form, need = outcome.variant, outcome.resources
        text = cross_compile(form, TARGET).asm["ptx"]
        copied = {int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", text)}
        facts[f"{form.name} {names[form]}"] = {
            "reasons": [str(reason) for reason in outcome.reasons],
            "roles": need.roles if need else [],
            "shared": need.shared if need else 0,
            "occupancy": need.occupancy if need else 0,
            "copied": sorted(copied),
            "stored": len(re.findall(r"st\.global\S*\.v4\.b32", text)),
            "powers_stored": len(re.findall(r"st\.global\S*\.b16", text)),
            "loaded": len(re.findall(r"ld\.global\S*\.v4\.b32", text)),
            "factors": factors(text),
            "unfenced": unfenced(text),
            "announced": announced(text),
            "narrow": len(re.findall(r"st\.shared\S*\.(?:b8|b16|u8|u16)\b", text)),
        }
    return facts


def needs(variants: Sequence[Variant], counted: Mapping[str, str]) -> list[dict[str, Any]]:
    """Name, constants, broken limits and occupancy of each variant. counted: patterns that are counted in its PTX."""
    facts = []
    for outcome in compile_all(list(dict.fromkeys(variants)), TARGET):
        text, need = cross_compile(outcome.variant, TARGET).asm["ptx"], outcome.resources
        facts.append(
            {
                "name": outcome.variant.name,
                **dict(outcome.variant.constants),
                "reasons": [str(reason) for reason in outcome.reasons],
                "occupancy": need.occupancy if need else 0,
                **{name: len(re.findall(pattern, text)) for name, pattern in counted.items()},
            }
        )
    return facts


def tile_forms(
    heads: Sequence[int], kinds: Sequence[tuple[int, KeyFormat]], lses: Sequence[bool] = (False, True)
) -> list[dict[str, Any]]:
    """What each form of the kernels of one tile needs and does. kinds: numbers of segments, and formats of keys."""
    variants = [
        with_largest(form) if dict(form.types).get("lse", "none") != "none" else form
        for number in heads
        for segments, kind in kinds
        for form in small_decode.variants(segments, kind, number, sinks=(True,), lses=lses)
    ]
    loads_and_stores = {
        "loaded": r"ld\.global\S*\.v4\.b32",
        "parts_stored": r"st\.global\S*\.v2\.b32",
        "parts_loaded": r"ld\.global\S*\.v2\.b32",
    }
    return needs(variants, loads_and_stores)


def few_heads_forms(heads: Sequence[int]) -> list[dict[str, Any]]:
    """What each form of the kernel of few heads that tells every result needs and does."""
    variants = [
        with_largest(form)
        for number in heads
        for segments in (1, 2)
        for form in few_heads.variants(segments, number, sinks=(True,), lses=(True,))
        if form.name == "attend_few_heads"
    ]
    products = {"products": r"mma\.sync\.aligned\.m16n8k16", "narrow": r"(?:st|ld)\.shared\S*\.(?:b8|u8|u16)\b"}
    return needs(variants, products)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["planted"]:
        results: Any = planted(words[1])
    elif words[:1] == ["tiles"]:
        results = tile_forms([*map(int, words[1:])], [(1, FP8_RECORDS), (2, FP8_RECORDS)])
    elif words[:1] == ["coded_tiles"]:
        results = tile_forms([*map(int, words[1:])], [(1, CODED[0]), *((2, kind) for kind in CODED)])
    elif words[:1] == ["fullest_tiles"]:
        results = tile_forms([*map(int, words[1:])], [(2, FP8_RECORDS)], (True,))
    elif words[:1] == ["fullest_coded_tiles"]:
        results = tile_forms([*map(int, words[1:])], [(2, kind) for kind in CODED[1::2]], (True,))
    elif words[:1] == ["few_heads"]:
        results = few_heads_forms([*map(int, words[1:])])
    elif words[:1] == ["fullest"]:
        results = all_forms([*map(int, words[1:])], fullest)
    elif words[:1] == ["grouped"]:
        results = all_forms([*map(int, words[1:])], grouped)
    elif words[:1] == ["barest"]:
        results = all_forms([*map(int, words[1:])], barest)
    else:
        results = all_forms([*map(int, words)] or HEADS)
    print(json.dumps(results))

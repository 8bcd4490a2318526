"""Forms of the layer's kernels that need most, compiled for targets; what is wrong with them, as JSON.

Run as a program: a process that interprets kernels cannot compile them. Of each kernel a target has the forms with most
registers or shared memory. The others do less of the same, and `compiling/test_gates` compiles them with `-m slow`.
With the word "alike": those of these forms that need as much as others of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.compiling.aot import compile_near
from dsv4attn.backends._triton.compiling.targets import Target
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.layer.compressor import latents
from dsv4attn.backends._triton.layer.compressor import launch as compress
from dsv4attn.backends._triton.layer.hyper_connections import launch as hyper_connections
from dsv4attn.backends._triton.layer.hyper_connections.tuning import FEW, tile_of, tuning_for
from dsv4attn.backends._triton.layer.indexer import candidates
from dsv4attn.backends._triton.layer.indexer import launch as index_logits
from dsv4attn.backends._triton.layer.indexer import query as index_query
from dsv4attn.backends._triton.layer.projections import few_rows, output, products
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends._triton.layer.selection import ranks
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout

BF16 = torch.bfloat16


def streams(arch: str) -> Iterator[Variant]:
    """Hyper-connections: the first launch for many tokens, and of the second, with a norm, that with most splits.

    Of two with as many splits that with fewer warps, whose threads have more to hold.
    """
    tuning, mixes = tuning_for(arch), []
    for variant in hyper_connections.variants(4, 7168, BF16, BF16, arch=arch):
        constants = dict(variant.constants)
        tile = tile_of(tuning, FEW + 1, 4, BF16, 16, fused=dict(variant.types).get("X") not in (None, "none"))
        if {"BLOCK_M": tile.tokens, "BLOCK_K": tile.columns, "MIXES": 24}.items() <= constants.items():
            yield variant
        if dict(variant.types).get("NORM") == "*bf16":
            mixes.append(variant)
    yield max(mixes, key=lambda v: (dict(v.constants)["SPLITS"], -v.num_warps))


def wide_streams(arch: str) -> Iterator[Variant]:
    """Hyper-connections: the second launch for rows of two blocks, with a norm whose weight is fp32."""
    forms = hyper_connections.variants(4, 2**14, BF16, torch.float32, arch=arch)
    mixes = [form for form in forms if dict(form.types).get("NORM") == "*fp32"]
    yield max(mixes, key=lambda form: (dict(form.constants)["SPLITS"], -form.num_warps))


def codes(arch: str, fp8_format: Fp8Format) -> Iterator[Variant]:
    """The output projection in fp8: the largest tile, and that with most stages, with scales of one type."""
    tiles = output.tiles_for(fp8_format, arch)
    forms = [*output.variants(64, 512, 64, 8, 1024, BF16, arch=arch)]
    for tile in (*tiles.single[:1], tiles.many or tiles.large):
        constants = {"BLOCK_M": tile.tokens, "BLOCK_N": tile.ranks, "FNUZ": fp8_format is Fp8Format.FNUZ}
        at_hand = [form for form in forms if form.num_stages == tile.stages]
        yield next(form for form in at_hand if constants.items() <= dict(form.constants).items())


def native_codes(arch: str) -> Iterator[Variant]:
    """Codes that a matrix unit takes."""
    return codes(arch, Fp8Format.OCP)


def decoded_codes(arch: str) -> Iterator[Variant]:
    """Codes that are decoded to fp16; those of the other dialect differ in one constant."""
    return codes(arch, Fp8Format.FNUZ)


def multiplied(arch: str) -> Iterator[Variant]:
    """Products of bf16: the base tile, of rows of any form, and the largest tiles of results in bf16 and in fp32."""
    for variant in products.variants(arch=arch):
        constants, of_fp32 = dict(variant.constants), dict(variant.types)["OUT"] == "*fp32"
        if is_large(variant) or (constants.get("WHOLE") is False and not of_fp32):
            yield variant


def is_large(variant: Variant) -> bool:
    """Whether a product has one of the largest tiles."""
    constants = dict(variant.constants)
    return bool(constants["BLOCK_M"] * constants["BLOCK_N"] >= 128 * 256)


def turned(arch: str) -> Iterator[Variant]:
    """The output projection in bf16 whose rotation is undone before: its products with the largest tiles."""
    for variant in projection.variants(64, 448, 64, 8, 1024, BF16, BF16, arch=arch):
        if variant.name == "project_kernel":
            continue
        if variant.name == "turn_back_kernel" or is_large(variant) or dict(variant.constants)["BLOCK_M"] == 64:
            yield variant


def of_few_rows(arch: str) -> Iterator[Variant]:
    """Products of codes with few rows."""
    yield from few_rows.variants_of(products.Tile(16, 64, 128, 4, 4), BF16, torch.float32, arch=arch)
    yield from few_rows.variants_of(products.Tile(64, 64, 128, 4, 3), BF16, torch.uint8, arch=arch)


def selection(arch: str) -> Iterator[Variant]:
    """Scores with maxima, of pages of any size, and the selection of 512 entries in rows that do not fit registers."""
    for variant in index_logits.variants(KVCacheLayout.index_fp8(), 64, arch=arch):
        if dict(variant.constants)["FORM"].stride == 0 and dict(variant.types)["MAXIMA"] != "none":
            yield variant
    for variant in select.variants(512, 2**18, arch=arch):
        if dict(variant.constants).get("LONG"):
            yield variant


def candidates_of_ranks(arch: str) -> Iterator[Variant]:
    """Candidates of two ranks and of four, as many as there can be."""
    del arch
    yield from (variant for variant in ranks.variants(2048) if variant.name == "keep_kernel")


def compressor(arch: str) -> Iterator[Variant]:
    """Entries of both ratios, and the queries of the indexer."""
    for ratio in (4, 128):
        layout = KVCacheLayout.fp8_ds_mla(448, 64)
        forms = compress.variants(layout, ratio, 64, overlap=ratio == 4, aligned=True, arch=arch)
        yield from (variant for variant in forms if variant.name != "save_kernel")
    yield from index_query.variants(KVCacheLayout.index_fp8(), 64, 64, BF16, (torch.float32,), arch=arch)


def latest(arch: str) -> Iterator[Variant]:
    """Latents of two tokens, records and index keys of them, and scores of blocks."""
    del arch
    yield from latents.latent_variants(512, 2, norms=(BF16,))
    for layout, norms in ((KVCacheLayout.v41_fp4(), (None,)), (KVCacheLayout.index_fp8(), (BF16,))):
        yield from latents.variants(layout, 2, 64, BF16, norms)
    yield from candidates.variants(8, 512)
    yield from candidates.variants(8, 2048)


CASES: dict[str, tuple[Callable[[str], Iterator[Variant]], ...]] = {
    "sm_80": (decoded_codes, candidates_of_ranks),
    "sm_90": (streams, wide_streams, native_codes, decoded_codes, multiplied, turned, of_few_rows),
    "sm_100": (selection, latest),
    "sm_120": (streams, native_codes, multiplied),
    "gfx942": (streams, decoded_codes, compressor),
    "gfx950": (streams,),
    "gfx1100": (decoded_codes, multiplied),
}
"""By target, so that each row of a tuning table, and each way to compile, is there. Of targets with one row that one
has most registers in use, or least shared memory."""


def is_alike(variant: Variant, target: str) -> bool:
    """Whether another form of the kernel, for this target or one of its kind, needs as much, or is the same but larger.

    The largest order of candidates takes 8 seconds, for 73 registers of 255.
    """
    constants, types = dict(variant.constants), dict(variant.types)
    if variant.name == "described_product_kernel":
        return (constants["BLOCK_M"] == 128) is (types["OUT"] == "*bf16")
    return {
        "choose_kernel": constants.get("SPLITS") == 1,
        "order_kernel": constants.get("N") == 2048,
        "project_turned_kernel": constants.get("BLOCK_M") == 128,
        "products_kernel": target == "gfx950" and types.get("X") == "none",
    }.get(variant.name, False)


def wrong(variant: Variant, target: Target) -> list[str]:
    """Reasons against a form. Products of codes are not of 16 bits, so their matrix instructions are asked for here."""
    outcome = compile_near(variant, target)
    matrix = outcome.resources.matrix if outcome.resources else 0
    lacking = variant.name in ("project_codes_kernel", "score_kernel") and not matrix
    return [*map(str, outcome.reasons), *(["no matrix instructions"] if lacking else [])]


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for name, cases in CASES.items():
        for case in cases:
            forms = [form for form in dict.fromkeys(case(name)) if is_alike(form, name) is ("alike" in sys.argv)]
            reasons = [f"{form.name}: {reason}" for form in forms for reason in wrong(form, Target.named(name))]
            if forms:
                results[f"{name} {case.__name__}"] = {"forms": len(forms), "reasons": reasons}
    print(json.dumps(results))

"""Cases of the layer around attention: compressor, indexer, selection, hyper-connections; those of V4.1 come last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.testing.case import Area, Case
from dsv4attn.testing.checks import compressor, selection
from dsv4attn.testing.checks import hyper_connections as hyper
from dsv4attn.testing.checks.insert import FAR_POSITIONS
from dsv4attn.testing.checks.memory import layer_temporaries
from dsv4attn.testing.checks.norms import NormRows, normalises, norms_no_rows
from dsv4attn.testing.kit.factories import (
    INDEX_HEAD_COUNTS,
    INDEX_TOPKS,
    PAGE_SIZES,
    flash,
    index_layout,
    layout,
    tiny_geometry,
)
from dsv4attn.testing.kit.strided import each_strided

_layer = partial(Case, Area.LAYER)
LONG = ((69_974, 10), (65_535, 1), (65_528, 17))
"""Requests with positions that need more than 16 bits."""


def compressing(kind: str, cache: str, **fields: object) -> compressor.CompressorStep:
    """A compressor of keys (`cache` of `case inputs.layout`), or with kind "index" of index keys (`index_layout`)."""
    indexer = kind == "index"
    defaults: dict[str, object] = {
        "geometry": flash("c4a" if indexer else kind),
        "layout": index_layout(cache) if indexer else layout(cache),
        "kind": "c4a" if indexer else kind,
        "indexer": indexer,
    }
    if kind == "c128a":
        defaults |= {"requests": ((0, 130), (127, 1), (250, 8), (300, 90)), "state_page": 8, "entry_page": 2}
    return compressor.CompressorStep(**{**defaults, **fields})  # type: ignore[arg-type]


def compressor_cases() -> Iterator[Case]:
    """All cases of the compressor."""
    for kind, name in (("c4a", "ocp"), ("c128a", "ocp"), ("index", "fp8")):
        inputs = compressing(kind, name)
        says = f"{kind}: kv, and scores with the bias of their place in the window, are saved bit for bit"
        yield _layer(f"states-{kind}", "K1", says, inputs, compressor.saves_states)
    says = "slots of states that are negative or do not exist are skipped, and no other byte is written"
    yield _layer("states-skips", "K1 K7", says, compressing("index", "fp8", gap=4608), compressor.saves_only_its_slots)
    for kind, caches in (
        ("c4a", ("ocp", "fnuz", "interleaved", "bf16", "fp32")),
        ("c128a", ("ocp", "bf16")),
        ("index", ("fp8", "fnuz", "mxfp4", "bf16", "fp32")),
    ):
        for cache in caches:
            says = f"{kind}: entries are compressed, normalised, rotated and written to {cache} records"
            yield _layer(f"compress-{kind}-{cache}", "K2 K3 K4", says, compressing(kind, cache), compressor.compresses)
    says = "the first entry of a request has no window before its own, whatever stands in the pages"
    first = compressing("c4a", "ocp", requests=((0, 4), (2, 2), (3, 1), (4, 4)))
    yield _layer("compress-first", "K2", says, first, compressor.compresses)
    says = "states and entries at positions beyond 65,536 are found by position, and entries are rotated there"
    for kind, cache in (("c4a", "ocp"), ("index", "fp8")):
        inputs = compressing(kind, cache, requests=LONG)
        yield _layer(f"compress-positions-{kind}", "K2 K3", says, inputs, compressor.compresses)
    says = "positions beyond 65,536 have the biases of their places in the window"
    far = compressing("c128a", "ocp", requests=((65_500, 70),))
    yield _layer("states-positions", "K1", says, far, compressor.saves_states)
    says = "an eps of 0.02, with kv so small that it shows, is the one that is added"
    yield _layer("compress-eps", "K3", says, compressing("c4a", "ocp", size=0.02, eps=0.02), compressor.compresses)
    says = "a weight of the norm in bf16 counts as the same numbers in fp32, where the ops take one"
    halved = compressing("c128a", "ocp", norm_dtype=torch.bfloat16)
    yield _layer("compress-norm-bf16", "K3", says, halved, compressor.compresses)
    says = "slots of entries that are negative or do not exist are skipped, and no other byte is written"
    many = compressing("index", "fp8", requests=((0, 33), (4, 20)), gap=4608)
    yield _layer("compress-skips", "K7", says, many, compressor.compresses_only_its_slots)
    says = "a step without tokens, or without the last token of a window, leaves both caches as they are"
    yield _layer("compress-none", "K7", says, compressing("c4a", "ocp"), compressor.stores_nothing)
    for kind, cache in (("c4a", "ocp"), ("index", "mxfp4")):
        says = f"{kind}: pages of states and of entries lie further apart, and entries are the same"
        yield _layer(f"compress-gaps-{kind}", "K2 K4", says, compressing(kind, cache), compressor.moved)
    says = "NaN or not, bytes of the state pages that belong to no state never reach an entry"
    for kind in ("c4a", "c128a"):
        yield _layer(f"compress-unused-{kind}", "K8", says, compressing(kind, "bf16"), compressor.unused_bytes)
    for kind, cache, requests in (
        ("c4a", "ocp", ((0, 21), (0, 10))),
        ("index", "fp8", ((0, 33), (0, 14), (0, 3))),
        ("c128a", "ocp", ((0, 258),)),
    ):
        says = f"{kind}: steps of any sizes leave the same bytes in states and entries"
        cuts = ((16, 7, 100, 1), (128,)) if kind == "c128a" else ((3, 1, 5, 2, 4), (16, 7, 100, 1), (1,))
        inputs = compressing(kind, cache, requests=requests)
        yield _layer(f"cuts-{kind}", "K5", says, inputs, compressor.any_cut(*cuts))
    for kind, cache in (("c4a", "bf16"), ("index", "fp8")):
        says = f"{kind}: drafts that are replaced, and tokens computed again, leave the bytes of one pass"
        inputs = compressing(kind, cache, requests=((0, 21), (0, 19)))
        yield _layer(f"replay-{kind}", "K6", says, inputs, compressor.replays)
    for kind, cache in (("c4a", "ocp"), ("index", "fp8"), ("index", "mxfp4")):
        says = f"{kind}: a NaN of a token reaches the entries that the token counts in, and no other"
        inputs = compressing(kind, cache, requests=((0, 24), (0, 9)))
        yield _layer(f"compress-nan-{kind}-{cache}", "K8", says, inputs, compressor.spoils_own_entries)
    yield from _compressor_page_cases()
    yield from _compressor_padding_cases()
    says = "1,031 tokens of 70 requests are saved and compressed in one step"
    many = compressing("index", "fp8", requests=(*[(i, 4) for i in range(69)], (40, 755)))
    yield _layer("compress-1031", "K2 F7", says, many, compressor.saves_and_compresses)
    says = "an entry of another model, of 32 dims, is compressed and rotated"
    tiny = compressor.CompressorStep(geometry=tiny_geometry(), layout=KVCacheLayout.rows(24, 8))
    yield _layer("dims-compress", "K2 K3 F5", says, tiny, compressor.compresses)


def _compressor_page_cases() -> Iterator[Case]:
    """Pages of entries of every size."""
    for (kind, cache), page in product((("c4a", "ocp"), ("index", "fp8")), PAGE_SIZES):
        says = f"{kind}: entries are written to the end of a page of {page} records, and to the next page"
        inputs = compressing(kind, cache, requests=((4 * page - 6, 13),), entry_page=page)
        yield _layer(f"compress-{kind}-pages-{page}", "K2 K3 K4 F5", says, inputs, compressor.compresses)


def _compressor_padding_cases() -> Iterator[Case]:
    """Rows of padding around the tokens."""
    for kind, cache in (("c4a", "ocp"), ("c128a", "ocp"), ("index", "fp8")):
        says = f"{kind}: rows of padding save no state and store no entry, and no position of them is looked up"
        check = partial(compressor.saves_and_compresses, padded=True)
        yield _layer(f"no-token-compress-{kind}", "B5", says, compressing(kind, cache), check)


FORMATS = ("fp8", "fnuz", "mxfp4", "bf16", "fp32")


def queries(name: str, **fields: object) -> selection.IndexQueries:
    """Queries for index keys of a layout."""
    return selection.IndexQueries(**{"geometry": flash("c4a"), "layout": index_layout(name), **fields})  # type: ignore[arg-type]


def selecting(name: str = "fp8", **fields: object) -> selection.IndexSelection:
    """A selection among index keys of a layout."""
    return selection.IndexSelection(**{"geometry": flash("c4a"), "layout": index_layout(name), **fields})  # type: ignore[arg-type]


def mixing(**fields: object) -> hyper.ResidualStreams:
    """Streams."""
    cache = "fp32" if fields.get("dtype") == torch.float32 else "ocp"
    return hyper.ResidualStreams(**{"geometry": flash("swa"), "layout": layout(cache), **fields})  # type: ignore[arg-type]


def indexer_cases() -> Iterator[Case]:
    """Queries of the indexer, and scores as selection shows them."""
    for name in FORMATS:
        says = f"bf16 queries are rotated on their trailing dims and become {name} queries; factors are in the weights"
        yield _layer(f"query-{name}", "X1 X2", says, queries(name), selection.quantises_queries)
    for name in ("fp8", "mxfp4"):
        says = f"fp32 queries become {name} queries, with fp32 weights of 64 heads"
        inputs = queries(name, dtype=torch.float32, weight_dtype=torch.float32, heads=64, count=5)
        yield _layer(f"query-{name}-64", "X1 X2", says, inputs, selection.quantises_queries)
    for heads in INDEX_HEAD_COUNTS:
        says = f"queries of {heads} heads, as many as a model has, are quantised with their weights"
        inputs = queries("fp8", heads=heads, count=3)
        yield _layer(f"query-heads-{heads}", "X1 X2 F5", says, inputs, selection.quantises_queries)
    says = "queries are rotated at positions beyond 65,536"
    yield _layer("query-positions", "X1", says, queries("fp8", table_rows=FAR_POSITIONS), selection.quantises_queries)
    says = "no position of padding is looked up, and none changes another query"
    some = queries("fp8", count=17)
    yield _layer("no-token-query", "B5", says, some, selection.quantises_without_positions_of_padding)
    says = "1,031 queries are quantised in one step"
    yield _layer("query-1031", "X1 X2 F7", says, queries("fp8", count=1031, heads=2), selection.quantises_queries)
    says = "rows of q, of the weights or of the table lie apart, and queries are the same"
    check = each_strided("q weights cos_sin_cache all", selection.quantises_queries)
    yield _layer("apart-query", "X1 A7", says, queries("mxfp4"), check)
    yield _layer("query-none", "X1", "no tokens make no queries", queries("mxfp4"), selection.makes_no_queries)
    for name in FORMATS:
        says = f"scores of {name} queries, as the backend makes them, and of {name} keys: the largest ones are selected"
        requests, heads = ((900, 2), (4000, 1)), 64 if name == "fp8" else 8
        keys = selecting(name, whole=False, requests=requests, heads=heads, topk=40)
        yield _layer(f"scores-{name}", "X3", says, keys, selection.scores_through)


def norming(**fields: object) -> NormRows:
    """Products of hidden states."""
    return NormRows(**{"geometry": flash("c4a"), "layout": layout("ocp"), **fields})  # type: ignore[arg-type]


def norm_cases() -> Iterator[Case]:
    """Norms between the projections."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for name, dtype, weight_dtype, out_dtype in (
        ("bf16", bf16, bf16, bf16),
        ("mixed", fp32, bf16, bf16),
        ("fp32", fp32, fp32, fp32),
    ):
        says = f"{name}: the latent of q and the key are normalised with their own weights, and rounded once"
        inputs = norming(dtype=dtype, weight_dtype=weight_dtype, out_dtype=out_dtype)
        yield _layer(f"norms-{name}", "N1", says, inputs, normalises)
    says = "an eps of 0.02 is the one that is added"
    yield _layer("norms-eps", "N1", says, norming(eps=0.02), normalises)
    says = "1,031 tokens are normalised in one step"
    yield _layer("norms-1031", "N1 F7", says, norming(count=1031), normalises)
    says = "rows of products lie apart, as parts of one product do, and results are the same"
    yield _layer("apart-norms", "N1 A7", says, norming(), each_strided("q kv all", normalises))
    yield _layer("norms-none", "N1", "no tokens have no results", norming(), norms_no_rows)


def selection_cases() -> Iterator[Case]:
    """Selection. Most scores are exact in fp32, so that the rule alone decides."""
    for name in FORMATS:
        says = f"the entries of {name} keys with the largest scores are selected, of equal scores the lower ones"
        yield _layer(f"select-{name}", "T1 T2", says, selecting(name), selection.select_entries)
    for topk, entries, heads in ((512, 1100, 64), (1024, 2300, 4)):
        says = f"{topk} of {entries} entries are selected, with {heads} heads"
        inputs = selecting(topk=topk, requests=((4 * entries, 2),), heads=heads)
        yield _layer(f"select-{topk}", "T1 T2", says, inputs, selection.select_entries)
    says = "scores of any size are selected, and only entries within the error of the last one may differ"
    inputs = selecting(whole=False, requests=((4000, 3), (700, 1)), topk=100)
    yield _layer("select-random", "T1", says, inputs, selection.select_entries)
    says = "of scores that are 0 or -0 the lower entries are selected, one head"
    inputs = selecting(heads=1, requests=((900, 4), (500, 1)))
    yield _layer("select-zeros", "T2", says, inputs, selection.select_entries)
    says = "entries whose scores are NaN are not selected, and a token whose query is NaN selects none"
    for name in ("fp8", "mxfp4", "bf16"):
        yield _layer(f"select-nan-{name}", "T3", says, selecting(name, nan=True, topk=200), selection.select_entries)
    says = "fewer entries than are to be selected: all of them, then -1; none are visible: -1"
    few = selecting(topk=512, requests=((0, 9), (1, 1), (40, 3)), padding=3)
    yield _layer("select-few", "T4", says, few, selection.select_entries)
    for topk in INDEX_TOPKS:
        for name, says, seen in (
            (
                "few",
                f"no token of a step sees more than half of the {topk} entries to be selected",
                (0, 2, 10, topk // 2),
            ),
            (
                "most",
                f"tokens see one entry fewer than the {topk} to be selected, all, and one more",
                range(topk - 1, topk + 2),
            ),
        ):
            inputs = selecting(topk=topk, heads=2, requests=[(4 * count, 1) for count in seen])
            yield _layer(f"select-{name}-{topk}", "T4 F5", says, inputs, selection.select_entries)
    for heads in INDEX_HEAD_COUNTS:
        says = f"entries are selected by queries of {heads} heads, as many as a model has"
        inputs = selecting(heads=heads, topk=16, requests=((300, 2), (70, 1)))
        yield _layer(f"select-heads-{heads}", "T1 F5", says, inputs, selection.select_entries)
    for page in PAGE_SIZES:
        says = f"entries are selected from two pages of {page} index keys"
        inputs = selecting(heads=2, topk=16, requests=((4 * page + 76, 2), (70, 1)), page=page)
        yield _layer(f"select-pages-{page}", "T1 F5", says, inputs, selection.select_entries)
    says = "several tokens of a request each see their own entries"
    verify = selecting(topk=512, requests=((2, 4), (5, 3), (1021, 4), (1022, 2)))
    yield _layer("select-verify", "T5", says, verify, selection.select_entries)
    says = "rows of out, of the table and of the weights lie apart"
    yield _layer("apart-select", "T1 A7", says, selecting(strided="all"), selection.select_entries)
    says = "bytes that belong to no key, and keys past the visible ones, are not looked at"
    for byte, name in ((0x00, "zero"), (0x7F, "large")):
        yield _layer(f"select-unused-{name}", "T5 T6", says, selecting(unused=byte), selection.select_entries)
    says = "entries whose block is -1 or does not exist are absent"
    dead = selecting(dead=True, topk=512, requests=((2000, 1), (1500, 2), (1700, 1), (2500, 1)))
    yield _layer("select-blocks", "T6", says, dead, selection.select_entries)
    yield _layer("select-gaps", "T6", "pages lie further apart", selecting(gap=4608), selection.select_entries)
    says = "the bound of visible entries is far above them, as in a captured graph"
    yield _layer("select-bound", "T5", says, selecting(more_entries=3000), selection.select_entries)
    says = "70 requests in one step, each by its own row of the block table"
    many = selecting(requests=tuple((i * 37 % 600, 1) for i in range(70)), topk=32, heads=2)
    yield _layer("select-requests", "T1 F7", says, many, selection.select_entries)
    says = "1,031 tokens of one request in one step"
    many = selecting(requests=((0, 1031),), topk=16, heads=2)
    yield _layer("select-1031", "T1 F7", says, many, selection.select_entries)
    for ranks, name, inputs in (
        (2, "fp8", selecting()),
        (3, "few", selecting("fp32", topk=512, requests=((0, 9), (1, 1), (1500, 3)), padding=2)),
        (3, "nan", selecting("mxfp4", nan=True, topk=200)),
    ):
        says = f"{ranks} ranks with a part of the entries each propose theirs: the best of all are those of one rank"
        yield _layer(f"select-ranks-{name}", "T7", says, inputs, selection.selects_over_ranks(ranks))
    says = "no tokens select nothing"
    yield _layer("select-none", "T4", says, selecting(requests=((300, 0),)), selection.select_entries)


def hyper_cases() -> Iterator[Case]:
    """Hyper-connections."""
    fp32 = {"dtype": torch.float32}
    unlike = {"size": 0.05, "rms_eps": 2e-3, "pre_eps": 0.03, "sinkhorn_eps": 0.005}
    for name, fields in (
        ("bf16", {}),
        ("fp32", fp32),
        ("n2", {"streams": 2}),
        ("n8", {"streams": 8, "count": 5}),
        ("flash", {"hidden": 4096, "count": 3}),
    ):
        n, d = fields.get("streams", 4), fields.get("hidden", 96)
        of, inputs = f"{n} streams of {d}", mixing(**fields)
        yield _layer(f"mhc-pre-{name}", "H1", f"{of} are mixed before a sublayer", inputs, hyper.check_pre)
        yield _layer(f"mhc-post-{name}", "H2", f"{of} take the output of a sublayer", inputs, hyper.check_post)
        yield _layer(f"hc-head-{name}", "H4", f"{of} are mixed after the last layer", inputs, hyper.check_head)
    for name, fields in (("bf16", {}), ("fp32", fp32)):
        says = f"{name} streams: the fused op is post, then pre of the new streams"
        yield _layer(f"mhc-fused-{name}", "H3", says, mixing(**fields), hyper.check_fused)
        says = f"{name} streams: the input of the sublayer goes through an RMSNorm with a weight and an eps of its own"
        normed = mixing(normed=True, norm_eps=0.01, **fields)
        yield _layer(f"mhc-norm-{name}", "H5", says, normed, hyper.check_pre)
        yield _layer(f"mhc-fused-norm-{name}", "H3 H5", says, normed, hyper.check_fused)
    for repeat in (1, 2, 3):
        says = f"{repeat} of Sinkhorn's iterations: the first divides columns, later ones divide rows, then columns"
        yield _layer(f"mhc-sinkhorn-{repeat}", "H1", says, mixing(repeat=repeat), hyper.check_pre)
    says = "each eps is added where it belongs, and post has a factor of its own"
    yield _layer("mhc-eps", "H1", says, mixing(post_mult=1.5, repeat=3, **unlike), hyper.check_pre)
    yield _layer("mhc-fused-eps", "H3", says, mixing(post_mult=1.5, repeat=3, **unlike), hyper.check_fused)
    says = "both eps of the head are added where they belong"
    yield _layer("hc-head-eps", "H4", says, mixing(**unlike), hyper.check_head)
    many = mixing(count=1031)
    for name, clause, check in (
        ("mhc-pre", "H1", hyper.check_pre),
        ("mhc-post", "H2", hyper.check_post),
        ("mhc-fused", "H3", hyper.check_fused),
        ("hc-head", "H4", hyper.check_head),
    ):
        yield _layer(f"{name}-1031", f"{clause} F7", f"{name}: streams of 1,031 tokens in one step", many, check)
    says = "there are gaps between rows of the streams, or of the output of a sublayer"
    strided = each_strided("x residual all", hyper.check_fused, hyper.check_head)
    yield _layer("apart-mhc", "H3 H4 A7", says, mixing(), strided)
    none = hyper.check_no_tokens(hyper.check_pre, hyper.check_post, hyper.check_fused, hyper.check_head)
    yield _layer("mhc-none", "H1 H2 H3 H4", "no tokens: empty results", mixing(), none)


def step_memory_cases() -> Iterator[Case]:
    """Temporaries of the layer ops, with sizes at which a step in torch that is not cut into tiles holds too much."""
    says = "temporaries of the ops stay within transient_bytes"
    step = compressing("c4a", "ocp")
    yield _layer("temporaries-compressor", "W5", says, step, layer_temporaries(27, compressor.saves_and_compresses))
    many = queries("mxfp4", count=1031, heads=64)
    yield _layer("temporaries-indexer", "W5", says, many, layer_temporaries(1031, selection.run_queries))
    entries = selecting(requests=((3000, 70),), heads=64, topk=512)
    yield _layer("temporaries-selection", "W5", says, entries, layer_temporaries(70, selection.select_entries))
    wide = mixing(count=1031, hidden=7168)
    yield _layer("temporaries-mhc", "W5", says, wide, layer_temporaries(1031, hyper.check_fused, hyper.check_head))


def delayed_cases() -> Iterator[Case]:
    """V4.1's hyper-connections: the pre of the previous sublayer weighs the streams."""
    fp32 = {"dtype": torch.float32}
    for name, fields in (("bf16", {}), ("fp32", fp32), ("n2", {"streams": 2}), ("flash", {"hidden": 5120, "count": 3})):
        of, inputs = f"{fields.get('streams', 4)} streams of {fields.get('hidden', 96)}", mixing(**fields)
        says = f"{of}: the pre of the previous sublayer weighs them, and their own pre is returned"
        yield _layer(f"delayed-pre-{name}", "V1 V2", says, inputs, hyper.check_pre_delayed)
        says = f"{of}: the first sublayer takes stream 0"
        yield _layer(f"delayed-first-{name}", "V1 V2", says, inputs, hyper.check_first_delayed)
        says = f"{of}: the fused op is post, then the delayed pre of the new streams"
        yield _layer(f"delayed-fused-{name}", "V3", says, inputs, hyper.check_fused_delayed)
        says = f"{of} are collapsed by the pre of the last sublayer"
        yield _layer(f"delayed-collapse-{name}", "V4", says, inputs, hyper.check_collapse)
    for name, fields in (("bf16", {}), ("fp32", fp32)):
        says = f"{name} streams: small streams, and an eps of 1e-20 in both norms"
        normed = mixing(normed=True, size=2.0**-12, norm_eps=1e-20, rms_eps=1e-20, **fields)
        yield _layer(f"delayed-norm-{name}", "V1 V2", says, normed, hyper.check_pre_delayed)
    says = "each eps is added where it belongs, and post has a factor of its own"
    unlike = mixing(size=0.05, rms_eps=2e-3, pre_eps=0.03, sinkhorn_eps=0.005, post_mult=1.5, repeat=3)
    yield _layer("delayed-eps", "V1 V2", says, unlike, hyper.check_pre_delayed)
    says = "streams of 1,031 tokens in one step"
    yield _layer("delayed-fused-1031", "V3", says, mixing(count=1031), hyper.check_fused_delayed)
    says = "there are gaps between rows of the streams, or of the output of a sublayer"
    strided = each_strided("x residual all", hyper.check_fused_delayed, hyper.check_collapse)
    yield _layer("delayed-apart", "V3 V4", says, mixing(), strided)
    of_v41 = hyper.check_first_delayed, hyper.check_pre_delayed, hyper.check_fused_delayed, hyper.check_collapse
    none = hyper.check_no_tokens(*of_v41)
    yield _layer("delayed-none", "V1 V2 V3 V4", "no tokens: empty results", mixing(), none)


def latent(name: str = "ocp", **fields: object) -> compressor.LatentSteps:
    """Latents, stored to keys (ocp, bf16) or to index keys of a layout."""
    cache = layout(name) if name in ("ocp", "fnuz") else index_layout(name, 512 if name == "bf16" else 128)
    return compressor.LatentSteps(**{"geometry": flash("c4a"), "layout": cache, **fields})  # type: ignore[arg-type]


def latent_cases() -> Iterator[Case]:
    """Latents of one and of two tokens, and what is stored of them."""
    says = "latents of one token are the RMSNorm of its kv, in bf16"
    yield _layer("latents-1", "V5", says, latent(ratio=1), compressor.makes_latents())
    says = "latents of two tokens are weighed by a softmax of both for each channel, whatever stands in the pages"
    yield _layer("latents-2", "V5 V6", says, latent(), compressor.makes_latents((13,), (1,), (5, 2, 9)))
    says = "rings of two blocks hold the last tokens, and steps may be longer than they are"
    ring = latent(state_page=4, ring_blocks=2)
    yield _layer("latents-ring", "V6", says, ring, compressor.makes_latents((3,), (20,), (1, 7)))
    says = "kv so small that an eps of 1e-6 would show"
    yield _layer("latents-eps", "V5", says, latent(size=2.0**-12), compressor.makes_latents((6,)))
    says = "drafts that are replaced leave latents and rings of one pass"
    yield _layer("latents-drafts", "V6", says, latent(), compressor.replaces_drafts)
    for ratio in (1, 2):
        for name in ("ocp", "bf16"):
            says = f"keys of ratio {ratio} are rotated at the first position of their window, in {name} records"
            inputs = latent(name, ratio=ratio)
            yield _layer(f"latent-keys-{name}-{ratio}", "V7", says, inputs, compressor.stores(normed=False))
        for name in ("fp8", "mxfp4"):
            says = f"index keys of ratio {ratio} go through an RMSNorm, bf16 and RoPE to {name} records"
            inputs = latent(name, ratio=ratio)
            yield _layer(f"latent-index-{name}-{ratio}", "V7", says, inputs, compressor.stores(normed=True))
    says = "rows of padding among the tokens have latents of zeros, and change no other"
    yield _layer("no-token-latents-1", "B5", says, latent(ratio=1), compressor.makes_latents((5, 2), padded=True))
    says = "rows of padding are in no window, and leave the rings of all requests as they are"
    ring = latent(state_page=4, ring_blocks=2)
    yield _layer("no-token-latents-2", "B5", says, ring, compressor.makes_latents((3,), (1,), (11, 2), padded=True))
    for ratio in (1, 2):
        says = f"rows of padding store no key of ratio {ratio}, and no position of them is looked up"
        check = compressor.stores(normed=False, padded=True)
        yield _layer(f"no-token-keys-{ratio}", "B5", says, latent(ratio=ratio), check)
        says = f"rows of padding store no index key of ratio {ratio}, and no position of them is looked up"
        check = compressor.stores(normed=True, padded=True)
        yield _layer(f"no-token-index-{ratio}", "B5", says, latent("fp8", ratio=ratio), check)


def narrowing(name: str = "fp8", **fields: object) -> selection.CandidateSelection:
    """A selection with candidates, among index keys of a layout."""
    return selection.CandidateSelection(**{"geometry": flash("c4a"), "layout": index_layout(name), **fields})  # type: ignore[arg-type]


def candidate_cases() -> Iterator[Case]:
    """Blocks that are published, and selection among their entries."""
    for name in ("fp8", "mxfp4", "bf16"):
        says = f"the blocks of {name} keys with the largest scores are published, and the newest one"
        yield _layer(f"candidates-{name}", "V8", says, narrowing(name, heads=32), selection.publishes)
        says = f"entries of {name} keys in any blocks are selected, and blocks that do not exist are none"
        yield _layer(f"within-{name}", "V9", says, narrowing(name, heads=32, topk=40), selection.selects_within)
    random = narrowing(whole=False, requests=((4000, 3), (700, 1)), topk=20, blocks=20)
    yield _layer("candidates-random", "V8", "scores of any size: blocks", random, selection.publishes)
    yield _layer("within-random", "V9", "scores of any size: entries of blocks", random, selection.selects_within)
    says = "fewer blocks are visible than are wanted: all of them, and selection among them is that among all"
    void = narrowing(requests=((0, 9), (1, 1), (40, 3), (1021, 4)), blocks=40, padding=3)
    yield _layer("candidates-void", "V8", says, void, selection.publishes)
    yield _layer("within-void", "V9", says, void, selection.selects_within_published)
    says = "more blocks are visible than are wanted: selection is among the published ones"
    yield _layer("within-published", "V9", says, narrowing(blocks=5, topk=64), selection.selects_within_published)
    for size in (1, 32):
        says = f"blocks of {size} entries"
        yield _layer(f"candidates-of-{size}", "V8", says, narrowing(block_size=size), selection.publishes)
        yield _layer(f"within-of-{size}", "V9", says, narrowing(block_size=size), selection.selects_within)
    says = "entries whose block is -1 or does not exist are absent"
    dead = narrowing(dead=True, requests=((2000, 1), (1500, 2), (1700, 1), (2500, 1)))
    yield _layer("candidates-blocks", "V8", says, dead, selection.publishes)
    yield _layer("within-blocks", "V9", says, dead, selection.selects_within)
    says = "the bound of visible entries is far above them"
    yield _layer("candidates-bound", "V8", says, narrowing(more_entries=3000), selection.publishes)
    yield _layer("within-bound", "V9", says, narrowing(more_entries=3000), selection.selects_within)


def v41_cases() -> Iterator[Case]:
    """All of them."""
    yield from candidate_cases()
    yield from latent_cases()
    yield from delayed_cases()

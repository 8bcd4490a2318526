"""Cases of the indexer, of selection and of hyper-connections."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4attn.testing.case import Area, Bench, Case, CaseInput, Check, Measure, Wrong
from dsv4attn.testing.cases_compressor import compressing, index_layout, saves_and_compresses
from dsv4attn.testing.check_hyper_connections import (
    ResidualStreams,
    runs_fused,
    runs_head,
    runs_nothing,
    runs_post,
    runs_pre,
)
from dsv4attn.testing.check_index_queries import (
    IndexQueries,
    makes_no_queries,
    quantises_queries,
    quantises_without_positions_of_padding,
    run_queries,
    shape_error,
)
from dsv4attn.testing.check_insert import FAR_POSITIONS
from dsv4attn.testing.check_memory import layer_temporaries
from dsv4attn.testing.check_rank_selection import selects_over_ranks
from dsv4attn.testing.check_selection import IndexSelection, judge_selection, run_selection, select_entries, sum_bits
from dsv4attn.testing.factories import flash, layout
from dsv4attn.testing.strided import each_strided

__all__ = ["hyper_cases", "indexer_cases", "selection_cases", "step_memory_cases"]

FORMATS = ("fp8", "fnuz", "mxfp4", "bf16", "fp32")


def queries(name: str, **fields: object) -> IndexQueries:
    """Queries for index keys of a layout."""
    return IndexQueries(**{"geometry": flash("c4a"), "layout": index_layout(name), **fields})  # type: ignore[arg-type]


def selecting(name: str = "fp8", **fields: object) -> IndexSelection:
    """A selection among index keys of a layout."""
    return IndexSelection(**{"geometry": flash("c4a"), "layout": index_layout(name), **fields})  # type: ignore[arg-type]


def mixing(**fields: object) -> ResidualStreams:
    """Streams."""
    cache = "fp32" if fields.get("dtype") == torch.float32 else "ocp"
    return ResidualStreams(**{"geometry": flash("swa"), "layout": layout(cache), **fields})  # type: ignore[arg-type]


def scores_through(bench: Bench, inputs: IndexSelection) -> Measure:
    """The backend quantises the queries, and selects by its own codes and weights."""
    fields = {"geometry": inputs.geometry, "layout": inputs.layout, "heads": inputs.heads, "device": inputs.device}
    query = run_queries(bench, IndexQueries(count=len(inputs.tokens), table_rows=4096, **fields))  # type: ignore[arg-type]
    if error := shape_error(query, inputs.layout, len(inputs.tokens), inputs.heads):
        raise Wrong(error)
    return judge_selection(inputs, run_selection(bench, inputs, query), query, sum_bits(bench))


def indexer_cases() -> Iterator[Case]:
    """Queries of the indexer, and scores as selection shows them."""
    for name in FORMATS:
        says = f"bf16 queries are rotated on their trailing dims and become {name} queries; factors are in the weights"
        yield _case(f"query-{name}", "X1 X2", says, queries(name), quantises_queries)
    for name in ("fp8", "mxfp4"):
        says = f"fp32 queries become {name} queries, with fp32 weights of 64 heads"
        inputs = queries(name, dtype=torch.float32, weight_dtype=torch.float32, heads=64, count=5)
        yield _case(f"query-{name}-64", "X1 X2", says, inputs, quantises_queries)
    says = "queries are rotated at positions beyond 65,536"
    yield _case("query-positions", "X1", says, queries("fp8", table_rows=FAR_POSITIONS), quantises_queries)
    says = "no position of padding is looked up, and none changes another query"
    yield _case("no-token-query", "B5", says, queries("fp8", count=17), quantises_without_positions_of_padding)
    says = "1,031 queries are quantised in one step"
    yield _case("query-1031", "X1 X2 F7", says, queries("fp8", count=1031, heads=2), quantises_queries)
    says = "rows of q, of the weights or of the table lie apart, and queries are the same"
    check = each_strided("q weights cos_sin_cache all", quantises_queries)
    yield _case("apart-query", "X1 A7", says, queries("mxfp4"), check)
    yield _case("query-none", "X1", "no tokens make no queries", queries("mxfp4"), makes_no_queries)
    for name in FORMATS:
        says = f"scores of {name} queries, as the backend makes them, and of {name} keys: the largest ones are selected"
        requests, heads = ((900, 2), (4000, 1)), 64 if name == "fp8" else 8
        keys = selecting(name, whole=False, requests=requests, heads=heads, topk=40)
        yield _case(f"scores-{name}", "X3", says, keys, scores_through)


def selection_cases() -> Iterator[Case]:
    """Selection, most of it among scores that fp32 holds exactly, so that nothing but the rule decides."""
    for name in FORMATS:
        says = f"the entries of {name} keys with the largest scores are selected, of equal scores the lower ones"
        yield _case(f"select-{name}", "T1 T2", says, selecting(name), select_entries)
    for topk, entries, heads in ((512, 1100, 64), (1024, 2300, 4)):
        says = f"{topk} of {entries} entries are selected, with {heads} heads"
        inputs = selecting(topk=topk, requests=((4 * entries, 2),), heads=heads)
        yield _case(f"select-{topk}", "T1 T2", says, inputs, select_entries)
    says = "scores of any size are selected, and only entries within the error of the last one may differ"
    inputs = selecting(whole=False, requests=((4000, 3), (700, 1)), topk=100)
    yield _case("select-random", "T1", says, inputs, select_entries)
    says = "of scores that are 0 or -0 the lower entries are selected, one head"
    yield _case("select-zeros", "T2", says, selecting(heads=1, requests=((900, 4), (500, 1))), select_entries)
    says = "entries whose scores are NaN are not selected, and a token whose query is NaN selects none"
    for name in ("fp8", "mxfp4", "bf16"):
        yield _case(f"select-nan-{name}", "T3", says, selecting(name, nan=True, topk=200), select_entries)
    says = "fewer entries than are to be selected: all of them, then -1; none are visible: -1"
    few = selecting(topk=512, requests=((0, 9), (1, 1), (40, 3)), padding=3)
    yield _case("select-few", "T4", says, few, select_entries)
    says = "several tokens of a request each see their own entries"
    verify = selecting(topk=512, requests=((2, 4), (5, 3), (1021, 4), (1022, 2)))
    yield _case("select-verify", "T5", says, verify, select_entries)
    says = "rows of out, of the table and of the weights lie apart"
    yield _case("apart-select", "T1 A7", says, selecting(strided=True), select_entries)
    says = "bytes that belong to no key, and keys behind the visible ones, are not looked at"
    for byte, name in ((0x00, "zero"), (0x7F, "large")):
        yield _case(f"select-unused-{name}", "T5 T6", says, selecting(unused=byte), select_entries)
    says = "entries whose block is -1 or does not exist are absent"
    dead = selecting(dead=True, topk=512, requests=((2000, 1), (1500, 2), (1700, 1), (2500, 1)))
    yield _case("select-blocks", "T6", says, dead, select_entries)
    yield _case("select-gaps", "T6", "pages lie further apart", selecting(gap=4608), select_entries)
    says = "the bound of visible entries is far above them, as in a captured graph"
    yield _case("select-bound", "T5", says, selecting(more_entries=3000), select_entries)
    says = "70 requests in one step, each by its own row of the block table"
    many = selecting(requests=tuple((i * 37 % 600, 1) for i in range(70)), topk=32, heads=2)
    yield _case("select-requests", "T1 F7", says, many, select_entries)
    says = "1,031 tokens of one request in one step"
    yield _case("select-1031", "T1 F7", says, selecting(requests=((0, 1031),), topk=16, heads=2), select_entries)
    for ranks, name, inputs in (
        (2, "fp8", selecting()),
        (3, "few", selecting("fp32", topk=512, requests=((0, 9), (1, 1), (1500, 3)), padding=2)),
        (3, "nan", selecting("mxfp4", nan=True, topk=200)),
    ):
        says = f"{ranks} ranks with a part of the entries each propose theirs: the best of all are those of one rank"
        yield _case(f"select-ranks-{name}", "T7", says, inputs, selects_over_ranks(ranks))
    says = "no tokens select nothing"
    yield _case("select-none", "T4", says, selecting(requests=((300, 0),)), select_entries)


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
        of = f"{n} streams of {d}"
        yield _case(f"mhc-pre-{name}", "H1", f"{of} are mixed before a sublayer", mixing(**fields), runs_pre)
        yield _case(f"mhc-post-{name}", "H2", f"{of} take a sublayer's output", mixing(**fields), runs_post)
        yield _case(f"hc-head-{name}", "H4", f"{of} are mixed behind the last layer", mixing(**fields), runs_head)
    for name, fields in (("bf16", {}), ("fp32", fp32)):
        says = f"{name} streams: the fused step is post, then pre of the new streams"
        yield _case(f"mhc-fused-{name}", "H3", says, mixing(**fields), runs_fused)
        says = f"{name} streams: the sublayer's input goes through an RMSNorm with a weight and an eps of its own"
        normed = mixing(normed=True, norm_eps=0.01, **fields)
        yield _case(f"mhc-norm-{name}", "H5", says, normed, runs_pre)
        yield _case(f"mhc-fused-norm-{name}", "H3 H5", says, normed, runs_fused)
    for repeat in (1, 2, 3):
        says = f"{repeat} of Sinkhorn's iterations: the first divides columns, the others rows, then columns"
        yield _case(f"mhc-sinkhorn-{repeat}", "H1", says, mixing(repeat=repeat), runs_pre)
    says = "each eps is added where it belongs, and the sublayer's output has its own factor"
    yield _case("mhc-eps", "H1", says, mixing(post_mult=1.5, repeat=3, **unlike), runs_pre)
    yield _case("mhc-fused-eps", "H3", says, mixing(post_mult=1.5, repeat=3, **unlike), runs_fused)
    says = "both eps of the head are added where they belong"
    yield _case("hc-head-eps", "H4", says, mixing(**unlike), runs_head)
    many = mixing(count=1031)
    for name, clause, check in (
        ("mhc-pre", "H1", runs_pre),
        ("mhc-post", "H2", runs_post),
        ("mhc-fused", "H3", runs_fused),
        ("hc-head", "H4", runs_head),
    ):
        yield _case(f"{name}-1031", f"{clause} F7", f"{name}: streams of 1,031 tokens in one step", many, check)
    says = "rows of the streams, or of a sublayer's output, lie apart"
    strided = each_strided("x residual all", runs_fused, runs_head)
    yield _case("apart-mhc", "H3 H4 A7", says, mixing(), strided)
    yield _case("mhc-none", "H1 H2 H3 H4", "no tokens: empty results", mixing(), runs_nothing)


def step_memory_cases() -> Iterator[Case]:
    """Temporaries of the layer steps, with sizes at which a step in torch that is not cut into tiles holds too much."""
    says = "temporaries of the steps stay within transient_bytes"
    one = compressing("c4a", "ocp")
    yield _case("temporaries-compressor", "W5", says, one, layer_temporaries(27, saves_and_compresses))
    many = queries("mxfp4", count=1031, heads=64)
    yield _case("temporaries-indexer", "W5", says, many, layer_temporaries(1031, run_queries))
    entries = selecting(requests=((3000, 70),), heads=64, topk=512)
    yield _case("temporaries-selection", "W5", says, entries, layer_temporaries(70, select_entries))
    wide = mixing(count=1031, hidden=7168)
    yield _case("temporaries-mhc", "W5", says, wide, layer_temporaries(1031, runs_fused, runs_head))


def _case(name: str, clauses: str, says: str, inputs: CaseInput, check: Check) -> Case:
    return Case(name=name, area=Area.LAYER, clauses=clauses, says=says, inputs=inputs, check=check)

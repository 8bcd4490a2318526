"""Scores of index keys: every kind of record and page, ragged rows, lost blocks, NaN, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf, nan

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import architecture, observed, recording
from dsv4attn.backends._triton.layer.indexer import kernels
from dsv4attn.backends._triton.layer.indexer import launch as index_logits
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.selection import group_select
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.index_records import read_index_keys, slots_of, store_index_keys
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.torch_ops import indexer
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.errors import ArgumentError, LayoutMismatchError

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LAYOUTS = {
    "fp8": KVCacheLayout.index_fp8(128),
    "fnuz": KVCacheLayout.index_fp8(128, fp8_format=Fp8Format.FNUZ),
    "mxfp4": KVCacheLayout.index_mxfp4(128),
    "bf16": KVCacheLayout.rows(96, 32),
    "fp32": KVCacheLayout.rows(96, 32, dtype=torch.float32),
    "48 dims": KVCacheLayout.index_fp8(48),
}
EXACT = 3e-6
"""Error of fp32, relative to the sum of the products' norms."""
NATIVE = 2.0**-14
"""The same where a matrix unit adds fp8 products; see `index_logits.multiplies_codes`."""


class ScoredKeys:
    """Keys of three requests on shuffled pages, one block of which is lost, and queries of seven tokens."""

    def __init__(self, layout: KVCacheLayout, page: int = 64, heads: int = 8, gap: int = 0) -> None:
        torch.manual_seed(0)
        self.layout, columns = layout, -(-300 // page)
        item = layout.dtype.itemsize
        stride, last = layout.page_stride(page) // item + gap // item, layout.record_bytes // item
        memory = torch.full((40 * stride,), 255 if layout.is_quantised else nan, dtype=layout.dtype, device=DEVICE)
        self.cache = PagedKVCache(memory.as_strided((40, page, last), (stride, last, 1)), layout)
        self.table = torch.randperm(40)[: 3 * columns].view(3, columns).int().to(DEVICE)
        for request, count in enumerate((200, 77, 300)):
            entry = torch.arange(count, device=DEVICE)
            slots = self.table[request][entry // page].long() * page + entry % page
            store_index_keys(torch.randn(count, layout.head_dim, device=DEVICE), self.cache, slots)
        self.table[2, 1] = -1
        self.token_to_req = torch.tensor([0, 1, 1, 2, 2, 9, 2], dtype=torch.int32, device=DEVICE)
        self.lens = torch.tensor([200, 70, 77, 0, 200, 5, 300], dtype=torch.int32, device=DEVICE)
        q = torch.randn(7, heads, layout.head_dim, device=DEVICE)
        weights, angles = torch.randn(7, heads, device=DEVICE), torch.randn(9, 16, device=DEVICE)
        self.query = indexer.indexer_q_rope_quant(q, weights, torch.arange(7, device=DEVICE), angles, layout)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """[7, 300] scores in float64, NaN without a block; their sizes; and which of them tokens see."""
        entry = torch.arange(300, device=DEVICE, dtype=torch.int32).expand(7, -1)
        slots = slots_of(entry, self.table, self.token_to_req, self.cache)
        k = read_index_keys(self.cache, slots).double().masked_fill(slots[..., None] < 0, nan)
        q, weights = self.query.rows(slice(None)).double(), self.query.weights.double()
        sizes = (weights.abs() * q.norm(dim=-1)).sum(1)[:, None] * k.norm(dim=-1)
        return indexer.scores(q, weights, k), sizes, entry < self.lens[:, None]

    def score(self, run: int = 0, *, exact_rows: bool = False, by_length: bool = False) -> tuple[Tensor, Tensor | None]:
        """What the kernel writes over 7s."""
        scores = torch.full((7, 300), 7.0, device=DEVICE)
        groups = (-(-300 // run) + by_length) * index_logits.LANES if run else 0
        maxima = torch.full((7, groups), 7.0, device=DEVICE) if run else None
        token_map = TokenMap(self.table, self.token_to_req, self.lens)
        options = {"exact_rows": exact_rows, "by_length": by_length}
        self.run, self.together = index_logits.score(
            self.query, self.cache, token_map, scores, maxima, run, **options
        )  # fmt: skip
        return scores, maxima


def hold(actual: Tensor, expected: Tensor, sizes: Tensor, layout: KVCacheLayout) -> None:
    """Equal within rounding, and NaN in the same places."""
    budget = NATIVE if index_logits.multiplies_codes(layout, architecture()) else EXACT
    assert torch.equal(actual.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert ((actual - expected).abs()[kept] <= budget * sizes[kept]).all()


@pytest.mark.parametrize("exact_rows", [False, True])
@pytest.mark.parametrize(
    ("name", "page", "heads"),
    [*product(LAYOUTS, (64, 48, 128), (8,)), *product(("fp8",), (64,), (1, 3, 16, 64))],
)
def test_scores_of_what_a_token_sees_are_written_and_nothing_else(
    name: str, page: int, heads: int, *, exact_rows: bool
) -> None:
    keys = ScoredKeys(LAYOUTS[name], page, heads, gap=4608 if page == 48 else 0)
    actual, _ = keys.score(exact_rows=exact_rows)
    expected, sizes, seen = keys.expected()

    hold(actual[seen], expected[seen], sizes[seen], keys.layout)
    assert (actual[~seen] == 7).all()


@pytest.mark.parametrize(("run", "alone"), [(128, 0), (256, 0), (64, 300), (512, 100)])
@pytest.mark.parametrize("exact_rows", [False, True])
def test_maxima_are_those_of_the_scores(
    run: int, alone: int, monkeypatch: pytest.MonkeyPatch, *, exact_rows: bool
) -> None:
    """In runs of a given length; and, with `alone`, in runs that the kernel computes: of a tile, or of more entries."""
    keys = ScoredKeys(LAYOUTS["fp8"])
    if alone:
        monkeypatch.setattr(select, "SPLIT_LENGTH", alone)
        keys.lens.clamp_(min=min(alone + 1, 300))
    scores, maxima = keys.score(run, exact_rows=exact_rows, by_length=alone > 0)
    assert maxima is not None
    assert (keys.together > 0) is (alone > 0)
    run = max(run, keys.run)
    entry = torch.arange(300, device=DEVICE)
    group = entry // run * index_logits.LANES + entry % index_logits.LANES
    for token, count in enumerate(keys.lens.tolist()):
        visible = scores[token, :count].masked_fill(scores[token, :count].isnan(), -inf)
        expected = torch.full_like(maxima[token], -inf).scatter_reduce(0, group[:count], visible, "amax")
        runs = -(-count // run) * index_logits.LANES

        assert torch.equal(maxima[token, :runs], expected[:runs]), token


@pytest.mark.parametrize("what", ["code", "scale", "query"])
def test_a_nan_reaches_its_own_scores(what: str) -> None:
    keys = ScoredKeys(LAYOUTS["fp8"])
    clean, _ = keys.score()
    entry, token = 67, 4
    block = int(keys.table[0, entry // 64])
    if what == "code":
        keys.cache.region("nope")[block, entry % 64, 5] = 0xFF
    elif what == "scale":
        keys.cache.region("scale")[block, entry % 64] = nan
    else:
        keys.query.values.view(torch.uint8)[token, 3, 7] = 0x7F
    scores, _ = keys.score()
    hit = torch.zeros_like(clean, dtype=torch.bool)
    if what == "query":
        hit[token, :200] = True
    else:
        hit[0, entry] = True

    assert scores[hit].isnan().all()
    assert torch.equal(scores[~hit].nan_to_num(1e30), clean[~hit].nan_to_num(1e30))


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "bf16"])
def test_bits_do_not_depend_on_other_tokens_if_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile has two tokens, of one request or of two.

    On a device a token is the first of its tile in one call and the second in another. Numpy's products, of which the
    interpreter makes those of a tile, have other bits in other columns.
    """
    two = index_logits.Tile(2, 128, 4, 2)
    tiles = index_logits.Tiles(index_logits.Tile(1, 64, 8, 2), index_logits.Tile(2, 64, 8, 2), two, "in a test")
    if INTERPRETED:
        monkeypatch.setattr(index_logits, "PLAIN", tiles)
    keys = ScoredKeys(LAYOUTS[name])
    whole, _ = keys.score(exact_rows=True)
    spans = [(2, 3), (4, 5), (6, 7), (2, 7), (0, 6)]
    for first, end in spans if INTERPRETED else [*spans, (1, 2), (3, 4), (1, 5)]:
        rows = slice(first, end)
        part = torch.full((end - first, 300), 7.0, device=DEVICE)
        token_map = TokenMap(keys.table, keys.token_to_req[rows], keys.lens[rows])
        index_logits.score(keys.query.tokens(rows), keys.cache, token_map, part, None, 0, exact_rows=True)

        assert torch.equal(part.nan_to_num(1e30), whole[rows].nan_to_num(1e30))


def test_all_calls_have_one_tile_if_bits_may_not_depend_on_other_tokens() -> None:
    keys, sizes = ScoredKeys(LAYOUTS["fp8"]), set()
    for tokens in (1, 3, 7):
        rows = slice(0, tokens)
        scores = torch.empty(tokens, 300, device=DEVICE)
        token_map = TokenMap(keys.table, keys.token_to_req[rows], keys.lens[rows])
        with observed() as seen:
            index_logits.score(keys.query.tokens(rows), keys.cache, token_map, scores, None, 0, exact_rows=True)
        sizes |= {(variant.constants, variant.num_warps) for variant in seen}

    assert len(sizes) == 1


def agree(actual: Tensor, expected: Tensor) -> None:
    """Equal within rounding, and -inf in the same places."""
    assert torch.equal(actual == -inf, expected == -inf)
    is_visible = expected != -inf
    assert torch.allclose(
        actual[is_visible], expected[is_visible], rtol=1e-4, atol=1e-3 * float(expected[is_visible].abs().max())
    )


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("page", [64, 48])
@pytest.mark.parametrize("dim", [128, 64])
def test_the_fields_function_on_pages(drafts: int, page: int, dim: int) -> None:
    torch.manual_seed(1)
    dialect = Fp8Format.OCP if dim == 128 else Fp8Format.FNUZ
    cache = PagedKVCache.allocate(KVCacheLayout.index_fp8(dim, fp8_format=dialect), 30, page, DEVICE)
    store_index_keys(torch.randn(30 * page, dim, device=DEVICE), cache, torch.arange(30 * page, device=DEVICE))
    table = torch.randperm(30)[:21].view(3, 7).int().to(DEVICE)
    table[1, 1], table[2, 0] = -1, 99
    q = torch.randn(3, drafts, 8, dim, device=DEVICE).to(dialect.dtype)
    weights = torch.randn(3 * drafts, 16, device=DEVICE)[:, :8]
    lens = torch.tensor([[200, 0, 310], [77, 330, 5], [-3, 129, 64]], dtype=torch.int32, device=DEVICE)[:, :drafts]
    arguments = q, cache, weights, lens, table, None, 333

    agree(index_logits.fp8_paged_mqa_logits(*arguments), indexer.fp8_paged_mqa_logits(*arguments))


def test_the_fields_function_over_gathered_rows() -> None:
    torch.manual_seed(2)
    k, scales = torch.randn(201, 128, device=DEVICE).to(torch.float8_e4m3fn), torch.rand(201, device=DEVICE)
    q, weights = torch.randn(7, 8, 128, device=DEVICE).to(torch.float8_e4m3fn), torch.randn(7, 8, device=DEVICE)
    first = torch.tensor([0, 0, 70, 130, 200, 5, 150], dtype=torch.int32, device=DEVICE)
    end = torch.tensor([201, 3, 140, 130, 201, 100, 190], dtype=torch.int32, device=DEVICE)
    arguments = q, (k, scales), weights, first, end

    agree(index_logits.fp8_mqa_logits(*arguments), indexer.fp8_mqa_logits(*arguments))


@pytest.mark.parametrize("empty", ["requests", "columns", "blocks"])
def test_nothing_to_score(empty: str) -> None:
    layout = LAYOUTS["fp8"]
    cache = PagedKVCache.allocate(layout, 0 if empty == "blocks" else 3, 64, DEVICE)
    requests = 0 if empty == "requests" else 2
    q = torch.zeros(requests, 1, 8, 128, device=DEVICE).to(torch.float8_e4m3fn)
    table = torch.zeros(requests, 0 if empty == "columns" else 3, dtype=torch.int32, device=DEVICE)
    lens = torch.full((requests,), 9, dtype=torch.int32, device=DEVICE)
    weights = torch.ones(requests, 8, device=DEVICE)
    logits = index_logits.fp8_paged_mqa_logits(q, cache, weights, lens, table, None, 100)

    assert logits.shape == (requests, 100)
    assert (logits == -inf).all()


def test_keys_of_another_layout_are_refused() -> None:
    cache = PagedKVCache.allocate(LAYOUTS["fnuz"], 3, 64, DEVICE)
    q = torch.zeros(1, 1, 8, 128, device=DEVICE).to(torch.float8_e4m3fn)
    arguments = torch.ones(1, 8), torch.ones(1, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32), None, 9
    with observed() as seen, pytest.raises(LayoutMismatchError, match="e4m3fnuz"):
        index_logits.fp8_paged_mqa_logits(q, cache, *arguments)
    with observed() as other, pytest.raises(ArgumentError, match="float8"):
        index_logits.fp8_paged_mqa_logits(q.float(), cache, *arguments)

    assert not seen
    assert not other


def forms(layout: KVCacheLayout, pages: Sequence[int]) -> set[object]:
    with observed() as seen:
        for page in pages:
            for run in (0, 128):
                keys = ScoredKeys(layout, page, heads=8)
                for exact in (False, True):
                    keys.score(run, exact_rows=exact)
    return {*seen}


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "bf16"])
def test_forms_are_foreseen(name: str) -> None:
    launched = forms(LAYOUTS[name], (64, 48))
    known = {*index_logits.variants(LAYOUTS[name], 8, aligned=False)}

    assert launched <= known, {str(variant) for variant in launched - known}


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's own kernels have these sums, see `dsv4attn conform --option`")
@pytest.mark.parametrize("model", ["flash", "v4.1-flash"])
@pytest.mark.parametrize("make", [GenericBackend, Sm90Backend])
def test_exact_sums_multiply_no_codes(make: type[TritonBackend], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = WarmupSpec.of(ModelGeometry.preset(model), Limits(8, 64, 2**18), layer_parts=True)
    # what a device launches, and no kernel runs
    for module in (index_logits, group_select):
        monkeypatch.setattr(module, "INTERPRETED", False)
        for name, function in [*vars(module).items()]:  # what is cached here would stay after this test
            if hasattr(function, "cache_info"):
                monkeypatch.setattr(module, name, function.__wrapped__)

    def facts(index_sums: str) -> tuple[set[object], int]:
        """Kinds of products in kernels that score, and bits of their sums."""
        with recording("sm_90") as variants:
            backend = make(index_sums=index_sums)
            bits = backend.layer_ops.sum_bits
            backend._launch_within(bounds, DeviceFacts.named("sm_90"))
        scoring = [
            dict(variant.constants) for variant in variants if "select" in variant.name or "score" in variant.name
        ]
        forms = [constants["FORM"].kind if "FORM" in constants else constants.get("KIND") for constants in scoring]
        return {kind for kind in forms if kind is not None}, bits

    assert facts("fp8") == ({kernels.NATIVE.value}, 14)
    assert facts("exact") == ({kernels.CODES.value}, 24)
    with pytest.raises(ArgumentError, match="index_sums: expected 'fp8' or 'exact', got 'more'"):
        make(index_sums="more")

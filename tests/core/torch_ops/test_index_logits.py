"""Logits of index keys under the field's names, and matrix products whose rows do not depend on each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.indexer import fp8_mqa_logits, fp8_paged_mqa_logits
from dsv4attn.core.torch_ops.tiles import batch_invariant_linear, linear
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.checks.selection import score_errors
from dsv4attn.testing.kit.oracle_cache import OracleCache, PagePlacement, Pages
from dsv4attn.testing.kit.tolerances import Formula, hold_values
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer

HEADS, DIM, PAGE = 6, 128, 64
F64 = Any


def drawn(seed: int, *shape: int) -> F64:
    return np.random.default_rng(seed).normal(size=shape)


def codes(values: F64, dialect: Fp8Format = Fp8Format.OCP) -> tuple[Tensor, F64]:
    """fp8 values as a tensor, and what they are."""
    encoded = torch.from_numpy(oracle.encode_e4m3(values, dialect is Fp8Format.FNUZ)).view(dialect.dtype)
    return encoded, encoded.double().numpy()


class Scene:
    """Requests with index keys on shuffled pages, queries of n tokens each, and the oracle's logits."""

    def __init__(self, lens: F64, *, gap: int = 0, dialect: Fp8Format = Fp8Format.OCP, columns: int = 200) -> None:
        lens = np.asarray(lens)
        per_token = lens if lens.ndim == 2 else lens[:, None]
        requests, tokens = per_token.shape
        layout = KVCacheLayout.index_fp8(fp8_format=dialect)
        counts = per_token.max(1).clip(0) + 7  # keys after the visible ones, which are finite
        self.pages = Pages([(0, int(n)) for n in counts], PAGE, spare=2, dead=-1, key=(1,))
        self.book = OracleCache.blank(layout, self.pages.count, PagePlacement(PAGE, gap), "cpu")
        for request, count in enumerate(counts):
            self.book.write(self.pages.slots(request, range(count)), 3 * drawn(request, int(count), DIM))
        self.q, values = codes(drawn(50, requests, tokens, HEADS, DIM), dialect)
        self.weights = torch.from_numpy(drawn(51, requests * tokens, HEADS)).float()
        self.lens, self.table, self.columns = torch.from_numpy(lens).int(), torch.from_numpy(self.pages.table), columns
        self.expected = np.full((requests * tokens, columns), -math.inf)
        self.errors = np.zeros_like(self.expected)
        for row in range(requests * tokens):
            request, token = divmod(row, tokens)
            count = int(per_token[request, token].clip(0))
            keys = self.book.values[self.pages.slots(request, range(count))]
            weights = self.weights[row].double().numpy()
            self.expected[row, :count] = oracle_layer.index_scores(values[request, token], weights, keys)
            self.errors[row, :count] = score_errors(values[request, token], weights, keys)

    def run(self, **changes: Any) -> Tensor:
        arguments = {
            "q": self.q, "kv_cache": self.book.cache, "weights": self.weights, "context_lens": self.lens,
            "block_tables": self.table, "max_model_len": self.columns,
        }  # fmt: skip
        return fp8_paged_mqa_logits(**{**arguments, **changes})

    def judge(self, actual: Tensor) -> None:
        assert (tuple(actual.shape), actual.dtype) == (self.expected.shape, torch.float32)
        seen = np.isfinite(self.expected)
        assert (np.isneginf(actual.numpy()) == ~seen).all(), "-inf exactly after the visible entries"
        hold_values(actual[torch.from_numpy(seen)], Formula(self.expected[seen], self.errors[seen]), torch.float32, "")


@pytest.mark.parametrize("dialect", Fp8Format)
@pytest.mark.parametrize("gap", [0, 4608])
def test_g23_paged_logits_equal_the_oracle_with_a_length_for_each_token(gap: int, dialect: Fp8Format) -> None:
    # L = 5, n = 2: (L - n + j + 1) // 4 is 1, 1 and not 0, 1
    scene = Scene([[1, 1], [0, 1], [64, 65], [130, 130], [0, 0]], gap=gap, dialect=dialect)

    scene.judge(scene.run())


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_one_token_a_request_may_have_lens_of_one_or_two_dims(shape: tuple[int, ...]) -> None:
    scene = Scene(np.array([5, 0, 150]).reshape(shape))

    scene.judge(scene.run())


@pytest.mark.parametrize("lens", [[8, 9, 3], [[8], [9], [3]]])
def test_lens_of_requests_are_refused_for_several_tokens(lens: Any) -> None:
    scene = Scene([[8, 8], [8, 9], [3, 3]])

    with pytest.raises(ArgumentError, match=r"context_lens: expected \[3, 2\], a length for each token") as caught:
        scene.run(context_lens=torch.tensor(lens, dtype=torch.int32))
    assert "(position + 1) // ratio" in str(caught.value)


def test_negative_lens_are_none_and_weights_have_a_row_for_each_token() -> None:
    scene = Scene([[-3, 2], [-1, -1]])

    scene.judge(scene.run())
    with pytest.raises(ArgumentError, match="weights"):
        scene.run(weights=scene.weights[:2])
    with pytest.raises(ArgumentError, match=r"q: expected torch.float8_e4m3fn or torch.float8_e4m3fnuz"):
        scene.run(q=scene.q.float())


def test_raw_tensors_of_both_shapes_are_pages() -> None:
    scene = Scene([[70, 71], [3, 4]], gap=4608)
    raw = scene.book.cache.tensor

    for tensor in (raw, raw[:, :, None]):
        assert torch.equal(scene.run(kv_cache=tensor), scene.run())


def test_bytes_that_no_entry_has_and_blocks_that_do_not_exist_have_no_effect() -> None:
    scene = Scene([[130, 131], [20, 21]])
    expected = scene.run()
    for byte in (0x00, 0x7F):
        cache = PagedKVCache(scene.book.cache.tensor.clone(), scene.book.cache.layout)
        named = {int(s) for r, n in enumerate((131, 21)) for s in scene.pages.slots(r, range(n))}
        unused = [slot for slot in range(cache.capacity) if slot not in named]
        for name in ("nope", "scale"):
            region = cache.region(name).view(torch.uint8)
            region[[s // PAGE for s in unused], [s % PAGE for s in unused]] = byte
        assert torch.equal(scene.run(kv_cache=cache), expected)
    for bad in (-1, scene.pages.count, 2**31 - 1):
        table = scene.table.clone()
        table[0, 1] = bad
        actual = scene.run(block_tables=table)
        assert torch.isneginf(actual[:2, 64:128]).all()
        assert torch.equal(actual[:2, :64], expected[:2, :64])
        assert torch.equal(actual[:2, 128:], expected[:2, 128:])


def test_a_nan_key_gives_nan_where_it_is_seen() -> None:
    scene = Scene([[10, 12]])
    slot = int(scene.pages.slots(0, [11])[0])
    scene.book.cache.region("scale")[slot // PAGE, slot % PAGE] = math.nan

    actual = scene.run()

    assert actual.isnan().nonzero().tolist() == [[1, 11]]


@pytest.mark.parametrize("dialect", Fp8Format)
def test_g23_gathered_logits_equal_the_oracle_between_the_bounds_of_each_row(dialect: Fp8Format) -> None:
    starts, ends = [0, 0, 30, 30, 7], [0, 30, 30, 77, 6]
    q, values = codes(drawn(1, 5, HEADS, DIM), dialect)
    k, keys = codes(drawn(2, 77, DIM), dialect)
    scales = 2.0 ** np.random.default_rng(3).integers(-9, 4, 77)
    weights = torch.from_numpy(drawn(4, 5, HEADS)).float()
    scales32 = torch.from_numpy(scales).float()

    bounds = (torch.tensor(row, dtype=torch.int32) for row in (starts, ends))
    actual = fp8_mqa_logits(q, (k, scales32), weights, *bounds)

    assert (tuple(actual.shape), actual.dtype) == ((5, 77), torch.float32)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        seen = range(start, max(end, start))
        formula = values[row], weights[row].double().numpy(), (keys * scales[:, None])[seen]
        expected = Formula(oracle_layer.index_scores(*formula), score_errors(*formula))
        assert torch.isneginf(actual[row]).sum() == 77 - len(seen)
        hold_values(actual[row, start : max(end, start)], expected, torch.float32, "")


def test_gathered_logits_ask_for_fp8_queries() -> None:
    k, _ = codes(drawn(2, 3, DIM))
    bounds = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)

    with pytest.raises(ArgumentError, match=r"q: expected torch\.float8_e4m3fn"):
        fp8_mqa_logits(torch.zeros(1, HEADS, DIM), (k, torch.ones(3)), torch.ones(1, HEADS), *bounds)


# products


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_g24_a_rows_bits_do_not_depend_on_how_many_rows_there_are_nor_on_its_place(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x = torch.from_numpy(drawn(1, 70, 515)).to(dtype)
    weight = torch.from_numpy(drawn(2, 24, 515)).to(weight_dtype)
    whole = batch_invariant_linear(x, weight)

    for rows in (range(1), range(1, 2), range(31), range(32), range(3, 36), range(69, 70), range(69, -1, -1)):
        picked = list(rows)
        assert torch.equal(batch_invariant_linear(x[picked], weight), whole[picked])
    np.testing.assert_allclose(whole, linear(x, weight), rtol=1e-4, atol=1e-4)


def test_products_of_any_shape_and_of_no_rows() -> None:
    x, weight = torch.from_numpy(drawn(1, 2, 3, 16)).float(), torch.from_numpy(drawn(2, 5, 16)).float()

    assert batch_invariant_linear(x, weight).shape == (2, 3, 5)
    assert torch.equal(batch_invariant_linear(x, weight)[1, 2], batch_invariant_linear(x[1, 2:], weight)[0])
    assert batch_invariant_linear(x[:0], weight).shape == (0, 3, 5)
    other = batch_invariant_linear(x.transpose(0, 1), weight)
    assert torch.equal(other.transpose(0, 1), batch_invariant_linear(x, weight))

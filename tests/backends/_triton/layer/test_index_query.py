"""The kernel of the indexer's query gives the definition's bits, in every format and for values of any kind."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.indexer import query as index_query
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.torch_ops import indexer
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE, draw, seeded, strided
from tests.harness import bytes_of

FNUZ = Fp8Format.FNUZ
LAYOUTS = [
    KVCacheLayout.index_fp8(),
    KVCacheLayout.index_fp8(fp8_format=FNUZ),
    KVCacheLayout.index_fp8(29),
    KVCacheLayout.index_fp8(8),
    KVCacheLayout.index_mxfp4(),
    KVCacheLayout.index_mxfp4(96),
    KVCacheLayout.index_mxfp4(32),
    KVCacheLayout.rows(64, 64),
    KVCacheLayout.rows(21, 8),
    KVCacheLayout.rows(24, 8, dtype=torch.float32),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.fingerprint)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@attrs.define(eq=False, slots=False)
class Query:
    """One random call. Odd seeds put everything out of step with 16 bytes.

    rope: dims that rotate; 0 takes the layout's, or half of all.
    """

    layout: KVCacheLayout
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    heads: int = 0
    rope: int = 0

    def __attrs_post_init__(self) -> None:
        g, odd, dim = seeded(self.seed), self.seed % 2, self.layout.head_dim
        tokens, self.heads = draw(g, 1, 5), self.heads or draw(g, 1, 9)
        rope = self.rope or self.layout.rope_dim or dim // 4 * 2
        scale = torch.exp2(torch.randint(-30, 30, (tokens, self.heads, 1), generator=g).float())
        q = torch.randn(tokens, self.heads, dim, generator=g) * scale
        self.q = strided(q.to(self.dtype), odd)
        self.weights = strided(torch.randn(tokens, self.heads, generator=g).to(self.dtype), odd)
        self.table = strided(torch.randn(13, rope, generator=g), odd)
        self.positions = torch.randint(0, 13, (tokens,), generator=g).to(DEVICE)

    def run(self, step: Callable[..., IndexQuery] = index_query.indexer_q_rope_quant) -> IndexQuery:
        """The query that a step makes; its arguments must stay."""
        arguments = self.q, self.weights, self.positions, self.table
        copies = [tensor.clone() for tensor in arguments]
        query = step(*arguments, self.layout)
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(arguments, copies, strict=True))
        return query

    def check(self) -> None:
        """Fail unless all bits are the definition's."""
        same(self.run(), self.run(indexer.indexer_q_rope_quant))


def same(actual: IndexQuery, expected: IndexQuery) -> None:
    """Fail unless two queries have the same types, shapes and bits; one NaN is as good as another."""
    for name in ("values", "weights", "scales"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) is (b is None)
        if a is None or b is None:
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.is_floating_point():
            number = ~b.float().isnan()
            assert torch.equal(number, ~a.float().isnan())
            a, b = (tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype)[number] for tensor in (a, b))
        assert torch.equal(a, b)


@each_layout
@each_dtype
def test_queries_are_the_definition_s(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    for seed in range(3):
        Query(layout, dtype, seed).check()


@pytest.mark.parametrize("rope", [2, 6, 16, 64, 126, 128])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4], LAYOUTS[7]], ids=lambda layout: layout.name)
def test_any_trailing_dims_rotate(layout: KVCacheLayout, rope: int) -> None:
    Query(layout, rope=rope, seed=rope).check()


@pytest.mark.parametrize("heads", [1, 31, 33, 64, 65])
def test_any_number_of_heads_is_served(heads: int) -> None:
    for layout in (LAYOUTS[0], LAYOUTS[4]):
        Query(layout, heads=heads, seed=heads).check()


def test_q_may_be_part_of_a_larger_tensor() -> None:
    query = Query(LAYOUTS[0], heads=4, seed=2)
    for wide in (query.q.new_full((5, 9, 3 * 128), nan), query.q.new_full((9, 5, 3 * 128), nan).transpose(0, 1)):
        part = wide[: len(query.q), 2:6, 128:256]
        part.copy_(query.q)
        moved = attrs.evolve(query, heads=4, seed=2)
        moved.q = part

        same(moved.run(), query.run())


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "below the floor": lambda x: x * 1e-30,
    "largest": lambda x: x.sign() * 3.3e38,
    "spread over 60 octaves": lambda x: x * torch.exp2(torch.linspace(-30, 30, x.shape[-1], device=x.device)),
    "negative zero": lambda x: -torch.zeros_like(x),
    "infinite": lambda x: torch.where(x > 2, inf, x),
    "NaN": lambda x: torch.where(x > 2, nan, x),
    "one NaN": lambda x: x.index_fill(-1, torch.tensor([5], device=x.device), nan),
}


@pytest.mark.parametrize("values", VALUES)
@each_dtype
def test_values_of_any_size_are_quantised_as_in_the_definition(values: str, dtype: torch.dtype) -> None:
    for layout in (LAYOUTS[0], LAYOUTS[1], LAYOUTS[4], LAYOUTS[7]):
        query = Query(layout, dtype, heads=9)
        query.q = VALUES[values](torch.randn(3, 9, 128, generator=seeded(7)).to(DEVICE)).to(dtype)
        query.weights = torch.randn(3, 9, generator=seeded(8)).to(DEVICE)
        query.positions = torch.tensor([0, 5, 12], device=DEVICE)
        query.check()


def test_a_nan_reaches_its_own_group_of_codes_and_no_other() -> None:
    for layout, group in ((LAYOUTS[4], 32), (LAYOUTS[0], 1), (LAYOUTS[7], 1)):
        query = Query(layout, heads=2, seed=4)
        clean = query.run().rows(slice(None))
        query.q[0, 1, 3] = nan
        spoilt = query.run().rows(slice(None))
        hit = torch.zeros_like(spoilt, dtype=torch.bool)
        hit[0, 1, 3 // group * group : 3 // group * group + group] = True

        assert torch.equal(spoilt.isnan(), hit)
        assert layout.fp8_format or torch.equal(spoilt[~hit], clean[~hit])
        others = hit.flatten(2).any(-1)
        assert torch.equal(spoilt[~others], clean[~others])


def all_bf16() -> Tensor:
    """Bit patterns that are no NaN."""
    values = torch.arange(2**16, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    values = values[~values.isnan()]
    # interpreted, subnormal numbers of bf16 change when they are read
    return values[(values.abs() >= 2.0**-126) | (values == 0)] if INTERPRETED else values


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [LAYOUTS[6], KVCacheLayout.index_fp8(32)], ids=lambda layout: layout.name)
@pytest.mark.parametrize("factor", [1.0, 0.0], ids=["alone", "beside the largest code"])
def test_every_bf16_value_gets_the_definition_s_code(layout: KVCacheLayout, factor: float) -> None:
    values = all_bf16()
    q = torch.zeros(len(values), 1, 32)
    q[:, 0, 3] = values
    if not factor:
        q[:, 0, 0] = layout.fp8_max
        q = q[values.abs() <= layout.fp8_max]
    q = torch.nn.functional.pad(q[:, 0], (0, 0, 0, -len(q) % 512)).view(-1, 512, 32)
    query = Query(layout, rope=2)
    query.q, query.weights = q.bfloat16().to(DEVICE), torch.ones(q.shape[:2], device=DEVICE)
    query.positions = torch.zeros(len(q), dtype=torch.int64, device=DEVICE)
    query.check()


def test_no_tokens_make_an_empty_query() -> None:
    for layout in LAYOUTS:
        query = Query(layout)
        query.q, query.weights, query.positions = query.q[:0], query.weights[:0], query.positions[:0]
        query.check()


def test_garbage_positions_of_padding_rows_read_no_memory_after_the_table() -> None:
    query = Query(LAYOUTS[0], seed=2)
    for garbage, row in ((2**62, 12), (-(2**62), 0)):
        query.positions.fill_(garbage)
        wild = query.run()
        query.positions.fill_(row)

        same(wild, query.run())


def test_bits_of_a_token_depend_on_no_other_token() -> None:
    for layout in (LAYOUTS[0], LAYOUTS[4]):
        query = Query(layout, seed=6, heads=40)
        together = query.run()
        for token in range(len(query.q)):
            single = attrs.evolve(query)
            single.q, single.weights, single.positions, single.table = (
                query.q[token:][:1], query.weights[token:][:1], query.positions[token:][:1], query.table
            )  # fmt: skip
            alone = single.run()

            assert torch.equal(bytes_of(alone.values), bytes_of(together.values[token:][:1]))
            assert torch.equal(alone.weights, together.weights[token:][:1])


def test_an_unreadable_stride_is_refused_by_name() -> None:
    query = Query(LAYOUTS[0], heads=3)
    query.q = torch.zeros(2, 3, 256, device=DEVICE)[..., ::2]
    with pytest.raises(ArgumentError, match="q: "):
        query.run()


@each_layout
@each_dtype
def test_warm_up_foresees_every_form_that_is_launched(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    for seed in range(2):
        query = Query(layout, dtype, seed, heads=3)
        with observed() as seen:
            query.run()
        facts = layout, 3, query.table.shape[1], dtype
        known = set(index_query.variants(*facts, (torch.bfloat16, torch.float32), aligned_rows=False))
        usual = set(index_query.variants(*facts, (dtype,)))

        assert set(seen) <= known
        assert usual <= known
        assert seed or set(seen) <= usual

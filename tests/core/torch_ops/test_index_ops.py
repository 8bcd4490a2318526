"""Index arithmetic and the builder against plain Python: one loop a token, from the formulas of the field."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.cache.selected_keys import ChunkTokens
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, CompressedMetadata
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.core.torch_ops.selection import select_all
from dsv4attn.testing.kit.random_step import StepFixture
from tests.core.attention.strategies import examples, scenarios, searched
from tests.harness import BUILDER_OPS, all_builder_ops

INT = torch.int32


def built(scenario: StepFixture, builder_ops: str) -> AttentionMetadata:
    """Metadata of a scenario's batch."""
    builder = MetadataBuilder(
        scenario.geometry,
        scenario.limits,
        swa_block_size=scenario.swa_block_size,
        compressed_block_tokens=scenario.compressed_block_tokens,
        builder_ops=BUILDER_OPS[builder_ops],
    )
    return builder.build_for(scenario.batch(), [scenario.kind])[scenario.kind]


def compressed_of(metadata: AttentionMetadata) -> CompressedMetadata:
    assert metadata.compressed is not None
    return metadata.compressed


def slot(table: Sequence[int], record: int, block_size: int) -> int:
    return int(table[record // block_size]) * block_size + record % block_size


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


# the builder


@all_builder_ops
@given(scenario=scenarios(dead_block=-1))
@examples(100)
def test_window_metadata_equals_the_formulas(scenario: StepFixture, builder_ops: str) -> None:
    swa = built(scenario, builder_ops).swa
    batch, window, size = scenario.batch(), scenario.layer.window, scenario.swa_block_size
    rows, lens = [], []
    for token in scenario.tokens:
        first = max(token.position - window + 1, 0)
        seen = range(first, token.position + 1) if token.valid else range(0)
        slots = [slot(batch.block_table[token.request].tolist(), p, size) for p in seen]
        rows.append(slots + [-1] * (window - len(slots)))
        lens.append(len(slots))
    decodes = [i for i, (_, n, *_) in enumerate(scenario.requests) if n <= scenario.limits.decode_threshold]
    decode_tokens = sum(n for _, n, *_ in scenario.requests[: len(decodes)])

    assert decodes == list(range(swa.num_decodes))
    assert (swa.num_decode_tokens, swa.num_prefill_tokens) == (decode_tokens, len(rows) - decode_tokens)
    assert torch.cat([swa.decode_swa_indices, swa.prefill_swa_indices])[:, 0].tolist() == rows
    assert torch.cat([swa.decode_swa_lens, swa.prefill_swa_lens]).tolist() == lens
    assert swa.token_to_req_indices.tolist() == [token.request if token.valid else -1 for token in scenario.tokens]
    assert swa.is_valid_token.tolist() == [token.valid for token in scenario.tokens]
    prefills = scenario.requests[swa.num_decodes :]
    assert swa.prefill_gather_lens.tolist() == [n + min(context, window - 1) for context, n, *_ in prefills]
    assert swa.prefill_seq_lens.tolist() == [context + n for context, n, *_ in prefills]
    assert swa.prefill_query_lens_cpu.tolist() == [n for _, n, *_ in prefills]
    assert swa.max_query_len == max((n for _, n, *_ in scenario.requests), default=0)
    assert swa.max_seq_len == max((context + n for context, n, *_ in scenario.requests), default=0)


@all_builder_ops
@given(scenario=scenarios(kind=LayerKind.CSA), kind=st.sampled_from(["c4a", "c128a"]))
@examples(75)
def test_compressed_metadata_equals_the_formulas(scenario: StepFixture, kind: str, builder_ops: str) -> None:
    scenario = StepFixture(
        kind=kind,
        requests=scenario.requests,
        geometry=scenario.geometry,
        num_speculative_tokens=scenario.num_speculative_tokens,
        compressed_block_tokens=scenario.compressed_block_tokens,
        extra_rows=scenario.extra_rows,
        seed=scenario.seed,
    )
    ratio = scenario.layer.compress_ratio
    per_block = scenario.compressed_block_tokens // ratio
    metadata, batch = built(scenario, builder_ops), scenario.batch()
    compressed = compressed_of(metadata)
    assert batch.compressed_block_table is not None
    tables = batch.compressed_block_table.tolist()
    visible = [(t.position + 1) // ratio if t.valid else 0 for t in scenario.tokens]
    slots = [
        slot(tables[t.request], t.position // ratio, per_block) if t.valid and (t.position + 1) % ratio == 0 else -1
        for t in scenario.tokens
    ]

    assert compressed.compressed_lens.tolist() == visible
    assert compressed.slot_mapping.tolist() == slots + [-1] * (scenario.extra_rows // 2)
    assert compressed.records_per_block == per_block
    table, lens = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
    if kind == "c4a":
        assert table is None
        return
    assert table is not None
    assert lens is not None
    assert table.shape[2] % 128 == 0
    assert table.shape[2] >= max(visible, default=0)
    for token, row, n, count in zip(scenario.tokens, table[:, 0].tolist(), lens.tolist(), visible, strict=False):
        assert n == count
        assert row[:n] == [slot(tables[token.request], e, per_block) for e in range(n)]
        assert set(row[n:]) <= {-1}
    local = compressed.c128a_prefill_topk_indices
    assert local is not None
    assert local.shape == (metadata.swa.num_prefill_tokens, table.shape[2])
    assert all(row == list(range(table.shape[2])) for row in local.tolist())


@all_builder_ops
@pytest.mark.parametrize(
    ("context", "count", "gather_len", "windows", "entries"),
    [
        (1000, 512, 639, {1000: (873, 128), 1511: (1384, 128)}, {1000: (250, 7), 1511: (378, 11)}),
        (1509, 3, 130, {1509: (1382, 128)}, {1509: (377, 11), 1510: (377, 11), 1511: (378, 11)}),
        (0, 1, 1, {0: (0, 1)}, {0: (0, 0)}),
        (0, 512, 512, {0: (0, 1), 127: (0, 128), 128: (1, 128)}, {3: (1, 0), 126: (31, 0), 127: (32, 1)}),
    ],
)
def test_the_worked_example_of_flash(
    context: int,
    count: int,
    gather_len: int,
    windows: dict[int, tuple[int, int]],
    entries: dict[int, tuple[int, int]],
    builder_ops: str,
) -> None:
    """Flash, blocks of 64 and 256: windows as (first position, length), entries of c4a and c128a."""
    flash, last = ModelGeometry.preset("flash"), context + count
    builder = MetadataBuilder(flash, Limits(1, 512, 2048), builder_ops=BUILDER_OPS[builder_ops])
    table = torch.arange(24, dtype=INT)[None]  # block i stands in page i, so a slot is a position
    seq_len, starts = int32(last), int32(0, count)
    batch = Batch(
        num_reqs=1,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_len,
        seq_lens_cpu=seq_len,
        slot_mapping=torch.arange(context, last),
        block_table=table,
        compressed_block_table=table,
    )
    metadata = builder.build_for(batch, list(LayerKind))
    swa = metadata[LayerKind.SWA].swa
    rows = torch.cat([swa.decode_swa_indices, swa.prefill_swa_indices])[:, 0]
    lens = torch.cat([swa.decode_swa_lens, swa.prefill_swa_lens])

    if count > 1:
        assert swa.prefill_gather_lens.tolist() == [gather_len]
        assert int(swa.prefill_seq_lens[0] - swa.prefill_gather_lens[0]) == max(context - 127, 0)
    for position, (first, n) in windows.items():
        row = rows[position - context].tolist()
        assert row == [*range(first, first + n)] + [-1] * (128 - n)
        assert lens[position - context] == n
    for position, (light, heavy) in entries.items():
        assert compressed_of(metadata[LayerKind.CSA]).compressed_lens[position - context] == light
        assert compressed_of(metadata[LayerKind.HCA]).compressed_lens[position - context] == heavy


def test_token_maps_skip_requests_without_tokens_and_give_padding_no_request() -> None:
    starts = int32(0, 0, 3, 3, 5, 5)

    assert indices.token_to_req_indices(starts, 8).tolist() == [1, 1, 1, 3, 3, -1, -1, -1]
    assert indices.token_to_req_indices(int32(2, 4), 4).tolist() == [-1, -1, 0, 0]
    assert indices.token_to_req_indices(int32(0), 0).tolist() == []


@all_builder_ops
def test_buffers_keep_their_addresses_and_their_tails_are_cleared(builder_ops: str) -> None:
    geometry, limits, made_by = StepFixture(requests=[]).geometry, Limits(6, 64, 256), BUILDER_OPS[builder_ops]
    builder = MetadataBuilder(geometry, limits, swa_block_size=4, compressed_block_tokens=32, builder_ops=made_by)
    big = StepFixture(kind="c128a", requests=[(90, 1), (60, 1), (33, 1), (10, 12), (0, 9)])
    small = StepFixture(kind="c128a", requests=[(40, 1), (0, 5)])

    def build(scenario: StepFixture) -> AttentionMetadata:
        return builder.build_for(scenario.batch(), [LayerKind.HCA])[LayerKind.HCA]

    def addresses(metadata: AttentionMetadata) -> list[int]:
        swa, compressed = metadata.swa, compressed_of(metadata)
        tensors = [
            swa.decode_swa_indices,
            swa.decode_swa_lens,
            swa.prefill_swa_indices,
            swa.prefill_swa_lens,
            swa.is_valid_token,
            swa.token_to_req_indices,
            swa.prefill_gather_lens,
            compressed.slot_mapping,
            compressed.compressed_lens,
            compressed.c128a_global_decode_topk_indices,
            compressed.c128a_decode_topk_lens,
        ]
        return [t.data_ptr() for t in tensors if t is not None]

    first = build(big)
    old_addresses, whole_lens = addresses(first), first.swa.decode_swa_lens.as_strided((6,), (1,))
    table_lens = compressed_of(first).c128a_decode_topk_lens
    assert table_lens is not None
    assert (whole_lens[:3] > 0).all()

    assert addresses(build(small)) == old_addresses
    assert whole_lens.tolist() == [8, 0, 0, 0, 0, 0], "rows past the batch attend to nothing in a captured graph"
    assert table_lens.as_strided((6,), (1,)).tolist() == [2, 0, 0, 0, 0, 0]
    slots = compressed_of(build(small)).slot_mapping
    assert slots.as_strided((64,), (1,))[6:].tolist() == [-1] * 58


# translation, combination, packing


def random_topk(draw: st.DrawFn, rows: int, width: int, visible: Sequence[int]) -> list[list[int]]:
    """Distinct entry numbers, some absent, some not visible, in any order."""
    absent = st.sampled_from([-1, -7, 2**31 - 1, 0x7FC00000])
    rows_of_topk = []
    for row in range(rows):
        distinct = draw(st.lists(st.integers(0, visible[row] + 3), unique=True, max_size=width))
        rows_of_topk.append([*distinct, *(draw(absent) for _ in range(width - len(distinct)))])
        rows_of_topk[-1] = draw(st.permutations(rows_of_topk[-1]))
    return rows_of_topk


@searched(150, data=st.data())
def test_translation_equals_the_formula(data: st.DataObject) -> None:
    draw = data.draw
    rows, width, size = draw(st.integers(0, 5)), draw(st.integers(0, 6)), draw(st.sampled_from([1, 2, 8]))
    visible = [draw(st.integers(0, 12)) for _ in range(rows)]
    request = [draw(st.integers(0, 2)) for _ in range(rows)]
    table = [draw(st.permutations(range(14))) for _ in range(3)]
    topk = draw(st.composite(random_topk)(rows, width, visible))
    expected = [[slot(table[request[t]], e, size) if 0 <= e < visible[t] else -1 for e in topk[t]] for t in range(rows)]
    wide = torch.full((rows, width + 3), 77, dtype=INT)  # any row stride
    wide[:, :width] = torch.tensor(topk, dtype=INT).view(rows, width)
    slots, lens = torch.full((rows, width), 99, dtype=INT), torch.full((rows,), 99, dtype=INT)

    indices.compute_global_topk_indices_and_lens(
        wide[:, :width], int32(*visible), int32(*request), torch.tensor(table, dtype=INT), size, out=(slots, lens)
    )

    assert slots.tolist() == expected
    for row, n in zip(expected, lens.tolist(), strict=True):
        assert n == max((c + 1 for c, s in enumerate(row) if s >= 0), default=0), "no entry past the length"


@searched(150, data=st.data(), ratio=st.sampled_from([1, 2, 4, 16]), window=st.sampled_from([1, 3, 8]))
def test_combination_equals_the_formula(data: st.DataObject, ratio: int, window: int) -> None:
    """Rows M*b + entry, then M*b + N + (position - gather start); what names no visible entry is left out."""
    draw = data.draw
    pairs = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=4))
    seq_lens, counts = [context + n for context, n in pairs], [n for _, n in pairs]
    gather_lens = [n + min(context, window - 1) if n else 0 for context, n in pairs]
    base = draw(st.integers(0, 9))
    starts = [base + sum(counts[:i]) for i in range(len(counts) + 1)]
    tokens = [(b, context + j) for b, (context, n) in enumerate(pairs) for j in range(n)]
    valid = [draw(st.integers(0, 4)) > 0 for _ in tokens]
    visible = [(p + 1) // ratio if ratio > 1 and ok else 0 for (_, p), ok in zip(tokens, valid, strict=True)]
    width = draw(st.integers(1, 6)) if ratio > 1 else 0
    topk = draw(st.composite(random_topk)(len(tokens), width, visible))
    offset = max(n // ratio for n in seq_lens) if ratio > 1 else 0
    rows, columns = offset + max(gather_lens), width + window + draw(st.integers(0, 3))
    expected = []
    for (b, p), ok, seen, chosen in zip(tokens, valid, visible, topk, strict=True):
        row = [rows * b + e for e in chosen if 0 <= e < seen]
        gather_start = seq_lens[b] - gather_lens[b]
        row += [rows * b + offset + w - gather_start for w in range(max(p - window + 1, 0), p + 1) if ok]
        expected.append((row + [-1] * (columns - len(row)), len(row)))
    out = torch.full((len(tokens), columns), 99, dtype=INT), torch.full((len(tokens),), 99, dtype=INT)

    indices.combine_topk_swa_indices(
        torch.tensor(topk, dtype=INT).view(len(tokens), width) if ratio > 1 else None,
        ChunkTokens(
            int32(*seq_lens),
            int32(*gather_lens),
            int32(*starts),
            int32(*visible) if ratio > 1 else None,
            torch.tensor(valid, dtype=torch.bool),
            window=window,
            topk=width,
            rows=rows,
            offset=offset,
        ),
        out=out,
    )

    assert list(zip(out[0].tolist(), out[1].tolist(), strict=True)) == expected


def test_select_all_takes_rows_and_columns_of_a_larger_buffer() -> None:
    buffer = torch.full((5, 6), 9, dtype=INT)

    select_all(torch.tensor([0, 2, 4, 7], dtype=INT), buffer[:4, :4])

    assert buffer[:4, :4].tolist() == [[-1] * 4, [0, 1, -1, -1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert (buffer[4] == 9).all()
    assert (buffer[:, 4:] == 9).all()

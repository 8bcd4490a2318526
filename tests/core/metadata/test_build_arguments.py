"""Arguments of a build: slot mappings that are too short or stale, and kinds given by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, NoForwardContextError, UnknownNameError
from tests.core.metadata.test_metadata import GOOD, buffers, builder, refused
from tests.harness import BUILDER_OPS, C4A, C128A, I32, SWA, all_builder_ops, batch_of, bound_layer, metadata_of


@all_builder_ops
@pytest.mark.parametrize("slots", [0, 1, 2])
def test_a_slot_mapping_that_leaves_tokens_out_is_refused(slots: int, builder_ops: str) -> None:
    said = rf"^slot_mapping: expected at least 3 elements, one for each .*, got {slots} elements -> .*-1 for"
    for validate in (True, False):
        build = builder(builder_ops=BUILDER_OPS[builder_ops], validate=validate)
        refused(build, lambda: batch_of([1, 2], [5, 9], slot_mapping=torch.arange(slots)), said)


@all_builder_ops
def test_the_step_itself_takes_tokens_past_the_slot_mapping_for_padding(builder_ops: str) -> None:
    request, valid = torch.full((3,), 7, dtype=I32), torch.ones(3, dtype=torch.bool)
    BUILDER_OPS[builder_ops].build_token_maps(
        torch.tensor([0, 1, 3], dtype=I32), torch.tensor([0]), out=(request, valid)
    )

    assert request.tolist() == [0, -1, -1]
    assert valid.tolist() == [True, False, False]


@all_builder_ops
def test_stale_slots_after_the_tokens_are_refused_where_values_are_checked(builder_ops: str) -> None:
    def build(last: int) -> Batch:
        return batch_of([1, 2], [5, 9], slot_mapping=torch.tensor([4, 263, 264, -1, last]))

    said = r"^slot_mapping\[4\]: expected a negative slot past the 3 tokens of the batch, got 0 -> fill .* with -1"
    refused(builder(builder_ops=BUILDER_OPS[builder_ops], validate=True), lambda: build(0), said)
    assert builder(builder_ops=BUILDER_OPS[builder_ops], validate=True).build(build(-1)).num_actual_tokens == 3
    assert builder(builder_ops=BUILDER_OPS[builder_ops], validate=False).build(build(0)).num_actual_tokens == 3


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("block_table", {"slot_mapping": torch.tensor([4, 4, 5])}, "slot_mapping: expected each key of .*slot 4 for"),
        (
            "compressed_block_table",
            {},
            "compressed_block_table: expected each entry .*requests 0 and 1 -> requests may",
        ),
        ("c4a_state_block_table", {}, "Batch.c4a_state_block_table: expected each state .* in a slot of its own, got"),
    ],
)
def test_requests_that_write_the_same_slots_are_refused(name: str, change: dict[str, Any], said: str) -> None:
    lens = {"block_table": [5, 6]}.get(name, [4, 5])  # the last token of an entry of four is token 3
    batch = batch_of([1, 2], lens)
    tables = [name, "block_table"] if name == "block_table" else [name]
    for table_name in tables:
        table = getattr(batch, table_name)
        if table is None:  # of states, which these batches do not have
            table = torch.arange(2 * 16, dtype=I32).reshape(2, 16)
        shared = table.clone()
        shared[1] = shared[0]
        setattr(batch, table_name, shared)
    for field, value in change.items():
        setattr(batch, field, value)

    refused(builder(), lambda: batch, f"^{said}")
    builder(validate=False).build_for(batch, ["swa", "c4a"])


def test_requests_may_share_a_page_of_which_one_stores_no_token() -> None:
    batch = batch_of([9, 9], [36, 36], compressed_block_table=torch.tensor([[0, 1], [0, 2]], dtype=I32))
    batch.slot_mapping[9:14] = -1  # tokens up to 31, the last one whose entry is in the shared page

    compressed = builder().build_for(batch, ["c4a"])[C4A].compressed
    assert compressed is not None
    assert compressed.slot_mapping[compressed.slot_mapping >= 0].tolist() == [6, 7, 8, 16]
    batch.slot_mapping[13] = batch.block_table[1, 7] * 4 + 3
    refused(builder(), lambda: batch, r"^compressed_block_table: expected each entry .*slot 7 for requests 0 and 1")


def test_metadata_of_an_earlier_build_are_refused_but_those_of_a_capture() -> None:
    build = builder()
    other = evolve(GOOD)
    first, captured = build.build_for(GOOD, ["swa"]), build.build_for(other, ["swa"], full_width=True)
    part, last = build.build_for(other, ["swa"]), build.build_for(other, ["c4a"])  # for one batch, kind by kind

    def found(metadata: dict[LayerKind, AttentionMetadata], *, as_captured: bool = False) -> AttentionMetadata | None:
        with set_forward_context(metadata, as_captured=as_captured) as context:
            return context.for_layer("l", "l.swa", SWA)

    for metadata in (captured, part | last):
        assert found(metadata) is metadata[SWA]
    with pytest.raises(ArgumentError, match=r"^attn_metadata: expected metadata of .* last build, .* -> build the met"):
        found(first)
    assert found(first, as_captured=True) is first[SWA]
    by_prefix: dict[str, Any] = {"l.swa": first[SWA].swa}
    with pytest.raises(ArgumentError, match="of an earlier one, whose tensors hold another step by now"):
        found(by_prefix)  # type: ignore[arg-type]


def test_counts_may_be_integers_of_numpy() -> None:
    counts: list[Any] = [np.int64(2), np.int32(8), 64]

    assert Limits(*counts) == Limits(2, 8, 64)


def test_a_builder_takes_kinds_by_name_and_answers_by_kind() -> None:
    build = builder()
    named, meant = build.build_for(GOOD, ["c128a", "swa"]), build.build_for(GOOD, iter([C128A, SWA]))

    assert list(named) == list(meant) == [C128A, SWA]
    assert all(type(kind) is LayerKind for kind in named)
    metadata = named[C128A].compressed
    assert metadata is not None
    assert metadata.kind is C128A
    part = build.build_compressed(GOOD, named[SWA].swa, "c128a")  # type: ignore[arg-type]
    assert part.kind is C128A
    assert part.c128a_decode_topk_lens is not None


@pytest.mark.parametrize(
    ("kinds", "error", "said"),
    [
        ("swa", ArgumentError, r"^kinds: expected a list of kinds, got 'swa' -> pass a list, \['c4a'\]"),
        (SWA, ArgumentError, r"^kinds: expected a list of kinds, got 'swa' -> pass a list"),
        (None, ArgumentError, r"^kinds: expected a list of kinds, got None -> pass a list"),
        (["swa", "c5a"], UnknownNameError, r"^unknown layer kind 'c5a'; did you mean .* \(known: c128a, c4a, swa\)"),
        ([None], UnknownNameError, r"^unknown layer kind 'None' \(known: c128a, c4a, swa\)"),
    ],
)
def test_a_builder_refuses_what_is_no_list_of_kinds(kinds: Any, error: type[Exception], said: str) -> None:
    build = builder()
    for tensor in buffers(vars(build)):
        tensor.fill_(1)
    with pytest.raises(error, match=said):
        build.build_for(GOOD, kinds)

    assert all(bool((tensor == 1).all()) for tensor in buffers(vars(build)))


@pytest.mark.parametrize("kind", LayerKind)
def test_a_step_takes_metadata_by_the_name_of_a_kind(kind: LayerKind) -> None:
    case = bound_layer(kind)
    expected = case.run()
    with set_forward_context(case.metadata) as context:
        both = context.for_layer(case.layer.prefix, case.layer.swa_prefix, kind)
    assert both is not None
    case.metadata = {kind.value: both}  # type: ignore[dict-item]
    assert torch.equal(case.run(), expected)


def test_a_step_without_metadata_of_a_layer_names_the_kinds_that_came_by_name() -> None:
    case = bound_layer(C4A)
    case.metadata = {"swa": metadata_of(SWA)}  # type: ignore[dict-item]
    with pytest.raises(NoForwardContextError, match=r"expected metadata of c4a layers, got metadata of: swa -> "):
        case.run()


def test_a_step_refuses_metadata_of_a_kind_that_does_not_exist() -> None:
    metadata: dict[str, AttentionMetadata] = {"swaa": metadata_of(SWA)}
    with (
        pytest.raises(UnknownNameError, match=r"^unknown layer kind in attn_metadata 'swaa'; did you mean 'swa'\?"),
        set_forward_context(metadata),
    ):
        pytest.fail("a step ran")

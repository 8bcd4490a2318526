"""FlashMLA's interface: FlashMLA's own metadata objects, batch invariance, and the effect of its newest switches."""

from __future__ import annotations

import math
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch

from dsv4attn.compat import direct, flash_mla
from dsv4attn.compat.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from dsv4attn.core.contract.backend import Rank
from dsv4attn.errors import ArgumentError, NoBackendError
from dsv4attn.selection import load_backend
from tests.backends.built_in import of_rank
from tests.compat.flash_mla_calls import S_Q, TOPK, B, H, decode_args, prefill_args, random

INT = torch.int32


def foreign(*fields: str) -> Any:
    """FlashMLA's object, with these fields of its `Config`: other classes, the same names."""
    config = make_dataclass("Config", fields)
    names = ("have_initialized", "config", "tile_scheduler_metadata", "num_splits")
    meta = make_dataclass("FlashMLASchedMeta", [(name, Any, None) for name in names])
    meta.Config = config  # type: ignore[attr-defined]
    return meta()


SHAPES: dict[str, Any] = {
    "b": B,
    "s_q": S_Q,
    "h_q": H,
    "page_block_size": 4,
    "h_k": 1,
    "causal": False,
    "is_fp8_kvcache": True,
}
SHAPES |= {"topk": TOPK, "extra_page_block_size": None, "extra_topk": None, "enable_batch_invariant": False}


def test_flash_mlas_own_metadata_is_taken_and_then_has_the_shapes_as_it_would_store_them() -> None:
    meta, plain = foreign(*SHAPES), flash_mla_with_kvcache(**decode_args())
    # planned ahead: `get_mla_decoding_metadata`
    meta.tile_scheduler_metadata = torch.ones(8, 8, dtype=INT)
    for _ in range(2):
        out, _ = flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta))
        assert torch.equal(out, plain[0])

    assert meta.have_initialized
    assert {name: getattr(meta.config, name) for name in SHAPES} == SHAPES
    with pytest.raises(ArgumentError, match=r"topk=8, got topk=4 -> take a new one"):
        flash_mla_with_kvcache(
            **decode_args(tile_scheduler_metadata=meta, indices=torch.zeros(B, S_Q, 4, dtype=torch.int32))
        )


def test_shapes_that_flash_mla_stored_are_compared_by_field_and_fields_of_other_releases_do_not_matter() -> None:
    fewer = {name: value for name, value in SHAPES.items() if name != "enable_batch_invariant"}
    for shapes in (SHAPES, fewer, {**SHAPES, "unknown": 3}):
        meta = foreign(*shapes)
        meta.have_initialized, meta.config = True, meta.Config(**shapes)
        stored = meta.config
        flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta))
        assert meta.config is stored
        with pytest.raises(ArgumentError, match=r"tile_scheduler_metadata: .* b=3, got b=2 -> "):
            flash_mla_with_kvcache(
                **decode_args(
                    tile_scheduler_metadata=meta,
                    q=random(2, S_Q, H, 512),
                    indices=torch.zeros(2, S_Q, TOPK, dtype=torch.int32),
                )
            )


def test_what_flash_mla_plans_ahead_is_nothing_here() -> None:
    meta, _ = get_mla_metadata()
    planned = get_mla_decoding_metadata(torch.zeros(B, dtype=INT), H, 1, H, is_fp8_kvcache=True, topk=TOPK)
    meta.tile_scheduler_metadata, meta.num_splits = planned

    out, _ = flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta))
    assert torch.equal(out, flash_mla_with_kvcache(**decode_args())[0])


@pytest.mark.parametrize("backend", [*of_rank(Rank.REFERENCE), *of_rank(Rank.GENERIC)])
def test_batch_invariant_bits_do_not_depend_on_the_batch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[dict[str, Any]] = []

    def loading(name: str, **options: Any) -> object:
        requested.append(options)
        return load_backend(name, **options)

    monkeypatch.setattr(direct, "_backend", loading)
    direct.plan.cache_clear()
    whole = decode_args(enable_batch_invariant=True)
    try:
        out, _ = flash_mla_with_kvcache(**whole, backend=backend)
        single = {**whole, "q": whole["q"][1:2], "indices": whole["indices"][1:2]}
        single["tile_scheduler_metadata"] = get_mla_metadata()[0]
        alone, _ = flash_mla_with_kvcache(**single, backend=backend)
        flash_mla_with_kvcache(**decode_args(), backend=backend)
    except NoBackendError as error:
        pytest.skip(str(error))
    finally:
        direct.plan.cache_clear()

    assert requested == [{"deterministic": True}, {}]
    assert torch.equal(out[1:2], alone)


def test_a_metadata_object_serves_calls_of_one_invariance() -> None:
    meta, _ = get_mla_metadata()
    flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta))

    with pytest.raises(ArgumentError, match="enable_batch_invariant=False, got enable_batch_invariant=True"):
        flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta, enable_batch_invariant=True))


def test_switches_between_flash_mlas_kernels_change_nothing() -> None:
    plain, (out, top, lse) = flash_mla_with_kvcache(**decode_args()), flash_mla_sparse_fwd(**prefill_args())

    assert flash_mla.has_legacy()
    for switches in ({"use_legacy": True}, {"kv_format": "V4", "use_legacy": True}, {"is_fp8_kvcache": None}):
        assert torch.equal(flash_mla_with_kvcache(**decode_args(**switches))[0], plain[0])
    for same in zip(flash_mla_sparse_fwd(**prefill_args(use_legacy=True)), (out, top, lse), strict=True):
        assert torch.equal(*same)


def test_statistics_come_in_either_base_or_not_at_all() -> None:
    indices = prefill_args()["indices"].clone()
    indices[0] = -1
    out, top, lse = flash_mla_sparse_fwd(**prefill_args(indices=indices))
    same, top_2, lse_2 = flash_mla_sparse_fwd(**prefill_args(indices=indices, return_log2_lse=True))
    none = flash_mla_sparse_fwd(**prefill_args(indices=indices, return_log2_lse=False))

    assert torch.equal(out, same)
    assert torch.equal(out, none[0])
    assert none[1:] == (None, None)
    assert bool((lse_2[0] == torch.inf).all())
    assert bool((top_2[0] == -torch.inf).all())
    torch.testing.assert_close(top_2[1:], top[1:] / math.log(2))
    torch.testing.assert_close(lse_2[1:], lse[1:] / math.log(2))
    empty = prefill_args(q=random(0, H, 512), indices=indices[:0], return_log2_lse=False)
    assert flash_mla_sparse_fwd(**empty)[1:] == (None, None)

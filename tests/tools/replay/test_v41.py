"""A replay of whole layers of DeepSeek-V4.1: those that own a compressed cache, of both ratios."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.layer_ops import EntryNorm, default_layer_ops
from dsv4attn.core.layer import indexer
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.tools.replay.report import as_text
from tests.harness_v41 import SMALL_V41
from tests.tools.replay.small import run

FLASH = ModelGeometry.preset("v4.1-flash")


def text_of(report: Any) -> str:
    """The report as printed with --verbose."""
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as captured:
        console.print(as_text(report, verbose=True))
    return captured.get()


@pytest.mark.matrix
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "bf16", "fp32"])
def test_layers_that_own_a_cache_pass(cache: str) -> None:
    report = run(geometry=SMALL_V41, cache=cache)

    assert report.ok
    assert [(x.kind, x.layers_in_model) for x in report.layers] == [("swa", 1), ("c4a r=2", 2), ("c4a r=1", 1)]
    for layer in report.layers[1:]:
        assert layer.check is not None
        assert layer.check.worst.selection is not None
        assert layer.check.worst.index_key is not None
    assert [layer.state_bytes_per_sequence > 0 for layer in report.layers] == [False, True, False]


@pytest.mark.matrix
def test_bytes_of_a_token_in_all_layers_are_printed() -> None:
    report = run(geometry=SMALL_V41)
    layout, index = KVCacheLayout.fp8_ds_mla(48, 16), KVCacheLayout.index_fp8(32)
    a_page = [layout.page_stride(n) + index.page_stride(n) for n in (128, 256)]

    assert report.kv_bytes_per_token == (2 * a_page[0] + a_page[1]) / 256
    assert SMALL_V41.entries_per_token == report.records_per_token == 2
    assert FLASH.entries_per_token == 2.5
    said = text_of(report)
    assert f"{report.kv_bytes_per_token:,.0f} bytes of KV per token of context, in all layers: 2 compressed" in said
    assert "4 layers read the compressed caches of others; such layers are not run" in said
    part = run(geometry=SMALL_V41, kinds=[LayerKind.SWA])
    assert "per token of context" not in text_of(part)


def own_first_token(*args: Any, **options: Any) -> torch.Tensor:
    """Weigh the window by the scores of its first token only: the mean of both."""
    kv, score, *rest = args
    return _LATENTS(kv, None if score is None else torch.zeros_like(score), *rest, **options)


def without_norm(x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, norm: EntryNorm, *rest: Any) -> None:
    """Leave out the norm of index keys."""
    _STORE(x, positions, slots, attrs.evolve(norm, weight=None), *rest)


_OPS = default_layer_ops()
_LATENTS, _STORE = _OPS.compress_latents, _OPS.norm_rope_store


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("step", "bug", "stage"),
    [("compress_latents", own_first_token, "entry"), ("norm_rope_store", without_norm, "index_key")],
)
def test_a_bug_is_named_by_its_stage(monkeypatch: pytest.MonkeyPatch, step: str, bug: Any, stage: str) -> None:
    monkeypatch.setattr("dsv4attn.core.contract.layer_ops._TORCH", (attrs.evolve(_OPS, **{step: bug}),) * 2)
    report = run(geometry=SMALL_V41)

    assert not report.ok
    check = report.layers[1].check
    assert check is not None
    assert stage in check.worst.beyond(check.tolerance)


def test_a_selection_of_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    select = indexer.Indexer.__call__

    def last(self: Any, *args: Any, **options: Any) -> None:
        select(self, *args, **options)
        args[7].copy_(args[7].roll(1, 0))

    monkeypatch.setattr(indexer.Indexer, "__call__", last)

    assert not run(geometry=SMALL_V41).ok

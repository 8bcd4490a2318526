"""FlashMLA's interface: the backend that computes, when it is asked, and the memory that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.compat import direct
from dsv4attn.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from dsv4attn.core.cache.selected_keys import GatheredKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, Capabilities, IndexForm, Phase
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.memory.workspace import WorkspaceManager, use_workspace
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.errors import NoBackendError, WorkspaceError
from dsv4attn.selection import Selection, resolve
from tests.compat.flash_mla_calls import S_Q, TOPK, B, H, cache_of, decode_args, prefill_args

INT = torch.int32


@pytest.fixture(autouse=True)
def _choices_are_made_anew() -> Iterator[None]:
    direct.forget_choices()
    yield
    direct.forget_choices()


def recorded_problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Problems that selection is asked about from now on."""
    problems: list[Problem] = []

    def recording(problem: Problem, **facts: Any) -> Selection:
        problems.append(problem)
        return resolve(problem, **facts)

    monkeypatch.setattr(direct, "resolve", recording)
    return problems


def test_selection_is_asked_once_for_each_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = recorded_problems(monkeypatch)
    for blocks in (6, 6, 9):
        flash_mla_with_kvcache(**decode_args(k_cache=cache_of(blocks=blocks)))
    assert len(problems) == 1
    extra = {"extra_k_cache": cache_of(2), "extra_indices_in_kvcache": torch.zeros(B, S_Q, 5, dtype=INT)}
    flash_mla_with_kvcache(**decode_args(**extra, attn_sink=torch.zeros(H)))
    flash_mla_sparse_fwd(**prefill_args())

    tokens, chunk, rows = problems
    assert (tokens.phase, tokens.swa.page_size, tokens.layer.window, tokens.compressed, tokens.sink) == (
        "decode",
        4,
        TOPK,
        None,
        False,
    )
    assert (chunk.topk, chunk.compressed, chunk.query_len, chunk.sink) == (5, CacheFacts(page_size=2), S_Q, True)
    assert (rows.phase, rows.layer.window, rows.layer.scale, rows.lse) == ("prefill", TOPK, 0.1, True)


def test_a_backend_that_only_reads_pages_is_asked_about_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "dsv4attn.toml"
    config.write_text('[options.reference]\nprefill_keys = "paged"\n', encoding="utf-8")
    monkeypatch.setenv("DSV4ATTN_CONFIG", str(config))
    problems = recorded_problems(monkeypatch)
    flash_mla_sparse_fwd(**prefill_args(backend="reference"))

    assert [problem.swa for problem in problems] == [CacheFacts(), CacheFacts("rows", "bfloat16", 1)]


def test_an_argument_wins_over_the_environment_and_both_are_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "decode=nonesuch")
    with pytest.raises(NoBackendError, match="nonesuch"):
        flash_mla_with_kvcache(**decode_args())
    flash_mla_with_kvcache(**decode_args(backend="reference"))
    flash_mla_sparse_fwd(**prefill_args())
    with pytest.raises(NoBackendError, match=r"did you mean 'reference'"):
        flash_mla_sparse_fwd(**prefill_args(backend="ref"))


class Scratchy(ReferenceBackend):
    """The reference, with scratch memory that it fills, and indices that it wants in fours."""

    def __init__(self) -> None:
        super().__init__(decode_indices="ragged")
        self.capabilities = Capabilities(IndexForm.RAGGED, IndexForm.RAGGED, index_alignment=16)
        self.seen: list[AttentionCall] = []

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, width), torch.float32), ((3,), torch.uint8)]

    def decode(self, call: AttentionCall) -> None:
        self.seen.append(call)
        for view in call.scratch:
            view.fill_(1)
        super().decode(call)


@pytest.fixture
def scratchy(monkeypatch: pytest.MonkeyPatch) -> Scratchy:
    """The backend that everything is computed on, whatever is chosen."""
    backend = Scratchy()
    monkeypatch.setattr(direct, "_backend", lambda _: backend)
    return backend


def test_a_backend_gets_its_scratch_and_its_form_of_indices(scratchy: Scratchy) -> None:
    extra = {"extra_k_cache": cache_of(3), "extra_indices_in_kvcache": torch.zeros(B, S_Q, 5, dtype=INT)}
    flash_mla_with_kvcache(**decode_args(**extra))
    flash_mla_sparse_fwd(**prefill_args())
    decode, prefill = scratchy.seen

    assert [view.shape for view in decode.scratch] == [(B * S_Q, TOPK + 5), (3,)]
    assert not isinstance(decode.keys, GatheredKeys)
    assert [type(keys.rows) for keys in decode.keys] == [RaggedIndices] * 2
    assert [keys.cache.block_size for keys in decode.keys] == [4, 3]
    assert isinstance(prefill.keys, GatheredKeys)
    assert isinstance(prefill.keys.rows, RaggedIndices)
    assert prefill.keys.rows.width == 16, "columns are rounded up to the alignment"
    assert prefill.scratch[0].shape == (5, 16)


def test_results_do_not_depend_on_form_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = flash_mla_with_kvcache(**decode_args()), flash_mla_sparse_fwd(**prefill_args())
    direct.forget_choices()
    monkeypatch.setattr(direct, "_backend", lambda _: Scratchy())
    got = flash_mla_with_kvcache(**decode_args()), flash_mla_sparse_fwd(**prefill_args())

    for left, right in zip(expected, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_workspace_of_the_context_is_used_and_its_lock_holds(scratchy: Scratchy) -> None:
    manager = WorkspaceManager(debug=True)
    with use_workspace(manager):
        flash_mla_with_kvcache(**decode_args())
        flash_mla_sparse_fwd(**prefill_args())
        manager.check_canaries()
        assert manager.size("decode") > 0
        assert manager.size("prefill") > 0
        manager.lock()
        flash_mla_with_kvcache(**decode_args())
        wide = torch.zeros(B, S_Q, 1000, dtype=INT)
        with pytest.raises(WorkspaceError, match=r"reference\.decode needs"):
            flash_mla_with_kvcache(**decode_args(indices=wide))
    flash_mla_with_kvcache(**decode_args(indices=wide))


def test_the_workspace_of_another_device_is_not_used(scratchy: Scratchy) -> None:
    manager = WorkspaceManager("meta")
    with use_workspace(manager):
        flash_mla_with_kvcache(**decode_args())

    assert manager.total_bytes == 0
    assert scratchy.seen[0].scratch[0].device.type == "cpu"

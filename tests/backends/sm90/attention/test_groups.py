"""Rows of one request that Hopper's kernel on pages computes together; `_triton/attention/test_groups.py` has more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.attention.key_format import FP8_RECORDS, ROWS
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import PREFILL_COST_MODEL
from dsv4attn.core.attention import paged
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing.kit.random_step import StepFixture, step
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.sm90.indexer.test_launch import hopper

FEW = ((126, 3), (0, 2), (300, 4, 1))
"""An entry that is completed inside a step, a request that begins, a rejected draft."""


def drafts(requests: Sequence[tuple[int, ...]], heads: int = 8, **changes: Any) -> StepFixture:
    """A step of a c128a layer of V4, whose unused bytes are NaN."""
    fields: dict[str, Any] = {"num_speculative_tokens": 3, "poison": 0xFF, "extra_rows": 2, "device": str(DEVICE)}
    return step("c128a", *requests, heads=heads, **{**fields, **changes})


def groups_in(backend: Sm90Backend, fixture: StepFixture) -> dict[str, int]:
    """Check a step, and return the sizes of groups of its attention, by kernel."""
    with observed() as seen:
        fixture.check(backend)
    sizes = {"list_groups": "G", "combine_parts": "GROUP"}
    return {form.name: dict(form.constants)[sizes[form.name]] for form in seen if form.name in sizes}


def test_drafts_share_tiles_and_rows_are_split() -> None:
    groups = groups_in(Sm90Backend(small="gluon"), drafts(FEW))

    assert groups == {"list_groups": 4, "combine_parts": 4}


@pytest.mark.matrix
@pytest.mark.parametrize(("heads", "most"), [(3, 8), (16, 1)])
def test_so_they_do_with_other_heads_and_drafts(heads: int, most: int) -> None:
    requests = [(1300, 9, 5), (126, 4), (520, 1)] if most == 8 else [(126, 2), (0, 1), (700, 2)]
    fixture = drafts(requests, heads, num_speculative_tokens=most, pages_seed=3)

    assert groups_in(Sm90Backend(small="gluon"), fixture)["list_groups"] == min(
        64 // heads if heads > 3 else 8, most + 1
    )


PROMPTS = ((50, 1), (300, 21), (0, 13), (126, 9), (1300, 18))
"""A decode; requests whose groups are not full, a window that begins late, entries that are completed in a chunk."""


def prompts(kind: str, heads: int = 8, **changes: Any) -> StepFixture:
    """A prefill of a layer of V4, whose unused bytes are NaN."""
    fields: dict[str, Any] = {"poison": 0xFF, "device": str(DEVICE), "pages_seed": 5, "num_speculative_tokens": 0}
    return step(kind, *PROMPTS, heads=heads, **{**fields, **changes})


@pytest.fixture
def groups_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length are computed in groups where they can be."""
    monkeypatch.setattr(launch, "PREFILL_COST_MODEL", evolve(PREFILL_COST_MODEL, group_start=-1e6))


@pytest.mark.matrix
@pytest.mark.usefixtures("groups_of_prompts")
@pytest.mark.parametrize(("kind", "heads", "size"), [("c128a", 8, 8), ("swa", 16, 4), ("c4a", 8, None)])
def test_prompts_share_tiles(kind: str, heads: int, size: int | None) -> None:
    assert groups_in(Sm90Backend(prefill="paged"), prompts(kind, heads)).get("list_groups") == size


@pytest.mark.usefixtures("groups_of_prompts")
def test_prompts_in_chunks_and_after_decodes_share_tiles() -> None:
    backend, fixture = Sm90Backend(prefill="paged"), prompts("c128a")
    limits = evolve(fixture.limits, max_index_elements=11 * 138)
    with observed() as seen:
        fixture.compare(*fixture.problem(backend, limits=limits).run(backend))

    launches = [form for form in seen if form.name == "list_groups"]
    assert len(launches) > 4, "a request is cut"


@pytest.mark.usefixtures("groups_of_prompts")
def test_rows_of_other_requests_in_a_group_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Any = paged.PagedCall.of_chunk

    def of_chunk(cls: Any, *args: Any) -> Any:
        call = whole.__func__(cls, *args)
        call.request_rows = evolve(call.request_rows, token_to_req=call.request_rows.token_to_req * 0)
        return call

    monkeypatch.setattr(paged.PagedCall, "of_chunk", classmethod(of_chunk))
    with pytest.raises(AssertionError):
        prompts("swa").check(Sm90Backend(prefill="paged"))


def test_where_rows_are_computed_together() -> None:
    layer, swa, c4a = (step(kind, (3, 2), heads=8).layer for kind in ("c128a", "swa", "c4a"))
    backend, deterministic = Sm90Backend(), Sm90Backend(deterministic=True)

    assert [backend._largest_group(Phase.DECODE, FP8_RECORDS, kind, 4) for kind in (layer, swa, c4a)] == [4, 1, 1]
    assert [backend._largest_group(Phase.PREFILL, FP8_RECORDS, kind, 8) for kind in (layer, swa, c4a)] == [8, 8, 1]
    for phase in Phase:
        assert (
            backend._largest_group(phase, ROWS, layer, 4)
            == deterministic._largest_group(phase, FP8_RECORDS, layer, 4)
            == 1
        )
        assert backend._largest_group(phase, FP8_RECORDS, evolve(layer, num_heads=64), 4) == 1


@pytest.mark.parametrize("drafts_of_requests", [0, 3])
def test_warm_up_has_the_forms_of_drafts_where_requests_may_have_them(drafts_of_requests: int) -> None:
    limits = Limits(8, 64, 4096, num_speculative_tokens=drafts_of_requests)
    geometry = evolve(ModelGeometry.preset("flash"), num_heads=8)
    bounds = WarmupSpec.of(geometry, limits, layer_parts=False)
    forms = list(Sm90Backend().kernel_variants(bounds, DeviceFacts.here_or_named("sm_90")))

    sizes = {dict(form.constants)["G"] for form in forms if form.name == "list_groups"}
    assert sizes == ({4, 8} if drafts_of_requests else {8}), "prompts have groups of eight"
    assert LayerKind.HCA in {layer.kind for layer in bounds.layers}


class TestOnDevice:
    pytestmark = hopper

    @pytest.mark.parametrize(("kind", "heads"), [("c128a", 8), ("c128a", 16), ("swa", 8)])
    def test_long_prompts_share_tiles_by_the_model_of_times(self, kind: str, heads: int) -> None:
        fixture = evolve(prompts(kind, heads), requests=((50, 1), (300, 21), (1300, 3000)))

        assert groups_in(Sm90Backend(), fixture)["list_groups"] == 64 // heads

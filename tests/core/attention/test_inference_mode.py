"""Objects that are made in inference mode can be written and read outside of it, and the other way round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.backends.rocm.metadata import RocmMetadata
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import c128a_columns
from dsv4attn.core.model.geometry import LayerKind, Rope
from dsv4attn.core.model.rope import cos_sin_cache
from tests.core.metadata.test_metadata import LIMITS, builder
from tests.harness import SMALL, batch_of

KINDS = (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)


class WithExtension(ReferenceBackend):
    """A backend that extends the metadata, as the one for ROCm does."""

    name = "extending"

    def metadata_extension(self, geometry: object, limits: object, device: torch.device) -> RocmMetadata:
        return RocmMetadata(SMALL, LIMITS, device)


@pytest.mark.parametrize("backend", [None, WithExtension()], ids=["plain", "extension"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_builder_builds_in_both_modes(backend: object, inside: bool) -> None:
    with torch.inference_mode(inside):
        metadata_builder = builder(backend=backend)
    batch = batch_of([1, 2, 9], [40, 2, 70])
    expected = builder(backend=backend).build_for(batch, KINDS)

    for mode in (not inside, inside, not inside):
        with torch.inference_mode(mode):
            metadata = metadata_builder.build_for(batch, KINDS)

        for kind in KINDS:
            assert torch.equal(metadata[kind].swa.decode_swa_indices, expected[kind].swa.decode_swa_indices)
            assert torch.equal(metadata[kind].swa.prefill_gather_lens, expected[kind].swa.prefill_gather_lens)
        part, expected_part = metadata[LayerKind.HCA].compressed, expected[LayerKind.HCA].compressed
        assert part is not None
        assert expected_part is not None
        assert part.c128a_prefill_topk_indices is not None
        assert expected_part.c128a_prefill_topk_indices is not None
        assert torch.equal(part.compressed_lens, expected_part.compressed_lens)
        assert torch.equal(part.c128a_prefill_topk_indices, expected_part.c128a_prefill_topk_indices)


def test_all_kinds_have_the_full_width_that_a_captured_graph_needs() -> None:
    batch = batch_of([1, 2, 9], [40, 2, 70])
    metadata_builder = builder()
    narrow = metadata_builder.build_for(batch, KINDS)[LayerKind.HCA].compressed
    swa = metadata_builder.build(batch)
    alone = metadata_builder.build_compressed(batch, swa, LayerKind.HCA, full_width=True)

    parts = metadata_builder.build_for(batch, KINDS, full_width=True)

    part = parts[LayerKind.HCA].compressed
    assert part is not None
    assert narrow is not None
    for table, expected in (
        (part.c128a_global_decode_topk_indices, alone.c128a_global_decode_topk_indices),
        (part.c128a_prefill_topk_indices, alone.c128a_prefill_topk_indices),
    ):
        assert table is not None
        assert expected is not None
        assert torch.equal(table, expected)
        assert table.shape[-1] == c128a_columns(SMALL, LIMITS)


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "a cache": lambda: PagedKVCache.allocate(KVCacheLayout.fp8_ds_mla(), 2, 4).tensor,
    "a region of a cache": lambda: PagedKVCache.allocate(KVCacheLayout.fp8_ds_mla(), 2, 4).region("rope"),
    "rows": lambda: PagedKVCache.allocate(KVCacheLayout.rows(), 2, 4).tensor,
    "angles": lambda: cos_sin_cache(Rope(8, 10000.0), 16),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_tensor_made_in_inference_mode_is_written_outside(name: str) -> None:
    with torch.inference_mode():
        tensor = MAKERS[name]()

    tensor.add_(1)
    with torch.inference_mode():
        tensor.add_(1)

    assert not tensor.is_inference()


def test_a_workspace_that_grew_in_inference_mode_serves_outside() -> None:
    workspace = WorkspaceManager()
    with torch.inference_mode():
        workspace.get_simultaneous(((4, 4), torch.float32))

    for mode in (False, True, False):
        with torch.inference_mode(mode):
            (view,) = workspace.get_simultaneous(((4, 4), torch.float32))
            view.fill_(1)

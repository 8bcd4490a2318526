"""The ROCm backend: the shared one on ragged rows, and its metadata."""

from __future__ import annotations

import torch

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends.rocm.metadata import RocmMetadata
from dsv4attn.backends.rocm.tuning import TUNING
from dsv4attn.core.contract.backend import Capabilities, IndexForm, KeyForm
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import ModelGeometry

__all__ = ["RocmBackend"]


class RocmBackend(TritonBackend):
    """Attention of decode on pages, of prefill on rows that core gathers; ragged in both."""

    name = "rocm"
    tunings = TUNING
    capabilities = Capabilities(
        decode_indices=IndexForm.RAGGED,
        prefill_indices=IndexForm.RAGGED,
        prefill_keys=KeyForm.GATHERED,
        max_logits=True,
        empty_lse=True,
        prefill_pages=True,
    )

    def metadata_extension(self, geometry: ModelGeometry, limits: Limits, device: torch.device) -> RocmMetadata:
        """See `contract.Backend`."""
        return RocmMetadata(geometry, limits, device)

"""The ROCm backend: the shared one on ragged rows, and its metadata."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.backend import TritonBackend, with_keys_as_in_decode
from dsv4attn.backends.rocm.metadata import RocmMetadata
from dsv4attn.backends.rocm.tuning import TUNING
from dsv4attn.core.contract.backend import AttentionCall, Capabilities, IndexForm, KeyForm, Phase
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.model.quantized_weight import Weight, dense_weight


class RocmBackend(TritonBackend):
    """Attention of decode on pages, of prefill on rows that core gathers; ragged in both.

    With `deterministic` prefill reads pages too.
    """

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

    def __init__(self, *, tuning: str = "auto", deterministic: bool = False, projection: str = "bf16") -> None:
        """Check the options; no device is touched."""
        super().__init__(tuning=tuning, deterministic=deterministic, projection=projection)
        if deterministic:
            self.capabilities = with_keys_as_in_decode(self.capabilities)

    def metadata_extension(self, geometry: ModelGeometry, limits: Limits, device: torch.device) -> RocmMetadata:
        """See `contract.Backend`."""
        return RocmMetadata(geometry, limits, device)

    def attend(self, phase: Phase, call: AttentionCall, angles: tuple[Tensor, Tensor] | None = None) -> int:
        """Attend, and return how many leading rows of `out` have their rotation undone: all rows, or none.

        angles: positions [T] int64 and the table of cosines and sines, to undo the rotation where splits of rows are
        combined; rows of one split stay rotated, and so do all rows with `deterministic`.
        """
        if self.deterministic:
            self.prepare(phase, call)(call.tensors)
            return 0
        width = sum(rows.width for rows in attention_launch.index_rows(call.keys))
        tuning = self.tuning_of(phase, call.layer, call.q.shape[0], width) if call.scratch else self.tuning.of(phase)
        return attention_launch.attend(call, tuning, angles=angles)

    def inv_rope_o_proj(
        self,
        o: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        wo_a: Weight,
        num_groups: int,
        *,
        turned_rows: int = 0,
    ) -> Tensor:
        """See `contract.Backend`. turned_rows: leading rows of o whose rotation `attend` has undone already."""
        if not turned_rows:
            return super().inv_rope_o_proj(o, positions, cos_sin_cache, wo_a, num_groups)
        weight = dense_weight(wo_a)
        return projection.inv_rope_o_proj(o, positions, cos_sin_cache, weight, num_groups, turned=turned_rows)

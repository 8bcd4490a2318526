"""The backend class: its capabilities, its memory, and its calls into `kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, Backend, Capabilities, IndexForm, KeyForm, Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.errors import ArgumentError
from dsv4attn_acme import kernels
from dsv4attn_acme.tuning import row_for


class AcmeBackend(Backend):
    """Reads pages in both phases: ragged slots in decode, dense ones in prefill; one tile of keys at a time.

    tile_tokens: keys of a tile; by default what `tuning` has for this machine.
    """

    name = "acme"
    capabilities = Capabilities(IndexForm.RAGGED, IndexForm.DENSE, KeyForm.PAGED)

    def __init__(self, *, tile_tokens: int | str | None = None) -> None:
        """Take options: from a configuration file with their types, from a command line as text."""
        row = row_for(DeviceFacts.here())
        if tile_tokens is not None and not str(tile_tokens).isdecimal():
            raise ArgumentError("option tile_tokens of acme", expected="a number", actual=repr(tile_tokens))
        self.tile_rows = row.tile_rows
        self.tile_tokens = row.tile_tokens if tile_tokens is None else max(int(tile_tokens), 1)

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Keys of a tile, sums of values, and the running maximum and sum of weights."""
        rows, heads, dim = min(tokens, self.tile_rows), layer.num_heads, layer.head_dim
        keys = (rows, min(width, self.tile_tokens), dim)
        return [(shape, torch.float32) for shape in (keys, (rows, heads, dim), (2, rows, heads, 1))]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """The largest call's: no view shrinks when a call grows."""
        return simultaneous_bytes(self.scratch(phase, layer, max_tokens, max_width))

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """Bytes that torch allocates for a tile; a kernel that allocates nothing returns 0."""
        heads, dim = layer.num_heads, layer.head_dim
        return self.tile_rows * (self.tile_tokens * (16 * dim + 16 * heads + 64) + 24 * dim * heads + 64 * dim)

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """Write keys as they are."""
        for part in kernels.tiles(min(len(k), len(slot_mapping)), self.tile_rows):
            kernels.insert(k[part].float(), cache, slot_mapping[part])

    def qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        eps: float | None,
    ) -> None:
        """Normalise, unless eps is None, and rotate q in place; rotate and write a copy of kv."""
        for part in kernels.tiles(len(q), self.tile_rows):
            rows = q[part].float() if eps is None else kernels.normalise(q[part].float(), eps)
            q[part] = kernels.rotate(rows, kernels.angles_at(cos_sin_cache, positions[part]))
        for part in kernels.tiles(min(len(kv), len(slot_mapping)), self.tile_rows):
            k = kernels.rotate(kv[part, None].float(), kernels.angles_at(cos_sin_cache, positions[part]))
            kernels.insert(k[:, 0], cache, slot_mapping[part])

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        cache: PagedKVCache,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        offset: int,
    ) -> None:
        """Never called: `capabilities` say that prefill reads pages."""
        raise NotImplementedError

    def decode(self, call: AttentionCall) -> None:
        """Attend over pages."""
        kernels.attend(call, self.tile_rows, self.tile_tokens)

    def prefill(self, call: AttentionCall) -> None:
        """Attend over pages, too."""
        kernels.attend(call, self.tile_rows, self.tile_tokens)

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, num_groups: int
    ) -> Tensor:
        """Rotate back, then one matrix product for each group of heads."""
        turned = kernels.rotate(o.float(), kernels.angles_at(cos_sin_cache, positions), inverse=True)
        groups = turned.reshape(len(o), num_groups, -1).transpose(0, 1)
        weight = wo_a.reshape(num_groups, -1, groups.shape[-1]).float()
        return torch.bmm(groups, weight.mT).transpose(0, 1).to(o.dtype)

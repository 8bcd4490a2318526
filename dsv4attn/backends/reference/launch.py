"""The reference backend: forms as options, bounds on its temporaries, and calls into `kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.core.attention.checks import check_attention_strides, check_keys
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, Backend, Capabilities, ChunkCost, IndexForm, KeyForm, Phase
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.model.quantized_weight import Weight, dense_weight
from dsv4attn.core.tensorspec import BufferSpec, check_strides
from dsv4attn.core.torch_ops.tiles import batch_invariant_linear, linear
from dsv4attn.errors import ArgumentError, UnknownNameError

AnyForm = TypeVar("AnyForm", IndexForm, KeyForm)


def _form(kind: type[AnyForm], option: str, value: AnyForm | str) -> AnyForm:
    try:
        return kind(value)
    except ValueError:
        names = [form.value for form in kind]
        raise UnknownNameError(f"{option} form", str(value), names) from None


class ReferenceBackend(Backend):
    """Plain torch. Takes every form of keys and indices, so that core can be proven in all of them."""

    name = "reference"

    def __init__(
        self,
        *,
        decode_indices: IndexForm | str = IndexForm.DENSE,
        prefill_indices: IndexForm | str = IndexForm.DENSE,
        prefill_keys: KeyForm | str = KeyForm.GATHERED,
        deterministic: bool = False,
        raw_q: bool = False,
    ) -> None:
        """Choose the forms that core prepares.

        deterministic: rows are computed one by one, and prefill reads pages by the indices of decode, whatever
        `prefill_keys` and `prefill_indices` say, so that a token has the same bits in both phases.
        raw_q: see `takes_raw_q`.
        """
        for option, value in (("deterministic", deterministic), ("raw_q", raw_q)):
            if not isinstance(value, bool):
                raise ArgumentError(option, expected="true or false", actual=repr(value))
        self.deterministic, self._raw_q = deterministic, raw_q
        keys = _form(KeyForm, "prefill_keys", prefill_keys)
        of_decode = _form(IndexForm, "decode_indices", decode_indices)
        of_prefill = _form(IndexForm, "prefill_indices", prefill_indices)
        if deterministic:
            keys, of_prefill = KeyForm.PAGED, of_decode
        self.capabilities = Capabilities(
            of_decode,
            of_prefill,
            keys,
            max_logits=True,
            empty_lse=True,
            prefill_pages=keys is KeyForm.GATHERED,
        )

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """No scratch: temporaries come from torch, and `transient_bytes` bounds them."""
        return ()

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """Zero, because there is no scratch."""
        return 0

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """Bytes of one tile, or of one row if a row is larger, and of the index vectors of a gather."""
        row = kernels.attend_bytes(layer.num_heads, layer.head_dim, max_width)
        return max(kernels.TILE_BYTES, row) + 64 * (max_rows + max_tokens)

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """See `contract.Backend`."""
        check_keys(k, cache, slot_mapping)
        for part in kernels.tiles(min(k.shape[0], slot_mapping.shape[0]), kernels.record_bytes(cache.layout)):
            kernels.insert(k[part], cache, slot_mapping[part])

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
        """See `contract.Backend`."""
        tensors = {"q": q, "kv": kv, "slot_mapping": slot_mapping, "positions": positions}
        check_strides(written=("q",), cos_sin_cache=cos_sin_cache, **tensors)
        kernels.qnorm_rope(q, positions, cos_sin_cache, eps)
        for part in kernels.tiles(min(kv.shape[0], slot_mapping.shape[0]), kernels.record_bytes(cache.layout)):
            kernels.insert(kernels.rotated(kv[part], positions[part], cos_sin_cache), cache, slot_mapping[part])

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        cache: PagedKVCache,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        offset: int,
    ) -> None:
        """See `contract.Backend`."""
        tensors = {"out": out, "seq_lens": seq_lens, "gather_lens": gather_lens, "block_table": block_table}
        check_strides(written=("out",), **tensors)
        kernels.gather(out, cache, seq_lens, gather_lens, block_table, offset)

    def decode(self, call: AttentionCall) -> None:
        """See `contract.Backend`."""
        check_attention_strides(call)
        results = call.out, call.lse, call.max_logits, call.empty_lse
        rows = 1 if self.deterministic else None
        kernels.attend(call.q, call.keys, call.layer.scale, call.attn_sink, *results, rows=rows)

    def prefill(self, call: AttentionCall) -> None:
        """See `contract.Backend`. The reference has one attention for both phases."""
        raw = call.raw_q
        if raw is not None:
            call = evolve(call, q=call.q.clone())
            kernels.qnorm_rope(call.q, raw.positions, raw.cos_sin_cache, raw.eps)
        self.decode(call)

    def takes_raw_q(self, layer: LayerGeometry, q: Tensor, row_dtype: torch.dtype, chunks: Sequence[ChunkCost]) -> bool:
        """See `contract.Backend`. With option `raw_q`: a copy of q is prepared, and gives the step's bits."""
        return self._raw_q

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Weight, num_groups: int
    ) -> Tensor:
        """See `contract.Backend`. wo_a may be block-scaled fp8 too, see `quantized_weight.dense_weight`."""
        check_strides(o=o, positions=positions, cos_sin_cache=cos_sin_cache)
        weight = dense_weight(wo_a)
        check_strides(wo_a=weight)
        product = batch_invariant_linear if self.deterministic else linear
        return kernels.inv_rope_o_proj(o, positions, cos_sin_cache, weight, num_groups, product)

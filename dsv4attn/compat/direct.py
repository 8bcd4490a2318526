"""Attention over keys that the caller's indices name, without a step's metadata: shared by the compat interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import inf, nan
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions, Backend, IndexForm, KeyForm, Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.memory.plan import ragged_specs
from dsv4attn.core.memory.workspace import WorkspaceManager, current_workspace_manager
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.errors import Dsv4AttnError
from dsv4attn.selection import build, load_backend, registered, resolve

HEAD_DIM, ROPE_DIM = 512, 64
PAGE_SIZE = 64
"""Records of a page as which rows of a prefill are described."""
TILE_BYTES = 64 * 2**20
"""Most bytes of temporaries of a tile of `largest_logits`."""

_backend = lru_cache(maxsize=None)(load_backend)


@frozen
class CallKind:
    """Calls of one kind run on one backend: the question that `plan` answers, and the key of its cache.

    phase: decode over pages, or prefill over rows.
    heads: heads of q.
    q_dtype: dtype of q.
    scale: factor of the logits.
    sink: whether heads have sinks.
    query_len: queries of a sequence.
    sizes: of each cache, columns of the indices into it and records of a page. The second cache is optional.
    layouts: of both caches, by default `fp8_ds_mla`.
    deterministic: whether the bits of a row must not depend on the other rows.
    """

    phase: Phase
    heads: int
    q_dtype: torch.dtype
    scale: float
    sink: bool
    query_len: int
    sizes: tuple[tuple[int, int], ...]
    layouts: tuple[KVCacheLayout, ...] = ()
    deterministic: bool = False

    @property
    def problem(self) -> Problem:
        """What backends are asked about.

        Columns of the first cache are described as the window, those of a second cache as its selected entries. In
        prefill there is no cache, only bf16 rows, as gathering writes them. A backend that reads pages takes them as
        pages of one row.
        """
        (width, page_size), (extra_width, extra_page_size) = (*self.sizes, (0, 0))[:2]
        kind, ratio = (LayerKind.CSA, 4) if extra_width else (LayerKind.SWA, 1)
        rope = Rope(ROPE_DIM, 10000.0)  # keys are rotated already: the angles are not used
        layer = LayerGeometry(kind, ratio, self.heads, HEAD_DIM, rope, width, extra_width, softmax_scale=self.scale)
        layouts = self.layouts or (KVCacheLayout.fp8_ds_mla(),)
        return Problem(
            self.phase.value,
            layer,
            CacheFacts.of(layouts[0], page_size),
            CacheFacts.of(layouts[-1], extra_page_size) if extra_width else None,
            extra_width,
            q_dtype=str(self.q_dtype).removeprefix("torch."),
            sink=self.sink,
            lse=True,
            query_len=self.query_len,
            deterministic=self.deterministic,
        )


@lru_cache(maxsize=4096)
def plan(kind: CallKind, device: torch.device, name: str | None) -> tuple[Backend, LayerGeometry]:
    """Choose the backend of one kind of call on a device, and describe its layer. Computed once for each kind.

    name: of the backend to use; None: the backend that selection chooses.
    """
    problem, facts = kind.problem, DeviceFacts.here(device)
    chosen = resolve(problem, backend=name, device=facts).require().info.name
    backend = _backend(chosen, deterministic=True) if kind.deterministic else _backend(chosen)
    if kind.phase is Phase.PREFILL and backend.capabilities.prefill_keys is KeyForm.PAGED:
        resolve(evolve(problem, swa=CacheFacts("rows", "bfloat16", 1)), backend=chosen, device=facts)
    return backend, problem.layer


@cache
def device_backend(name: str, **options: Any) -> Any:  # noqa: ANN401 - a device's backend, with methods of its own
    """The backend of a front door for one device, with these options and no others: no configuration is read."""
    return build(registered(name).info, options)


def forget_choices() -> None:
    """Clear the cached choices, so that the next call reads environment, configuration and plugins again."""
    plan.cache_clear()
    _backend.cache_clear()
    device_backend.cache_clear()


def attend(
    phase: Phase,
    backend: Backend,
    layer: LayerGeometry,
    q: Tensor,
    sources: Sequence[PagedKVCache] | Tensor,
    rows: Sequence[DenseIndices],
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
) -> None:
    """Call the backend with the form of indices that it takes, and with scratch memory.

    q, out: [T, H, D]. sources: a cache for each of `rows`, or the key rows [S, D] for the only one. lse: [T, H] fp32.
    +inf for rows without keys, as FlashMLA has it. max_logits: the same, only where `Capabilities.max_logits`.
    Scratch is the context's workspace if one is set, otherwise memory allocated for this call alone. The allocator
    handles that memory correctly on every stream and in captured graphs.
    """
    n, widths = q.shape[0], [r.indices.shape[1] for r in rows]
    form = backend.capabilities.decode_indices if phase is Phase.DECODE else backend.capabilities.prefill_indices
    specs = [spec for w in widths for spec in ragged_specs(n, w)] if form is IndexForm.RAGGED else []
    specs += backend.scratch(phase, layer, n, sum(widths))
    caller = f"{backend.name}.{phase.value}"
    views = _scratch(specs, q.device, phase.value, caller)

    def formed(dense: DenseIndices, slots: int) -> DenseIndices | RaggedIndices:
        if form is IndexForm.DENSE:
            return dense
        ragged = RaggedIndices(views.pop(0), views.pop(0), dense.indices.shape[1])
        target = (ragged.indices, ragged.indptr)
        backend.index_ops.build_ragged_indices_from_dense(dense.indices, dense.lens, slots, out=target)
        return ragged

    keys: Sequence[PagedKeys] | GatheredKeys
    if isinstance(sources, Tensor):
        keys = GatheredKeys(sources, formed(rows[0], sources.shape[0]))
    else:
        keys = tuple(PagedKeys(c, formed(r, c.capacity)) for c, r in zip(sources, rows, strict=True))
    writes_empty_lse = backend.capabilities.empty_lse
    options = AttentionOptions(max_logits, inf if writes_empty_lse else -inf)
    call = AttentionCall(layer, q, keys, attn_sink, out, lse, views, options)
    (backend.decode if phase is Phase.DECODE else backend.prefill)(call)
    if not writes_empty_lse:
        lse.nan_to_num_(nan=nan, posinf=inf, neginf=inf)


def _scratch(specs: Sequence[BufferSpec], device: torch.device, arena: str, caller: str) -> list[Tensor]:
    """Views of the context's workspace, if it is on this device; otherwise memory of the caller's alone."""
    try:
        manager = current_workspace_manager()
        is_same_device = manager.device.type == device.type and manager.device.index in (None, device.index)
    except Dsv4AttnError:
        is_same_device = False
    if not is_same_device and device.type == "cuda":
        # the allocator aligns to more than a workspace does; elsewhere a workspace aligns
        return [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in specs]
    return (manager if is_same_device else WorkspaceManager(device)).get_simultaneous(
        *specs, arena=arena, caller=caller
    )


def largest_logits(q: Tensor, kv: Tensor, rows: DenseIndices, scale: float) -> Tensor:
    """[T, H] fp32: max_j scale * q . k_j over the keys of each row, -inf without keys. In plain torch, tile by tile.

    q: [T, H, D]. kv: [S, D].
    """
    tokens, heads, dim = q.shape
    width = rows.indices.shape[1] if kv.shape[0] else 0
    top = torch.full((tokens, heads), -torch.inf, device=q.device, dtype=torch.float32)
    columns = torch.arange(width, device=q.device)
    step = max(TILE_BYTES // max(width * (6 * dim + 4 * heads + 16), 1), 1)
    for start in range(0, tokens if width else 0, step):
        part = slice(start, start + step)
        indices = rows.indices[part].long()  # so that more keys than an int32 can count are compared as they are
        present = (columns < rows.lens[part, None]) & (indices >= 0) & (indices < kv.shape[0])
        keys = kv.index_select(0, indices.masked_fill(~present, 0).flatten()).unflatten(0, indices.shape)
        logits = torch.bmm(q[part].float(), keys.float().mT).mul_(scale)
        top[part] = logits.masked_fill_(~present[:, None], -torch.inf).amax(-1)
    return top

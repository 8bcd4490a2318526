"""A whole step of one layer, to be timed: `forward_mqa` with its metadata, on the inputs of the attention kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.tools.bench.cases import WINDOW_PAGE
from dsv4attn.tools.bench.inputs import Inputs

_TILE = 16


@frozen(eq=False, slots=False)
class ForwardStep(ForwardCall):
    """The arguments of one `forward_mqa`, which may run any number of times."""

    def run(self) -> None:
        """Run the step once."""
        forward_mqa(
            self.q,
            self.caches,
            self.metadata,
            self.backend,
            self.workspace,
            self.out,
            layer=self.layer,
            limits=self.limits,
            attn_sink=self.attn_sink,
            topk_indices=self.topk_indices,
        )


def make_forward_step(inputs: Inputs, backend: Backend) -> ForwardStep:
    """Make metadata with a builder, and plan and lock the workspace, as an engine does."""
    device, (window, *rest) = inputs.q.device, inputs.segments
    layer, limits, batch, builder = scheduled(inputs, MetadataBuilder, backend)
    workspace = WorkspaceManager(device)
    workspace.reserve(plan_workspace(layer, limits, backend, window.cache.layout))
    workspace.lock()
    return ForwardStep(
        inputs.q,
        LayerCaches(window.cache, rest[0].cache if rest else None),
        builder.build_for(batch, [layer.kind])[layer.kind],
        backend,
        workspace,
        torch.empty_like(inputs.q),
        layer,
        limits,
        inputs.sink,
        rest[0].local.int() if layer.kind is LayerKind.CSA else None,
    )


def scheduled(
    inputs: Inputs, builder: Callable[..., MetadataBuilder], backend: Backend
) -> tuple[LayerGeometry, Limits, Batch, MetadataBuilder]:
    """Geometry of the layer, limits of the workspace plan, the batch, and a builder that `builder` makes for it."""
    case, device = inputs.case, inputs.q.device
    window, *rest = inputs.segments
    model = ModelGeometry.preset(case.preset.model)
    layer = model.layer_of_kind(case.preset.kind, case.preset.ratio)
    seqs = torch.tensor([prefix + count for prefix, count in case.requests], dtype=torch.int32, device="cpu")
    counts = torch.tensor([count for _, count in case.requests], dtype=torch.int32, device="cpu")
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    limits = Limits(len(case.requests), case.tokens, max(int(seqs.max()), WINDOW_PAGE))
    # a token's own slot is the last of its window
    last = (window.slots.lens - 1).long()[:, None]
    batch = Batch(
        num_reqs=len(case.requests),
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seqs.to(device),
        seq_lens_cpu=seqs,
        slot_mapping=window.slots.indices.gather(1, last)[:, 0].long(),
        block_table=window.table,
        compressed_block_table=rest[0].table if rest else None,
    )
    step_builder = builder(
        model.with_own_layers([layer.key]),
        limits,
        swa_block_size=WINDOW_PAGE,
        compressed_block_tokens=case.preset.page * case.preset.ratio,
        device=device,
        backend=backend,
    )
    return layer, limits, batch, step_builder


def products(inputs: Inputs) -> Callable[[], None]:
    """Matrix products q . k and p . v of every row over its number of keys, on prepared operands and outputs.

    Rows are in tiles of equal key counts (their mean). The type is fp32 on a CPU, where it is the fastest, else bf16.
    """
    layer, device = inputs.layer, inputs.q.device
    keys_per_row = sum(segment.slots.lens for segment in inputs.segments)
    assert isinstance(keys_per_row, Tensor)
    counts = [max(round(float(part.float().mean())), 1) for part in keys_per_row.cpu().split(_TILE)]
    rows = min(_TILE, keys_per_row.shape[0])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(rows, layer.num_heads, layer.head_dim, device=device, dtype=torch.float32).to(dtype)
    k = torch.randn(rows, max(counts), layer.head_dim, device=device, dtype=torch.float32).to(dtype)
    p = torch.empty(rows, layer.num_heads, max(counts), device=device, dtype=dtype)
    o = torch.empty_like(q)

    def run() -> None:
        for count in counts:
            torch.bmm(q, k[:, :count].mT, out=p[..., :count])
            torch.bmm(p[..., :count], k[:, :count], out=o)

    return run

"""A small engine on dsv4attn's public API: paged caches, chunked prefill, mixed batches, a prefix hit.

    python examples/engine.py                       # on the backend that `dsv4attn backends` calls automatic
    python examples/engine.py --backend reference   # or as DSV4ATTN_BACKEND and dsv4attn.toml say

The attention is DeepSeek-V4-Flash's on one of eight tensor-parallel ranks: one layer each of swa, c4a and c128a with 8
heads of 512. Scheduler and model are stand-ins (`engine_parts.py`). Requests A, B and C begin with the same 512 tokens:
B takes over the pages that A filled, C computes all of them again, and both have to generate the same.
"""

from __future__ import annotations

from functools import reduce

import click
import torch
from attrs import evolve
from engine_parts import HIDDEN, VOCAB, Request, Scheduler, StandIn, chosen_backend, norm
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import dsv4attn as ds

MODEL = evolve(ds.ModelGeometry.preset("flash").tensor_parallel(8), index_topk=64)
LIMITS = ds.Limits(max_num_reqs=4, max_num_batched_tokens=256, max_model_len=1024)
LAYOUT = ds.KVCacheLayout.fp8_ds_mla()
PAGE, BLOCKS = (64, 256), (64, 16)  # of the window and the compressed caches: tokens a page stands for, pages
NEW_TOKENS, TOLERANCE = 8, 0.02  # tolerance: of the largest logit; other batches may round products differently


def bind(kind: ds.LayerKind, backend: ds.Backend, workspace: ds.WorkspaceManager) -> ds.DeepseekV4MLAAttention:
    """Make a bound layer with its caches: done once, before the first step."""
    layer, device = MODEL.layer_of_kind(kind), workspace.device
    attention = ds.DeepseekV4MLAAttention(
        f"layers.{kind.value}",
        layer,
        LIMITS,
        backend,
        attn_sink=torch.randn(layer.num_heads).to(device),
        cos_sin_cache=ds.cos_sin_cache(layer.rope, LIMITS.max_model_len, device),
        topk_indices_buffer=torch.empty(LIMITS.max_num_batched_tokens, layer.topk, dtype=torch.int32, device=device),
        workspace=workspace,
    )
    # a page of a compressed cache holds one record for every 4 or 128 of its tokens
    caches = [ds.PagedKVCache.allocate(LAYOUT, BLOCKS[0], PAGE[0], device)]
    if kind is not ds.LayerKind.SWA:
        caches.append(ds.PagedKVCache.allocate(LAYOUT, BLOCKS[1], PAGE[1] // layer.compress_ratio, device))
    attention.bind_kv_cache(*caches)
    return attention


class Engine:
    """Three bound layers. Everything is allocated before the first step."""

    def __init__(self, backend: ds.Backend, device: torch.device) -> None:
        """Plan, reserve and lock the workspace; bind the layers; make the builder of metadata."""
        self.device, self.backend, workspace = device, backend, ds.WorkspaceManager(device)
        plans = [ds.plan_workspace(MODEL.layer_of_kind(k), LIMITS, self.backend, LAYOUT) for k in MODEL.kinds]
        workspace.reserve(reduce(ds.WorkspacePlan.union, plans))
        workspace.lock()
        self.layers = [(bind(kind, self.backend, workspace), StandIn(MODEL, device)) for kind in MODEL.kinds]
        self.embedding, self.head = (torch.randn(VOCAB, HIDDEN).bfloat16().to(device) for _ in range(2))
        self.builder = ds.MetadataBuilder(
            MODEL,
            LIMITS,
            swa_block_size=PAGE[0],
            compressed_block_tokens=PAGE[1],
            num_swa_blocks=BLOCKS[0],
            num_compressed_blocks=BLOCKS[1],
            device=device,
            backend=self.backend,
        )

    def batch(self, work: list[tuple[Request, int]], positions: Tensor) -> ds.Batch:
        """Describe a step: decodes first, tokens in request order. positions: [T] int64 on the host."""
        counts, lens = torch.tensor([n for _, n in work]), torch.tensor([r.done + n for r, n in work]).int()
        starts = torch.tensor([0, *counts.cumsum(0)]).int()
        window, compressed = (pad_sequence([torch.tensor(r.tables[i]) for r, _ in work], True, -1) for i in (0, 1))
        block = window[torch.arange(len(work)).repeat_interleave(counts), positions // PAGE[0]]
        return ds.Batch(
            num_reqs=len(work),
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            slot_mapping=(block * PAGE[0] + positions % PAGE[0]).to(self.device),
            block_table=window.int().to(self.device),
            compressed_block_table=compressed.int().to(self.device),
        )

    @torch.inference_mode()
    def step(self, work: list[tuple[Request, int]]) -> Tensor:
        """Run the layers over (request, tokens); return the logits [R, VOCAB] fp32 of each request's last token."""
        tokens = torch.tensor([token for r, n in work for token in r.tokens[r.done : r.done + n]])
        positions = torch.cat([torch.arange(r.done, r.done + n) for r, n in work])
        batch = self.batch(work, positions)
        metadata = self.builder.build_for(batch, MODEL.kinds)
        x, positions = self.embedding[tokens.to(self.device)], positions.to(self.device)
        with ds.set_forward_context(metadata):
            for index, kind in enumerate(MODEL.kinds):
                x = self.layer(index, x, positions, metadata[kind])
        return (norm(x[batch.query_start_loc[1:] - 1]) @ self.head.T).float().cpu()

    def layer(self, index: int, x: Tensor, positions: Tensor, metadata: ds.AttentionMetadata) -> Tensor:
        """One layer: store keys and entries of all tokens of the step, then attend."""
        attention, model = self.layers[index]
        q, kv = model.q_and_kv(x)
        attention.fused_qnorm_rope_kv_insert(q, kv, positions)
        if metadata.compressed is not None:
            # the slot of each token that completes an entry, -1 for the others
            slots, cache = metadata.compressed.slot_mapping, attention.caches.compressed
            self.backend.quantize_and_insert_k_cache(model.entries(x), cache, slots)
        if attention.geometry.topk:
            attention.topk_indices_buffer[: len(x)] = model.topk(positions, attention.geometry)
        out = torch.empty_like(q)
        attention.forward_mqa(q, kv, positions, out)
        return model.output(x, attention.o_proj(out, positions, model.wo_a, MODEL.o_groups))


@click.command(help=__doc__)
@click.option("--backend", metavar="NAME", help="One that `dsv4attn backends` lists.  [default: as `explain` says]")
def main(backend: str | None) -> None:
    """Serve three requests and compare two of them."""
    torch.manual_seed(0)
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if kind is None else torch.device(kind.type, 0)
    engine = Engine(chosen_backend(MODEL, LIMITS, backend, device), device)
    scheduler = Scheduler(LIMITS, PAGE, BLOCKS, NEW_TOKENS)
    tokens = torch.randint(VOCAB, (672,)).tolist()
    a, b, c = Request("A", tokens), Request("B", tokens[:560]), Request("C", tokens[:560], use_prefixes=False)
    arrivals = {1: a, 5: b, 8: c}
    for number in range(1, 20):
        if request := arrivals.get(number):
            scheduler.add(request)
            click.echo(f"   {request.name} arrives with {len(request.tokens)} tokens, {request.done} in the caches")
        if work := scheduler.schedule():
            click.echo(f"step {number:2}  {', '.join(request.describe(n) for request, n in work)}")
            scheduler.step_done(work, engine.step(work))
    off = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(b.logits, c.logits, strict=True))
    equal = b.tokens == c.tokens and off <= TOLERANCE
    click.echo(f"B, prefix taken over, generated {b.tokens[560:]}\nC, prefix computed,   generated {c.tokens[560:]}")
    click.echo(f"{'ok' if equal else 'NOT EQUAL'}: logits differ by {off:.1e} of the largest, at most {TOLERANCE:.0e}")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()

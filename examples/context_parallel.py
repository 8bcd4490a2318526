"""Three layers over the ranks of a process group, compared with the same layers on one rank.

Run it with `torchrun --standalone --nproc-per-node 2 examples/context_parallel.py`. Every rank makes the same random
weights and runs the same steps: two prompts, one of them in two parts, then decodes. Each rank also runs the layers on
its own, and compares the outputs.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dsv4attn as ds
from dsv4attn.core.model.weights import weight_shapes

KINDS = (ds.LayerKind.SWA, 1), (ds.LayerKind.CSA, 4), (ds.LayerKind.HCA, 128)
MODEL = ds.ModelGeometry(
    num_heads=4,
    head_dim=512,
    rope_dim=64,
    window=128,
    index_topk=64,
    layers=KINDS,
    max_position=65536,
    hidden_size=128,
    o_groups=2,
    o_lora_rank=64,
    q_lora_rank=64,
    index_n_heads=16,
)
LIMITS = ds.Limits(max_num_reqs=2, max_num_batched_tokens=1024, max_model_len=2048)
LAYOUT = ds.KVCacheLayout.rows(dtype=torch.float32)


class Model:
    """The layers, their caches, and two sequences."""

    def __init__(self, context: ds.ContextParallel | None) -> None:
        backend = ds.load_backend("reference")
        self.manager = ds.CacheManager(MODEL, LIMITS, LAYOUT, backend=backend, context_parallel=context)
        workspace, self.layers = ds.WorkspaceManager(), []
        for i in range(MODEL.num_layers):
            draw = torch.Generator().manual_seed(i)
            shapes = weight_shapes(MODEL, MODEL.layer(i))
            weights = {name: torch.randn(shape, generator=draw) * shape[-1] ** -0.5 for name, shape in shapes.items()}
            layer = ds.DeepseekV4Attention(
                f"layers.{i}",
                MODEL,
                i,
                LIMITS,
                backend,
                ds.AttentionWeights.from_dict(weights, MODEL, MODEL.layer(i)),
                workspace=workspace,
                context_parallel=context,
            )
            layer.bind_kv_cache(self.manager.caches[i])
            self.layers.append(layer)
        self.sequences = [self.manager.new(), self.manager.new()]

    def step(self, hidden: torch.Tensor, *counts: int) -> list[torch.Tensor]:
        """Give each sequence its number of tokens, and return the outputs of every layer."""
        requests: Any = [(sequence, count) for sequence, count in zip(self.sequences, counts, strict=True) if count]
        with torch.no_grad(), ds.set_forward_context(self.manager.metadata(self.manager.batch(requests))):
            out = [layer(hidden, self.manager.positions(requests)) for layer in self.layers]
        self.manager.advance(requests)
        return out


def main() -> None:
    """Run both, and print on rank 0 what each rank has."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    context = ds.ContextParallel(dist.group.WORLD)
    alone, parallel = Model(None), Model(context)
    draw, largest = torch.Generator().manual_seed(9), 0.0
    for counts in ((900, 0), (1, 600), (1, 400), *[(1, 1)] * 8):
        hidden = torch.randn(sum(counts), MODEL.hidden_size, generator=draw)
        for actual, expected in zip(parallel.step(hidden, *counts), alone.step(hidden, *counts), strict=True):
            largest = max(largest, float((actual - expected).abs().max() / expected.abs().max()))
    entries = [context.ownership.count(s.length // 4) for s in parallel.sequences]
    reports: list[Any] = [None] * context.ownership.size
    dist.all_gather_object(reports, (entries, parallel.manager.kv_bytes, largest))
    if dist.get_rank() == 0:
        print("one rank:", alone.manager.kv_bytes)
        for rank, (held, sizes, difference) in enumerate(reports):
            print(
                f"rank {rank} of {len(reports)}: c4a entries {held}, bytes {sizes}, largest difference {difference:.1e}"
            )
    dist.destroy_process_group()
    if largest > 1e-4:
        raise SystemExit("the outputs differ from those of one rank")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

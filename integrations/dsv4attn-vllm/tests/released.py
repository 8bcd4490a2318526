"""Engines on a GPU with the sizes of released models: layers with fp8 weights, on one set of caches full of keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from engine import Engine, Request, config_of, model_folder, world
from released_sizes import FP8, MODELS, RELEASED
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

GPU = torch.device("cuda")
KINDS = ("swa", "c4a", "c128a")
LAYERS, TIMES = 4, 5
"""Layers of each kind, so that a layer does not find its own caches in the L2; and how often a step runs them, so that
what happens once a step has the share that it has in a model."""


class GPUEngine(Engine):
    """Layers on a GPU with fp8 weights, and caches full of random keys."""

    def load(self, layer: Any) -> None:
        """Give a layer the weights that its prefix decides, and process them as vLLM's loader does."""
        random = torch.Generator(GPU).manual_seed(len(layer.prefix) * 1000 + int(layer.prefix.split(".")[2]))
        for name, weight in layer.named_parameters():
            if weight.dtype == torch.float8_e4m3fn:
                weight.data.copy_((torch.randn(weight.shape, generator=random, device=GPU) * 64).clamp(-440, 440))
            elif "scale" in name:
                weight.data.copy_(torch.full(weight.shape, 2.0**-12, device=GPU))
            elif "norm" not in name:
                std = 1.0 if "sink" in name or "ape" in name else 0.02
                weight.data.copy_(torch.randn(weight.shape, generator=random, device=GPU) * std)
        for module in layer.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        # vLLM's class for FlashMLA has nothing to do here
        getattr(layer, "process_weights_after_loading", lambda _: None)(torch.bfloat16)

    def _grow(self, request: Request, tokens: int) -> None:
        """Give pages as vLLM's cache manager does: before a window it keeps none, and the table names page 0."""
        for group, blocks, size in zip(self.caches.kv_cache_groups, request.blocks, self.block_sizes, strict=True):
            spec = group.kv_cache_spec
            specs = getattr(spec, "kv_cache_specs", None)
            spec = next(iter(specs.values())) if specs else spec
            window = spec.sliding_window if isinstance(spec, SlidingWindowMLASpec) else tokens
            first = max(0, request.tokens - window) // size
            while len(blocks) * size < tokens:
                blocks.append(self._free.pop() if len(blocks) >= first else 0)

    def at(self, tokens: int) -> Request:
        """A request with this number of tokens, whose keys `fill` wrote."""
        self.requests += 1
        return Request(self.requests, tokens, [[] for _ in self.block_sizes])

    def share(self, other: GPUEngine) -> None:
        """Work on the caches of another engine."""
        mine, of_vllm = (e.config.compilation_config.static_forward_context for e in (self, other))
        for name, layer in mine.items():
            layer.kv_cache = of_vllm[name].kv_cache
        self.tensors = {}


def fill(engine: GPUEngine, ours: GPUEngine, work: Sequence[tuple[Request, int]]) -> None:
    """Random keys and entries in the pages of these requests, written by an insert of dsv4attn.

    Groups share memory, so a page is written as those of its group are, and the others hold bytes that are finite in
    every format: e4m3, bf16, fp32, exponents.
    """
    raw = next(iter(engine.tensors.values())).untyped_storage()
    for part in torch.empty(0, dtype=torch.uint8, device=GPU).set_(raw).split(2**30):
        part.copy_(torch.randint(0x30, 0x40, part.shape, dtype=torch.uint8, device=GPU))
    random = torch.Generator(GPU).manual_seed(7)
    for i, group in enumerate(engine.caches.kv_cache_groups):
        blocks = torch.tensor([b for request, _ in work for b in request.blocks[i] if b], device=GPU)
        for layer in ours.layers:
            caches = layer._caches()
            for name, cache in ((layer.swa_cache_layer.prefix, caches.swa), (layer.prefix, caches.compressed)):
                if name in group.layer_names:
                    write(layer, cache, blocks, random)


def write(layer: Any, cache: Any, blocks: Tensor, random: torch.Generator) -> None:
    """Random records in all slots of some pages of a cache of dsv4attn's layer."""
    slots = (blocks[:, None] * cache.block_size + torch.arange(cache.block_size, device=GPU)).flatten()
    for part in slots.split(16384):
        kv = torch.randn(len(part), 512, generator=random, device=GPU).bfloat16()
        q, table = kv.new_zeros(len(part), layer.n_local_heads, 512), layer.rotary_emb.cos_sin_cache
        layer._serving.backend.qnorm_rope_kv_insert(q, kv, cache, part, part % 1024, table, 1e-6)


@contextmanager
def engines(model: str, classes: dict[str, tuple[type, str]], **limits: int) -> Iterator[dict[str, GPUEngine]]:
    """An engine for each (layer class, DSV4ATTN_VLLM_PARTS), all on the caches of the first."""
    kinds = tuple(kind for kind in KINDS for _ in range(LAYERS))
    folder = model_folder(kinds, **RELEASED, **MODELS[model])
    written = Path(folder, "config.json")
    written.write_text(json.dumps({**json.loads(written.read_text()), "quantization_config": FP8}))
    by_name: dict[str, GPUEngine] = {}
    with ExitStack() as stack:
        for name, (layer_class, parts) in classes.items():
            os.environ["DSV4ATTN_VLLM_PARTS"] = parts
            config = config_of(folder, enforce_eager=False, max_model_len=32768, **limits)
            stack.enter_context(set_current_vllm_config(config) if by_name else world(config, device=GPU))
            # a prompt of 8,192 tokens takes 7,000 pages, most of them for states of the compressors
            pages = 8192 + limits["max_num_seqs"] * 72
            streams = {"aux_stream_list": [torch.cuda.Stream() for _ in range(3)]}
            by_name[name] = GPUEngine(config, layer_class, layers=len(kinds), pages=pages, device=GPU, **streams)
            first = next(iter(by_name.values()))
            if by_name[name] is not first:
                by_name[name].share(first)
        yield by_name


def of_kind(engine: GPUEngine, kind: str) -> list[Any]:
    """The layers of a kind, as often as a step runs them."""
    at = KINDS.index(kind) * LAYERS
    return engine.layers[at : at + LAYERS] * TIMES

"""What an engine does around a few DeepSeek-V4 layers of vLLM: plans caches, describes steps, calls layers."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from attrs import define, evolve, field
from dsv4attn_vllm.guard import is_before_0_33
from released_sizes import KINDS
from small_model import write_as_released
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV4Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, init_distributed_environment, initialize_model_parallel
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, get_kv_cache_spec, init_attn_backend, init_kv_cache
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

import dsv4attn as ds
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import read_row
from dsv4attn.testing.oracle import attention as oracle

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

REFERENCE, TORCH_OPS = ReferenceBackend(), LayerOps()
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 512,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_topk": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": "bfloat16",
}
BEFORE_0_33 = is_before_0_33(version("vllm"))
PAGES, MOST_PAGES = 500, 1000
"""Pages of each cache, and pages whose order is drawn. A smaller cache then leaves later draws as they are."""
CPU = torch.device("cpu")
LAYOUTS = {
    layout.record_bytes: layout
    for layout in (ds.KVCacheLayout.fp8_ds_mla(), ds.KVCacheLayout.v41_fp8(), ds.KVCacheLayout.v41_fp4())
}
"""Of vLLM's caches, by the bytes of a record."""
WINDOWS = "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL"
"""VLLM's kernel that lists the window of each token."""


@cache
def model_folder(kinds: tuple[str, ...] = ("swa", "c4a", "c128a"), **sizes: Any) -> str:
    """A folder with the configuration of a small model, as a checkpoint has it."""
    types = [KINDS[kind] for kind in kinds]
    config = DeepseekV4Config(
        **{**SIZES, **sizes}, num_hidden_layers=len(types), layer_types=types, mlp_layer_types=["moe"] * len(types)
    )
    folder = tempfile.mkdtemp(prefix="dsv4attn-vllm-")
    config.save_pretrained(folder)
    write_as_released(Path(folder))
    return folder


def config_of(folder: str | None = None, **arguments: Any) -> VllmConfig:
    """VLLM's own configuration, from its command-line arguments."""
    defaults = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256, "enforce_eager": True}
    fixed = {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "block_size": 256}
    return EngineArgs(model=folder or model_folder(), **{**defaults, **fixed, **arguments}).create_engine_config()


def with_images(config: VllmConfig, most_tokens: int) -> VllmConfig:
    """The configuration with a model that reads images of at most this many tokens."""
    hf_config = config.model_config.hf_config
    hf_config.update({"vision_n_layers": 2, "vision_max_n_token": most_tokens})
    # what vLLM 0.32 derives from the first
    hf_config.update({"mm_prefix_clamp_sliding_window": True})
    return config


@contextmanager
def world(
    config: VllmConfig, rank: int = 0, size: int = 1, store: str = "", device: torch.device = CPU
) -> Iterator[None]:
    """The process groups that vLLM's linears want, and its workspace on a device."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    old_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    store = store or f"file://{tempfile.mktemp()}"  # noqa: S306 - the store makes it
    try:
        with set_current_vllm_config(config):
            init_distributed_environment(size, rank, store, rank, "gloo" if device.type == "cpu" else "nccl")
            initialize_model_parallel(size)
            init_workspace_manager(device)
            yield
    finally:
        reset_workspace_manager()
        destroy_model_parallel()
        destroy_distributed_environment()
        torch.set_default_dtype(old_dtype)


def planned_caches(config: VllmConfig, pages: int | None = PAGES, memory: int = 2**40) -> KVCacheConfig:
    """What vLLM's engine core plans for the layers that were built with this configuration.

    pages: None: as many as fit in the memory, in bytes.
    """
    register_all_kvcache_specs(config)
    specs = get_kv_cache_spec(config)
    names = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
    resolve_kv_cache_layout(config, [names], specs.values())
    config.cache_config.num_gpu_blocks_override = pages
    groups = [get_global_kv_cache_groups(config, [specs])] if get_global_kv_cache_groups else []
    [caches] = get_kv_cache_configs(config, [specs], [memory], *groups)
    caches.kv_cache_layout = config.cache_config.kv_cache_layout
    return caches


def bytes_of(cache: Tensor) -> Tensor:
    """A copy of the bytes of a cache."""
    return cache.contiguous().view(torch.uint8).clone()


def generator(seed: int) -> torch.Generator:
    """A generator of torch's with this seed."""
    return torch.Generator().manual_seed(seed)


@define(eq=False)
class Request:
    """name: seed of its keys. tokens: in the caches before the step. blocks: its pages in each group."""

    name: int
    tokens: int = 0
    blocks: list[list[int]] = field(factory=list)


class Engine:
    """Layers of one kind each, their caches, and steps over them.

    Keys, queries and compressor inputs are random, and depend on the request and the position only, so that a step that
    runs again at the same positions writes the same keys.
    """

    WINDOW_PAGE: ClassVar[int] = 64
    BLOCK: ClassVar[int] = 256

    def __init__(
        self,
        config: VllmConfig,
        layer_class: type,
        *,
        layers: int = 3,
        pages: int = PAGES,
        device: torch.device = CPU,
        **options: Any,
    ) -> None:
        self.config, self.device = config, device
        hf, tokens = config.model_config.hf_config, config.scheduler_config.max_num_batched_tokens
        with device:
            self.topk = torch.full((tokens, hf.index_topk), -1, dtype=torch.int32)
            build = {"topk_indices_buffer": self.topk, **options}
            self.layers = [layer_class(config, prefix=f"model.layers.{i}.attn", **build) for i in range(layers)]
        for layer in self.layers:
            layer.first_head = get_tensor_model_parallel_rank() * layer.n_local_heads
            self.load(layer)
        self.caches = planned_caches(config, pages)
        self.groups, self.graphs, sizes = init_attn_backend(self.caches, config, device)
        self.block_sizes = sizes
        context = config.compilation_config.static_forward_context
        self.tensors = init_kv_cache(context, self.caches, device, sizes, config)
        for tensor in self.tensors.values():
            # a byte that no kernel wrote must not be read: NaN in every format
            tensor.view(torch.uint8).fill_(0xFF) if tensor.dtype == torch.uint8 else tensor.fill_(float("nan"))
        order = torch.randperm(max(pages, MOST_PAGES) - 1) + 1
        self._free = order[order < pages].tolist()
        limits, longest = config.scheduler_config, config.model_config.max_model_len
        with device:
            self.tables = [torch.zeros(limits.max_num_seqs, -(-longest // size), dtype=torch.int32) for size in sizes]
            self.slots = torch.full((len(sizes), tokens), -1, dtype=torch.int64)
            self.positions = torch.zeros(tokens, dtype=torch.int64)
            # of long requests, so that a row of padding that counts as a token sees entries
            stale = torch.randint(longest // 2, longest, (tokens,), generator=generator(tokens))
            self.stale_positions = stale.to(device)
        self.queries: dict[str, Tensor] = {}
        self.requests = 0

    def load(self, layer: Any) -> None:
        """Give a layer random weights, as a checkpoint would."""
        for name, weight in [*layer.named_parameters()]:
            torch.nn.init.normal_(weight, std=1.0 if "sink" in name or "ape" in name else 0.05)
        for module in layer.modules():
            if hasattr(module, "quant_method"):
                module.cpu_linear = functional.linear
        layer.process_weights_after_loading(torch.bfloat16)

    def request(self, tokens: int = 0) -> Request:
        """A request whose first tokens are in the caches already, with keys as a prefill of them would write."""
        self.requests += 1
        request = Request(self.requests, blocks=[[] for _ in self.block_sizes])
        with self.written_by_reference():
            while request.tokens < tokens:
                self.step([(request, min(tokens - request.tokens, 200))], attend=False)
        return request

    @contextmanager
    def written_by_reference(self) -> Iterator[None]:
        """Write caches by torch. Interpreted kernels write the same bytes, and take longer than the next step."""
        with ExitStack() as stack:
            for layer in self.layers:
                backend = layer._serving.backend
                names = "save_partial_states", "compress_norm_rope_store"
                ops = evolve(backend.layer_ops, **{name: getattr(TORCH_OPS, name) for name in names})
                by_torch = {"layer_ops": ops, "qnorm_rope_kv_insert": REFERENCE.qnorm_rope_kv_insert}
                stack.enter_context(patch.dict(vars(backend), by_torch))
            yield

    def _grow(self, request: Request, tokens: int) -> None:
        """Give a request the pages for these tokens in every group: from one pool, in random order, never page 0."""
        for blocks, size in zip(request.blocks, self.block_sizes, strict=True):
            while len(blocks) * size < tokens:
                blocks.append(self._free.pop())

    def describe(
        self, work: Sequence[tuple[Request, int]], *, pad: int = 0, pad_requests: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Metadata of a step, by prefix, from vLLM's builders. work: requests, decodes first, and their new tokens.

        pad: tokens of padding after the others, as a captured graph of a fixed size has them. Their slots are -1. Their
        positions are what earlier steps left in the buffer: vLLM writes those of the step's tokens only.
        pad_requests: requests of padding, without tokens, as graphs of whole decode steps have them.
        """
        counts, requests = [count for _, count in work], [request for request, _ in work]
        for request, count in work:
            self._grow(request, request.tokens + count)
        nothing = [0] * pad_requests
        starts = torch.tensor([0, *itertools.accumulate(counts + nothing)], dtype=torch.int32)
        lens = torch.tensor([request.tokens + count for request, count in work] + nothing, dtype=torch.int32)
        self.positions.copy_(self.stale_positions)
        self.positions[: sum(counts)] = torch.cat([torch.arange(r.tokens, r.tokens + n) for r, n in work])
        self.slots.fill_(-1)
        for group, size in enumerate(self.block_sizes):
            self.tables[group].fill_(0)
            for i, request in enumerate(requests):
                pages = torch.tensor(request.blocks[group], dtype=torch.int32)
                self.tables[group][i, : len(pages)] = pages
                at = torch.arange(request.tokens, request.tokens + counts[i])
                self.slots[group, starts[i] : starts[i + 1]] = pages[at // size].long() * size + at % size
        tokens = sum(counts) + pad
        return build_attn_metadata(
            self.groups,
            num_reqs=len(work) + pad_requests,
            num_tokens=tokens,
            query_start_loc_gpu=starts.to(self.device, copy=True),
            query_start_loc_cpu=starts,
            max_query_len=max(counts),
            seq_lens=lens.to(self.device, copy=True),
            max_seq_len=int(lens.max()),
            block_tables=[table[: len(work) + pad_requests] for table in self.tables],
            slot_mappings=self.slots[:, :tokens],
            kv_cache_config=self.caches,
            seq_lens_cpu_upper_bound=lens,
            positions=self.positions[:tokens],
            **options,
        )

    def random_rows(self, work: Sequence[tuple[Request, int]], rows: int, columns: int, seed: int = 0) -> Tensor:
        """[rows, columns] fp32, which depend on request, position and seed only; rows of padding are 3."""
        parts = [
            torch.randn(columns, generator=generator(position * 1009 + request.name * 31 + seed), dtype=torch.float32)
            for request, count in work
            for position in range(request.tokens, request.tokens + count)
        ]
        parts += [torch.full((columns,), 3.0, dtype=torch.float32)] * (rows - len(parts))
        return torch.stack(parts) if parts else torch.zeros(0, columns, dtype=torch.float32)

    def inputs(self, layer: Any, work: Sequence[tuple[Request, int]], rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Q [rows, h, 512] and kv [rows, 512] bf16 before the insert, and what the compressor gets, [rows, c] fp32."""
        sizes = layer.n_heads * layer.head_dim, layer.head_dim, self.score_columns(layer)
        q, kv, scores = self.random_rows(work, rows, sum(sizes), self.seed_of(layer)).split(sizes, dim=1)
        heads = slice(layer.first_head, layer.first_head + layer.n_local_heads)
        q = q.view(rows, layer.n_heads, layer.head_dim)[:, heads].bfloat16().contiguous()
        return q, kv.bfloat16().contiguous(), scores.contiguous()

    def score_columns(self, layer: Any) -> int:
        """Columns of what a layer's compressor gets."""
        compressor = layer.compressor
        return 2 * compressor.coff * compressor.head_dim if compressor else 0

    def seed_of(self, layer: Any) -> int:
        """What random inputs of a layer depend on, next to request and position."""
        return 0

    def select(self, work: Sequence[tuple[Request, int]]) -> None:
        """What the indexer would write: some of the visible entries of each token, in no order, then -1.

        Rows of padding have what an earlier step left there: entries that a longer request saw.
        """
        self.topk.copy_(self.stale_selection())
        row = 0
        for request, count in work:
            for position in range(request.tokens, request.tokens + count):
                seed = generator(position * 1009 + request.name)
                picks = torch.randperm((position + 1) // 4, generator=seed)[: self.topk.shape[1]]
                self.topk[row] = -1
                self.topk[row, : len(picks)] = picks.int()
                row += 1

    def stale_selection(self) -> Tensor:
        """A selection of the first few entries in every row, [K] int32."""
        return torch.arange(self.topk.shape[1], dtype=torch.int32, device=self.device) % 4

    def step(
        self,
        work: Sequence[tuple[Request, int]],
        *,
        pad: int = 0,
        pad_requests: int = 0,
        extra_rows: int = 0,
        attend: bool = True,
        **options: Any,
    ) -> list[Tensor]:
        """One step: the output of each layer's attention, [rows, h, 512].

        pad, pad_requests: see `describe`.
        extra_rows: rows of padding that the metadata do not have.
        attend: False writes keys only. vLLM's builder then lists no windows, which is quicker.
        """
        with nullcontext() if attend else patch.object(sparse_swa, WINDOWS, lambda *_, **__: None):
            metadata = self.describe(work, pad=pad, pad_requests=pad_requests, **options)
        rows = sum(count for _, count in work) + pad + extra_rows
        self.select(work)
        with set_forward_context(metadata, self.config, num_tokens=rows):
            outs = [self.run(layer, metadata, work, rows, attend=attend) for layer in self.layers]
        for request, count in work:
            request.tokens += count
        return outs

    def run(self, layer: Any, metadata: Any, work: Any, rows: int, *, attend: bool = True) -> Tensor:
        """Insert, compress and attend on one layer, through the methods that vLLM's layer calls."""
        q, kv, scores = self.inputs(layer, work, rows)
        positions = self.positions[:rows]
        q = layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)
        if layer.compressor is not None:
            layer.compressor(scores, positions, layer.rotary_emb)
        out = torch.full_like(q, float("nan"))
        self.queries[layer.prefix] = q
        if attend:
            layer.forward_mqa(q, kv, positions, out)
        return out

    # ---------------------------------------------------------------- what a step should have computed

    def bound(self) -> dict[str, Tensor]:
        """All caches that vLLM bound, by prefix."""
        context = self.config.compilation_config.static_forward_context
        return {name: layer.kv_cache for name, layer in context.items() if layer.kv_cache.numel()}

    def group_of(self, prefix: str) -> int:
        """The number of the group of caches that a layer's cache is in."""
        groups = self.caches.kv_cache_groups
        return next(i for i, group in enumerate(groups) if prefix in group.layer_names)

    def entries_of(self, layer: Any) -> Any:
        """The layer that owns the compressed cache that a layer reads, if it reads one."""
        return layer if layer._geometry.has_entries else None

    def selection_of(self, layer: Any) -> Tensor:
        """The entries [rows, K] that a layer read in the last step."""
        return self.topk

    def records(self, cache: Tensor, prefix: str, index: int, numbers: Sequence[int]) -> list[np.ndarray]:
        """Records of a request in float64, read from a cache by its block table."""
        (page, record), table = cache.shape[1:], self.tables[self.group_of(prefix)]
        layout, keys = LAYOUTS[record], []
        for number in numbers:
            raw = cache[int(table[index][number // page])].as_strided((page * record,), (1,)).numpy()
            keys.append(read_row(raw[place_of(layout, number % page, page)], layout))
        return keys

    def of_oracle(
        self, layer: Any, index: int, position: int, row: int, *, window_keys: range | None = None, **rule: Any
    ) -> np.ndarray:
        """One token's attention in float64, from the bytes in the caches. index, row: of its request and of itself.

        window_keys: positions whose keys of the window cache are visible, where that is not the plain window. rule: of
        the window, see `oracle.visible_keys`.
        """
        owner, picks = self.entries_of(layer), None
        if layer._geometry.kind is ds.LayerKind.CSA:
            picks = [entry for entry in self.selection_of(layer)[row].tolist() if entry >= 0]
        ratio = layer.compress_ratio if owner is not None else None
        positions, entries = oracle.visible_keys(position, 128, ratio, picks, **rule)
        swa = layer.swa_cache_layer
        keys = self.records(swa.kv_cache, swa.prefix, index, positions if window_keys is None else window_keys)
        if owner is not None:
            keys += self.records(owner.kv_cache, owner.prefix, index, entries)
        q = self.queries[layer.prefix][row].double().numpy()
        return oracle.attend_row(q, np.array(keys), layer.attn_sink.double().numpy(), 512**-0.5)[0]

    def error(self, layer: Any, out: Tensor, index: int, position: int, row: int, **rule: Any) -> float:
        """The largest difference of a row to the oracle's, as a part of its largest value. Arguments of `of_oracle`."""
        expected = self.of_oracle(layer, index, position, row, **rule)
        return float(np.abs(out[row].double().numpy() - expected).max() / np.abs(expected).max())

    def check_rows(self, outs: Sequence[Tensor], requests: Sequence[tuple[int, int]], rows: Sequence[int]) -> None:
        """Hold rows of the last step against the oracle. before: tokens in the caches before it, and new tokens."""
        tokens = [(i, tokens + j) for i, (tokens, count) in enumerate(requests) for j in range(count)]
        for layer, out in zip(self.layers, outs, strict=True):
            for row in rows:
                error = self.error(layer, out, *tokens[row], row)
                assert error < 0.012, (layer.prefix, row, error)

    def check_step(self, requests: Sequence[tuple[int, int]], rows: Sequence[int], *, extra_rows: int = 0) -> None:
        """Run a step of new requests, and hold it against `of_own_builder`, and these rows against the oracle."""
        outs = self.step([(self.request(tokens), count) for tokens, count in requests], extra_rows=extra_rows)
        for layer, out in zip(self.layers, outs, strict=True):
            assert torch.equal(self.of_own_builder(layer, requests, len(out)), out), layer.prefix
            assert not out[len(out) - extra_rows :].any()
        self.check_rows(outs, requests, rows)

    def of_own_builder(self, layer: Any, requests: Sequence[tuple[int, int]], rows: int) -> Tensor:
        """The last step of a layer by dsv4attn's MetadataBuilder and forward_mqa. before: as in `check_rows`."""
        serving, swa, owner = layer._serving, layer.swa_cache_layer, self.entries_of(layer)
        counts, window = [count for _, count in requests], self.group_of(swa.prefix)
        entries = window if owner is None else self.group_of(owner.prefix)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        lens = torch.tensor([tokens + count for tokens, count in requests], dtype=torch.int32)
        pages = {"swa_block_size": self.WINDOW_PAGE, "compressed_block_tokens": self.BLOCK}
        builder = ds.MetadataBuilder(
            serving.model, serving.limits, short_prefills=True, backend=serving.backend, **pages
        )
        batch = ds.Batch(
            num_reqs=len(counts),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            seq_lens_cpu=lens,
            slot_mapping=self.slots[window][: sum(counts)],
            block_table=self.tables[window][: len(counts)],
            compressed_block_table=self.tables[entries][: len(counts)],
        )
        compressed = None if owner is None else ds.PagedKVCache(owner.kv_cache, serving.compressed_layout)
        caches = ds.LayerCaches(ds.PagedKVCache(swa.kv_cache, serving.swa_layout), compressed)
        q = self.queries[layer.prefix]
        out, metadata = torch.full_like(q, float("nan")), builder.build_all(batch)[layer._geometry.key]
        selects = layer._geometry.kind is ds.LayerKind.CSA
        ds.forward_mqa(
            q,
            caches,
            metadata,
            serving.backend,
            ds.WorkspaceManager(),
            out,
            layer=layer._geometry,
            limits=serving.limits,
            attn_sink=layer.attn_sink,
            topk_indices=self.selection_of(layer) if selects else None,
        )
        return out

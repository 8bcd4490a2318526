"""A process with vLLM's own engine in it: see `main`.

vLLM's scheduler, cache manager with prefix caching, worker and model runner (version 2) for CPUs, sampler and model run
as they are. A DeepSeek-V4 model runs its attention with all parts around it, and its hyper-connections, on dsv4attn.

Faked, next to the interpreter of conftest.py:
- Five compiled ops that are not attention's are written in torch below (`OPS`), unless vLLM's `_C` is installed.
- The CPU has AMX while vLLM makes its configuration: without AMX it forbids chunks and prefix caching for this model.
- The engine, its worker and the caller are one process. Of pipeline-parallel stages each is one: see served_rank.py.
- In vLLM's batch-invariant mode, which the wheel refuses on a CPU: its overrides of torch's ops are for GPUs, and are
  not installed; linears multiply some rows at a time (`batch_invariant_linear`); experts are taken for invariant.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import conftest  # noqa: F401 - Triton's interpreter and the variables of these tests

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from small_model import answers
from torch import Tensor
from torch.nn import functional

from dsv4attn.core.torch_ops.tiles import batch_invariant_linear


def init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind no memory."""


def prepack_moe_weight(weight: Tensor, packed: Tensor, isa: str) -> None:
    """Keep the order of a weight."""
    packed.copy_(weight)


def hash_topk_cpu(
    gating_output: Tensor, tid2eid: Tensor, topk: int, scoring_func: str, fused: int, experts: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the experts that a token's id names."""
    weights = functional.softplus(gating_output.float()).sqrt().gather(1, tid2eid.long())
    return weights / weights.sum(1, keepdim=True) * scale, tid2eid.int()


def biased_topk_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    fused: int,
    scale: float | None,
    scaled: bool,
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the experts with the largest scores and biases."""
    scores = functional.softplus(gating_output.float()).sqrt()
    experts = (scores + correction_bias).topk(topk, dim=1)[1]
    weights = scores.gather(1, experts)
    return weights / weights.sum(1, keepdim=True) * (scale or 1.0), experts.int()


def cpu_fused_moe(
    out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    skip_weighted: bool,
    act: str,
    isa: str,
) -> None:
    """Experts without biases, in fp32."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in experts.unique().tolist():
        rows, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[rows].float(), w13[expert].float()).chunk(2, dim=1)
        y = functional.linear(functional.silu(gate) * up, w2[expert].float())
        total.index_add_(0, rows, y * weights[rows, choice, None])
    out.copy_(total)


def take_mode_for_served() -> None:
    """Let this process run in vLLM's batch-invariant mode on a CPU."""
    from dsv4attn_vllm import invariance
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    os.environ[invariance.SWITCH] = "1"
    invariance.PLATFORMS = ("cpu",)
    batch_invariant.init_batch_invariance = lambda: None
    FusedMoEExperts._supports_batch_invariance = staticmethod(lambda: True)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = batch_invariant_linear(x, weight)
        return out if bias is None else out + bias

    functional.linear = linear


OPS = {
    init_cpu_memory_env: (),
    prepack_moe_weight: ("packed",),
    hash_topk_cpu: (),
    biased_topk_cpu: (),
    cpu_fused_moe: ("out",),
}
"""Ops of vLLM's `_C`, and the arguments that each writes."""


@contextmanager
def _ops() -> Iterator[None]:
    """Define the ops that vLLM's Python calls on a CPU, where nothing compiled does."""
    import vllm._custom_ops  # noqa: F401 - it loads what is compiled

    library = torch.library.Library("_C", "FRAGMENT")
    for op, written in OPS.items():
        if not hasattr(torch.ops._C, op.__name__):
            library.define(op.__name__ + torch.library.infer_schema(op, mutates_args=written))
            library.impl(op.__name__, op, "CompositeExplicitAutograd")
    yield
    library._destroy()


@contextmanager
def configured_with_amx() -> Iterator[None]:
    """Let vLLM find AMX, without which it forbids chunks and prefix caching for this model on a CPU."""
    real, torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_tile_supported, lambda: True
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = real


def engine(**arguments: Any) -> Any:
    """VLLM's `LLM` of these arguments."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    make = EngineArgs.create_engine_config

    def configured(*inputs: Any, **options: Any) -> Any:
        with configured_with_amx():
            return make(*inputs, **options)

    EngineArgs.create_engine_config = configured
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "disable_log_stats": False}
    return LLM(**options, kv_cache_memory_bytes=2**28, **arguments)


def main(
    *,
    out: str,
    backend: str,
    rounds: list[list[list[int]]],
    tokens: int,
    of_prompts: int = 1,
    invariant: bool = False,
    entries: str = "",
    **arguments: Any,
) -> None:
    """Serve rounds of prompts, one round after another, and save their `answers`, and how many requests were preempted.

    of_prompts: the first rounds, which have log-probabilities of prompts too; vLLM does not take these prompts from the
    prefix cache. invariant: in the batch-invariant mode. entries: a folder in which selected entries are recorded.
    """
    os.environ.update(DSV4ATTN_BACKEND=backend, DSV4ATTN_VLLM_PARTS="all")
    if entries:
        os.environ["DSV4ATTN_VLLM_ENTRIES"] = entries
    if invariant:
        take_mode_for_served()
    with _ops():
        llm = engine(**arguments)
        results = [answers(llm, prompts, tokens, of_prompts=i < of_prompts) for i, prompts in enumerate(rounds)]
        if entries:
            from dsv4attn_vllm.entries import write_entries

            llm.collective_rpc(write_entries)
        [preempted] = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    torch.save((results, preempted), out)

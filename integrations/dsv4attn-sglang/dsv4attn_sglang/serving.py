"""Whether dsv4attn can run the attention of a model that SGLang is about to serve: asked before its first token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import evolve

from dsv4attn import Backend, KVCacheLayout, Limits, ModelGeometry
from dsv4attn.compat.direct import PAGE_SIZE, CallKind, plan
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.errors import Dsv4AttnError
from dsv4attn.integrations.engines import SGLANG
from dsv4attn.selection import explain
from dsv4attn_sglang import attention, functions, gather, indexer, parts, records
from dsv4attn_sglang.guard import LOG, RefusedError

WINDOW = 128
COLUMNS = 64
"""SGLang fills rows of indices up to a multiple of this."""


def targets(device: str) -> dict[str, str]:
    """The functions of SGLang that attention on this device calls, and what in `attention` replaces each of them.

    Raises RefusedError for a device on which SGLang calls other functions.
    """
    from sglang.srt.runtime_context import get_platform
    from sglang.srt.utils import is_cuda, is_hip, is_xpu

    if is_xpu():
        return functions.XPU
    if is_cuda():
        return functions.SM120 if get_platform().is_sm120 else functions.CUDA
    expected = "a GPU of NVIDIA or Intel: on others SGLang does not call FlashMLA's functions"
    actual = "ROCm" if is_hip() else device
    raise RefusedError("device", expected=expected, actual=actual, cure="use such a GPU")


def check(runner: Any, served_parts: Collection[str] = ()) -> list[str]:  # noqa: ANN401 - SGLang's ModelRunner
    """Check options, caches and backends of a model. A line for each phase: which backend runs it, and why.

    runner: SGLang's ModelRunner with its caches in place. served_parts: of `parts`, those that run on dsv4attn; a line
    for each of them. Raises RefusedError for what dsv4attn does not serve in SGLang; NoBackendError, with all reasons,
    if no backend, or not the one that was asked for, can run a call.
    """
    targets(runner.device)
    _check_both_phases(runner)
    _check_experts(runner)
    _check_options()
    _check_caches(runner.token_to_kv_pool)
    if parts.INDEXER in served_parts:
        parts.check(runner)
    device, heads = torch.empty(0, device=runner.device, dtype=torch.float32).device, _heads(runner)
    facts = (heads, torch.bfloat16, runner.model_config.head_dim**-0.5, True, 1)
    lines: dict[str, list[str]] = {}
    of_parts: list[str] = []
    backends: list[Backend] = []
    for phase, layers, sizes, layouts in _calls(runner):
        # what the calls themselves ask: it raises, and loads the backend
        kind = CallKind(phase, *facts, sizes, layouts)
        backend, _ = plan(kind, device, None)
        backends += [backend] * (backend not in backends)
        if layers == "c4a" and parts.INDEXER in served_parts:
            indexer.serve(runner.token_to_kv_pool, backend)
            of_parts.append(f"indexer: scores and selection of {backend.name} ({parts.VARIABLE})")
        if kind.phase is Phase.PREFILL and parts.GATHER in served_parts:
            gather.serve(device, backend)
            of_parts.append(f"gather: keys of prompts by {backend.name} ({parts.VARIABLE})")
        chosen = explain(kind.problem, device=device)
        lines.setdefault(f"{phase.value}, {heads} heads: {chosen.verdict} ({chosen.request.source})", []).append(layers)
    if device.type != "cpu":
        _compile(runner, backends, served_parts, device)
    return [*(f"{line}; {', '.join(layers)}" for line, layers in lines.items()), *of_parts]


def _compile(
    runner: Any,  # noqa: ANN401 - SGLang's ModelRunner
    backends: Sequence[Backend],
    served_parts: Collection[str],
    device: torch.device,
) -> None:
    """Compile all kernels before the first request. The log of dsv4attn says how many were in Triton's cache."""
    try:
        bounds = bounds_of(runner, served_parts)
    except Dsv4AttnError as error:
        LOG.warning("kernels are compiled when they run first, because this model's sizes are not known: %s", error)
        return
    for backend in backends:
        backend.warmup(bounds, device)


def bounds_of(runner: Any, served_parts: Collection[str]) -> WarmupSpec:  # noqa: ANN401 - as above
    """What is compiled ahead. Raises Dsv4AttnError for a configuration that `ModelGeometry` does not read."""
    pool, config = runner.token_to_kv_pool, runner.model_config
    model = ModelGeometry.from_config(config.hf_text_config, name="the model")
    ratios = [*pool.present_ratios]
    return WarmupSpec.of(
        evolve(model, num_heads=_heads(runner), o_groups=max(model.o_groups // _ranks(), 1)),
        Limits(max_num_reqs=256, max_num_batched_tokens=8192, max_model_len=config.context_len),
        swa=records.LAYOUTS[pool.kv_layout.value],
        compressed=records.LAYOUTS[pool.compressed_kv_layout(ratios[0]).value] if ratios else None,
        swa_block_size=pool.get_swa_key_page_size(),
        lse=True,
        aligned_rows=True,
        layer_parts=parts.INDEXER in served_parts,
        parts=("selection",) if parts.INDEXER in served_parts else (),
    )


def _check_both_phases(runner: Any) -> None:  # noqa: ANN401
    """Two attention backends, one for prefill and one for decode, are refused.

    SGLang puts them into its `HybridAttnBackend`, which lacks what DeepSeek-V4's layers call: the first request fails.
    """
    prefill, decode = runner.prefill_attention_backend_str, runner.decode_attention_backend_str
    if prefill != decode:
        expected = "dsv4 for both: SGLang's hybrid backend lacks methods that DeepSeek-V4's layers call"
        cure = "start SGLang with --attention-backend dsv4 and without these two"
        raise RefusedError(
            "--prefill-attention-backend and --decode-attention-backend",
            expected=expected,
            actual=f"{prefill} and {decode}",
            cure=cure,
        )


def _check_experts(runner: Any) -> None:  # noqa: ANN401
    """Experts in MXFP4 run on Humming alone before sm_90, for which SGLang refuses Marlin and chooses Triton by itself.

    Its Triton kernels multiply no codes of 4 bits. From sm_89 on they multiply fp8, to which SGLang converts MXFP4 if
    it is told to.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    from sglang.srt.runtime_context import get_platform
    from sglang.srt.utils import is_cuda

    if not is_cuda() or not getattr(runner.model_config, "is_fp4_experts", False):
        return
    sm, experts = get_platform().device_sm, get_moe_runner_backend()
    if sm < 90 and not experts.is_humming() and not (sm == 89 and envs.SGLANG_DSV4_FP4_DEQUANT.get()):
        expected = f"humming on sm_{sm}, as SGLang has nothing else there for experts in MXFP4"
        cure = "start SGLang with --moe-runner-backend humming"
        raise RefusedError("--moe-runner-backend", expected=expected, actual=experts.value, cure=cure)


def _check_options() -> None:
    """Options of SGLang that lead past FlashMLA's functions are refused."""
    from sglang.srt.layers.attention.dsv4.sparse_prefill_utils import (
        DSV4_Q8KV8_PREFILL_ENV,
        use_dsv4_q8kv8_sparse_prefill,
    )
    from sglang.srt.runtime_context import get_exec

    kernel = get_exec().kernel
    if kernel.dsv4_attn_backend not in ("auto", "flashmla"):
        what, cure = "--dsv4-attn-backend", "start SGLang with --dsv4-attn-backend flashmla"
        raise RefusedError(what, expected="flashmla", actual=kernel.dsv4_attn_backend, cure=cure)
    if use_dsv4_q8kv8_sparse_prefill(kernel.dsv4_prefill_backend):
        cure = f"start SGLang with --dsv4-prefill-backend flashmla_sparse and without {DSV4_Q8KV8_PREFILL_ENV}"
        raise RefusedError("--dsv4-prefill-backend", expected="flashmla_sparse", actual="flashmla_sparse_q8", cure=cure)


def _check_caches(pool: Any) -> None:  # noqa: ANN401 - SGLang's DeepSeekV4TokenToKVPool
    """Caches of other records than the 584 bytes of V4 are refused, but for V4.1's own where they are asked for."""
    cure = "set SGLANG_DSV4_KV_LAYOUT=v4 and SGLANG_DSV4_COMPRESSED_KV_LAYOUT=auto"
    if pool._unified_kv or pool.uniform_fp8:  # noqa: SLF001 - SGLang has no other name for it
        actual = "one pool of plain rows" if pool._unified_kv else "uniform fp8 rows"  # noqa: SLF001
        raise RefusedError("KV cache", expected="pages of 584-byte records", actual=actual, cure=cure)
    layouts = {"window": pool.kv_layout}
    layouts |= {f"c{ratio}": pool.compressed_kv_layout(ratio) for ratio in pool.present_ratios}
    served = {"v4"}
    if records.are_asked_for():
        served = set(records.LAYOUTS)
        records.check(pool)
        attention.serve(records.LAYOUTS[records.NAME].record_bytes)
    other = [f"{name} {layout.value}" for name, layout in layouts.items() if layout.value not in served]
    if other:
        raise RefusedError(
            "layout of the KV cache", expected="v4, 584-byte records", actual=", ".join(other), cure=cure
        )


def _ranks() -> int:
    """Ranks that divide the heads."""
    from sglang.srt.runtime_context import get_parallel

    size: int = get_parallel().attn_tp_size
    return size


def _heads(runner: Any) -> int:  # noqa: ANN401
    """Heads of q, which SGLang fills up to 64 for FlashMLA."""
    heads: int = runner.model_config.num_attention_heads
    local = heads // _ranks()
    return SGLANG.least_heads if local <= SGLANG.least_heads else heads


_Call = tuple[Phase, str, tuple[tuple[int, int], ...], tuple[KVCacheLayout, ...]]


def _calls(runner: Any) -> list[_Call]:  # noqa: ANN401
    """The kinds of calls: decode of each kind of layer, and prefill over gathered rows; with the name of the layers.

    Sizes are columns and page size of the window, then those of the compressed cache. Layouts are those of both.
    """
    pool, config = runner.token_to_kv_pool, runner.model_config
    window = (WINDOW, pool.get_swa_key_page_size())
    widths = {ratio: getattr(config.hf_text_config, "index_topk", 512) for ratio in pool.present_ratios}
    if 128 in widths:
        widths[128] = config.context_len // 128
    swa = records.LAYOUTS[pool.kv_layout.value]
    calls: list[_Call] = [(Phase.DECODE, "swa", (window,), (swa,))]
    for ratio, width in widths.items():
        sizes = window, (_filled(width), max(runner.page_size // ratio, 1))
        layouts = swa, records.LAYOUTS[pool.compressed_kv_layout(ratio).value]
        calls.append((Phase.DECODE, f"c{ratio}a", sizes, layouts))
    gathered = _filled(WINDOW + max(widths.values(), default=0))
    return [*calls, (Phase.PREFILL, f"up to {gathered} of the gathered rows", ((gathered, PAGE_SIZE),), ())]


def _filled(width: int) -> int:
    return -(-max(width, 1) // COLUMNS) * COLUMNS

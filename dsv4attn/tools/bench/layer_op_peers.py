"""Other libraries' functions for the ops around attention, on our inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.contract.backend import Backend
from dsv4attn.tools.bench.attention_peers import Peer, missing
from dsv4attn.tools.bench.contenders import Contender, Task, returning, writing
from dsv4attn.tools.bench.hyper_connections import StreamInputs
from dsv4attn.tools.bench.index_ops import PAGE, IndexInputs, selection_bounds

_SPLITS = 16
"""Parts of the sum in DeepGEMM's product of few tokens."""
_FEW = 64
_MOST = 2
"""Tokens of a request in its paged function."""
_WORKSPACE_BYTES = 2**20
"""Bytes that vLLM gives to its top-k of a decode."""
_CLUSTER_ROWS = 64
"""Most rows for which vLLM takes cooperative_topk."""


_Chooser: TypeAlias = "tuple[str, Callable[[Tensor], Tensor]]"
"""The name of a top-k, and its call: logits [T, E] to entries [T, K]."""


class DeepGEMM(Peer):
    """DeepSeek's kernels, from their own package or, without it, from vLLM's wheel, which ships them.

    They are compiled when they are first called (CUDA_HOME must name a CUDA toolkit). A selection is its logits and
    then a top-k: `torch.topk` here, other libraries' in subclasses.
    """

    name = "deep_gemm"
    kernels: tuple[str, ...] = ("index", "select", "mhc")
    _modules = ("deep_gemm", "vllm.third_party.deep_gemm")
    _functions = (
        "fp8_fp4_paged_mqa_logits",
        "fp8_fp4_mqa_logits",
        "get_paged_mqa_logits_metadata",
        "tf32_hc_prenorm_gemm",
    )

    def available(self) -> str | None:
        """Why it cannot be used here, or None."""
        return super().available() or self._found()[1]

    def contender(self, task: Task, gatherers: Sequence[Backend]) -> Contender | None:
        """See `Peer`. It needs no rows."""
        of_task = task.inputs
        if isinstance(of_task, StreamInputs):
            return self._product(of_task) if of_task.case.step == "pre" else None
        if not isinstance(of_task, IndexInputs):
            return None
        if of_task.case.kernel == "index":
            logits = self._logits(of_task)
            return returning(self.name, lambda: [logits()])
        chooser = self._chooser(of_task)
        if chooser is None:
            return None
        title, choose = chooser
        logits = self._logits(of_task)
        note = f"select: logits (of a prompt: of keys gathered before), then {title}"
        return returning(
            self.name, lambda: [choose(logits())], lambda results: selection_bounds(of_task, results[0]), note
        )

    def _chooser(self, of_task: IndexInputs) -> _Chooser | None:
        """The top-k of a case, or None if it is another peer's.

        What an engine makes once for all layers of a step is made before the call.
        """
        topk = of_task.case.topk
        return "torch.topk", lambda logits: torch.topk(logits, topk, dim=-1, sorted=False).indices

    def _found(self) -> tuple[str, str | None]:
        """The module that has the functions, and None; or why no module has them."""
        obstacles = []
        for module in self._modules:
            why = missing(module, *self._functions)
            if why is None:
                return module, None
            obstacles.append(why)
        return "", "; ".join(obstacles)

    def _module(self) -> Any:  # noqa: ANN401 - another library
        return importlib.import_module(self._found()[0])

    def _logits(self, of_task: IndexInputs) -> Callable[[], Tensor]:
        """Its logits [T, E]. Its plan of a paged call is made before: an engine makes one for all layers of a step."""
        module = self._module()
        keys, q, cache = of_task.case.keys, of_task.q, of_task.cache
        if cache is None or _is_prompt(of_task):
            codes, ends = (of_task.codes[0], of_task.scales[0]), of_task.lens[0]
            gathered = (q[0], None), codes, of_task.weights, torch.zeros_like(ends), ends, keys
            return lambda: module.fp8_fp4_mqa_logits(*gathered)[:, :keys]
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        plan = module.get_paged_mqa_logits_metadata(of_task.lens, PAGE, processors)
        pages = cache.tensor.unsqueeze(2)
        paged = (q, None), pages, of_task.weights, of_task.lens, of_task.table, plan, keys
        return lambda: module.fp8_fp4_paged_mqa_logits(*paged)[:, :keys]

    def _product(self, of_task: StreamInputs) -> Contender:
        """The product and the sums of squares at the beginning of mhc_pre."""
        module = self._module()
        x, fn = of_task.streams.flatten(1), of_task.weights.fn
        splits = _SPLITS if x.shape[0] <= _FEW else None
        lead = () if splits is None else (splits,)
        out = fn.new_empty(*lead, x.shape[0], fn.shape[0])
        squares = fn.new_empty(*lead, x.shape[0])
        wide = x.float()
        expected = [wide @ fn.T, wide.square().sum(-1, keepdim=True)]
        product = partial(module.tf32_hc_prenorm_gemm, x, fn, out, squares, splits)

        def results() -> list[Tensor]:
            sums = [out, squares[..., None]]
            return sums if splits is None else [part.sum(0) for part in sums]

        note = "mhc: the product with fn and the sums of squares at the beginning of mhc_pre, and nothing else"
        written = writing(f"{self.name} product", product, out, squares)
        return evolve(written, results=results, note=note, expected=expected)


class FlashInferTopk(DeepGEMM):
    """FlashInfer's radix top-k of DeepGEMM's logits, by the function that engines call."""

    name, kernels = "flashinfer_topk", ("select",)
    needs = (("flashinfer", "top_k_ragged_transform"),)

    def _chooser(self, of_task: IndexInputs) -> _Chooser | None:
        module: Any = importlib.import_module("flashinfer")
        lens, topk = of_task.lens.flatten(), of_task.case.topk
        offsets = torch.zeros_like(lens)
        choose = module.top_k_ragged_transform
        return "flashinfer.top_k_ragged_transform", lambda logits: choose(_whole_rows(logits), offsets, lens, topk)


class SglangTopk(DeepGEMM):
    """SGLang's top-k v2 of DeepGEMM's logits, which SGLang compiles when it is first called."""

    name, kernels = "sglang_topk", ("select",)
    _module_of_topk = "sglang.kernels.ops.attention.dsv4"
    needs = ((_module_of_topk, "plan_topk_v2", "topk_transform_paged_v2", "topk_transform_ragged_v2"),)

    def _chooser(self, of_task: IndexInputs) -> _Chooser | None:
        module: Any = importlib.import_module(self._module_of_topk)
        lens, case = of_task.lens.flatten(), of_task.case
        out, none = lens.new_empty(case.count, case.topk), torch.zeros_like(lens)
        is_prompt = _is_prompt(of_task)
        plan = None if is_prompt else module.plan_topk_v2(lens)

        def choose(logits: Tensor) -> Tensor:
            if is_prompt:
                module.topk_transform_ragged_v2(logits, lens, out_offsets=none, out_indices=out)
            else:
                module.topk_transform_paged_v2(logits, lens, None, out, 1, plan)
            return out

        return f"SGLang's topk_transform_{'ragged' if is_prompt else 'paged'}_v2", choose


class VllmTopk(DeepGEMM):
    """The top-k per row of vLLM's wheel, of DeepGEMM's logits."""

    name, kernels = "vllm_topk", ("select",)
    _libraries = ("vllm._C_stable_libtorch", "vllm._C")
    """Modules of the wheel that register its ops, of newer and of older versions."""
    _ops: tuple[str, ...] = ("top_k_per_row_prefill", "top_k_per_row_decode")

    def available(self) -> str | None:
        """Why it cannot be used here, or None."""
        obstacles = [missing(library) for library in self._libraries]
        if all(obstacles):
            return obstacles[0]
        lacks = [name for name in self._ops if not hasattr(torch.ops._C, name)]  # noqa: SLF001 - vLLM's namespace
        return f"vllm's wheel has no op {', '.join(lacks)}" if lacks else super().available()

    def _chooser(self, of_task: IndexInputs) -> _Chooser | None:
        case, lens = of_task.case, of_task.lens
        out = lens.new_empty(case.count, case.topk)
        is_prompt = _is_prompt(of_task)
        name = self._ops[not is_prompt]
        op = getattr(torch.ops._C, name)  # noqa: SLF001 - vLLM's namespace
        first, ends = torch.zeros_like(lens[0]), lens[0]

        def choose(logits: Tensor) -> Tensor:
            shape = out, case.count, *logits.stride(), case.topk
            if is_prompt:
                op(logits, first, ends, *shape)
            else:
                op(logits, case.tokens, lens, *shape)
            return out

        return f"vLLM's {name}", choose


class VllmAutoTopk(VllmTopk):
    """The top-k that vLLM chooses for decodes on NVIDIA's GPUs, if nothing else is asked for."""

    name = "vllm_auto_topk"
    _ops = ("cooperative_topk", "persistent_topk")

    def _chooser(self, of_task: IndexInputs) -> _Chooser | None:
        case, lens = of_task.case, of_task.lens
        if _is_prompt(of_task):  # vLLM takes that of `VllmTopk`
            return None
        name = self._ops[case.count > _CLUSTER_ROWS or not _has_clusters(lens)]
        out = lens.new_empty(case.count, case.topk)
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=lens.device)
        op = getattr(torch.ops._C, name)  # noqa: SLF001 - vLLM's namespace

        def choose(logits: Tensor) -> Tensor:
            op(logits, lens, out, workspace, case.topk, case.keys)
            return out

        return f"vLLM's {name}", choose


def _is_prompt(of_task: IndexInputs) -> bool:
    """Whether a case takes the functions of prompts, on gathered keys."""
    return of_task.case.tokens > _MOST


def _has_clusters(of_device: Tensor) -> bool:
    """Whether a device has the clusters of blocks that cooperative_topk needs, as vLLM asks: sm_90 and sm_100."""
    return of_device.is_cuda and 9 <= torch.cuda.get_device_capability(of_device.device)[0] < 12


def _whole_rows(logits: Tensor) -> Tensor:
    """The rows with the columns up to the next row, which are not to be read, so that nothing is copied."""
    rows, wide = logits.shape[0], logits.stride(0)
    end = logits.storage_offset() + rows * wide
    if logits.is_contiguous() or logits.stride(1) != 1 or end * logits.itemsize > logits.untyped_storage().nbytes():
        return logits.contiguous()
    return logits.as_strided((rows, wide), (wide, 1))

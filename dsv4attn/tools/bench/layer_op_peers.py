"""Other libraries' functions for the ops around attention, on our inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.hyper_connections import StreamInputs
from dsv4attn.tools.bench.index_ops import PAGE, TOPK, IndexInputs, selection_bounds
from dsv4attn.tools.bench.peers import missing

__all__ = ["LAYER_OP_PEERS", "DeepGEMM", "FlashInferTopk"]

_SPLITS = 16
"""Parts of the sum in DeepGEMM's product of few tokens."""
_FEW = 64
_MOST = 2
"""Tokens of a request in its paged function."""


class DeepGEMM:
    """DeepSeek's kernels, which are compiled when they are first called (CUDA_HOME must name a CUDA toolkit)."""

    name = "deep_gemm"
    kernels: tuple[str, ...] = ("index", "select", "mhc")
    _functions = (
        "fp8_fp4_paged_mqa_logits",
        "fp8_fp4_mqa_logits",
        "get_paged_mqa_logits_metadata",
        "tf32_hc_prenorm_gemm",
    )

    def available(self) -> str | None:
        """Why it cannot be used here, or None."""
        return missing("deep_gemm", *self._functions)

    def contender(self, task: Task) -> Contender | None:
        """Its counterpart of a case, or None."""
        of_task = task.inputs
        if isinstance(of_task, StreamInputs):
            return self._product(of_task) if of_task.case.step == "pre" else None
        if not isinstance(of_task, IndexInputs):
            return None
        logits = self._logits(of_task)
        if of_task.case.kernel == "index":
            return returning(self.name, lambda: [logits()])
        note = f"select: logits (of a prompt: of keys gathered before), then {self._chooser}"
        return returning(
            self.name, lambda: [self._topk(logits())], lambda results: selection_bounds(of_task, results[0]), note
        )

    _chooser = "torch.topk"

    def _topk(self, logits: Tensor) -> Tensor:
        return torch.topk(logits, TOPK, dim=-1, sorted=False).indices

    def _logits(self, of_task: IndexInputs) -> Callable[[], Tensor]:
        """Its logits [T, E]. Its plan of a paged call is made before: an engine makes one for all layers of a step."""
        module: Any = importlib.import_module("deep_gemm")
        keys, q = of_task.case.keys, of_task.q
        if of_task.cache is None or of_task.case.tokens > _MOST:
            first = torch.zeros_like(of_task.lens[0])
            gathered = (
                (q[0], None),
                (of_task.codes[0], of_task.scales[0]),
                of_task.weights,
                first,
                of_task.lens[0],
                keys,
            )
            return lambda: module.fp8_fp4_mqa_logits(*gathered)[:, :keys]
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        plan = module.get_paged_mqa_logits_metadata(of_task.lens, PAGE, processors)
        pages = of_task.cache.tensor.unsqueeze(2)
        paged = (q, None), pages, of_task.weights, of_task.lens, of_task.table, plan, keys
        return lambda: module.fp8_fp4_paged_mqa_logits(*paged)[:, :keys]

    def _product(self, of_task: StreamInputs) -> Contender:
        """The product and the sums of squares at the beginning of mhc_pre."""
        module: Any = importlib.import_module("deep_gemm")
        x, fn = of_task.streams.flatten(1), of_task.weights.fn
        splits = _SPLITS if x.shape[0] <= _FEW else None
        lead = () if splits is None else (splits,)
        out = fn.new_empty(*lead, x.shape[0], fn.shape[0])
        squares = fn.new_empty(*lead, x.shape[0])
        wide = x.float()
        expected = [wide @ fn.T, wide.square().sum(-1, keepdim=True)]

        def run() -> None:
            module.tf32_hc_prenorm_gemm(x, fn, out, squares, splits)

        def reset() -> None:
            out.fill_(torch.nan)
            squares.fill_(torch.nan)

        def results() -> list[Tensor]:
            sums = [out, squares[..., None]]
            return sums if splits is None else [part.sum(0) for part in sums]

        note = "mhc: the product with fn and the sums of squares at the beginning of mhc_pre, and nothing else"
        return Contender(f"{self.name} product", run, reset, results, note, expected)


class FlashInferTopk(DeepGEMM):
    """FlashInfer's top-k of DeepGEMM's logits."""

    name = "flashinfer_topk"
    kernels = ("select",)
    _chooser = "flashinfer.top_k"

    def available(self) -> str | None:
        """Why it cannot be used here, or None."""
        return missing("flashinfer", "top_k") or super().available()

    def _topk(self, logits: Tensor) -> Tensor:
        module: Any = importlib.import_module("flashinfer")
        indices: Tensor = module.top_k(logits.contiguous(), TOPK)[1]
        return indices


LAYER_OP_PEERS: dict[str, DeepGEMM] = {"deep_gemm": DeepGEMM(), "flashinfer_topk": FlashInferTopk()}

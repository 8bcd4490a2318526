"""Other libraries' attention on our inputs, through their public functions."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.contract.backend import Backend, Products
from dsv4attn.errors import UnsupportedError
from dsv4attn.tools.bench.attention_call import gather_rows
from dsv4attn.tools.bench.cases import ATTENTION, HEAD_DIM
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.inputs import Inputs

_WORKSPACE_BYTES = 128 * 2**20


def missing(module: str, *names: str) -> str | None:
    """Why functions of a module cannot be had, or None."""
    package = module.partition(".")[0]
    try:
        # what a library prints meanwhile is no result of ours
        with redirect_stdout(sys.stderr):
            importlib.import_module(package)
            functions = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"{package} is not installed" if error.name == package else f"{package} lacks a module: {error.name}"
    except Exception as error:  # noqa: BLE001 - importing another package may raise anything
        return f"cannot be imported: {type(error).__name__}: {error}"
    lacks = [name for name in names if not hasattr(functions, name)]
    return f"{module} has no {', '.join(lacks)}" if lacks else None


class Peer(ABC):
    """Another library.

    name: name in tables.
    kernels: kernels that it has.
    products: type of its products, by which its results are judged.
    needs: modules, each with the names that it must have.
    """

    name: str
    kernels: tuple[str, ...]
    products = Products.BF16
    needs: Sequence[tuple[str, ...]] = ()

    def available(self) -> str | None:
        """Why it cannot be used here, or None."""
        return next(filter(None, (missing(*needed) for needed in self.needs)), None)

    @abstractmethod
    def contender(self, task: Task, gatherers: Sequence[Backend]) -> Contender | None:
        """Its counterpart of a case, or None if it has none. gatherers: backends that may gather rows for it."""


class AttentionPeer(Peer):
    """Another library's attention, with or without a gather before it. Calls return [T, H, D].

    reads_pages: whether its prefill reads pages. Otherwise a backend gathers rows for it, inside the timed call.
    """

    kernels = ATTENTION
    reads_pages = False

    @abstractmethod
    def decode(self, inputs: Inputs) -> Callable[[], Tensor]:
        """Attention on pages."""

    @abstractmethod
    def prefill(self, inputs: Inputs, rows: Tensor) -> Callable[[], Tensor]:
        """Attention over the combined rows, `rows` being the matrix of them [S, D]; or on pages, if it reads pages."""

    def contender(self, task: Task, gatherers: Sequence[Backend]) -> Contender:
        """See `Peer`. The first of the gatherers gathers rows for a library that does not read pages."""
        inputs = task.inputs
        if not isinstance(inputs, Inputs):
            raise UnsupportedError("kernel", expected="attention", actual=task.case.kernel)
        if any(segment.cache.layout.name != "fp8_ds_mla" for segment in inputs.segments):
            raise UnsupportedError("records", expected="584 bytes: others are not compared", actual=inputs.case.records)
        name, gather, note = self.name, None, ""
        if inputs.case.kernel == "decode":
            call = self.decode(inputs)
        else:
            assert inputs.rows is not None
            rows = inputs.rows
            if inputs.case.kernel == "prefill" and not self.reads_pages:
                if not gatherers:
                    raise UnsupportedError("prefill", expected="a backend that gathers for it", actual="none that runs")
                rows, name = torch.full_like(rows, torch.nan), f"{name} + gather"
                gather, note = partial(gather_rows, gatherers[0], inputs, rows), f"rows gathered by {gatherers[0].name}"
            call = self.prefill(inputs, rows.flatten(0, 1))

        def run() -> list[Tensor]:
            if gather is not None:
                gather()
            return [call()]

        return returning(name, run, note=note)


class FlashMLA(AttentionPeer):
    """DeepSeek's kernels, from their own package or from an engine that ships them."""

    def __init__(self, name: str = "flash_mla", module: str = "flash_mla", asks: str = "") -> None:
        """name: in tables. asks: function of the module that returns (supported, why not)."""
        self.name, self._module, self._asks = name, module, asks
        self.needs = [(module, "flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata")]

    def available(self) -> str | None:
        """Why it cannot be used here, or None."""
        why = super().available()
        if why or not self._asks:
            return why
        support = getattr(importlib.import_module(self._module), self._asks, None)
        supported, reason = support() if support else (True, None)
        return None if supported else str(reason or "not supported here")

    def decode(self, inputs: Inputs) -> Callable[[], Tensor]:
        """Its decode, one query token a sequence."""
        module = importlib.import_module(self._module)
        window, *rest = inputs.segments
        optional: dict[str, Any] = {}
        for extra in rest:
            optional = {
                "extra_k_cache": extra.cache.tensor.unsqueeze(2),
                "extra_indices_in_kvcache": extra.slots.indices.unsqueeze(1),
                "extra_topk_length": extra.slots.lens,
            }
        q, cache = inputs.q.unsqueeze(1), window.cache.tensor.unsqueeze(2)
        plan = module.get_mla_metadata()[0]
        call = partial(
            module.flash_mla_with_kvcache,
            q=q,
            k_cache=cache,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=HEAD_DIM,
            tile_scheduler_metadata=plan,
            num_splits=None,
            softmax_scale=inputs.layer.scale,
            is_fp8_kvcache=True,
            indices=window.slots.indices.unsqueeze(1),
            attn_sink=inputs.sink,
            topk_length=window.slots.lens,
            **optional,
        )
        return lambda: call()[0].squeeze(1)

    def prefill(self, inputs: Inputs, rows: Tensor) -> Callable[[], Tensor]:
        """Its prefill over gathered rows."""
        module, combined = importlib.import_module(self._module), inputs.combined
        assert combined is not None
        call = partial(
            module.flash_mla_sparse_fwd,
            q=inputs.q,
            kv=rows.unsqueeze(1),
            indices=combined.indices.unsqueeze(1),
            sm_scale=inputs.layer.scale,
            d_v=HEAD_DIM,
            attn_sink=inputs.sink,
            topk_length=combined.lens,
        )
        return lambda: call()[0]


class FlashInfer(AttentionPeer):
    """FlashInfer's sparse MLA for this format, on pages in both phases; it has kernels for SM120 only."""

    name = "flashinfer"
    products, reads_pages = Products.FP8, True
    needs = (("flashinfer.mla", "trtllm_batch_decode_sparse_mla_dsv4"),)

    def decode(self, inputs: Inputs) -> Callable[[], Tensor]:
        """Its one function; more than 64 tokens make it a prefill."""
        module, name = self.needs[0]
        function = getattr(importlib.import_module(module), name)
        window, *rest = inputs.segments
        optional: dict[str, Any] = {}
        for extra in rest:
            optional = {
                "compressed_kv_cache": extra.cache.tensor.unsqueeze(1),
                "extra_sparse_indices": extra.slots.indices,
                "extra_sparse_topk_lens": extra.slots.lens,
            }
        out = torch.empty_like(inputs.q)
        call = partial(
            function,
            query=inputs.q,
            swa_kv_cache=window.cache.tensor.unsqueeze(1),
            workspace_buffer=torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=out.device),
            sparse_indices=window.slots.indices,
            swa_topk_lens=window.slots.lens,
            sinks=inputs.sink,
            bmm1_scale=inputs.layer.scale,
            bmm2_scale=1.0,
            out=out,
            **optional,
        )

        def run() -> Tensor:
            call()
            return out

        return run

    def prefill(self, inputs: Inputs, rows: Tensor) -> Callable[[], Tensor]:
        """The same on pages."""
        if inputs.case.kernel == "prefill-rows":
            raise UnsupportedError("prefill-rows", expected="pages", actual="gathered rows, which it does not take")
        return self.decode(inputs)

"""The Backend for sm_120 and sm_121: both phases on pages, by FlashInfer where it serves a call, else by our kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends.sm120 import probe
from dsv4attn.backends.sm120.flashinfer import FlashInferAttention, remember
from dsv4attn.backends.sm120.flashinfer_launches import variants
from dsv4attn.backends.sm120.probe import HEADS
from dsv4attn.backends.sm120.served import ARCHS, reasons
from dsv4attn.backends.sm120.tuning import TUNING
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.contract.backend import AttentionCall, Capabilities, KeyForm, Phase, Products, Run
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory.workspace import ALIGNMENT, simultaneous_bytes
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.errors import ArgumentError, UnsupportedError

OWN, FLASHINFER, AUTO = "own", "flashinfer", "auto"


class Sm120Backend(TritonBackend):
    """Attention on pages in both phases.

    kernel: "own", "flashinfer", or "auto": FlashInfer on sm_120 and sm_121, where it is installed and serves the call;
    this is decided before any launch. With "own", no call is rounded: FlashInfer rounds queries and weights to fp8.
    With "flashinfer", a call that FlashInfer cannot serve is an error.
    in_range: a promise that block tables name no block outside its cache; without it FlashInfer gets a checked copy of
    all indices. tuning, deterministic, projection: see `TritonBackend`; only our kernel is deterministic.
    """

    name = "sm120"
    tunings = TUNING

    def __init__(
        self,
        *,
        kernel: str = AUTO,
        in_range: bool = False,
        tuning: str = "auto",
        deterministic: bool = False,
        projection: str = "bf16",
    ) -> None:
        """Choose, touch no device and import no FlashInfer."""
        super().__init__(tuning=tuning, deterministic=deterministic, projection=projection)
        if kernel not in (AUTO, OWN, FLASHINFER):
            raise ArgumentError("kernel", expected=f"'{AUTO}', '{OWN}' or '{FLASHINFER}'", actual=repr(kernel))
        if not isinstance(in_range, bool):
            raise ArgumentError("in_range", expected="true or false", actual=repr(in_range))
        if kernel == FLASHINFER and deterministic:
            hint = "leave one of them out"
            raise ArgumentError("kernel", expected="not FlashInfer with deterministic", actual=repr(kernel), hint=hint)
        self._kernel, self._in_range = OWN if deterministic else kernel, in_range

    @cached_property
    def vendor(self) -> FlashInferAttention | Reason:
        """FlashInfer, or the reason why FlashInfer serves no call. The first access imports it."""
        device = DeviceFacts.here()
        if self._kernel == OWN:
            return Reason("KERNEL", "our kernel is asked for", "kernel=auto")
        if self._kernel == AUTO and not device.matches(ARCHS):
            return Reason("DEVICE", device.arch, "sm_120 or sm_121")
        installed = probe.find()
        if isinstance(installed, Reason):
            if self._kernel == FLASHINFER:
                raise UnsupportedError(
                    "kernel=flashinfer", expected=installed.allowed, actual=installed.actual, hint=installed.cure
                )
            return installed
        return FlashInferAttention(installed, in_range=self._in_range, lossy=self._kernel == FLASHINFER)

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Dense slots on pages; products may be in fp8 where FlashInfer serves."""
        products = Products.BF16 if isinstance(self.vendor, Reason) else Products.FP8
        own_kernel_only = products is Products.BF16
        return Capabilities(prefill_keys=KeyForm.PAGED, max_logits=own_kernel_only, empty_lse=True, products=products)

    def reasons(self, phase: Phase, layer: LayerGeometry, tokens: int, window: int = 0) -> Sequence[Reason]:
        """Why our kernel serves calls of this many tokens; empty if FlashInfer serves them.

        window: columns of a row's window, if they are more than the layer's window.
        """
        key = phase, layer, tokens, max(window, layer.window)
        answer = self._answers.get(key)
        if answer is None:
            answer = remember(self._answers, key, self._reasons(*key))
        return answer

    @cached_property
    def _answers(self) -> dict[tuple[Phase, LayerGeometry, int, int], Sequence[Reason]]:
        return {}

    def _reasons(self, phase: Phase, layer: LayerGeometry, tokens: int, window: int) -> Sequence[Reason]:
        vendor = self.vendor
        if isinstance(vendor, Reason):
            return [vendor]
        compressed = None if layer.kind is LayerKind.SWA else CacheFacts()
        problem = Problem(phase.value, layer, CacheFacts(), compressed, layer.topk, window_columns=window)
        against = reasons(vendor.installed, problem, tokens=tokens, in_range=self._in_range)
        if against and self._kernel == FLASHINFER:
            first = against[0]
            raise UnsupportedError(first.code, expected=first.allowed, actual=first.actual, hint=first.cure)
        return against

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Scratch of the kernel that serves calls of this shape."""
        vendor, window = self.vendor, _window_of(layer, width)
        if isinstance(vendor, Reason) or self.reasons(phase, layer, tokens, window):
            return super().scratch(phase, layer, tokens, width)
        return vendor.scratch(layer, tokens, window, width - window)

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """Enough for either kernel. FlashInfer splits rows of small calls only, and copies indices of all calls."""
        bound, vendor = super().scratch_bound(phase, layer, max_tokens, max_width), self.vendor
        if isinstance(vendor, Reason):
            return bound
        window = _window_of(layer, max_width)
        for tokens in {max_tokens, min(max_tokens, vendor.installed.max_decode_tokens)}:
            # FlashInfer may serve only the widest rows, or only rows of the layer's window
            if not all(self.reasons(phase, layer, tokens, columns) for columns in (window, layer.window)):
                specs = vendor.scratch(layer, tokens, window, max_width - window)
                bound += round_up(simultaneous_bytes(list(specs)), ALIGNMENT)
        return bound

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `contract.Backend`. By FlashInfer if it serves the call."""
        vendor, layer, tokens = self.vendor, call.layer, call.q.shape[0]
        columns = [rows.width for rows in attention_launch.index_rows(call.keys)]
        if isinstance(vendor, Reason) or self.reasons(phase, layer, tokens, _window_of(layer, sum(columns))):
            return super().prepare(phase, call)
        served = not self.reasons(phase, layer, tokens, columns[0])
        form = vendor.fit(call) if served and self._kernel == AUTO else None
        if form is None and self._kernel == AUTO:
            # scratch was planned by shapes for FlashInfer, which cannot read these tensors; our kernel needs none
            return super().prepare(phase, evolve(call, scratch=()))
        return vendor.prepare(call, form)

    def _launch_within(self, bounds: WarmupSpec, device: DeviceFacts) -> None:
        """See `TritonBackend`. Also the launches before and after FlashInfer, installed or not."""
        super()._launch_within(bounds, device)
        if self._kernel == FLASHINFER or (self._kernel == AUTO and device.matches(ARCHS)):
            sinks, lses, copies = bounds.with_sink, bounds.with_lse, not self._in_range
            # decode takes most head counts as they are, prefill few
            pads = any(layer.num_heads not in HEADS for layer in bounds.layers)
            for padded in (False, True) if pads else (False,):
                variants(sinks, lses, padded=padded, copies=copies, aligned=bounds.aligned_rows)

    def warmup(self, bounds: WarmupSpec, device: torch.device) -> int:
        """See `contract.Backend`. FlashInfer is imported here, and compiles when its shapes run first."""
        _ = self.vendor
        return super().warmup(bounds, device)


def _window_of(layer: LayerGeometry, width: int) -> int:
    """Columns of the window among those of a row: all of a window-only layer, else at most the layer's window."""
    return width if layer.kind is LayerKind.SWA else min(width, layer.window)

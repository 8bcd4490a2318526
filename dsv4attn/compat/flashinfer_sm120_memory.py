"""Memory that `SparseMLASm120Wrapper` owns. A captured graph may use all of it, so none of it is freed or moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4attn.compat.arguments import layer_of
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.errors import ArgumentError

_ARENA, _DIM, _ROPE = "decode", 512, 64
_ALL_COLUMNS = 2**31 - 1
"""Length of a row of which every column counts: kernels look at no column after the last."""
_FEW = 64
"""Rows of the first lengths if the largest number of tokens is not given."""


class WrapperMemory:
    """Memory of the launches of one wrapper, besides the caller's tensors.

    Splits of rows: enough for any call of at most `heads` heads, allocated at once. Lengths of rows of which every
    column counts: for `tokens` rows allocated at once, and for more rows on demand; shorter ones stay allocated.
    Raises ArgumentError instead of allocating during a capture, because that memory would belong to the graph.
    """

    def __init__(self, device: torch.device, backend: Any, *, tokens: int, heads: int) -> None:  # noqa: ANN401
        """Allocate on a device.

        backend: of the calls, with a `tuning`. tokens: largest number of tokens, 0 if not given. heads: largest number.
        """
        self.device = device
        self._require_no_capture("the first call of a wrapper without maxima")
        self._workspace, self._lens = WorkspaceManager(device), list[Tensor]()
        # rows are split only while programs are free: splits x blocks of heads are at most all programs,
        # so that the bound for the heads of one block is the bound for any number of blocks
        layer = layer_of(min(heads, backend.tuning.heads), _DIM, _ROPE, 1.0)
        self._workspace.reserve(WorkspacePlan({_ARENA: backend.scratch_bound(Phase.DECODE, layer, max(tokens, 1), 1)}))
        self._workspace.lock()
        if tokens:
            self._lengthen(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all memory of the wrapper."""
        return self._workspace.total_bytes + sum(lens.nbytes for lens in self._lens)

    def parts(self, specs: Sequence[BufferSpec]) -> list[Tensor]:
        """Views for the splits of rows, with the specs of the backend's `scratch`; the same memory in every call."""
        return self._workspace.get_simultaneous(*specs, arena=_ARENA, caller="SparseMLASm120Wrapper.run")

    def lens(self, tokens: int) -> Tensor:
        """[tokens] int32 lengths with which every column counts, for any number of columns."""
        longest = self._lens[-1].shape[0] if self._lens else 0
        if longest < tokens:
            self._require_no_capture(f"{tokens} rows without lengths")
            # at least doubled each time, so that all lengths together are at most twice the last
            self._lengthen(max(tokens, 2 * longest, _FEW))
        return self._lens[-1][:tokens]

    def _lengthen(self, tokens: int) -> None:
        with torch.inference_mode(False):  # later calls outside inference mode use them too
            self._lens.append(torch.full((tokens,), _ALL_COLUMNS, dtype=torch.int32, device=self.device))

    def _require_no_capture(self, what: str) -> None:
        if is_capturing(self.device):
            expected = "a call whose memory was there before its capture"
            hint = "give max_num_tokens and max_num_heads, or run it eagerly once"
            raise ArgumentError("q", expected=expected, actual=what, hint=hint)


def device_of(device: torch.device | str | None) -> torch.device:
    """A device with its index; None means the current accelerator. Raises ArgumentError if there is no such device."""
    if device is None:
        accelerator = None if DeviceFacts.here().interpreted else torch.accelerator.current_accelerator()
        device = accelerator or torch.device("cpu")
    DeviceFacts.here(device)
    return torch.empty(0, device=device, dtype=torch.float32).device

"""Memory that `SparseMLASm120Wrapper` owns. A captured graph may use all of it, so none of it is freed or moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import INTERPRETED, multiprocessors
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.memory.workspace import ALIGNMENT, WorkspaceManager, WorkspacePlan
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.errors import ArgumentError

__all__ = ["WrapperMemory", "device_of"]

_ARENA, _DIM = "decode", 512
_ALL_COLUMNS = 2**31 - 1
"""Length of a row of which every column counts: kernels look at no column behind the last."""
_FEW = 64
"""Rows of the first lengths if the largest number of tokens is not given."""


class WrapperMemory:
    """Memory of the launches of one wrapper, besides the caller's tensors.

    Splits of rows: enough for any call of at most `heads` heads, allocated at once. Lengths of rows of which every
    column counts: for `tokens` rows allocated at once, and for more rows on demand; shorter ones stay allocated.
    Raises ArgumentError instead of allocating during a capture, because that memory would belong to the graph.
    """

    def __init__(self, device: torch.device, tuning: Tuning, *, tokens: int, heads: int) -> None:
        """Allocate on a device. tokens: largest number of tokens, 0 if not given. tuning: that of the calls."""
        self.device = device
        self._require_no_capture("the first call of a wrapper without maxima")
        self._workspace, self._lens = WorkspaceManager(device), list[Tensor]()
        # rows are split only while programs are free: splits x blocks of heads are at most all programs.
        # A block has at most so many heads; each split has a value of every dim, and two numbers, for each of them
        lines = multiprocessors() * min(heads, tuning.heads)
        self._workspace.reserve(WorkspacePlan({_ARENA: 4 * lines * (_DIM + 2) + 3 * ALIGNMENT}))
        self._workspace.lock()
        if tokens:
            self._lengthen(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all memory of the wrapper."""
        return self._workspace.total_bytes + sum(lens.nbytes for lens in self._lens)

    def parts(self, specs: Sequence[BufferSpec]) -> list[Tensor]:
        """Views for the splits of rows, with the specs of `attention.launch.scratch`; the same memory in every call."""
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
        found = None if INTERPRETED else torch.accelerator.current_accelerator()
        device = found or torch.device("cpu")
    DeviceFacts.here(device)
    return torch.empty(0, device=device, dtype=torch.float32).device

"""Cases of a decode over ranks: their sizes, what is refused, and the memory that they need on a device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import frozen

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.bench.cases import HEAD_DIM, PRESETS, KernelCase, Preset, decodes, with_topk
from dsv4attn.tools.bench.inputs import LAYOUT

INDEX = KVCacheLayout.index_fp8(ModelGeometry.preset("deepseek-v4-flash").index_head_dim)
_CHUNK = 65536
_ROW_BYTES = 24 * HEAD_DIM
"""Bytes of temporaries for each of _CHUNK records, while they are written."""
_MOVED_BYTES = 2048
"""Bytes of temporaries for each entry of a request on a rank, while they are copied."""
_RESERVE, _HOST_RESERVE = 2**31, 2**29
"""Bytes of an accelerator, and of a CPU, for everything else: flushes, workspaces, scores of a tile."""


@frozen
class ContextCase:
    """A decode of one token of each request.

    preset: kind of layer.
    requests: requests of the step.
    context: tokens of each request, the new one counted.
    """

    preset: Preset
    requests: int
    context: int

    @property
    def name(self) -> str:
        """Unique in a run, and the same in every run."""
        return f"context {self.preset.name} {self.label}"

    @property
    def label(self) -> str:
        """Name of the shape."""
        return f"b={self.requests} n={self.context}"

    @property
    def entries(self) -> int:
        """Compressed entries of each request."""
        return self.context // self.preset.ratio

    @property
    def selects(self) -> bool:
        """Whether a token attends to some of its entries only."""
        return self.preset.kind is LayerKind.CSA

    @property
    def case(self) -> KernelCase:
        """The decode of one rank."""
        preset = self.preset if self.selects else with_topk(self.preset, self.entries)
        return KernelCase(
            "decode", preset, self.label, decodes(preset, self.requests, self.context), seed=self.requests
        )

    def pages(self, ranks: int, interleave: int) -> int:
        """Pages of a request on the rank that holds the most entries."""
        return -(-Ownership(0, ranks, interleave).count(self.entries) // self.preset.page)

    def bytes(self, ranks: int, interleave: int) -> int:
        """Bytes of whole caches and a rank's part, and of temporaries while they are made."""
        layouts = (LAYOUT, INDEX) if self.selects else (LAYOUT,)
        pages = self.requests * (self.pages(1, 1) + self.pages(ranks, interleave))
        records = min(_CHUNK, self.requests * self.entries)
        temporaries = _ROW_BYTES * records + _MOVED_BYTES * -(-self.entries // ranks)
        return pages * sum(layout.page_stride(self.preset.page) for layout in layouts) + temporaries


def context_cases(
    names: Sequence[str], requests: int, contexts: Sequence[int], ranks: int, interleave: int
) -> list[ContextCase]:
    """Cases of some layers. Raises ArgumentError, with the option's name, for sizes that cannot be divided."""
    cases = [ContextCase(PRESETS[name], requests, context) for name in names for context in contexts]
    for case in cases:
        preset = case.preset
        if preset.page % interleave:
            expected = f"a divisor of {preset.page}, the records in a page of {preset.name}"
            raise ArgumentError("--interleave", expected=expected, actual=interleave)
        selected, held = (preset.topk + 1) * case.selects, ranks * interleave
        least, most = preset.ratio * max(selected, held), ModelGeometry.preset(preset.model).max_position
        if case.context < least:
            why = f"more than {preset.topk} entries" if selected > held else f"entries on each of {ranks} ranks"
            expected = f"at least {least:,} tokens on {preset.name}, for {why}"
            raise ArgumentError("--context", expected=expected, actual=f"{case.context:,}")
        if case.context > most:
            expected = f"at most {most:,} tokens, the longest context of {preset.name}"
            raise ArgumentError("--context", expected=expected, actual=f"{case.context:,}")
    return cases


def check_memory(
    cases: Sequence[ContextCase], ranks: int, interleave: int, device: torch.device, *, sharing: int = 1
) -> None:
    """Raise ArgumentError if a case does not fit the free memory of the device. sharing: processes of this host."""
    free, reserve = _free_bytes(device, sharing), _HOST_RESERVE if device.type == "cpu" else _RESERVE
    for case in cases:
        needed = case.bytes(ranks, interleave) + reserve
        if free is not None and needed > free:
            expected = f"a case that fits the {_gb(free)} that are free for a rank on {device}"
            actual = f"{_gb(needed)} ({needed:,} bytes) for {case.name}"
            raise ArgumentError("--context", expected=expected, actual=actual, hint="take fewer --requests too")


def _free_bytes(device: torch.device, sharing: int) -> int | None:
    """Free bytes of a device, or of a host's memory divided by the processes that share it; None if unknown."""
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        return None if ask is None else int(ask(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
        return pages * os.sysconf("SC_PAGE_SIZE") // sharing if pages else None
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else 1024 * kib // sharing


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"

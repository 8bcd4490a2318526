"""Notes of the sm120 backend for `dsv4attn explain`: FlashInfer or our kernel, from facts alone, without its import."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from dsv4attn.backends._triton.support import index_notes
from dsv4attn.backends.sm120.probe import FORMATS, HEADS, OLDEST, InstalledFlashInfer
from dsv4attn.backends.sm120.served import ARCHS, reasons
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.core.contract.problem import Problem

_NEWEST = "0.7.4"


def notes(device: DeviceFacts, problem: Problem) -> Sequence[str]:
    """The kernel that attends, and how scores of the indexer are computed."""
    return [_attends(device, problem), *index_notes(device, problem)]


def _attends(device: DeviceFacts, problem: Problem) -> str:
    """The kernel that attends, in one line. For our kernel: every reason against FlashInfer.

    FlashInfer is not imported here, so only its version is known; its kernels are taken to be those of release _NEWEST.
    Its real limits are read when this backend was chosen.
    """
    if not device.matches(ARCHS):
        return f"our kernel: FlashInfer is asked on sm_120 and sm_121, not on {device.arch}"
    version = version_of("flashinfer-python")
    if version is None and device.present:
        return "our kernel: flashinfer-python is not installed"
    against = [f"{reason.code} {reason.text}" for reason in reasons(_assumed(version or _NEWEST), problem)]
    if version is not None and _numbers(version) < OLDEST:
        against.insert(0, f"flashinfer {version}, needs {'.'.join(map(str, OLDEST))} or newer")
    if against:
        return f"our kernel, in bf16: {'; '.join(against)}"
    where = f"flashinfer {version}" if version else f"flashinfer {_NEWEST}, taken to be installed"
    return f"{where}, which multiplies in fp8; option kernel=own leaves the call to our kernel"


def _assumed(version: str) -> InstalledFlashInfer:
    """Formats whose kernels round queries to 4 bits are left out: they are used only if FlashInfer is asked for."""
    config, heads = SimpleNamespace(supports_decode=lambda *_, **__: True), frozenset(HEADS)
    others = tuple(
        InstalledFlashInfer(version, None, config, heads, format=cache_format)
        for cache_format in FORMATS[1:]
        if not cache_format.is_lossy and cache_format.since <= _numbers(version)
    )
    return InstalledFlashInfer(version, None, config, heads, others=others)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:3]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)

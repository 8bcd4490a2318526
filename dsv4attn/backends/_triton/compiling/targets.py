"""Targets of cross-compilation, and their limits, none of which the compiler enforces.

NVIDIA: CUDA C++ Programming Guide, technical specifications per compute capability; registers are allocated to warps
by 256. AMD: the LLVM AMDGPU backend's own tables (`AMDGPUBaseInfo.cpp`) and AMDGPUUsage; vector and accumulation
registers are one file on CDNA.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen
from triton.backends.compiler import GPUTarget

from dsv4attn.core.contract.devices import DEVICES, device_named, unknown

MAX_THREADS = 1024
"""Most threads of a block, on every target."""


@frozen
class Target:
    """A device. A unit is an SM of NVIDIA, a CU of CDNA, or a WGP of RDNA, and has four parts.

    shared_per_block, shared_per_unit: bytes. shared_overhead: bytes of a block that are not the kernel's.
    warps_per_part, blocks_per_unit: most at once. registers: of a part, for each lane of a warp, allocated by multiples
    of `granule`.
    """

    name: str
    warp_size: int
    shared_per_block: int
    shared_per_unit: int
    warps_per_part: int
    blocks_per_unit: int
    registers: int = 512
    granule: int = 8
    registers_per_thread: int = 255
    shared_overhead: int = 0

    @property
    def is_cuda(self) -> bool:
        """Whether NVIDIA made it."""
        return self.name.startswith("sm_")

    @property
    def gpu(self) -> GPUTarget:
        """Triton's description of the target."""
        if self.is_cuda:
            return GPUTarget("cuda", int(self.name.removeprefix("sm_")), self.warp_size)
        return GPUTarget("hip", self.name, self.warp_size)

    @classmethod
    def named(cls, name: str) -> Target:
        """The target of a device's name: "sm_90" or "sm90", "h200", "gfx942", "mi300x"."""
        return cls.of(device_named(name).arch)

    @classmethod
    def of(cls, arch: str) -> Target:
        """The target of an architecture. Raises UnknownNameError where kernels cannot be compiled for it from here."""
        if arch not in TARGETS:
            raise unknown("target", arch, [device for device in DEVICES if device.arch in TARGETS])
        return TARGETS[arch]

    def occupancy(self, registers: int, shared: int, warps: int) -> int:
        """Blocks of one kernel that a unit holds at once; 0 if not even one fits. An estimate."""
        allocated = max(-(-registers // self.granule), 1) * self.granule
        fit = 4 * min(self.registers // allocated, self.warps_per_part) // warps
        return min(fit, self.shared_per_unit // max(shared + self.shared_overhead, 1), self.blocks_per_unit)


def _cuda(name: str, shared_kb: int, warps: int, blocks: int) -> Target:
    """The system reserves 1 KB of each block."""
    return Target(name, 32, (shared_kb - 1) * 1024, shared_kb * 1024, warps, blocks, shared_overhead=1024)


def _cdna(name: str, shared_kb: int) -> Target:
    return Target(name, 64, shared_kb * 1024, shared_kb * 1024, 8, 16, registers_per_thread=512)


def _rdna(name: str) -> Target:
    """A WGP: two CUs that share 128 KB; waves of 32, and 1,536 registers for each of their lanes."""
    return Target(name, 32, 65536, 131072, 16, 32, 1536, 24, 256)


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _cuda("sm_80", 164, 16, 32),
        _cuda("sm_86", 100, 12, 16),
        _cuda("sm_89", 100, 12, 24),
        _cuda("sm_90", 228, 16, 32),
        _cuda("sm_100", 228, 16, 32),
        _cuda("sm_103", 228, 16, 32),
        _cuda("sm_120", 100, 12, 24),
        _cuda("sm_121", 100, 12, 24),
        _cdna("gfx90a", 64),
        _cdna("gfx942", 64),
        _cdna("gfx950", 160),
        _rdna("gfx1100"),
        _rdna("gfx1151"),
        _rdna("gfx1201"),
    )
}
"""By name, as `DeviceFacts.arch` has it."""

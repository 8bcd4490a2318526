"""`DEVICES`: product names of accelerators, and the architecture of each; `device_named` looks a name up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from dsv4attn.errors import UnknownNameError, did_you_mean

__all__ = [
    "DEVICES",
    "MEMORY_GIB",
    "KnownDevice",
    "described",
    "device_named",
    "memory_gib",
    "named_by_number",
    "unknown",
]


@frozen
class KnownDevice:
    """A row of `DEVICES`.

    arch: the compilers' name, "sm_90"; for CPU, Intel and Ascend the kind.
    kind: "cuda", "hip", "xpu", "npu" or "cpu".
    text: vendor and family, for people.
    names: product names, in lower case, without spaces and dashes.
    """

    arch: str
    kind: str
    text: str
    names: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The architecture and every product name."""
        return self.arch, *self.names


DEVICES: tuple[KnownDevice, ...] = (
    KnownDevice("cpu", "cpu", "a CPU"),
    KnownDevice("sm_80", "cuda", "NVIDIA A100", ("a100", "a800", "a30")),
    KnownDevice("sm_86", "cuda", "NVIDIA RTX 30", ("rtx3090", "rtx3080", "a40", "a10", "rtxa6000")),
    KnownDevice("sm_89", "cuda", "NVIDIA L40 or RTX 40", ("l40s", "l40", "l4", "rtx4090", "rtx4080", "rtx6000ada")),
    KnownDevice("sm_90", "cuda", "NVIDIA H100 or H200", ("h100", "h200", "h800", "h20", "gh200", "cuda")),
    KnownDevice("sm_100", "cuda", "NVIDIA B200", ("b200", "gb200")),
    KnownDevice("sm_103", "cuda", "NVIDIA B300", ("b300", "gb300")),
    KnownDevice("sm_120", "cuda", "NVIDIA RTX 50 or RTX PRO 6000", ("rtx5090", "rtx5080", "rtxpro6000")),
    KnownDevice("sm_121", "cuda", "NVIDIA GB10", ("gb10", "dgxspark")),
    KnownDevice("gfx90a", "hip", "AMD MI250", ("mi250x", "mi250", "mi210")),
    KnownDevice("gfx942", "hip", "AMD MI300", ("mi300x", "mi300a", "mi300", "mi325x", "hip", "rocm")),
    KnownDevice("gfx950", "hip", "AMD MI350", ("mi355x", "mi350x")),
    KnownDevice("gfx1100", "hip", "AMD RX 7900", ("rx7900xtx", "rx7900xt", "rx7900", "w7900")),
    KnownDevice("gfx1151", "hip", "AMD Strix Halo", ("strixhalo", "radeon8060s")),
    KnownDevice("gfx1201", "hip", "AMD RX 9070", ("rx9070xt", "rx9070")),
    KnownDevice("xpu", "xpu", "Intel GPU", ("b580", "b570", "b60", "a770", "max1550")),
    KnownDevice("npu", "npu", "Ascend NPU", ("ascend",)),
)
"""One row for each architecture. "cuda", "hip" and "rocm" mean this machine's device of that kind, else their row."""

_PRODUCTS_BY_GIB: Mapping[int, tuple[str, ...]] = {
    10: ("b570",),
    12: ("b580",),
    16: ("rtx4080", "rtx5080", "rx9070xt", "rx9070"),
    20: ("rx7900xt",),
    24: ("a30", "a10", "l4", "rtx3090", "rtx4090", "rx7900xtx", "b60"),
    32: ("rtx5090",),
    48: ("a40", "rtxa6000", "l40s", "l40", "rtx6000ada", "w7900"),
    64: ("mi210",),
    80: ("a100", "a800", "h100", "h800"),
    96: ("h20", "rtxpro6000"),
    141: ("h200",),
    180: ("b200",),
    192: ("mi300x",),
    256: ("mi325x",),
    288: ("mi350x", "mi355x"),
}
MEMORY_GIB = {name: size for size, names in _PRODUCTS_BY_GIB.items() for name in names}
"""Memory by product name, as makers publish it; of several sizes the one that servers have.

Makers write GB, and drivers report about as many GiB, less up to 2 percent. Products of which one name means several
devices or sizes are left out.
"""

_BY_NAME = {name: device for device in DEVICES for name in device.spellings}
_WORDS = re.compile(r"nvidia|geforce|amd|instinct|radeon(?=\s*(?:rx|pro))|intel|arc(?=\s)|tesla")


def device_named(name: str) -> KnownDevice:
    """The device of a name: "h200", "RTX 5090", "sm90", "gfx942:xnack-".

    Any sm_* and gfx* is accepted, also one that the table lacks. Raises UnknownNameError otherwise, which suggests
    names of one vendor.
    """
    lower = name.strip().lower()
    arch = re.sub(r"^sm_?(?=\d)", "sm_", lower.partition(":")[0])
    device = _BY_NAME.get(arch) or _BY_NAME.get(_product(name))
    if device is None and re.fullmatch(r"sm_\d+", arch):
        device = KnownDevice(arch, "cuda", arch)
    if device is None and re.fullmatch(r"gfx[0-9a-f]+", arch):
        device = KnownDevice(arch, "hip", arch)
    if device is None:
        raise unknown("device", name, DEVICES)
    return device


def memory_gib(name: str) -> int | None:
    """Memory of a product in GiB, such as "h200" or "RTX 5090"; None for a name without one size."""
    return MEMORY_GIB.get(_product(name))


def _product(name: str) -> str:
    """A product name as the table has it: in lower case, without the maker, spaces and dashes."""
    return re.sub(r"[\s_-]", "", _WORDS.sub("", name.strip().lower()))


def unknown(
    what: str,
    name: str,
    devices: Iterable[KnownDevice],
    others: Iterable[str] = (),
    *,
    near: Iterable[str] | None = None,
) -> UnknownNameError:
    """The error for a name that none of `devices` has. It shows a few names, and the command that lists all.

    what: "device" or "target".
    others: lines that follow the first one.
    near: names that may be suggested. With None, those of the vendor whose names are most alike.
    """
    rows = [*devices]
    known = [spelling for row in rows for spelling in row.spellings]
    examples = ", ".join(example for example in ("h200", "sm_90", "mi300x", "xpu", "cpu") if example in known)
    shown = f"{examples}, ...: `dsv4attn {'compile' if what == 'target' else 'explain'} --help` lists all"
    return UnknownNameError(what, name, known, others, near=_near(name, rows) if near is None else near, shown=shown)


def _near(name: str, devices: Iterable[KnownDevice]) -> list[str]:
    """Names to suggest, all of one vendor.

    The vendor is the one whose names alone have the same leading letters, as only AMD's begin with "mi". If there is no
    such vendor, it is that of the nearest name.
    """
    by_kind: dict[str, list[str]] = {}
    for device in devices:
        by_kind.setdefault(device.kind, []).extend(device.spellings)
    vendors, lower = [*by_kind.values()], re.sub(r"[\s-]", "", name.strip().lower())
    every = [known for names in vendors for known in names]
    if numbered := named_by_number(lower, every):
        return numbered
    alike = [known for known in every if known.replace("o", "0") == lower.replace("o", "0")]  # the letter o for a zero
    letters = [names for names in vendors if _letters(lower) in map(_letters, names)]
    if alike or len(letters) == 1:
        return alike or letters[0]
    begun = [names for names in vendors if any(known.startswith(lower) for known in names)]
    nearest = "" if len(begun) > 1 else did_you_mean(lower, every)
    return next((names for names in vendors if any(f"'{known}'" in nearest for known in names)), [])


def named_by_number(name: str, names: Iterable[str]) -> list[str]:
    """The one product that ends with a number, such as rtx4090 for 4090; nothing if several do."""
    ending = [known for known in names if name.isdecimal() and re.fullmatch(rf"[a-z]+{name}", known)]
    return ending if len(ending) == 1 else []


def _letters(name: str) -> str:
    return "".join(re.findall(r"^[a-z]+", name))


def described(devices: Iterable[KnownDevice]) -> Iterator[str]:
    """A line for each device: architecture, then its names."""
    for device in devices:
        yield f"{device.arch:<8}{', '.join(device.names) or device.text}"

"""Kernels of the xpu backend with one thing wrong each, made from their own text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from dsv4attn.backends.xpu import kernels
from tests.programs import import_text

_LEN = "tl.minimum(tl.maximum(tl.load(LENS + token), 0), width)"
GATHERING: Mapping[str, tuple[str, str]] = {
    "segments written over each other": ("token * columns + before + column", "token * columns + column"),
    "absent slots attended": ("tl.where(exists, row, -1)", "row"),
    "lengths ignored": (_LEN, "width"),
    "negative lengths believed": (_LEN, "tl.minimum(tl.load(LENS + token), width)"),
    "long lengths believed": (_LEN, "tl.maximum(tl.load(LENS + token), 0)"),
    "length of the last segment alone": ("LENS_OUT + token, before + count", "LENS_OUT + token, count"),
    "slot 0 absent": ("exists = (slot >= 0)", "exists = (slot > 0)"),
    "rows of another token": ("KV + row * kv_stride", "KV + (row - token * columns) * kv_stride"),
}
ATTENDING: Mapping[str, tuple[str, str]] = {
    "absent rows attended": (
        "z = tl.where(ok[None, :], z * (scale * LOG2E)",
        "z = tl.where(ok[None, :] | True, z * (scale * LOG2E)",
    ),
    "row 0 absent": ("ok = (slot >= 0)", "ok = (slot > 0)"),
    "lengths ignored": ("if lens is not None:", "if False:"),
    "tail of the key forgotten": ("z = tl.dot(q_tail, tl.trans(tail), z", "z = tl.dot(q_tail * 0, tl.trans(tail), z"),
    "second half forgotten": ("z = tl.dot(q_right, tl.trans(right), z", "z = tl.dot(q_right * 0, tl.trans(right), z"),
    "sink in the lse": (
        "tl.load(sink + head, mask=live, other=0.0) * LOG2E",
        "tl.load(sink + head, mask=live, other=0.0)",
    ),
    "lse in base 2": ("(largest + tl.log2(total)) * LN2", "(largest + tl.log2(total))"),
    "largest logit of the last tile": ("grown = tl.maximum(largest, tl.max(z, 1))", "grown = tl.max(z, 1)"),
}


def planted(folder: Path, bug: tuple[str, str]) -> ModuleType:
    """Return a copy of the backend's kernels with a bug in place of what is right; two empty texts are no bug."""
    right, wrong = bug
    text = Path(kernels.__file__).read_text(encoding="utf-8")
    assert not right or text.count(right) == 1, f"the kernels no longer say {right!r} once"
    return import_text(folder / "kernels_planted.py", text.replace(right or wrong, wrong))

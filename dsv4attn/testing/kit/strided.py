"""Tensors whose rows lie apart, as in slices such as `fused[:, :512]` or `big[:, :H]`, and tensors that calls keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from dsv4attn.testing.case import Bench, Check, Measure, Wrong, located, worst_of

FILL = 0xFF
"""Every byte between the rows: NaN in floats, -1 in integers."""
BEFORE, AFTER = 8, 24
"""Elements before and after a row. Addresses stay multiples of 16 bytes, as those of engines are."""
NAMES = (
    "q", "kv", "k", "o", "out", "lse", "topk_indices", "block_table", "cos_sin_cache", "wo_a", "weights", "x",
    "residual",
)  # fmt: skip
"""Arguments whose rows may lie apart. No two get the same strides, so that none is read by those of another."""
HEADS_BEFORE, HEADS_AFTER = 1, 2
"""Heads before and after those of a token, for tensors [T, H, D]."""


class StridedTensors:
    """Makes tensors with rows apart, and checks afterwards that nothing between the rows was written.

    names: of the arguments whose rows lie apart, separated by spaces; "all" means each of them.
    """

    def __init__(self, names: str) -> None:
        """Start without tensors."""
        self.names = set(names.split())
        self._made: list[tuple[str, Tensor, tuple[slice, ...]]] = []

    def __call__(self, name: str, values: Tensor) -> Tensor:
        """The values, with rows apart if this argument is one of the names."""
        if not self.names & {name, "all"} or values.ndim < 2:
            return values
        extra = 8 * NAMES.index(name)
        sizes, inside = [values.shape[0]], [slice(None)]
        for n in values.shape[1:-1]:
            sizes.append(n + HEADS_BEFORE + HEADS_AFTER)
            inside.append(slice(HEADS_BEFORE, HEADS_BEFORE + n))
        n, item = values.shape[-1], values.itemsize
        raw = torch.full((*sizes, (BEFORE + n + AFTER + extra) * item), FILL, dtype=torch.uint8, device=values.device)
        place = (*inside, slice(BEFORE, BEFORE + n))
        rows = raw.view(values.dtype)[place]
        rows.copy_(values)
        self._made.append((name, raw, (*inside, slice(BEFORE * item, (BEFORE + n) * item))))
        return rows

    def check(self) -> None:
        """Raise Wrong if a byte between the rows has changed."""
        for name, raw, inside in self._made:
            now = raw.clone()
            now[inside] = FILL
            if changed := int((now != FILL).sum()):
                raise Wrong(f"{changed} bytes next to the rows of {name} were written")


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that 0 and -0 differ and NaN equals itself."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@contextmanager
def unchanged(**tensors: Tensor) -> Iterator[None]:
    """Raise Wrong if the `with` block changes a byte of one of these tensors. The message has the keyword."""
    copies = {name: bits(tensor) for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if not torch.equal(bits(tensor), copies[name]):
            raise Wrong(f"{name} was changed")


def each_strided(names: str, *checks: Check) -> Check:
    """Run checks on a case input once for each argument, with the rows of that argument apart. A failure names it."""

    def check(bench: Bench, inputs: Any) -> Measure:  # noqa: ANN401 - a CaseInput with a field `strided`
        measures = []
        for name in names.split():
            if name == "lse" and not bench.lse:
                continue
            with located("rows of all tensors apart" if name == "all" else f"rows of {name} apart"):
                measures += [inner(bench, attrs.evolve(inputs, strided=name)) for inner in checks]
        return worst_of(*measures)

    return check

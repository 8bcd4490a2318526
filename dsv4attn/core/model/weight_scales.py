"""Scales of blocks of a matrix in fp8: which blocks there are, whether scales fit them, and what they multiply to."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import shown
from dsv4attn.errors import ArgumentError

__all__ = [
    "BLOCKS",
    "alike",
    "check_scale",
    "checked_block",
    "declared_block",
    "factors_of",
    "grid",
    "power_of_two",
    "product",
    "short",
]

BLOCKS = (128, 32)
"""Rows and columns under one scale in checkpoints of V4 and of V4.1. Scales of these blocks say their size by their
number. Two sizes never fit the same scales, unless one scale is that of the whole matrix in both."""
_ROWS = 512
"""Rows that are converted at once."""
# the oldest supported torch lacks float8_e8m0fnu
_SCALE_DTYPES = tuple(dict.fromkeys((torch.float32, getattr(torch, "float8_e8m0fnu", torch.uint8), torch.uint8)))
_BLOCK_SIZES = ("weight_block_size", "block_size")


def checked_block(label: str, size: object) -> tuple[int, int] | None:
    """A size of blocks as two numbers, or None. Raises ArgumentError for anything else."""
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else size
    if isinstance(pair, (tuple, list)) and len(pair) == len([n for n in pair if type(n) is int and n > 0]) == 2:
        return pair[0], pair[1]
    hint = "128 for V4, 32 for V4.1; by default the number of scales says it"
    raise ArgumentError(label, expected="two positive numbers, rows and columns", actual=shown(size), hint=hint)


def declared_block(module: object) -> tuple[int, int] | None:
    """The size of blocks that a module says, in an attribute of its own of `_BLOCK_SIZES`; None if it says none."""
    attributes = getattr(module, "__dict__", {})  # a missing attribute of a torch module takes microseconds
    for name in _BLOCK_SIZES:
        size = attributes.get(name)
        if isinstance(size, (tuple, list)) and len(size) == 2:
            return checked_block(name, size)
    return None


def check_scale(
    label: str, scale: object, weight_label: str, weight: Tensor, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Raise ArgumentError unless this is a scale for each block of a weight. Returns the size of a block.

    block: its size; None: one of `BLOCKS`.
    """
    sizes, name = [(n, n) for n in BLOCKS] if block is None else [block], label.rpartition(".")[2]
    shapes: dict[tuple[int, ...], tuple[int, int]] = {grid(weight.shape, size): size for size in reversed(sizes)}
    said = " or ".join(f"{rows} x {columns}" for rows, columns in sizes)
    actual, hint = type(scale).__name__, f"every block of {said} has one, a shorter block at the end too"
    if isinstance(scale, Tensor):
        if scale.dtype in _SCALE_DTYPES and tuple(scale.shape) in shapes:
            if scale.device == weight.device:
                return shapes[tuple(scale.shape)]
            expected, hint = (
                f"a tensor on {weight.device}, like {weight_label}",
                f"pass {name}.to({weight_label}.device)",
            )
            raise ArgumentError(label, expected=expected, actual=f"one on {scale.device}", hint=hint)
        actual = f"{[*scale.shape]} {short(scale.dtype)}"
        if scale.dtype not in _SCALE_DTYPES:
            hint = f"pass {name}.to(torch.float32)"
        elif block is None:
            hint = _hint(scale, weight) or f"{hint}; for other blocks pass BlockScaledWeight(..., block_size=)"
    grids = " or ".join(str([*shape]) for shape in reversed(shapes))
    expected = f"{grids} {' or '.join(map(short, _SCALE_DTYPES))}, the scales of {weight_label} {[*weight.shape]}"
    raise ArgumentError(label, expected=expected, actual=actual, hint=hint)


def _hint(scale: Tensor, weight: Tensor) -> str:
    """How to pass one scale of a whole matrix, or of each row; "" for other scales."""
    rows, columns = weight.shape
    shape, kept = tuple(scale.shape), "BlockScaledWeight(weight, scale.reshape({}), block_size=({}, {}))"
    if shape in ((), (1,), (1, 1)):
        return f"if it is one scale for the whole matrix, pass {kept.format('1, 1', rows, columns)}"
    if shape in ((rows,), (rows, 1)):
        return f"if it is a scale for each row, pass {kept.format('-1, 1', 1, columns)}"
    return ""


def grid(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Numbers of blocks of rows and of columns."""
    rows, columns = (-(-n // size) for n, size in zip(shape, block, strict=True))
    return rows, columns


def alike(first: Tensor, second: Tensor) -> bool:
    """Whether two scales have the same values; reads them."""
    return torch.equal(*(factors_of(scale).view(torch.int32) for scale in (first, second)))


def short(dtype: torch.dtype) -> str:
    """Name of a dtype, without that of torch."""
    return str(dtype).removeprefix("torch.")


def factors_of(scale: Tensor) -> Tensor:
    """fp32 factors of the blocks: an fp32 scale itself, else the `power_of_two` of its bytes."""
    return scale if scale.dtype == torch.float32 else power_of_two(scale.view(torch.uint8))


def power_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) as fp32, made of bits: byte is the exponent field. 0 is the subnormal 2^-127, 255 reads as NaN."""
    bits = (byte.int() << 23).masked_fill(byte == 0, 0x00400000).masked_fill(byte == 255, 0x7FC00000)
    return bits.view(torch.float32)


def product(weight: Tensor, factors: Tensor, block: tuple[int, int], out: Tensor | None) -> Tensor:
    """Each block times its factor as bf16, some rows of blocks at a time; into `out` if that fits.

    The memory stays the same then, and a captured graph reads the new values.
    """
    if out is None or (out.shape, out.device) != (weight.shape, weight.device):
        out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    (rows, columns), (height, width) = weight.shape, block
    step = max(1, _ROWS // height)
    for i in range(0, factors.shape[0], step):
        part = slice(i * height, min((i + step) * height, rows))
        wide = factors[i : i + step].repeat_interleave(width, 1)[:, :columns]
        out[part] = weight[part].float() * wide.repeat_interleave(height, 0)[: part.stop - part.start]
    return out

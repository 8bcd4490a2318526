"""Weights of the output projection: block-scaled fp8 matrices, and their conversion to bf16 where bf16 is multiplied.

The bf16 copy of a weight is cached for the weight's lifetime. When the weight or its scale was replaced or written, the
copy is computed again, in the same memory.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4attn.core.device import is_capturing
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.core.values import shown
from dsv4attn.errors import ArgumentError

__all__ = ["BLOCKS", "BlockScaledWeight", "Weight", "check_weight", "dense_weight", "forget", "scaled_weight"]

BLOCKS = (128, 32)
"""Rows and columns under one scale in checkpoints of V4 and of V4.1. Scales of these blocks say their size by their
number. Two sizes never fit the same scales, unless one scale is that of the whole matrix in both."""
_ROWS = 512
"""Rows that are converted at once."""
_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# the oldest supported torch lacks float8_e8m0fnu
_SCALE_DTYPES = tuple(dict.fromkeys((torch.float32, getattr(torch, "float8_e8m0fnu", torch.uint8), torch.uint8)))
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_BLOCK_SIZES = ("weight_block_size", "block_size")


@frozen(eq=False)
class BlockScaledWeight:
    """A weight matrix in fp8, with a scale for each block of rows and columns.

    weight: [rows, columns] float8_e4m3fn or float8_e4m3fnuz, any strides - the codes.
    scale: [ceil(rows / block rows), ceil(columns / block columns)] fp32, float8_e8m0fnu or uint8, on the same device -
        the factor of each block. float8_e8m0fnu and uint8 are exponents: 2^(byte - 127), and NaN for 255.
    block_size: (rows, columns) of a block, or one number for both; the last block of either dim may be shorter. By
        default 128 x 128 or 32 x 32, the sizes of checkpoints of V4 and V4.1, as the number of scales says. Give it for
        other blocks: (1, columns) if each row has a scale, (rows, columns) if the matrix has one scale.
    Raises ArgumentError unless both have these shapes and dtypes.
    """

    weight: Tensor
    scale: Tensor
    block_size: tuple[int, int] = field(default=None, kw_only=True)  # set when the weight is made

    def __attrs_post_init__(self) -> None:
        _check_matrix("weight", self.weight, _FP8)
        block = _checked_block("block_size", self.block_size)
        block = _check_scale("scale", self.scale, "weight", self.weight, block)
        object.__setattr__(self, "block_size", block)

    @classmethod
    def of(cls, module: object, name: str = "module") -> BlockScaledWeight:
        """The fp8 weight of a module: its `weight`, with its `weight_scale_inv`, `weight_scale` or `scale`.

        The size of a block is the module's `weight_block_size` or `block_size`, if it has one of two numbers. name: of
        the module, for errors. Raises ArgumentError if one of them is missing or does not fit.
        """
        _, weight, scales, _ = _inspected(name, module)
        _check_matrix(f"{name}.weight", weight, _FP8)
        return cls(weight, scales[0], block_size=_declared_block(module))  # type: ignore[arg-type] # None: by scales


Weight: TypeAlias = "Tensor | BlockScaledWeight | Any"
"""A tensor, a `BlockScaledWeight`, or any module with `weight` and, if that is fp8, one of `BlockScaledWeight.of`."""


def check_weight(name: str, value: Weight, *, converts: bool = True) -> tuple[str, Tensor]:
    """Check a weight, and convert nothing.

    name: of the argument. value: see `dense_weight`. converts: whether fp8 is to be converted. Returns the name of the
    matrix in errors (`wo_a`, or `wo_a.weight`) and the matrix: [rows, columns] bf16, fp16, fp32, or the fp8 codes.
    Raises ArgumentError as `dense_weight` does, or `scaled_weight` if nothing is to be converted.
    """
    label, weight, _, _ = _inspected(name, value, converts=converts)
    return label, weight


def scaled_weight(value: Weight, name: str = "wo_a") -> BlockScaledWeight | None:
    """The codes and scales of a weight that is fp8, unchanged; None if it is not fp8. Nothing is converted or read.

    value, name: see `dense_weight`. Raises ArgumentError as `dense_weight` does, but for captured graphs, and also if a
    module has two scales that are not one tensor.
    """
    if isinstance(value, Tensor) and value.dtype in _WIDE:
        return None
    _, weight, scales, _ = _inspected(name, value, converts=False)
    if weight.element_size() > 1:
        return None
    if isinstance(value, BlockScaledWeight):
        return value
    return BlockScaledWeight(weight, scales[0], block_size=_declared_block(value))  # type: ignore[arg-type] # as above


def dense_weight(value: Weight, name: str = "wo_a", *, recompute: bool = False) -> Tensor:
    """The weight as bf16 [rows, columns] if it is fp8, and unchanged if it is not.

    value: [rows, columns] bf16, fp16 or fp32, a `BlockScaledWeight`, or a module with `weight` and, if that is fp8,
    `weight_scale_inv`, `weight_scale` or `scale`, as in a `BlockScaledWeight`. name: of the argument, for errors. A
    weight of two bytes or more an element is never scaled, even with a scale beside it. Products are fp32, then rounded
    to bf16.

    The first call computes the copy, and later calls with the same weight and scale tensors return it. Writes that
    torch does not count, to `weight.data` or in inference mode, are not noticed. recompute: compute the copy again, in
    the same memory, as after such a write.
    Raises ArgumentError before anything is computed: also if a graph is being captured and there is no copy yet, and
    for fp8 in code that torch.compile traces.
    """
    if isinstance(value, Tensor) and value.dtype in _WIDE:
        check_weight(name, value)
        return value
    _, weight, scales, cached = _inspected(name, value, recompute=recompute)
    if weight.element_size() > 1:
        _copies.pop(id(weight), None)
        return weight
    if cached is not None:
        return cached.copy
    old = _copies.get(id(weight))
    # outside inference mode, so that the copy can be written again inside or outside of it
    block = _block_of(weight, scales[0], value)
    with torch.inference_mode(mode=False), torch.no_grad():
        own = None if old is None or old.weight() is not weight else old.copy
        copy = _product(weight, _factors(scales[0]), block, own)
    _copies[id(weight)] = _Copy.of(weight, scales, copy)
    return copy


def forget(value: Weight) -> None:
    """Drop the cached copy of a weight, if there is one; the next call of `dense_weight` computes another.

    value: see `dense_weight`. Graphs that were captured with the copy must not be replayed any more.
    """
    _copies.pop(id(_parts(value)[0]), None)


@frozen(eq=False)
class _Copy:
    """A cached copy with weak references to its weight and scales, and their states when it was made."""

    weight: weakref.ref[Tensor]
    scales: tuple[weakref.ref[Tensor], ...]
    states: tuple[Any, ...]
    copy: Tensor

    @classmethod
    def of(cls, weight: Tensor, scales: tuple[Tensor, ...], copy: Tensor) -> _Copy:
        """Record the sources of a new copy."""
        ref = weakref.ref(weight, partial(_drop, id(weight)))
        return cls(ref, tuple(map(weakref.ref, scales)), _states(weight, scales), copy)

    def is_of(self, weight: Tensor, scales: tuple[Tensor, ...]) -> bool:
        """Whether these are the same tensors and torch has counted no write to them."""
        return (
            self.weight() is weight
            and len(self.scales) == len(scales)
            and all(ref() is scale for ref, scale in zip(self.scales, scales, strict=True))
            and self.states == _states(weight, scales)
        )


_copies: dict[int, _Copy] = {}
"""Cached copies by `id` of their weight."""


def _drop(key: int, ref: weakref.ref[Tensor]) -> None:
    """Drop the copy of a weight that was deleted, unless another weight has its `id` already."""
    cached = _copies.get(key)
    if cached is not None and cached.weight is ref:
        del _copies[key]


def _states(weight: Tensor, scales: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """A value that changes when the weight or a scale is written or its memory replaced."""
    return tuple(
        (t.data_ptr(), None if t.is_inference() else t._version, t.dtype, t.shape, t.stride())  # noqa: SLF001
        for t in (weight, *scales)
    )


def _parts(value: Weight) -> tuple[Any, dict[str, Any]]:
    """The matrix of a weight, and its scales by the names of their attributes; nothing is checked."""
    if isinstance(value, Tensor):
        return value, {}
    names = ("scale",) if isinstance(value, BlockScaledWeight) else _SCALES
    scales = {name: scale for name in names if (scale := getattr(value, name, None)) is not None}
    return getattr(value, "weight", None), scales


def _inspected(
    name: str, value: Weight, *, converts: bool = True, recompute: bool = False
) -> tuple[str, Tensor, tuple[Tensor, ...], _Copy | None]:
    """Check a weight: (name of the matrix in errors, the matrix, its scales if it is fp8, its cached copy).

    converts: whether an fp8 weight is to be converted, which cannot be captured in a graph. recompute: use no copy.
    """
    weight, scales = _parts(value)
    label = name if weight is value else f"{name}.weight"
    if not isinstance(weight, Tensor):
        expected = "a tensor, a BlockScaledWeight, or a module with a weight"
        raise ArgumentError(name, expected=expected, actual=type(value).__name__)
    if weight.dtype in _WIDE:
        _check_matrix(label, weight, _WIDE)
        return label, weight, (), None
    found = tuple(scales.values())
    cached = None if recompute or torch.compiler.is_compiling() else _copies.get(id(weight))
    if cached is not None and cached.is_of(weight, found):
        return label, weight, found, cached  # all of it was checked when the copy was made
    _check_matrix(label, weight, (*_WIDE, *_FP8))
    if torch.compiler.is_compiling():
        # copies are found by identities and version counters, which a compiled graph does not have
        expected, hint = "bf16 or fp32 in compiled code", f"pass dense_weight({name}), made before and outside of it"
        raise ArgumentError(label, expected=expected, actual=_short(weight.dtype), hint=hint)
    if not scales:
        raise ArgumentError(
            label,
            expected=f"{' or '.join(_SCALES)} beside a weight in {_short(weight.dtype)}",
            actual="neither",
            hint="pass the module that has both, or BlockScaledWeight(weight, scale)"
            if label == name
            else "a weight without blocks goes in as bf16",
        )
    declared = value.block_size if isinstance(value, BlockScaledWeight) else _declared_block(value)
    for attribute, scale in scales.items():
        _check_scale(f"{name}.{attribute}", scale, label, weight, declared)
    if converts and is_capturing(weight.device):
        expected = "a weight that was converted to bf16 before the capture of the graph"
        hint = f"run the step once, or call dense_weight({name}), before the capture"
        raise ArgumentError(label, expected=expected, actual="one that was not, or has changed since", hint=hint)
    if len(found) > 1 and not (_alike(*found) if converts else found[0] is found[1]):
        raise ArgumentError(
            f"{name}.{_SCALES[1]}",
            expected=f"the {'values' if converts else 'tensor'} of {name}.{_SCALES[0]}, or no such attribute",
            actual="other values" if converts else "another tensor",
            hint="remove the one that does not belong to the weight",
        )
    return label, weight, found, None


def _check_matrix(label: str, weight: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ArgumentError unless this is a matrix of one of these dtypes; its strides may be any."""
    if isinstance(weight, Tensor) and weight.dtype in (torch.uint8, torch.int8):
        dialects = " or ".join(f".view({dtype})" for dtype in _FP8)
        raise ArgumentError(
            label,
            expected="a dtype that says what its bytes mean",
            actual=_short(weight.dtype),
            hint=f"view them as what they are: {dialects}; a code means half as much in the second",
        )
    if isinstance(weight, Tensor) and weight.dtype in _WIDE and dtypes == _FP8:
        expected, hint = "fp8 codes", "a weight that is not fp8 has no scale: pass the tensor itself"
        raise ArgumentError(label, expected=expected, actual=_short(weight.dtype), hint=hint)
    check_tensor(label, weight, "_ _", dtypes, {}, any_strides=True)


def _check_scale(
    label: str, scale: object, weight_label: str, weight: Tensor, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Raise ArgumentError unless this is a scale for each block of a weight. Returns the size of a block.

    block: its size; None: one of `BLOCKS`.
    """
    sizes, name = [(n, n) for n in BLOCKS] if block is None else [block], label.rpartition(".")[2]
    shapes: dict[tuple[int, ...], tuple[int, int]] = {_grid(weight.shape, size): size for size in reversed(sizes)}
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
        actual = f"{[*scale.shape]} {_short(scale.dtype)}"
        if scale.dtype not in _SCALE_DTYPES:
            hint = f"pass {name}.to(torch.float32)"
        elif block is None:
            hint = _hint(scale, weight) or f"{hint}; for other blocks pass BlockScaledWeight(..., block_size=)"
    grids = " or ".join(str([*shape]) for shape in reversed(shapes))
    expected = f"{grids} {' or '.join(map(_short, _SCALE_DTYPES))}, the scales of {weight_label} {[*weight.shape]}"
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


def _grid(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Numbers of blocks of rows and of columns."""
    rows, columns = (-(-n // size) for n, size in zip(shape, block, strict=True))
    return rows, columns


def _checked_block(label: str, size: object) -> tuple[int, int] | None:
    """A size of blocks as two numbers, or None. Raises ArgumentError for anything else."""
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else size
    if isinstance(pair, (tuple, list)) and len(pair) == len([n for n in pair if type(n) is int and n > 0]) == 2:
        return pair[0], pair[1]
    hint = "128 for V4, 32 for V4.1; by default the number of scales says it"
    raise ArgumentError(label, expected="two positive numbers, rows and columns", actual=shown(size), hint=hint)


def _declared_block(module: object) -> tuple[int, int] | None:
    """The size of blocks that a module says, in one of `_BLOCK_SIZES`; None if it says none."""
    for name in _BLOCK_SIZES:
        size = getattr(module, name, None)
        if isinstance(size, (tuple, list)) and len(size) == 2:
            return _checked_block(name, size)
    return None


def _block_of(weight: Tensor, scale: Tensor, value: Weight) -> tuple[int, int]:
    """The size of blocks of a weight that was checked."""
    declared = value.block_size if isinstance(value, BlockScaledWeight) else _declared_block(value)
    return declared or _check_scale("scale", scale, "weight", weight, None)


def _alike(first: Tensor, second: Tensor) -> bool:
    """Whether two scales have the same values; reads them."""
    return torch.equal(*(_factors(scale).view(torch.int32) for scale in (first, second)))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _factors(scale: Tensor) -> Tensor:
    """fp32 factors of the blocks: an fp32 scale itself, else 2^(byte - 127).

    The byte is the exponent field of the factor. 0 is the subnormal 2^-127, and 255 is NaN.
    """
    if scale.dtype == torch.float32:
        return scale
    byte = scale.view(torch.uint8)
    bits = (byte.int() << 23).masked_fill(byte == 0, 0x00400000).masked_fill(byte == 255, 0x7FC00000)
    return bits.view(torch.float32)


def _product(weight: Tensor, factors: Tensor, block: tuple[int, int], out: Tensor | None) -> Tensor:
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

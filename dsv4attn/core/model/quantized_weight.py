"""Weights of the output projection: block-scaled fp8 matrices, and their conversion to bf16 where bf16 is multiplied.

The bf16 copy of a weight is cached for the weight's lifetime, one for each of its scales. When `TensorState` sees that
the weight or its scale has changed, the copy is computed again, in the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import torch
from attrs import field
from torch import Tensor

from dsv4attn.core.model.tensor_state import TensorState
from dsv4attn.core.model.weight_scales import BLOCKS, check_scale, checked_block, declared_block, grid, short
from dsv4attn.core.model.weight_scales import alike as _alike
from dsv4attn.core.model.weight_scales import factors_of as _factors
from dsv4attn.core.model.weight_scales import product as _product
from dsv4attn.core.reprs import frozen
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.core.torch_modes import is_capturing, without_modes
from dsv4attn.errors import ArgumentError

__all__ = [
    "BLOCKS",
    "BlockScaledWeight",
    "CodedMatrix",
    "Weight",
    "check_weight",
    "codes_of",
    "converted",
    "dense_weight",
    "forget",
    "nan_scales",
    "scaled_weight",
    "tensors_of",
]

_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_SCALES = ("weight_scale_inv", "weight_scale", "scale")


def _given_block(size: object) -> tuple[int, int]:
    """`BlockScaledWeight.block_size` as two numbers. None stays, until the scales are known."""
    return cast("tuple[int, int]", checked_block("block_size", size))


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
    block_size: tuple[int, int] = field(default=None, kw_only=True, converter=_given_block)

    def __attrs_post_init__(self) -> None:
        _check_matrix("weight", self.weight, _FP8)
        block = check_scale("scale", self.scale, "weight", self.weight, self.block_size)
        object.__setattr__(self, "block_size", block)

    @classmethod
    def of(cls, module: object, name: str = "module") -> BlockScaledWeight:
        """The fp8 weight of a module: its `weight`, with its `weight_scale_inv`, `weight_scale` or `scale`.

        The size of a block is the module's `weight_block_size` or `block_size`, if it has one of two numbers. name: of
        the module, for errors. Raises ArgumentError if one of them is missing or does not fit.
        """
        _, weight, scales, _ = _inspected(name, module)
        _check_matrix(f"{name}.weight", weight, _FP8)
        return cls(weight, scales[0], block_size=declared_block(module))


@frozen(eq=False)
class CodedMatrix:
    """A bf16 matrix, and the fp8 weights that it is the copy of. Products of few rows read the codes.

    weight: [rows, columns] bf16.
    codes: weights that lie one after the other in the matrix; they are the caller's tensors.
    most_rows: of the other factor of a product that reads the codes.
    """

    weight: Tensor
    codes: tuple[BlockScaledWeight, ...]
    most_rows: int

    def first(self, count: int) -> CodedMatrix:
        """The first `count` of the weights."""
        codes = self.codes[:count]
        return CodedMatrix(self.weight[: sum(part.weight.shape[0] for part in codes)], codes, self.most_rows)


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
    return BlockScaledWeight(weight, scales[0], block_size=declared_block(value))


def codes_of(value: Weight, name: str = "wo_a") -> BlockScaledWeight | None:
    """`scaled_weight`, and None for a module with two scales that are not one tensor.

    value, name: see `dense_weight`.
    """
    scales = {id(scale) for scale in _parts(value)[1].values()}
    return scaled_weight(value, name) if len(scales) == 1 else None


def converted(value: Weight, name: str = "wo_a", out: Tensor | None = None) -> Tensor:
    """The weight as bf16 if it is fp8, computed now, and unchanged if it is not. Nothing is cached.

    value, name: see `dense_weight`. out: memory for the result, used if it fits.
    Raises ArgumentError as `dense_weight` does.
    """
    if isinstance(value, Tensor) and value.dtype in _WIDE:
        check_weight(name, value)
        return value
    _, weight, scales, _ = _inspected(name, value, recompute=True)
    if weight.element_size() > 1:
        return weight
    block = _block_of(weight, scales[0], value)
    # outside inference mode, so that the copy can be written again inside or outside of it
    with torch.inference_mode(mode=False), torch.no_grad():
        return _product(weight, _factors(scales[0]), block, out)


@without_modes
def dense_weight(value: Weight, name: str = "wo_a", *, recompute: bool = False) -> Tensor:
    """The weight as bf16 [rows, columns] if it is fp8, and unchanged if it is not.

    value: [rows, columns] bf16, fp16 or fp32, a `BlockScaledWeight`, or a module with `weight` and, if that is fp8,
    `weight_scale_inv`, `weight_scale` or `scale`, as in a `BlockScaledWeight`. name: of the argument, for errors. A
    weight of two bytes or more an element is never scaled, even if it has a scale. Products are fp32, then rounded
    to bf16.

    The first call computes the copy, and later calls with the same weight and scale tensors return it. The copy is
    computed again, in the same memory, when the weight or its scale has changed; `TensorState` says what is seen. A
    weight has a copy for each of its scales; the memory of one whose scale was deleted goes to the next. recompute:
    compute the copy again, in the same memory, as after a change that is not seen.
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
    known = _copies.get(id(weight))
    if known is None:
        known = _copies[id(weight)] = []
        weakref.finalize(weight, _copies.pop, id(weight), None).atexit = False
    block = _block_of(weight, scales[0], value)
    old = next((copy for copy in known if copy.is_of(scales, block)), None)
    if old is None:
        # of a scale that was replaced: captured graphs read the new values
        old = next((copy for copy in known if any(state.tensor is None for state in copy.states)), None)
    # states first: what is written meanwhile is seen later
    states = tuple(map(TensorState, (weight, *scales)))
    with torch.inference_mode(mode=False), torch.no_grad():
        product = _product(weight, _factors(scales[0]), block, None if old is None else old.copy)
    by_number = next(((n, n) for n in BLOCKS if grid(weight.shape, (n, n)) == scales[0].shape), None) == block
    known[:] = [copy for copy in known if copy is not old]
    known.append(_Copy(states, block, by_number, product))
    return product


def forget(value: Weight) -> None:
    """Drop the cached copies of a weight, if there are any; the next call of `dense_weight` computes another.

    value: see `dense_weight`. Graphs that were captured with the copy must not be replayed any more.
    """
    _copies.pop(id(_parts(value)[0]), None)


def tensors_of(value: Weight) -> list[tuple[Any, str, Tensor]]:
    """(owner, name, tensor) of each tensor of a weight: the matrix, and its scales if it is fp8.

    `owner.get(name)` is the tensor that is there now: of a module the present one, or None.
    """
    weight, scales = _parts(value)
    tensors = {"weight": weight, **(scales if weight.element_size() == 1 else {})}
    is_fixed = isinstance(value, (Tensor, BlockScaledWeight))
    return [(tensors if is_fixed else _owner(value, name), name, tensor) for name, tensor in tensors.items()]


def nan_scales(named: Iterable[tuple[str, Weight]]) -> dict[str, str]:
    """The fp8 weights that have scales of NaN, each with a text such as "2 of 64". Waits for the device.

    named: (name, weight) of each weight, see `dense_weight`. Tensors without memory are left out.
    """
    of_weights = {name: _factors(scales[0]) for name, value in named if (scales := _scales_with_values(value))}
    if not of_weights:
        return {}
    counts = torch.stack([factors.isnan().sum() for factors in of_weights.values()]).tolist()
    return {
        name: f"{count} of {factors.numel()}"
        for (name, factors), count in zip(of_weights.items(), counts, strict=True)
        if count
    }


def _scales_with_values(value: Weight) -> list[Tensor]:
    return [tensor for _, name, tensor in tensors_of(value) if name != "weight" and not tensor.is_meta]


def _owner(module: object, name: str) -> Any:  # noqa: ANN401 - a dict, or what reads attributes
    """The dict in which a module has an attribute; where there is none, as of a property, what reads the attribute."""
    attributes = getattr(module, "__dict__", {})  # attributes of a torch module itself take microseconds
    for owner in (attributes.get("_parameters"), attributes.get("_buffers"), attributes):
        if isinstance(owner, dict) and name in owner:
            return owner
    return _Attributes(module)


@frozen(eq=False)
class _Attributes:
    """The attributes of a module, read as a dict is."""

    module: object

    def get(self, name: str) -> Any:  # noqa: ANN401 - any attribute
        """An attribute, or None."""
        return getattr(self.module, name, None)


@frozen(eq=False)
class _Copy:
    """A cached copy.

    states: of the weight and its scales, before the copy was made. block: rows and columns under one scale. by_number:
    whether these are what the number of scales says.
    """

    states: tuple[TensorState, ...]
    block: tuple[int, int]
    by_number: bool
    copy: Tensor

    def is_of(self, scales: tuple[Tensor, ...], block: tuple[int, int] | None) -> bool:
        """Whether it is of these scales, changed or not. block: None: as their number says."""
        if len(self.states) != 1 + len(scales) or not (self.by_number if block is None else self.block == block):
            return False
        return all(state.tensor is scale for state, scale in zip(self.states[1:], scales, strict=True))


_copies: dict[int, list[_Copy]] = {}
"""Cached copies by `id` of their weight, as long as it exists; several if one weight has several scales."""


def _parts(value: Weight) -> tuple[Any, dict[str, Any]]:
    """The matrix of a weight, and its scales by the names of their attributes; nothing is checked."""
    if isinstance(value, Tensor):
        return value, {}
    if isinstance(value, BlockScaledWeight):
        return value.weight, {"scale": value.scale}
    scales = {name: scale for name in _SCALES[:2] if (scale := getattr(value, name, None)) is not None}
    if not scales and (scale := getattr(value, _SCALES[2], None)) is not None:
        scales = {_SCALES[2]: scale}
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
    scale_tensors = tuple(scales.values())
    copy = None if recompute or torch.compiler.is_compiling() else _cached(value, weight, scale_tensors)
    if copy is not None:
        return label, weight, scale_tensors, copy  # all of it was checked when the copy was made
    _check_matrix(label, weight, (*_WIDE, *_FP8))
    if torch.compiler.is_compiling():
        # copies are found by identities and version counters, which a compiled graph does not have
        expected, hint = "bf16 or fp32 in compiled code", f"pass dense_weight({name}), made before and outside of it"
        raise ArgumentError(label, expected=expected, actual=short(weight.dtype), hint=hint)
    if not scales:
        raise ArgumentError(
            label,
            expected=f"{', '.join(_SCALES[:-1])} or {_SCALES[-1]} next to a weight in {short(weight.dtype)}",
            actual="none of them",
            hint="pass the module that has both, or BlockScaledWeight(weight, scale)"
            if label == name
            else "a weight without blocks goes in as bf16",
        )
    declared = value.block_size if isinstance(value, BlockScaledWeight) else declared_block(value)
    for attribute, scale in scales.items():
        check_scale(f"{name}.{attribute}", scale, label, weight, declared)
    if converts and is_capturing(weight.device):
        expected = "a weight that was converted to bf16 before the capture of the graph"
        hint = f"run the step once, or call dense_weight({name}), before the capture"
        raise ArgumentError(label, expected=expected, actual="one that was not, or has changed since", hint=hint)
    if len(scale_tensors) > 1 and not (_alike(*scale_tensors) if converts else scale_tensors[0] is scale_tensors[1]):
        raise ArgumentError(
            f"{name}.{_SCALES[1]}",
            expected=f"the {'values' if converts else 'tensor'} of {name}.{_SCALES[0]}, or no such attribute",
            actual="other values" if converts else "another tensor",
            hint="remove the one that does not belong to the weight",
        )
    return label, weight, scale_tensors, None


def _cached(value: Weight, weight: Tensor, scales: tuple[Tensor, ...]) -> _Copy | None:
    """The copy of a weight with these scales, if there is one that is up to date."""
    known = _copies.get(id(weight))
    if not known:
        return None
    block = value.block_size if isinstance(value, BlockScaledWeight) else declared_block(value)
    for copy in known:
        if copy.is_of(scales, block) and all(map(TensorState.holds, copy.states, (weight, *scales))):
            return copy
    return None


def _check_matrix(label: str, weight: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ArgumentError unless this is a matrix of one of these dtypes; its strides may be any."""
    if isinstance(weight, Tensor) and weight.dtype in (torch.uint8, torch.int8):
        dialects = " or ".join(f".view({dtype})" for dtype in _FP8)
        raise ArgumentError(
            label,
            expected="a dtype that says what its bytes mean",
            actual=short(weight.dtype),
            hint=f"view them as what they are: {dialects}; a code means half as much in the second",
        )
    if isinstance(weight, Tensor) and weight.dtype in _WIDE and dtypes == _FP8:
        expected, hint = "fp8 codes", "a weight that is not fp8 has no scale: pass the tensor itself"
        raise ArgumentError(label, expected=expected, actual=short(weight.dtype), hint=hint)
    check_tensor(label, weight, "_ _", dtypes, {}, any_strides=True)


def _block_of(weight: Tensor, scale: Tensor, value: Weight) -> tuple[int, int]:
    """The size of blocks of a weight that was checked."""
    declared = value.block_size if isinstance(value, BlockScaledWeight) else declared_block(value)
    return declared or check_scale("scale", scale, "weight", weight, None)

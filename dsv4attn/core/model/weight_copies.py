"""`WeightCopies`: what a layer computes from its weights once, and how it notices that a weight has changed.

One rule for every weight. A weight that has the form in which it is multiplied is read as it is, in every step. Of
others there are copies: bf16 of fp8, fp32 of bf16. Before a step the layer asks `changed`. If a tensor that has a copy
was written, or any tensor lies elsewhere, the layer takes all weights again, with copies in the same memory, which
captured graphs read. `TensorState` says what is seen; after any other change `refresh` of the layer does the same.

Matrices that multiply the same input are joined: they lie one after the other in one memory, so that one product reads
them all. None is held twice, as the tensors that were given become views of that memory (`joined_memory`).

Products of few rows may read the codes of fp8 weights (`CodedMatrix`): the caller's tensors, where they are. So an fp8
weight takes one byte an element for its codes and two for its bf16 copy, with and without such products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from dsv4attn.core.model.joined_memory import follow_each_other, has_own_memory, lies_in, movable, users_of
from dsv4attn.core.model.quantized_weight import (
    BlockScaledWeight,
    CodedMatrix,
    Weight,
    check_weight,
    codes_of,
    converted,
    scaled_weight,
    tensors_of,
)
from dsv4attn.core.model.tensor_state import Place, TensorState, have_changed
from dsv4attn.core.reprs import frozen
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.errors import ArgumentError

__all__ = ["JoinedMatrix", "MostRows", "WeightCopies", "check_not_captured"]

MostRows: TypeAlias = Callable[[BlockScaledWeight], int]
"""Rows of a product up to which the codes of a weight are read; 0: they never are."""


@frozen(eq=False)
class JoinedMatrix:
    """What multiplies an input at once: a weight, or several that follow each other.

    matrix: [rows of all, columns]; with the codes of fp8 weights, if products read them.
    rows: of each weight by its name, in order.
    out_dtype: of the product; None: the wider of both factors.
    """

    matrix: Tensor | CodedMatrix
    rows: Mapping[str, int]
    out_dtype: torch.dtype | None

    def first(self, names: Collection[str]) -> JoinedMatrix | None:
        """The part of the matrix from its beginning to the last of the named weights; None if it has none of them."""
        kept = max((place for place, name in enumerate(self.rows, 1) if name in names), default=0)
        if not kept:
            return None
        if kept == len(self.rows):
            # a view would keep the memory of a weight that gets other memory
            return self
        named, matrix = dict([*self.rows.items()][:kept]), self.matrix
        part = matrix[: sum(named.values())] if isinstance(matrix, Tensor) else matrix.first(kept)
        return JoinedMatrix(part, named, self.out_dtype)


class WeightCopies:
    """Copies of the weights of a layer, by name, in memory that stays.

    Making a copy again under its name writes the same memory, if shape, dtype and device are the same.
    """

    def __init__(self) -> None:
        self._made: dict[str, Tensor] = {}
        self._places: dict[str, list[Place]] = {}
        self._all_places: tuple[Place, ...] = ()
        self._groups: dict[str, list[_Group]] = {}
        self._is_part_taken = False

    def changed(self) -> bool:
        """Whether the layer has to take its weights again. Reads no device."""
        return self._is_part_taken or have_changed(self._all_places)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """While all weights are taken. After an error, such as that of full memory, `changed` stays true."""
        self._is_part_taken = True
        yield
        self._is_part_taken = False

    def dense(self, name: str, value: Weight) -> Tensor:
        """A matrix as bf16 if it is fp8, and as it is otherwise. value: see `quantized_weight.dense_weight`."""
        is_copy = _matrix(value).element_size() == 1
        # states first: what is written meanwhile is seen later. A tensor that is multiplied is checked in every step
        places = [] if isinstance(value, Tensor) and not is_copy else _places([value], writes=is_copy)
        matrix = converted(value, name, self._made.get(name))
        self._keep(name, matrix if is_copy else None, places)
        return matrix

    def coded(self, name: str, value: Weight, most_rows: MostRows | None) -> Tensor | CodedMatrix:
        """`dense`, with the codes of the weight if products of some rows read them. most_rows: see `joined`."""
        return _with_codes(self.dense(name, value), {name: value}, most_rows)

    def scaled(self, name: str, value: Weight) -> Weight:
        """The codes and scales of a matrix that is fp8, as they are; `dense` of any other."""
        block_scaled = scaled_weight(value, name)
        if block_scaled is None:
            return self.dense(name, value)
        self._keep(name, None, _places([value]))
        return block_scaled

    def plain(self, name: str, value: Tensor, dtype: torch.dtype | None = None, *, is_checked: bool = False) -> Tensor:
        """A tensor in a dtype, without gaps between its elements; itself if it is so.

        dtype: default: its own. is_checked: whether every step checks its strides, which need not be watched then.
        """
        dtype = value.dtype if dtype is None else dtype
        if value.dtype == dtype and value.is_contiguous():
            self._keep(name, None, [] if is_checked else _places([value], writes=False))
            return value
        self._watch(name, _places([value]))
        return self._memory(name, value.shape, dtype, value.device).copy_(value)

    def joined(
        self,
        name: str,
        values: Mapping[str, Weight],
        in_fp32: Collection[str],
        *,
        gives_fp32: bool,
        most_rows: MostRows | None = None,
    ) -> tuple[JoinedMatrix, ...]:
        """Matrices that multiply the same input, as few as their dtypes allow.

        values: weights with as many columns, by name. in_fp32: names of those whose products are fp32; others are too
        where they share a matrix with these. gives_fp32: whether bf16 factors can be multiplied into fp32; if not, bf16
        weights of `in_fp32` have fp32 copies. most_rows: the rows of a product up to which codes of a weight are read;
        None: they never are. A matrix has codes if all of its weights are fp8 and its products are bf16.

        A weight whose memory others use too stays where it is, as a matrix of its own: a part of a larger tensor, one
        that has aliases, or memory which torch does not own. Which weights share a matrix is decided in the first call.
        Raises ArgumentError as `quantized_weight.dense_weight` does.
        """
        for part, value in values.items():
            check_weight(part, value)
        groups = self._groups.get(name)
        if groups is None:
            groups = self._groups[name] = _groups(values, in_fp32, gives_fp32=gives_fp32)
        matrices = []
        for number, group in enumerate(groups):
            of_group, label = {part: values[part] for part in group.parts}, f"{name} {number}"
            if group.copies:
                matrix = self._fp32(label, of_group)
            elif len(group.parts) == 1:
                matrix = self.dense(label, *of_group.values())
            else:
                matrix = self._together(label, of_group)
            rows = {part: _matrix(value).shape[0] for part, value in of_group.items()}
            both = _with_codes(matrix, of_group, most_rows if group.out_dtype is None else None)
            matrices.append(JoinedMatrix(both, rows, group.out_dtype))
        return tuple(matrices)

    def _fp32(self, name: str, values: Mapping[str, Weight]) -> Tensor:
        """fp32 copies of matrices, one after the other."""
        places = _places(values.values())
        parts = [converted(value, part) for part, value in values.items()]
        shape = torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        out = self._memory(name, shape, torch.float32, parts[0].device)
        for target, part in zip(out.split([part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(part)
        self._watch(name, places)
        return out

    def _together(self, name: str, values: Mapping[str, Weight]) -> Tensor:
        """Matrices of one dtype in one memory, in which tensors that are not fp8 lie from now on."""
        tensors = [_matrix(value) for value in values.values()]
        rows, dtype = [tensor.shape[0] for tensor in tensors], _dense_dtype(tensors[0])
        shape = torch.Size((sum(rows), tensors[0].shape[1]))
        if follow_each_other(tensors):
            first = tensors[0]
            # not a view of the first: torch makes no views of tensors of inference mode whose memory was exchanged.
            # not with its strides: a single row is dense to torch whatever its stride is
            memory = torch.empty(0, dtype=dtype, device=first.device)
            memory.set_(first.untyped_storage(), first.storage_offset(), shape, (shape[1], 1))
            self._keep(name, memory, _places(values.values(), writes=False))
            return memory
        places = _places(values.values())
        # they may be all that keeps tensors alive which lay in the memory before
        self._watch(name, [])
        known = self._made.get(name)
        if known is not None and (
            not has_own_memory(known) or users_of(known) > 1 + sum(map(lies_in, tensors, known.split(rows)))
        ):
            # who has kept a tensor that lay there, or an array, keeps its values
            del self._made[name]
        memory = self._memory(name, shape, dtype, tensors[0].device)
        parts = memory.split(rows)
        # those that lie in their places stay; they are asked for too, as others may share their memory
        moves = movable(tensors)
        for tensor, part, moved, (label, value) in zip(tensors, parts, moves, values.items(), strict=True):
            if tensor.element_size() == 1:
                converted(value, label, part)
            elif not lies_in(tensor, part):
                part.copy_(tensor.detach())
                if moved:
                    tensor.data = part
        # one tensor under two names lies in one of two places, and what is written to it must be seen
        copied = {id(tensor) for tensor, part in zip(tensors, parts, strict=True) if not lies_in(tensor, part)}
        read = {id(tensor) for tensor in tensors} - copied
        for i, (owner, attribute, _) in enumerate(places):
            if id(tensor := owner.get(attribute)) in read:
                places[i] = owner, attribute, TensorState(tensor, writes=False)
        self._watch(name, places)
        return memory

    def _keep(self, name: str, made: Tensor | None, places: list[Place]) -> None:
        """Remember what was made, None for a weight that is read as it is, and the tensors that were taken for it."""
        self._watch(name, places)
        if made is None:
            self._made.pop(name, None)
        else:
            self._made[name] = made

    def _watch(self, name: str, places: list[Place]) -> None:
        self._places[name] = places
        self._all_places = tuple(chain.from_iterable(self._places.values()))

    def _memory(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory of a copy: that which it has, if it fits."""
        memory = self._made.get(name)
        if memory is None or (memory.shape, memory.dtype, memory.device) != (shape, dtype, device):
            memory = self._made[name] = torch.empty(shape, dtype=dtype, device=device)
        return memory


def _places(values: Iterable[Weight], *, writes: bool = True) -> list[Place]:
    """Where the tensors of weights are, and their states. writes: whether writes are changes."""
    found = chain.from_iterable(map(tensors_of, values))
    return [(owner, name, TensorState(tensor, writes=writes)) for owner, name, tensor in found]


def _with_codes(matrix: Tensor, values: Mapping[str, Weight], most_rows: MostRows | None) -> Tensor | CodedMatrix:
    """A matrix and the codes of the weights that it is the copy of; itself if no product reads them."""
    if most_rows is None:
        return matrix
    codes = tuple(weight for name, value in values.items() if (weight := codes_of(value, name)) is not None)
    if len(codes) < len(values):
        return matrix
    most = min(map(most_rows, codes))
    return CodedMatrix(matrix, codes, most) if most > 0 else matrix


@frozen
class _Group:
    """Weights that share a matrix. copies: whether that is a copy in fp32. out_dtype: see `JoinedMatrix`."""

    parts: tuple[str, ...]
    out_dtype: torch.dtype | None
    copies: bool = False


def _groups(values: Mapping[str, Weight], in_fp32: Collection[str], *, gives_fp32: bool) -> list[_Group]:
    """Which weights share a matrix: those of a dtype, but for those that cannot be moved."""
    by_dtype: dict[tuple[torch.dtype, bool], list[str]] = {}
    for part, value in values.items():
        dtype = _dense_dtype(_matrix(value))
        copies = part in in_fp32 and dtype != torch.float32 and not gives_fp32
        by_dtype.setdefault((dtype, copies), []).append(part)
    groups = []
    for (_, copies), parts in by_dtype.items():
        alone: list[str] = []
        if not copies:
            alone = _not_joined({part: _matrix(values[part]) for part in parts})
        for shared in ([part for part in parts if part not in alone], *([part] for part in alone)):
            if shared:
                out_dtype = torch.float32 if any(part in in_fp32 for part in shared) else None
                groups.append(_Group(tuple(shared), out_dtype, copies))
    return groups


def _not_joined(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the matrices that stay where they are, unless all of them follow each other already."""
    if follow_each_other([*tensors.values()]):
        return []
    addresses: Sequence[int] = [tensor.data_ptr() for tensor in tensors.values()]
    return [
        name
        for (name, tensor), moves in zip(tensors.items(), movable([*tensors.values()]), strict=True)
        if tensor.element_size() > 1 and (not moves or addresses.count(tensor.data_ptr()) > 1)
    ]


def _matrix(value: Weight) -> Tensor:
    """The matrix of a weight, or its codes."""
    return tensors_of(value)[0][2]


def _dense_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a matrix is multiplied."""
    return torch.bfloat16 if tensor.element_size() == 1 else tensor.dtype


def check_not_captured(device: torch.device, name: str) -> None:
    """Raise ArgumentError while a graph is captured: copies of weights would be computed in every replay.

    name: of the layer.
    """
    if is_capturing(device):
        expected, hint = "weights that have not changed since the last step", "call refresh() before the capture"
        raise ArgumentError(f"weights of {name}", expected=expected, actual="changed ones", hint=hint)

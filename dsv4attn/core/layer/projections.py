"""`Projections`: products of one input with several weights, as few as the weights allow."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.contract.layer_ops import CodedProducts
from dsv4attn.core.model.quantized_weight import CodedMatrix, Weight
from dsv4attn.core.model.weight_copies import JoinedMatrix, MostRows, WeightCopies
from dsv4attn.core.torch_ops.tiles import Linear, gives_fp32

__all__ = ["CodedLinear", "Projections"]


@frozen
class CodedLinear:
    """`Linear` of matrices that may have codes too, which products of few rows read.

    linear: multiplies matrices.
    coded: multiplies codes.
    """

    linear: Linear
    coded: CodedProducts

    def __call__(self, x: Tensor, weight: Tensor | CodedMatrix, out_dtype: torch.dtype | None = None) -> Tensor:
        """The product: [..., N]."""
        options = () if out_dtype is None else (out_dtype,)
        if isinstance(weight, Tensor):
            return self.linear(x, weight, *options)
        is_bf16 = x.dtype == torch.bfloat16 and out_dtype in (None, torch.bfloat16)
        if not is_bf16 or x.shape[:-1].numel() > weight.most_rows:
            return self.linear(x, weight.weight, *options)
        out, end = x.new_empty(*x.shape[:-1], weight.weight.shape[0]), 0
        for codes in weight.codes:
            first, end = end, end + codes.weight.shape[0]
            self.coded.multiply(x, codes, out[..., first:end])
        return out


class Projections:
    """Products of one input with several weights; see `WeightCopies.joined` for which weights share a product.

    name: of the input.
    copies: of the layer.
    linear: multiplies.
    in_fp32: names of the weights whose products are fp32. Others are too where they share a product with these.
    most_rows: the rows of a product up to which the codes of an fp8 weight are read; None: they never are.
    """

    def __init__(
        self,
        name: str,
        copies: WeightCopies,
        linear: Linear | CodedLinear,
        in_fp32: Collection[str] = (),
        most_rows: MostRows | None = None,
    ) -> None:
        self._name, self._copies, self._linear, self._in_fp32 = name, copies, linear, frozenset(in_fp32)
        self._most_rows = most_rows
        self._matrices: tuple[JoinedMatrix, ...] = ()
        self._parts: dict[tuple[str, ...], tuple[JoinedMatrix, ...]] = {}

    def load(self, weights: Mapping[str, Weight | None]) -> None:
        """Take weights, with the names, shapes and dtypes of those before. Those that are None have no product."""
        named = {name: weight for name, weight in weights.items() if weight is not None}
        first = next(iter(named.values()))
        device = (first if isinstance(first, Tensor) else first.weight).device
        # views of a matrix would keep its memory from being written again
        self._parts.clear()
        fp32 = gives_fp32(device.type)
        self._matrices = self._copies.joined(
            self._name, named, self._in_fp32, gives_fp32=fp32, most_rows=self._most_rows
        )

    @property
    def matrices(self) -> tuple[JoinedMatrix, ...]:
        """What is multiplied."""
        return self._matrices

    def __call__(self, x: Tensor, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
        """Products [..., rows] of x [..., columns] by the name of the weight. Their rows may lie apart.

        wanted: names of weights whose products are needed; those before them in their matrix are made too. None: all.
        """
        products: dict[str, Tensor] = {}
        for part in self._matrices if wanted is None else self._of(tuple(wanted)):
            # without a dtype as every callable that multiplies takes its arguments
            options = () if part.out_dtype is None else (part.out_dtype,)
            product: Tensor = self._linear(x, part.matrix, *options)  # type: ignore[arg-type]
            products.update(zip(part.rows, product.split([*part.rows.values()], -1), strict=True))
        return products

    def _of(self, names: tuple[str, ...]) -> tuple[JoinedMatrix, ...]:
        """What the products of some weights need, kept until other weights are loaded."""
        parts = self._parts.get(names)
        if parts is None:
            firsts = (joined.first(names) for joined in self._matrices)
            parts = self._parts[names] = tuple(part for part in firsts if part is not None)
        return parts

"""`Projections`: products of one input with several weights, as few as the weights allow."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from dsv4attn.core.model.quantized_weight import Weight
from dsv4attn.core.model.weight_copies import JoinedMatrix, WeightCopies
from dsv4attn.core.torch_ops.tiles import Linear, gives_fp32

__all__ = ["Projections"]


class Projections:
    """Products of one input with several weights; see `WeightCopies.joined` for which weights share a product.

    name: of the input.
    copies: of the layer.
    linear: multiplies.
    in_fp32: names of the weights whose products are fp32. Others are too where they share a product with these.
    """

    def __init__(self, name: str, copies: WeightCopies, linear: Linear, in_fp32: Collection[str] = ()) -> None:
        self._name, self._copies, self._linear, self._in_fp32 = name, copies, linear, frozenset(in_fp32)
        self._matrices: tuple[JoinedMatrix, ...] = ()

    def load(self, weights: Mapping[str, Weight | None]) -> None:
        """Take weights, with the names, shapes and dtypes of those before. Those that are None have no product."""
        named = {name: weight for name, weight in weights.items() if weight is not None}
        first = next(iter(named.values()))
        device = (first if isinstance(first, Tensor) else first.weight).device
        self._matrices = self._copies.joined(self._name, named, self._in_fp32, gives_fp32=gives_fp32(device.type))

    @property
    def matrices(self) -> tuple[JoinedMatrix, ...]:
        """What is multiplied."""
        return self._matrices

    def __call__(self, x: Tensor, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
        """Products [..., rows] of x [..., columns] by the name of the weight. Their rows may lie apart.

        wanted: names of weights whose products are needed; those before them in their matrix are made too. None: all.
        """
        products: dict[str, Tensor] = {}
        for joined in self._matrices:
            part = joined if wanted is None else joined.first(wanted)
            if part is None:
                continue
            # without a dtype as every callable that multiplies takes its arguments
            options = () if part.out_dtype is None else (part.out_dtype,)
            product = self._linear(x, part.matrix, *options)
            products.update(zip(part.rows, product.split([*part.rows.values()], -1), strict=True))
        return products

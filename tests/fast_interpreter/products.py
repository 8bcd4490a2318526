"""A product of matrices for Triton's interpreter whose rows have the same bits at every place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def multiplied_alike(a: NDArray[Any], b: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
    """Product of two matrices, whose bits in a row are the same at every place: numpy's own differ on some CPUs.

    Triton's interpreter multiplies by `np.matmul`, which a test may replace by this.
    """
    product: NDArray[Any] = np.einsum("ik,kj->ij", a, b, dtype=dtype, casting="unsafe", optimize=False)
    return product

"""The reference in every form of keys and indices, so that one test proves what core prepares for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.selection import load_backend

KINDS = list(LayerKind)
NAMES = [f"{keys}-{indices}" for keys, indices in product(("gathered", "paged"), ("dense", "ragged"))]


def backend_of(form: str) -> ReferenceBackend:
    """Build the reference from a name such as "paged-ragged"; decode takes the same form of indices."""
    keys, indices = form.split("-")
    made = load_backend("reference", prefill_keys=keys, prefill_indices=indices, decode_indices=indices)
    assert isinstance(made, ReferenceBackend)
    return made


BACKENDS = {name: backend_of(name) for name in NAMES}
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=[kind.value for kind in KINDS])
all_forms = pytest.mark.parametrize("form", NAMES)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bytes, so that 0 and -0 differ and NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype or not left.numel():
        return left.shape == right.shape and left.dtype == right.dtype
    copies = [t.clone(memory_format=torch.contiguous_format) for t in (left, right)]
    return torch.equal(*(t.view(torch.uint8) for t in copies))


def assert_same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Assert that (out, lse) of two runs are equal byte for byte, or say where they first differ."""
    for name, a, b in zip(("out", "lse"), left, right, strict=True):
        if not same_bits(a, b):
            where = (a != b).nonzero()[:1].tolist()
            largest = (a.double() - b.double()).abs().max().item()
            pytest.fail(f"{name} differs, first at {where}, at most by {largest:.3g}")

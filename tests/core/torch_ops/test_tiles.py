"""Arithmetic whose bits in a row do not depend on the other rows."""

from __future__ import annotations

import torch

from dsv4attn.core.torch_ops import tiles


def test_g24_a_sigmoid_has_the_same_bits_at_every_place() -> None:
    # a CPU computes elements at the end of a tensor by other instructions than those that fill a vector register
    rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    for count in (1, 9, 21):
        repeated = torch.stack([tiles.sigmoid(row.expand(count, -1).contiguous()) for row in rows])
        assert torch.equal(repeated, repeated[:, :1].expand_as(repeated))
    torch.testing.assert_close(tiles.sigmoid(rows * 30), torch.sigmoid(rows * 30))

"""One random projection in fp8, and what its codes, its products and their scales have to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import architecture
from dsv4attn.backends._triton.layer.projections import output
from dsv4attn.core.cache.layout import Fp8Format
from dsv4attn.testing.kit.tolerances import F64
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.cache.caches import DEVICE, seeded, strided
from tests.core.model.scaled import FNUZ, OCP, Scaled

BF16, FP32_STEPS = 2.0**-8, 2.0**-20
NATIVE_STEPS = 2.0**-12
"""Some matrix units keep 14 bits of the sums of codes."""


def geometry(seed: int) -> tuple[int, int, int, int, int]:
    """Groups, heads of a group, head dim, rotated dims, rank."""
    return [(2, 2, 128, 64, 24), (1, 3, 256, 160, 130), (3, 1, 256, 64, 40), (2, 1, 128, 128, 128)][seed % 4]


def factors_of(scales: Tensor) -> F64:
    """What scales of outputs are worth."""
    known = scales.cpu().double().numpy()
    return known if scales.dtype == torch.float32 else np.exp2(known - 127)


class Call:
    """One random projection: values of many sizes, rows apart with NaN between them."""

    def __init__(
        self,
        seed: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        dialect: torch.dtype = OCP,
        form: str = "fp32",
        tokens: int = 5,
        block: int = 128,
    ) -> None:
        g, self.block = seeded(seed), block
        self.groups, heads, self.dim, self.rope, self.rank = geometry(seed)
        self.heads, pad = self.groups * heads, 8 * (seed % 2)
        o = torch.randn(tokens, self.heads, self.dim, generator=g)
        o *= torch.exp2(torch.randint(-12, 6, (tokens, self.heads, 1), generator=g))
        # a group of zeros, one below the floor, and values far below their group's largest
        o[:, 0, :block] *= torch.tensor([0.0, 1e-13, 1, 1, 1]).repeat(tokens)[:tokens, None]
        o[:, -1, ::3] *= 2.0**-9
        self.o = strided(o.to(dtype), pad)
        angle = torch.rand(11, self.rope // 2, generator=g) * 7
        self.table = strided(torch.cat([angle.cos(), angle.sin()], 1), pad)
        self.positions = torch.randint(0, 11, (tokens,), generator=g).to(DEVICE)
        self.scaled = Scaled.draw(
            seed, self.groups * self.rank, heads * self.dim, dialect, form, DEVICE, (block, block)
        )
        self.wo_a = self.scaled.pair()

    @property
    def fnuz(self) -> bool:
        return self.scaled.dialect == FNUZ

    @property
    def format(self) -> Fp8Format:
        return Fp8Format.FNUZ if self.fnuz else Fp8Format.OCP

    def quantise(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Codes and scales; o must stay."""
        original = self.o.clone().view(torch.uint8)
        rest = self.o, self.positions, self.table, self.groups
        options = {"columns": self.block, **options}
        codes, scales = output.inv_rope_fp8_quant(*rest, fp8_format=self.format, **options)
        assert torch.equal(self.o.contiguous().view(torch.uint8), original)
        return codes, scales

    def turned(self) -> NDArray[np.float32]:
        """Outputs turned back, [T, G, K], each operation rounded to fp32."""
        o = self.o.float().cpu().numpy().copy()
        cos, sin = np.split(self.table[self.positions].cpu().numpy()[:, None], 2, -1)
        tail = o[..., self.dim - self.rope :]
        even, odd = tail[..., ::2].copy(), tail[..., 1::2].copy()
        tail[..., ::2], tail[..., 1::2] = even * cos + odd * sin, odd * cos - even * sin
        turned: NDArray[np.float32] = o.reshape(len(o), self.groups, -1)
        return turned

    def check_codes(self, codes: Tensor, scales: Tensor) -> None:
        """Fail unless each group has the smallest scale with which it fits, and the nearest codes."""
        x = self.turned().astype(np.float64)
        grouped = x.reshape(*x.shape[:2], -1, self.block)
        amax = np.maximum(np.abs(grouped).max(-1), 1e-10)
        fraction, exponent = np.frexp(amax / (240.0 if self.fnuz else 448.0))
        exponent -= fraction == 0.5
        actual = oracle.decode_e4m3(codes.view(torch.uint8).cpu().numpy(), self.fnuz)
        expected = oracle.encode_e4m3(np.ldexp(grouped, -exponent[..., None]).reshape(x.shape), self.fnuz)
        assert codes.dtype == self.scaled.dialect
        assert np.array_equal(actual, oracle.decode_e4m3(expected, self.fnuz))
        assert np.array_equal(factors_of(scales), np.ldexp(1.0, exponent))

    def matrices(self) -> F64:
        """[G, rank, K] float64: codes times factors."""
        rows, columns = self.scaled.codes.shape
        factors = np.kron(self.scaled.factors, np.ones((self.block, self.block)))[:rows, :columns]
        return (oracle.decode_e4m3(self.scaled.codes.numpy(), self.fnuz) * factors).reshape(self.groups, self.rank, -1)

    def product(self, codes: Tensor, scales: Tensor) -> tuple[F64, F64]:
        """[T, G, rank] float64: what these codes are worth times the matrices, and the sum of magnitudes."""
        left = oracle.decode_e4m3(codes.view(torch.uint8).cpu().numpy(), self.fnuz)
        left, right = left * factors_of(scales).repeat(self.block, -1), self.matrices()
        return np.einsum("tgk,grk->tgr", left, right), np.einsum("tgk,grk->tgr", np.abs(left), np.abs(right))

    def check_product(self, z: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Fail unless z is the product, but for fp32 sums and one rounding."""
        expected, size = self.product(codes, scales)
        native = output.is_native(self.format, architecture())
        budget = (BF16 if z.dtype == torch.bfloat16 else 0) * np.abs(expected)
        budget += (NATIVE_STEPS if native else FP32_STEPS) * size
        assert z.shape == expected.shape
        assert (np.abs(z.double().cpu().numpy() - expected) <= budget).all()

    def project(self, **options: Any) -> Tensor:
        return output.project_fp8(self.o, self.positions, self.table, self.wo_a, self.groups, **options)

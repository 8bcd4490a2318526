"""The gather kernels return the bits of the stored keys, write no other row and read no other byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.cache import gather
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.reference import kernels as reference
from dsv4attn.core.cache.layout import CacheMemory, KVCacheLayout, PagedKVCache
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.cache.caches import CPU, DEVICE, FNUZ, LAYOUTS, OCP, draw, each_layout, poisoned, seeded
from tests.core.cache.v41_packer import unpack_fp4, unpack_fp8, unpack_nvfp4
from tests.harness import bytes_of

DEAD = [-1, -(2**31), 2**31 - 1, 2**20]


class Pages:
    """A cache that holds some records, with poison everywhere else, and the values that a reader should find."""

    def __init__(self, layout: KVCacheLayout, seed: int) -> None:
        """Write random records to half of the slots."""
        self.generator = g = seeded(seed)
        self.layout, self.blocks, self.size = layout, draw(g, 3, 7), draw(g, 1, 5)
        step = max(layout.dtype.itemsize, 2)
        gap, start = (step * draw(g, 0, 9), step * draw(g, 0, 9)) if seed % 2 else (0, 0)
        whole = poisoned(layout, self.blocks, self.size, gap=gap, start=start, device=CPU)
        self.live = torch.randperm(whole.capacity, generator=g)[: max(whole.capacity // 2, 1)]
        rows = torch.randn(len(self.live), layout.head_dim, generator=g) * torch.exp2(
            torch.randint(-30, 30, (len(self.live), layout.head_dim), generator=g).float()
        )
        reference.insert(rows, whole, self.live)
        self.values = {slot: self.read(whole, slot) for slot in self.live.tolist()}
        self.cache = poisoned(layout, self.blocks, self.size, gap=gap, start=start)
        self.cache.tensor.untyped_storage().copy_(whole.tensor.untyped_storage())

    def read(self, cache: PagedKVCache, slot: int) -> Tensor:
        """Return the key in a slot, by the oracle."""
        layout, where = self.layout, (slot // self.size, slot % self.size)
        if not layout.is_quantised:
            return cache.region("row")[where].clone()
        if layout.name.startswith("v41"):
            record = torch.cat([cache.region(name)[where] for name in ("nope", "scale")]).numpy()
            packed = (unpack_fp8 if layout.fp8_format else unpack_fp4)(record, layout.head_dim)
            return torch.from_numpy(packed).to(layout.row_dtype)
        parts = [cache.region(name)[where].contiguous().view(torch.uint8) for name in ("nope", "rope", "scale")]
        if layout.fp8_format is None:
            row = unpack_nvfp4(torch.cat(parts).numpy(), layout.nope_dim, layout.rope_dim)
            return torch.from_numpy(row).to(layout.row_dtype)
        row = oracle.dequantize_record(
            torch.cat(parts).numpy(),
            nope_dim=layout.nope_dim,
            rope_dim=layout.rope_dim,
            group_size=layout.group_size,
            fnuz=layout.fp8_format is FNUZ,
            scale_bytes=layout.scale_bytes,
        )
        return torch.from_numpy(row).to(layout.row_dtype)

    def blank(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Return rows of this shape that hold 7, and the larger memory around them, which is NaN elsewhere."""
        wide = [n + draw(self.generator, 0, 3) for n in (*shape, self.layout.head_dim)]
        whole = torch.full(wide, torch.nan, dtype=self.layout.row_dtype, device=DEVICE)
        part = whole[tuple(slice(n) for n in (*shape, self.layout.head_dim))]
        part.fill_(7)
        return part, whole

    def check_slots(self) -> None:
        """Gather a matrix of slots, a part of a wider one: written ones, and ones that do not exist."""
        g, capacity = self.generator, self.blocks * self.size
        pool = torch.cat([self.live, torch.tensor([-1, -2, -(2**31), capacity, 2**31 - 1])])
        rows, columns = draw(g, 1, 4), draw(g, 1, 5)
        slots = pool[torch.randint(len(pool), (rows, columns + 2), generator=g)].int().to(DEVICE)[:, :columns]
        for some in (slots, slots[:, 0]):
            out, whole = self.blank(some.numel())
            gather.dequant_gather_slots(out, self.cache, some)
            zeros = torch.zeros(self.layout.head_dim, dtype=out.dtype)
            expected = [self.values.get(slot, zeros) for slot in some.flatten().tolist()]
            assert torch.equal(bytes_of(out), bytes_of(torch.stack(expected)))
            out.fill_(torch.nan)
            assert whole.isnan().all()

    def check_requests(self) -> None:
        """Gather ragged requests whose pages hold written and dead blocks."""
        g, size = self.generator, self.size
        full = [b for b in range(self.blocks) if all(b * size + i in self.values for i in range(size))]
        requests, longest, offset = draw(g, 1, 3), draw(g, 0, 3 * size), draw(g, 0, 3)
        seq_lens = torch.randint(0, longest + 1, (requests,), generator=g).int()
        lens = (torch.rand(requests, generator=g) * (seq_lens + 1)).int()
        pool = torch.tensor(full + DEAD)
        table = pool[torch.randint(len(pool), (requests, -(-longest // size) + 3), generator=g)].int().to(DEVICE)
        table = table[:, : -(-longest // size) + 1]
        for passed_lens in (None, lens):
            takes = seq_lens if passed_lens is None else passed_lens
            out, whole = self.blank(requests, offset + longest + draw(g, 0, 2))
            expected = out.cpu().clone()
            for i, (length, count) in enumerate(zip(seq_lens.tolist(), takes.tolist(), strict=True)):
                for j in range(count):
                    block, row = divmod(length - count + j, size)
                    slot = int(table[i, block]) * size + row
                    if slot in self.values:
                        expected[i, offset + j] = self.values[slot]
            gather.dequantize_and_gather_k_cache(
                out,
                self.cache,
                seq_lens.to(DEVICE),
                None if passed_lens is None else passed_lens.to(DEVICE),
                table,
                offset,
            )
            assert torch.equal(bytes_of(out), bytes_of(expected))
            out.fill_(torch.nan)
            assert whole.isnan().all()

    def check(self) -> None:
        """Fail unless both steps are right."""
        self.check_slots()
        self.check_requests()


def check_all(layout: KVCacheLayout) -> None:
    """Check some calls; every other one has its pages out of step."""
    for seed in range(6):
        Pages(layout, seed).check()


@each_layout
def test_gathered_rows_are_the_stored_keys_bit_for_bit(layout: KVCacheLayout) -> None:
    check_all(layout)


@pytest.mark.parametrize("dialect", [OCP, FNUZ], ids=lambda dialect: dialect.value)
def test_every_code_under_every_scale_byte_reads_as_the_format_says(dialect: object) -> None:
    layout = KVCacheLayout.fp8_ds_mla(256, 2, group_size=256, fp8_format=OCP if dialect is OCP else FNUZ)
    cache = poisoned(layout, 16, 16, device=CPU)
    cache.region("nope")[:] = torch.arange(256, dtype=torch.uint8)
    cache.region("scale")[..., 0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    cache.region("rope").zero_()
    out = torch.full((256, 258), 7.0, dtype=torch.bfloat16, device=DEVICE)
    copied = poisoned(layout, 16, 16)
    copied.tensor.untyped_storage().copy_(cache.tensor.untyped_storage())
    gather.dequant_gather_slots(out, copied, torch.arange(256, dtype=torch.int32, device=DEVICE))
    actual = out.cpu()[:, :256].double()

    codes = oracle.decode_e4m3(np.arange(256, dtype=np.uint8), dialect is FNUZ)
    scales = np.array([*(2.0 ** (byte - 127) for byte in range(255)), np.nan])
    expected = torch.from_numpy(oracle.round_bf16(codes * scales[:, None]))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(1.5, 1e300, -1e300), expected.nan_to_num(1.5, 1e300, -1e300))


def test_nothing_happens_without_requests_rows_or_slots() -> None:
    pages = Pages(LAYOUTS[3], 0)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    one_row = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for out, lens in ((pages.blank(1, 4)[0], one_row), (pages.blank(2, 4)[0][:0], none)):
        copies = out.clone()
        gather.dequantize_and_gather_k_cache(out, pages.cache, lens, None, lens[:, None], out.shape[1])
        gather.dequantize_and_gather_k_cache(out, pages.cache, lens, lens * 0, lens[:, None], 0)
        assert torch.equal(out, copies)
    gather.dequant_gather_slots(pages.blank(1)[0][:0], pages.cache, none)
    gather.dequant_gather_slots(pages.blank(1)[0][:0], pages.cache, none.view(3, 0))


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[9], LAYOUTS[11]], ids=lambda x: x.fingerprint)
def test_warm_up_foresees_every_form_that_is_launched(layout: KVCacheLayout) -> None:
    known = set(gather.variants(layout, aligned=False, aligned_rows=False))
    with observed() as seen:
        check_all(layout)

    assert set(seen) <= known
    assert set(gather.variants(layout)) < known
    assert len(known) == 12


Strides = tuple[int, int, int, int]
MUTANTS: dict[str, Callable[[PagedKVCache, Strides], Strides]] = {
    "pages without gaps": lambda c, strides: (c.block_size * c.layout.record_bytes, *strides[1:]),
    "scales behind each record": lambda c, strides: (*strides[:2], c.layout.data_bytes, c.layout.record_bytes),
    "records one by one": lambda c, strides: (strides[0], c.layout.record_bytes, *strides[2:]),
}


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedKVCache.memory

    def wrong(cache: PagedKVCache) -> CacheMemory:
        memory: CacheMemory = right.__get__(cache)
        strides = MUTANTS[mutant](cache, memory.record_strides)
        return evolve(memory, record_strides=strides)

    monkeypatch.setattr(PagedKVCache, "memory", property(wrong))
    with pytest.raises(AssertionError):
        check_all(LAYOUTS[3])

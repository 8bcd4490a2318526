"""The compressor's states are saved bit for bit, wherever they stand, and nothing else is written."""

from __future__ import annotations

import attrs
import pytest
import torch

from dsv4attn.backends._triton.layer.compressor import launch as compress
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops import compressor
from tests.backends._triton.cache.caches import CPU, DEVICE, draw, memory, poisoned, seeded, strided


@attrs.define(eq=False, slots=False)
class Save:
    """One random step that saves states: rows and pages out of step with 16 bytes, slots that do not exist."""

    width: int
    ratio: int
    seed: int

    def __attrs_post_init__(self) -> None:
        g, odd = seeded(self.seed), self.seed % 2
        tokens, self.shape = draw(g, 1, 9), (draw(g, 1, 4), draw(g, 1, 5))
        both = strided(torch.randn(tokens, 2 * self.width, generator=g), 3 * odd)
        self.kv, self.score = both[:, : self.width], both[:, self.width :]
        self.ape = strided(torch.randn(self.ratio, self.width, generator=g), odd)
        capacity = self.shape[0] * self.shape[1]
        garbage = torch.tensor([-1, -7, -(2**40), capacity, 2**40, 2**62, 2**32])
        slots = torch.cat([torch.randperm(capacity, generator=g), garbage])
        self.slots = slots[torch.randperm(len(slots), generator=g)][: draw(g, 0, tokens + 2)].to(DEVICE)
        self.positions = torch.randint(0, 2**31 - 1, (tokens,), generator=g).to(DEVICE)
        self.gap, self.start = (4 * draw(g, 0, 9), 4 * draw(g, 0, 9)) if odd else (0, 0)

    def cache(self, device: torch.device = DEVICE) -> PagedKVCache:
        """Return an unwritten cache."""
        layout = KVCacheLayout.compressor_state(self.width)
        return poisoned(layout, *self.shape, gap=self.gap, start=self.start, device=device)

    def check(self) -> None:
        """Fail unless all bytes are the definition's."""
        actual, expected = self.cache(), self.cache(CPU)
        arguments = self.kv, self.score, self.ape, self.positions
        copies = [tensor.clone() for tensor in arguments]
        compress.save_partial_states(*arguments, actual, self.slots)
        kv, score, ape, positions = (tensor.cpu() for tensor in arguments)
        # without such a slot the definition rewrites the NaN of slot 0
        if ((self.slots >= 0) & (self.slots < expected.capacity)).any():
            compressor.save_partial_states(kv, score, ape, positions, expected, self.slots.cpu())

        assert torch.equal(memory(actual), memory(expected))
        assert all(map(torch.equal, copies, arguments))


@pytest.mark.parametrize(("width", "ratio"), [(64, 4), (48, 4), (7, 3), (1024, 4), (512, 128), (1500, 128)])
def test_states_are_saved_bit_for_bit(width: int, ratio: int) -> None:
    for seed in range(4):
        Save(width, ratio, seed).check()


def test_a_position_below_zero_has_the_bias_of_its_place() -> None:
    save = Save(64, 3, 0)
    save.positions -= 2**31
    save.check()

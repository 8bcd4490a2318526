"""Times are of the device, and of the call alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define, field

from dsv4attn.tools.bench.clock import Clock, Spread
from dsv4attn.tools.bench.roofline import Roofline, _fp8_product


def test_a_spread_is_a_median_between_tenths() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 1.4, 4.6)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_on_a_cpu_it_is_the_wall_clock() -> None:
    spread = Clock(torch.device("cpu")).times([lambda: time.sleep(0.003)], 3)[0]

    assert 0.003 <= spread.p10 <= spread.median <= spread.p90


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls: list[Callable[[], None]] = [lambda: order.append("a"), lambda: order.append("b")]
    Clock(torch.device("cpu")).times(calls, 4)

    assert "".join(order[-8:]) == "abababab"
    assert "".join(order[:-8]) == "aaabbb", "each is warm before the first round"


@define
class Device:
    """A device of its own pace: everything enqueued takes its time there, and events note when they are reached."""

    now: float = 0.0
    flush_s: float = 1e-3
    flushes: int = 0
    hides: int = 0
    log: list[str] = field(factory=list)

    def set_device(self, _: Any) -> None:
        self.log.append("set")

    def synchronize(self, _: Any) -> None:
        self.log.append("wait")

    def flush(self) -> None:
        self.now += self.flush_s
        self.flushes += 1
        self.log.append("flush")

    def caught_up(self) -> bool:
        """Whether the device did all before an event by the time the host asks: flushes keep it busy."""
        flushes, self.flushes = self.flushes, 0
        return flushes < self.hides

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        assert enable_timing
        event = SimpleNamespace(at=0.0, query=self.caught_up)

        def record() -> None:
            event.at = self.now
            self.log.append("event")

        event.record = record
        event.elapsed_time = lambda later: 1e3 * (later.at - event.at)
        return event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: fake)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(zero_=fake.flush))
    return fake


def test_on_an_accelerator_flushes_are_not_measured(device: Device) -> None:
    clock = Clock(torch.device("meta"))

    def call() -> None:
        device.now += 7e-6

    spread = clock.times([call], 5)[0]
    assert [spread.median, spread.p10, spread.p90] == pytest.approx([7e-6] * 3)
    assert device.log[:2] == ["set", "event"]
    last = "".join(word[0] for word in device.log[-6:])
    assert last.endswith("feew"), "a flush, the call between two events, and then a wait"


def test_flushes_take_longer_than_the_host_needs(device: Device) -> None:
    clock = Clock(torch.device("meta"))

    def slow_to_enqueue() -> None:
        time.sleep(0.004)

    device.log.clear()
    clock.times([slow_to_enqueue], 1)
    flushes = device.log.count("flush") * device.flush_s
    assert 2 * 0.004 <= flushes <= 0.064


def test_what_the_flushes_did_not_hide_is_tried_again_after_more(device: Device) -> None:
    clock = Clock(torch.device("meta"))
    device.hides = 5
    device.log.clear()
    spread = clock.times([lambda: None], 2)[0]

    assert not spread.exposed
    rounds = "".join(word[0] for word in device.log).replace("w", "").split("ee")
    assert [len(flushes) for flushes in rounds[:-1]] == [2, 4, 8, 8]


def test_what_cannot_be_hidden_is_marked(device: Device) -> None:
    clock = Clock(torch.device("meta"))
    device.hides = 1000

    assert clock.times([lambda: None], 1)[0].exposed


def test_the_roofline_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(torch.device("cpu"))
    monkeypatch.setattr(clock, "times", lambda calls, _: [Spread(2.0, 1.0, 3.0) for _ in calls])
    roof = Roofline.measure(clock)

    assert (roof.flops_s, roof.bytes_s, roof.dtype) == (2 * 1024**3, 2 * 2**26, "float32")
    assert roof.seconds(4 * 1024**3, 1) == 2.0
    assert roof.seconds(0, 2**28) == 2.0
    assert roof.best(Roofline(1.0, 1e99, "float32")) == Roofline(roof.bytes_s, 1e99, "float32")


def test_fp8_products_count_where_the_device_has_them() -> None:
    plain, fast = Roofline(1e9, 1e12, "bfloat16"), Roofline(1e9, 1e12, "bfloat16", 2e12)

    assert fast.seconds(4e12, 1.0, fp8=True) == 2.0
    assert fast.seconds(4e12, 1.0) == plain.seconds(4e12, 1.0, fp8=True) == 4.0
    assert plain.best(fast) == fast.best(plain) == fast
    assert plain.best(plain).fp8_flops_s is None


def test_the_fp8_product_is_that_of_the_devices_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: list[torch.dtype] = []

    def product(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> None:
        assert right.stride(0) == 1, "columns of the second matrix are dense"
        dtypes.append(left.dtype)
        if left.dtype != torch.float8_e4m3fnuz:
            raise RuntimeError("no such dialect here")

    monkeypatch.setattr(torch, "_scaled_mm", product)
    multiply = _fp8_product(32, torch.device("cpu"))
    assert multiply is not None
    assert dtypes == [torch.float8_e4m3fn, torch.float8_e4m3fnuz]

    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("needs compute capability 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", none)
    assert _fp8_product(32, torch.device("cpu")) is None

"""The Python frames of this package between a bound layer and the driver in a prepared decode, and their files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch

import dsv4attn
from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import Engine

PACKAGE = Path(dsv4attn.__file__).parent
MAX_FRAMES, MAX_FILES = 13, 8
LIMITS = Limits(max_num_reqs=2, max_num_batched_tokens=2, max_model_len=1024)


@contextmanager
def recorded_frames() -> Iterator[list[tuple[str, str]]]:
    """Collect (file, function) of each frame of this package in a `with` block, without those that a kernel calls."""
    frames: list[tuple[str, str]] = []
    inside: list[FrameType] = []  # the interpreted kernel that is running

    def ended(frame: FrameType, event: str, _: object) -> Any:
        if event == "return":
            inside.clear()
        return ended

    def started(frame: FrameType, _event: str, _: object) -> Any:
        if inside or PACKAGE not in Path(frame.f_code.co_filename).parents:
            return None
        path = Path(frame.f_code.co_filename)
        if not path.stem.startswith("kernels"):
            frames.append((str(path.relative_to(PACKAGE)), frame.f_code.co_name))
            return None
        inside.append(frame)
        frame.f_trace_lines = False
        return ended

    # not setprofile, which would also ask about each function of numpy that a kernel calls
    previous = sys.gettrace()
    sys.settrace(started)
    try:
        yield frames
    finally:
        sys.settrace(previous)


@pytest.mark.skipif(not INTERPRETED, reason="counted where kernels are interpreted")
@pytest.mark.parametrize("kind", [LayerKind.CSA])
@pytest.mark.parametrize("backend", [GenericBackend(), Sm90Backend()], ids=lambda backend: backend.name)
def test_a_prepared_decode_runs_few_frames_in_few_files(backend: TritonBackend, kind: LayerKind) -> None:
    engine = Engine(backend, ModelGeometry.preset("flash"), LIMITS, kind, DEVICE)
    batch = engine.load([(300, 1), (9, 1)], Random(1))
    metadata = engine.metadata(batch)
    tokens = engine.q[:2], engine.kv[:2], engine.positions[:2], engine.out[:2]
    # in grad mode a layer needs two frames more, to leave it
    with torch.inference_mode(), set_forward_context(metadata):
        engine.layer.forward_mqa(*tokens)
        with recorded_frames() as frames:
            engine.layer.forward_mqa(*tokens)
    print(f"\n{backend.name}, {kind.value}: {len(frames)} frames in {len({file for file, _ in frames})} files")
    print("\n".join(f"  {file}: {function}" for file, function in frames))

    assert engine.out[:2].abs().sum() > 0
    assert 8 <= len(frames) <= MAX_FRAMES
    assert len({file for file, _ in frames}) <= MAX_FILES

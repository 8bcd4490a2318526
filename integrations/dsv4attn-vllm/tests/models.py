"""What differs between tests of DeepSeek-V4 and of V4.1: configuration, classes of layers, engines, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from attrs import evolve, frozen
from dsv4attn_vllm import replacements, serving
from dsv4attn_vllm.cuda import CUDAAttention, V41CUDAAttention, select_attention, select_v41_attention
from dsv4attn_vllm.records import FP4_CACHE
from engine import Engine, config_of, world
from v41 import RATIOS, V41Engine, v41_config
from vllm.config import VllmConfig


@frozen
class Model:
    """One model for the tests.

    name: vLLM's folder of the model.
    config: makes vLLM's configuration of a small one.
    layer: dsv4attn's class of its layers on CUDA.
    engine: the engine for steps over these layers.
    layers: how many layers the small model has.
    draft: the number of a draft's layer.
    select: what replaces vLLM's choice of a class.
    platforms: what is replaced on each platform.
    flash_mla: the name of vLLM's FlashMLA backend.
    dtypes: cache dtypes that are served.
    parts: DSV4ATTN_VLLM_PARTS, or empty for the default.
    """

    name: str
    config: Callable[..., VllmConfig]
    layer: type
    engine: type[Engine]
    layers: int
    draft: int
    select: Callable[[VllmConfig], type]
    platforms: Mapping[str, Any]
    flash_mla: str
    dtypes: tuple[str, ...]
    parts: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.parts}".strip()


V4 = Model(
    name="deepseek_v4",
    config=config_of,
    layer=CUDAAttention,
    engine=Engine,
    layers=3,
    draft=0,
    select=select_attention,
    platforms=replacements.PLATFORMS,
    flash_mla="FLASHMLA_SPARSE_DSV4",
    dtypes=serving.CACHE_DTYPES,
)
V41 = Model(
    name="deepseek_v41",
    config=v41_config,
    layer=V41CUDAAttention,
    engine=V41Engine,
    layers=len(RATIOS),
    draft=len(RATIOS),
    select=select_v41_attention,
    platforms=replacements.V41_PLATFORMS,
    flash_mla="FLASHMLA_SPARSE_DSV41",
    dtypes=(*serving.V41_CACHE_DTYPES, FP4_CACHE),
)
V41_WITH_PARTS = evolve(V41, parts="indexer,compressor")
"""V4.1 with dsv4attn's compressor and indexer, which on a CPU are the default of V4 alone."""


@contextmanager
def engine_of(model: Model, backend: str, **arguments: Any) -> Iterator[Engine]:
    """An engine with the layers of a model on a backend. arguments: of vLLM."""
    with _asked(model, backend):
        config = model.config(**arguments)
        with world(config):
            yield model.engine(config, model.layer, layers=model.layers)


@contextmanager
def draft_engine(model: Model, backend: str) -> Iterator[Engine]:
    """An engine with the one layer of a draft, built with the draft's configuration as vLLM's loader does."""
    with _asked(model, backend):
        config = model.config(speculative_config={"method": "dspark", "num_speculative_tokens": 5})
        draft = replace(config, model_config=config.speculative_config.draft_model_config)

        def draft_layer(_: VllmConfig, prefix: str, **options: Any) -> Any:
            return model.layer(draft, prefix=prefix.replace(".0.", f".{model.draft}."), **options)

        with world(config):
            yield model.engine(config, draft_layer, layers=1)


@contextmanager
def _asked(model: Model, backend: str) -> Iterator[None]:
    """Ask for a backend and parts by the variables that a user sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4ATTN_BACKEND", backend)
        if model.parts:
            patch.setenv("DSV4ATTN_VLLM_PARTS", model.parts)
        serving._serving.cache_clear()
        yield

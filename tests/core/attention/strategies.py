"""Random one-layer problems for property tests: the same ones in every run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture


def examples(n: int) -> settings:
    """`n` examples, the same in every run, on a machine of any speed."""
    return settings(max_examples=n, deadline=None, derandomize=True, database=None)


def searched(n: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of `n` examples, the same in every run: the default run takes a quarter, and a `slow` test takes all.

    Parameters of the test without a strategy are those of pytest.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters
        fixed = [one for name, one in parameters.items() if name not in strategies and one.kind is not one.VAR_KEYWORD]

        @pytest.mark.parametrize("examples_count", [-(-n // 4), pytest.param(n, marks=pytest.mark.slow)])
        def run(examples_count: int, **params: Any) -> None:
            def drawn(**values: Any) -> None:
                test(**params, **values)

            drawn.__name__, drawn.__qualname__ = test.__name__, test.__qualname__
            examples(examples_count)(given(**strategies)(drawn))()

        run.__name__, run.__qualname__, run.__module__ = test.__name__, test.__qualname__, test.__module__
        run.__doc__ = test.__doc__
        count = inspect.Parameter("examples_count", inspect.Parameter.KEYWORD_ONLY)
        keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in fixed]
        run.__signature__ = inspect.Signature([count, *keywords])
        marked: Callable[..., None] = run
        return marked

    return decorate


def search(n: int) -> settings:
    """`n` examples, the same in every run; SEARCH times as many, and others in every run, where SEARCH is set."""
    times = int(os.environ.get("SEARCH", "0"))
    if not times:
        return examples(n)
    return settings(max_examples=n * times, deadline=None, derandomize=False, print_blob=True)


LENGTHS = st.one_of(st.integers(0, 12), st.sampled_from([15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100]))


@st.composite
def scenarios(draw: st.DrawFn, /, **fixed: Any) -> StepFixture:
    """A problem of any kind, dims, window, pages, layout and batch."""
    ratios = draw(st.sampled_from([(4, 16), (2, 8), (4, 128), (3, 5)]))
    geometry = tiny_geometry(
        num_heads=draw(st.sampled_from([1, 2, 3, 24])),
        head_dim=draw(st.sampled_from([8, 12, 16])),
        rope_dim=draw(st.sampled_from([2, 4])),
        window=draw(st.sampled_from([1, 2, 3, 7, 8, 16])),
        topk=draw(st.integers(1, 9)),
        ratios=ratios,
    )
    speculative = fixed.get("num_speculative_tokens", draw(st.integers(0, 3)))
    requests = draw(st.lists(st.tuples(LENGTHS, st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=5))
    requests = sorted(requests, key=lambda r: r[1] > 1 + speculative)
    options = {
        "kind": draw(st.sampled_from(["swa", "c4a", "c128a"])),
        "requests": [(context, count, min(padding, count)) for context, count, padding in requests],
        "geometry": geometry,
        "layout": draw(st.sampled_from([*layouts(geometry, draw(st.sampled_from([4, 5, 64]))).values()])),
        "q_dtype": draw(st.sampled_from([torch.bfloat16, torch.float32])),
        "topk": draw(st.sampled_from(["clean", "holes", "garbage"])),
        "sinks": draw(st.sampled_from(["random", None])),
        "swa_block_size": draw(st.sampled_from([1, 2, 4, 16])),
        "compressed_block_tokens": ratios[0] * ratios[1] * draw(st.sampled_from([1, 2])),
        "page_padding": draw(st.sampled_from([0, 8, 64])),
        "dead_block": draw(st.sampled_from([-1, 2**30, 0])),
        "extra_rows": draw(st.integers(0, 3)),
        "num_speculative_tokens": speculative,
        "outliers": draw(st.booleans()),
        "poison": draw(st.sampled_from([None, 0xFF, 0x80, 0x7F])),
        "seed": draw(st.integers(0, 2**16)),
    }
    return StepFixture(**{**options, **fixed})


@st.composite
def other_windows(draw: st.DrawFn, /, **fixed: Any) -> StepFixture:
    """The same with draft blocks, first positions of windows, and prefill tokens that see later ones; no padding."""
    scenario = draw(scenarios(**fixed))
    requests = [(context, count) for context, count, *_ in scenario.requests]
    return attrs.evolve(
        scenario,
        requests=requests,
        replay=draw(st.sampled_from([(), [draw(st.integers(0, context)) for context, _ in requests]])),
        causal=draw(st.booleans()),
        ahead=draw(st.sampled_from([0, 2, 11])),
    )

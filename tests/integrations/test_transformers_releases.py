"""The releases of transformers that are served: the names that each has for the cache, and what is refused."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.errors import ArgumentError, ConfigError, UnsupportedError
from tests.integrations.paged import causal_model, generated, ids_of, patched
from tests.parity import hf
from tests.parity.hf import deviation

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")

ROOT = Path(__file__).resolve().parents[2]
NEWEST, OLDEST = "cache", "past_key_values"
ANY = "DSV4ATTN_TRANSFORMERS_ANY_VERSION"


def of_version(version: str | None, patch: pytest.MonkeyPatch) -> None:
    """Let the metadata of transformers have this version."""
    real = importlib.metadata.version

    def version_of(name: str) -> str:
        if name != "transformers":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    patch.setattr(importlib.metadata, "version", version_of)


# versions


def test_the_extra_installs_what_is_tested_and_the_tests_run_with_the_ends_of_it() -> None:
    import transformers

    from dsv4attn.integrations.transformers.releases import RANGE, TESTED

    assert f'"{RANGE}; python_version >= ' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "Makefile"))
    (newest,) = re.findall(r"^transformers==(\S+);", pins, re.MULTILINE)
    (oldest,) = re.findall(r"^TRANSFORMERS := .*transformers==(\S+)$", makefile, re.MULTILINE)
    ends = [tuple(map(int, version.split(".")[:2])) for version in (oldest, newest)]
    assert ends == [TESTED[0], TESTED[-1]]
    assert tuple(map(int, transformers.__version__.split(".")[:2])) in TESTED


@pytest.mark.parametrize("version", ["5.25.0", "5.25.0.dev0", "6.0.0", "5.2.4", None])
def test_a_version_that_was_not_tested_is_refused_by_name(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.integrations import transformers

    model = causal_model()
    attentions = [layer.self_attn for layer in model.model.layers]
    of_version(version, monkeypatch)
    said = (
        rf"transformers: expected release 5\.23 or 5\.24, .*, got {re.escape(version or 'one without a version')} "
        rf"-> pip install 'transformers>=5\.23,<5\.25', or set {ANY}=1"
    )
    with pytest.raises(UnsupportedError, match=said):
        transformers.patch(model)
    with pytest.raises(UnsupportedError, match=said):
        transformers.register()

    assert [layer.self_attn for layer in model.model.layers] == attentions
    assert not hasattr(model, "dsv4attn")
    # the variable lets it be tried
    monkeypatch.setenv(ANY, "1")
    transformers.register()
    with patched(model):
        assert model.dsv4attn.num_sequences == 0
    monkeypatch.setenv(ANY, "yes")
    with pytest.raises(ConfigError, match=f"{ANY}.*expected 0 or 1, got 'yes'"):
        transformers.patch(model)


@pytest.mark.parametrize("version", ["5.23.0", "5.23.7", "5.24.0", "5.24.1+local"])
def test_every_patch_of_a_tested_release_is_served(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.integrations.transformers.releases import check_release

    of_version(version, monkeypatch)
    check_release()


# names


class Older:
    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None, **options: Any
    ) -> None: ...


class Newer:
    def forward(self, input_ids: Any = None, cache: Any = None, use_cache: Any = None, **options: Any) -> None: ...


class Neither:
    def forward(self, input_ids: Any = None, *, state: Any = None) -> None: ...


def test_names_are_those_of_the_signature() -> None:
    from dsv4attn.integrations.transformers.releases import ModelArguments

    older, newer = ModelArguments.of(Older), ModelArguments.of(Newer)
    assert (older.order, older.cache) == (("input_ids", OLDEST, "use_cache"), OLDEST)
    assert (newer.order, newer.cache) == (("input_ids", NEWEST, "use_cache"), NEWEST)
    assert older.bound((1, 2), {"use_cache": True, "more": 3}) == {
        "input_ids": 1,
        OLDEST: 2,
        "use_cache": True,
        "more": 3,
    }
    assert newer.bound((1, 2), {}) == {"input_ids": 1, NEWEST: 2}
    with pytest.raises(UnsupportedError, match=r"Neither\.forward: .*named cache or past_key_values, got input_ids"):
        ModelArguments.of(Neither)
    with pytest.raises(TypeError, match="3 arguments by position, got 4"):
        newer.bound((1, 2, 3, 4), {})
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        newer.bound((1,), {"input_ids": 2})


def test_the_name_of_another_release_is_renamed_or_refused_but_never_lost() -> None:
    from dsv4attn.integrations.transformers.releases import ModelArguments

    older, newer = ModelArguments.of(Older), ModelArguments.of(Newer)
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated: this transformers calls"):
        assert newer.bound((1,), {OLDEST: 2}) == {"input_ids": 1, NEWEST: 2}
    with pytest.warns(FutureWarning, match="deprecated"):
        assert newer.bound((), {OLDEST: 2, NEWEST: 3}) == {NEWEST: 3}
    with pytest.raises(ArgumentError, match=r"cache: expected none: .* calls the cache past_key_values, got int"):
        older.bound((), {NEWEST: 2})
    assert older.bound((), {NEWEST: None})[NEWEST] is None


@pytest.mark.parametrize("inner", [False, True], ids=["for causal", "base"])
def test_a_cache_that_is_passed_by_the_other_name_is_not_lost(*, inner: bool) -> None:
    from dsv4attn.integrations.transformers import DeepseekV4PagedCache

    model = causal_model()
    ids = ids_of(model, 12)
    called = model.model if inner else model
    with torch.no_grad():
        want = called(ids)[0]
    accepted_name = hf.cache_name()
    other_name = NEWEST if accepted_name == OLDEST else OLDEST
    with patched(model), torch.no_grad():
        cache = DeepseekV4PagedCache(model)
        called(ids[:, :9], **{accepted_name: cache})
        if accepted_name == OLDEST:
            with pytest.raises(ArgumentError, match=r"cache: expected none: .* calls the cache past_key_values"):
                called(ids[:, 9:], **{other_name: cache})
            assert cache.lengths == [9]
            return
        with pytest.warns(FutureWarning, match="past_key_values"):
            got = called(ids[:, 9:], **{other_name: cache})[0]
        assert cache.lengths == [12]
        assert deviation(got, want[:, 9:]) <= 1e-5


def test_generate_takes_a_cache_by_the_other_name_as_transformers_does() -> None:
    from dsv4attn.integrations.transformers import DeepseekV4PagedCache

    model = causal_model()
    ids = ids_of(model, 12)
    want = generated(model, 5, input_ids=ids)
    newest = hf.cache_name() == NEWEST
    expected: AbstractContextManager[Any] = (
        pytest.warns(FutureWarning) if newest else pytest.raises(ValueError, match="cache")
    )
    with patched(model):
        cache = DeepseekV4PagedCache(model)
        with expected:
            got = generated(model, 5, input_ids=ids, **{OLDEST if newest else NEWEST: cache})
        if newest:
            assert torch.equal(got, want)
        assert cache.lengths == ([16] if newest else [])


def test_a_call_by_position_continues_its_cache_without_a_warning() -> None:
    model = causal_model()
    ids = ids_of(model, 12)
    with torch.no_grad():
        want = model.model(ids).last_hidden_state
        with patched(model), warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = hf.cache_of(model.model(ids[:, :9], None, None, None, None, True))
            got = model.model(ids[:, 9:], None, None, cache)
            assert hf.cache_of(got) is cache
            assert cache.lengths == [12]
    assert deviation(got.last_hidden_state, want[:, 9:]) <= 1e-5


def test_outputs_are_tuples_and_fields_with_the_cache() -> None:
    model = causal_model()
    ids = ids_of(model, 6)
    with patched(model), torch.no_grad():
        logits, cache = model(ids, use_cache=True, return_dict=False)
        out = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
        assert logits.shape == (1, 6, 64)
        assert cache.lengths == [6]
        assert hf.cache_of(out).lengths == [8]
        # layers that are not linear attention: generate asks, and passes the whole prompt again otherwise
        assert cache.is_linear == [False] * 3


# weights


def test_sinks_and_norms_that_are_fp32_in_a_model_in_bf16_are_taken_as_they_are() -> None:
    """As transformers 5.24 makes them; rounded to bf16, these sinks would change outputs by a quarter and more."""
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_config(hf.config(), dtype=torch.bfloat16).eval().requires_grad_(requires_grad=False)
    )
    model.load_state_dict(causal_model().state_dict())
    for name, parameter in model.named_parameters():
        if "self_attn" in name and name.endswith(("sinks", "norm.weight", "position_bias")):
            parameter.data = parameter.data.float()
    attention = model.model.layers[0].self_attn
    attention.sinks.fill_(64.24)
    assert (attention.sinks.bfloat16() == 64).all()
    seen: list[Tensor] = []
    attention.register_forward_hook(lambda _module, _args, output: seen.append(output[0].double()))

    with torch.no_grad():
        model(ids_of(model, 20))
        with patched(model, kv_layout="bf16"):
            model(ids_of(model, 20))
        attention.sinks.fill_(64)
        model(ids_of(model, 20))

    want, got, rounded = seen
    errors = [float((output - want).norm() / want.norm()) for output in (got, rounded)]
    print(errors)
    assert errors[0] < 0.02
    assert errors[1] > 0.2

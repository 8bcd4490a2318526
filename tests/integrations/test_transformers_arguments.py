"""The attention function that transformers calls: masks, bad input, selection, memory; and its registration."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, IndexForm
from dsv4attn.errors import ArgumentError, ConfigError, NoBackendError, UnknownNameError, UnsupportedError
from dsv4attn.integrations.transformers.masks import VisibleKeys
from dsv4attn.selection import load_backend
from tests.backends.built_in import infos
from tests.forked_programs import run_forked
from tests.parity import hf

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")

N, S, L = 2, 3, 11
LEAST = torch.finfo(torch.float32).min


def register(backend: Any = None) -> Any:
    """Register a backend, and return the attention function, as `torch.compile` never sees it."""
    from transformers import AttentionInterface

    from dsv4attn.integrations import transformers

    transformers.register(backend)
    return AttentionInterface()["dsv4attn"].__wrapped__


@pytest.fixture(autouse=True)
def _the_default_is_registered() -> Iterator[None]:
    yield
    register()


def layer(kind: int = 0) -> Any:
    return hf.model(0).layers[kind].self_attn


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask_of(queries: int = S, keys: int = L) -> Tensor:
    """[N, 1, S, L] with every second key, and for each query some of them; no row is empty."""
    seen = random(N, 1, queries, keys, seed=3) > 0
    seen[..., 1::2] = False
    seen[..., 0] = True
    return torch.where(seen, 0.0, LEAST)


def arguments(queries: int = S, **changes: Any) -> dict[str, Any]:
    key = random(N, 1, L, hf.HEAD_DIM, seed=1)
    good = {
        "module": layer(),
        "query": random(N, hf.HEADS, queries, hf.HEAD_DIM, seed=2),
        "key": key,
        "value": changes.get("key", key),
        "attention_mask": mask_of(queries),
        "scaling": hf.HEAD_DIM**-0.5,
        "s_aux": changes.get("module", layer()).sinks,
    }
    return {**good, **changes}


def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    out: Tensor = eager_attention_forward(module, query, key, value, attention_mask, **options)[0]
    return out


# masks


@pytest.mark.parametrize("queries", [1, S])
@pytest.mark.parametrize("name", infos())
def test_nan_behind_masked_keys_never_reaches_the_output(name: str, queries: int) -> None:
    if name != "reference":
        pytest.importorskip("triton", reason="needs Triton")
    inputs = arguments(queries)
    inputs["attention_mask"][1, 0, queries - 1] = LEAST
    want = eager(**inputs)
    poisoned = inputs["key"].clone()
    poisoned[:, :, 1::2] = torch.nan

    out, weights = register(name)(**{**inputs, "key": poisoned, "value": poisoned})

    assert weights is None
    assert out.shape == (N, queries, hf.HEADS, hf.HEAD_DIM)
    assert out.is_contiguous()
    assert float((out - want).abs().max()) < 1e-5
    assert (out[1, queries - 1] == 0).all()


def test_a_batch_without_any_key_gives_zeros() -> None:
    attend = register()

    assert (attend(**arguments(attention_mask=torch.full((N, 1, S, L), LEAST)))[0] == 0).all()
    none = random(N, 1, 0, hf.HEAD_DIM)
    assert (attend(**arguments(key=none, attention_mask=torch.zeros(N, 1, S, 0)))[0] == 0).all()


def test_minus_infinity_is_absent_and_one_mask_may_serve_a_batch() -> None:
    mask = mask_of()[:1]
    attend = register()
    want = eager(**arguments(attention_mask=mask))

    for same in (mask, mask.masked_fill(mask < 0, -torch.inf), mask.clamp(min=-1e4), mask.expand(N, -1, -1, -1)):
        assert torch.allclose(attend(**arguments(attention_mask=same))[0], want, atol=1e-5)
    bf16 = torch.where(mask == 0, 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16)
    assert torch.allclose(attend(**arguments(attention_mask=bf16))[0], want, atol=1e-5)


@pytest.mark.parametrize("form", IndexForm)
def test_indices_are_those_of_the_mask(form: IndexForm) -> None:
    mask = mask_of()
    seen = VisibleKeys.of_mask(mask, N, S, L)
    got = seen.indices(form, 16)
    want = [[n * L + key for key in range(L) if mask[n, 0, s, key] == 0] for n in range(N) for s in range(S)]

    assert got.width == 16
    if isinstance(got, RaggedIndices):
        assert got.indices.tolist() == list(chain.from_iterable(want))
        assert got.indptr.tolist() == [sum(map(len, want[:i])) for i in range(len(want) + 1)]
    else:
        assert isinstance(got, DenseIndices)
        assert got.indices.tolist() == [row + [-1] * (16 - len(row)) for row in want]
        assert got.lens.tolist() == [len(row) for row in want]
    assert {got.indices.dtype, seen.counts.dtype} == {torch.int32}


def test_without_a_mask_the_only_query_sees_what_it_may() -> None:
    attend, nothing = register(), torch.zeros(N, 1, 1, L)
    window = nothing.masked_fill(torch.arange(L) < L - hf.WINDOW, -torch.inf)

    for kind, mask in ((0, window), (1, nothing), (2, nothing)):
        inputs = arguments(1, module=layer(kind), attention_mask=None)
        want = eager(**{**inputs, "attention_mask": mask})
        assert torch.allclose(attend(**inputs)[0], want, atol=1e-5)


def test_without_a_mask_a_window_is_causal() -> None:
    age = torch.arange(L - S, L)[:, None] - torch.arange(L)
    mask = torch.where((age >= 0) & (age < hf.WINDOW), 0.0, LEAST).expand(N, 1, S, L)
    inputs = arguments(attention_mask=None)

    assert torch.allclose(register()(**inputs)[0], eager(**{**inputs, "attention_mask": mask}), atol=1e-5)
    with pytest.raises(UnsupportedError, match=r"attention_mask.*3 queries over compressed keys.*call the model"):
        register()(**arguments(module=layer(1), attention_mask=None))


# bad input


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"attention_mask": mask_of()[..., 1:]}, ArgumentError, r"attention_mask: expected shape \[2, 1, 3, 11\]"),
        ({"attention_mask": mask_of()[0]}, ArgumentError, "attention_mask"),
        ({"attention_mask": mask_of().expand(-1, 4, -1, -1)}, ArgumentError, "attention_mask"),
        ({"attention_mask": mask_of() == 0}, ArgumentError, "attention_mask: expected floats"),
        ({"attention_mask": mask_of() - 1}, UnsupportedError, "biases.*eager"),
        ({"attention_mask": mask_of() * torch.nan}, UnsupportedError, "attention_mask"),
        ({"value": random(N, 1, L, hf.HEAD_DIM)}, ArgumentError, "key, value: expected one tensor"),
        ({"key": random(N, 2, L, hf.HEAD_DIM)}, ArgumentError, "key, value"),
        ({"query": random(N, hf.HEADS, S, 16)}, ArgumentError, "query: expected .*32"),
        ({"s_aux": None}, UnsupportedError, "s_aux: expected sinks of 4 heads"),
        ({"s_aux": torch.zeros(3)}, UnsupportedError, "s_aux"),
        ({"dropout": 0.1}, UnsupportedError, "dropout: expected 0.*eager"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions.*eager"),
        ({"query": random(N, hf.HEADS, S, hf.HEAD_DIM).half()}, UnsupportedError, "query.*float16.*torch.bfloat16"),
        ({"key": random(N, 1, L, hf.HEAD_DIM).double()}, UnsupportedError, "key: .*float64"),
        (
            {"query": random(N, hf.HEADS, S, hf.HEAD_DIM).requires_grad_()},
            UnsupportedError,
            "no gradients.*no_grad.*generate",
        ),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        register(Untouched())(**arguments(**changes))


class Untouched(ReferenceBackend):
    def decode(self, call: AttentionCall) -> None:
        raise AssertionError("a refused call was run")


def test_what_only_eager_does_is_refused_through_the_model() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

    register(Untouched())
    config = hf.config()
    config.attention_dropout = 0.1
    model, ids = hf.seeded(lambda: DeepseekV4Model(config), 0), hf.prompt(0)[None, :9]
    model.set_attn_implementation("dsv4attn")

    with pytest.raises(UnsupportedError, match="output_attentions"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(UnsupportedError, match=r"dropout.*model\.eval"):
        model.train()(input_ids=ids)
    model.eval().requires_grad_(requires_grad=True)
    with pytest.raises(UnsupportedError, match="gradients"):
        model(input_ids=ids)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="float16"):
        model.half()(input_ids=ids)


def test_another_model_is_refused() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    register(Untouched())
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **small), attn_implementation="dsv4attn")

    said = r"module: expected .*deepseek_v4.*'llama', without sinks"
    with torch.no_grad(), pytest.raises(UnsupportedError, match=said):
        llama(input_ids=hf.prompt(0)[None, :9])


def test_deepseek_v41_is_refused_by_name() -> None:
    other = copy.deepcopy(layer())
    other.config.model_type = "deepseek_v41"

    with pytest.raises(ArgumentError, match=r"DeepSeek-V4\.1 is not served yet"):
        register(Untouched())(**arguments(module=other))


# backends


@pytest.mark.parametrize(
    ("backend", "error", "said"),
    [
        ("referencee", UnknownNameError, "did you mean 'reference'"),
        ("decode=referencee", UnknownNameError, "did you mean 'reference'"),
        ("prefill=", ConfigError, "backend"),
        (3, ArgumentError, "backend: expected a name, a backend or None"),
        (ReferenceBackend, ArgumentError, "load_backend"),
    ],
)
def test_a_bad_backend_is_refused_at_once(backend: object, error: type[Exception], said: str) -> None:
    registered = register()

    with pytest.raises(error, match=said):
        register(backend)
    from transformers import AttentionInterface

    assert AttentionInterface()["dsv4attn"].__wrapped__ is registered


def chosen(attend: Any) -> list[str]:
    """Names of the backends that served calls."""
    attend(**arguments())
    return [backend.name for backend in attend._chosen.values()]


def test_the_backend_is_selected_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")

    assert chosen(register()) == ["reference"]
    assert chosen(register("auto")) == ["reference"]
    assert chosen(register("decode=reference,prefill=triton")) == ["reference+triton"]
    monkeypatch.setenv("DSV4ATTN_BACKEND", "xpu")
    assert chosen(register()) == ["xpu"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(NoBackendError, match="INTERPRETER"):
        chosen(register())


def test_one_selection_serves_all_layers() -> None:
    attend = register("reference")
    for kind in (0, 1, 2):
        attend(**arguments(module=layer(kind)))

    assert len(attend._chosen) == 1


@pytest.mark.parametrize("paged", [False, True])
def test_keys_are_not_copied(paged: bool) -> None:
    seen = []

    class Seen(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:
            seen.append(call.keys.kv if isinstance(call.keys, GatheredKeys) else call.keys[0].cache.tensor)
            super().decode(call)

    inputs = arguments()
    register(Seen(prefill_keys="paged" if paged else "gathered"))(**inputs)

    assert [rows.data_ptr() for rows in seen] == [inputs["key"].data_ptr()]
    assert seen[0].shape == ((N * L, 1, hf.HEAD_DIM) if paged else (N * L, hf.HEAD_DIM))


def test_each_thread_has_its_own_scratch_memory() -> None:
    attend, cpu = register("reference"), torch.device("cpu")
    mine, others = attend._workspace(cpu), []
    thread = threading.Thread(target=lambda: others.append(attend._workspace(cpu)))
    thread.start()
    thread.join()

    assert attend._workspace(cpu) is mine
    assert others
    assert others[0] is not mine


def test_scratch_memory_is_used_again() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    attend = register(load_backend("xpu", decode="gathered"))
    inputs = arguments(1)
    attend(**inputs)
    size = attend._workspace(torch.device("cpu")).total_bytes
    attend(**inputs)

    assert attend._workspace(torch.device("cpu")).total_bytes == size > 0


# import

IMPORT = """
import importlib.metadata, json, sys
version, real = sys.argv[1], importlib.metadata.version
if version == "none":
    sys.modules["transformers"] = None
importlib.metadata.version = lambda name: version if name == "transformers" else real(name)
try:
    import dsv4attn.integrations.transformers
    print(json.dumps("transformers" in sys.modules))
except ImportError as error:
    print(json.dumps(str(error)))
"""


def imported(version: str) -> Any:
    done = run_forked(["-c", IMPORT, version], folder=ROOT, environ={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("version", ["none", "5.22.3", "4.57.0"])
def test_a_missing_transformers_is_named_with_the_extra(version: str) -> None:
    said = imported(version)

    for part in ("transformers >= 5.23", f"found {version}", "pip install 'dsv4attn[transformers]'"):
        assert part in said


def test_transformers_is_imported_with_the_first_call_only() -> None:
    assert imported("5.23.0") is False
    assert imported("6.0.0.dev0") is False

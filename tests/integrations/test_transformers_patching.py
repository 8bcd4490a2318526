"""`patch` and `unpatch`: what is refused, what stays as it was, weights in fp8, and the choice of a backend."""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.errors import ArgumentError, Dsv4AttnError, LayoutMismatchError, UnknownNameError, UnsupportedError
from dsv4attn.selection import load_backend
from tests.integrations.paged import call, causal_model, chunked, ids_of, new_model, patched
from tests.parity import hf
from tests.parity.hf import deviation

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")


def fresh(**changes: Any) -> Any:
    """A model for a test that changes it."""
    return new_model(hf.config(**changes))


def patch(model: Any, *arguments: Any, **options: Any) -> Any:
    from dsv4attn.integrations import transformers

    return transformers.patch(model, *arguments, **options)


def unpatch(model: Any) -> None:
    from dsv4attn.integrations import transformers

    transformers.unpatch(model)


# what stays as it was


def test_names_parameters_and_hooks_are_the_same_while_patched_and_afterwards() -> None:
    model = fresh()
    modules = [layer.self_attn for layer in model.model.layers]
    names, parameters = [*model.state_dict()], [*model.parameters()]
    attributes = {module: {*module.__dict__} for module in (model, model.model)}
    calls: list[int] = []
    modules[1].register_forward_hook(lambda *_: calls.append(1))

    patch(model, "reference", kv_layout="fp32", max_len=64)
    assert [*model.state_dict()] == names
    assert all(map(torch.Tensor.is_set_to, model.parameters(), parameters))
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    assert not {id(layer.self_attn) for layer in model.model.layers} & {*map(id, modules)}
    call(model, ids_of(model, 5))
    assert calls == [1]
    unpatch(model)

    assert [layer.self_attn for layer in model.model.layers] == modules
    assert [*model.state_dict()] == names
    # transformers has marked the model as one with its hooks in place
    assert {module: {*module.__dict__} - {"_output_capturing_hooks_installed"} for module in attributes} == attributes


def test_unpatch_gives_the_logits_and_attention_weights_of_before() -> None:
    model = fresh()
    ids = ids_of(model, 20)
    want = call(model, ids)
    weights = call(fresh(), ids, output_attentions=True).attentions
    with patched(model):
        call(model, ids, output_hidden_states=True)

    got = call(model, ids, output_attentions=True)
    assert torch.equal(got.logits, want.logits)
    assert len(got.attentions) == len(weights) == 3
    assert all(map(torch.equal, got.attentions, weights))


def test_hidden_states_are_recorded_as_before() -> None:
    model = causal_model()
    want = call(model, ids_of(model, 20), output_hidden_states=True).hidden_states
    with patched(model):
        got = call(model, ids_of(model, 20), output_hidden_states=True).hidden_states
    assert len(got) == len(want)
    assert max(map(deviation, got, want)) <= 1e-5


def test_training_mode_carries_over() -> None:
    model = fresh()
    with patched(model):
        model.train()
    assert all(module.training for module in model.modules())


@pytest.mark.usefixtures("few_objects")
def test_memory_goes_with_unpatch() -> None:
    model = fresh()
    manager = weakref.ref(patch(model, max_len=64).pages.manager)
    call(model, ids_of(model, 5), use_cache=True)
    unpatch(model)
    gc.collect()
    assert manager() is None


def test_a_model_is_patched_again() -> None:
    model = fresh()
    want = call(model, ids_of(model, 20)).logits
    for _ in range(2):
        with patched(model):
            assert deviation(call(model, ids_of(model, 20)).logits, want) <= 1e-5
    with patched(model.model):
        assert deviation(call(model, ids_of(model, 20)).logits, want) <= 1e-5


# what is refused


def sharded(model: Any) -> Any:
    model._tp_size = 2
    return model


def of_type(model: Any, kind: str) -> Any:
    model.config.model_type = kind
    return model


def with_meta(model: Any) -> Any:
    model.lm_head.to("meta")
    return model


def fewer_layers(model: Any) -> Any:
    model.model.layers = model.model.layers[:2]
    return model


class Adapter(torch.nn.Linear):
    """A linear layer that does more than its weight says."""


def adapted(model: Any) -> Any:
    model.model.layers[1].self_attn.q_b_proj = Adapter(24, 128)
    return model


def biased(model: Any) -> Any:
    model.model.layers[2].self_attn.compressor.kv_proj = torch.nn.Linear(64, 32)
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [
        (lambda model: model.lm_head, {}, UnsupportedError, "model: expected a DeepseekV4Model or .*got Linear"),
        (lambda model: model.model.layers[0], {}, UnsupportedError, "model: .*DeepseekV4DecoderLayer"),
        (lambda model: of_type(model, "deepseek_v41"), {}, ArgumentError, r"DeepSeek-V4\.1 is not served yet"),
        (sharded, {}, UnsupportedError, "tensor parallel weights.*tp_plan"),
        (with_meta, {}, UnsupportedError, "weights on one device, got cpu, meta.*device_map"),
        (lambda model: model.half(), {}, UnsupportedError, "float16.*torch.bfloat16"),
        (fewer_layers, {}, UnsupportedError, "the 3 layers of its configuration, got 2"),
        (adapted, {}, UnsupportedError, r"layers\.1\.self_attn\.q_b_proj: .*got a Adapter.*merge adapters"),
        (biased, {}, UnsupportedError, r"layers\.2\.self_attn\.compressor\.kv_proj: expected no bias"),
        (None, {"max_len": 4097}, ArgumentError, "max_len: expected at most 4096, the max_position_embeddings"),
        (None, {"max_len": 0}, ArgumentError, "max_len: expected an integer of at least 1"),
        (None, {"max_batch": 0}, ArgumentError, "max_batch: expected an integer of at least 1"),
        (None, {"max_tokens": 1.5}, ArgumentError, "max_tokens"),
        (None, {"kv_layout": "fp8_ds_mlaa"}, UnknownNameError, "did you mean 'fp8_ds_mla'"),
        (None, {"kv_layout": KVCacheLayout.rows()}, LayoutMismatchError, "cache"),
        *(
            (
                None,
                {"index_layout": wrong},
                ArgumentError,
                f"index_layout: expected .*, got {said}.* -> pass KVCacheLayout",
            )
            for wrong, said in (
                (KVCacheLayout.index_fp8(64), "index_fp8/1.*dim64"),
                (KVCacheLayout.fp8_ds_mla(8, 8), "fp8_ds_mla/1"),
                ("index_fp", "'index_fp'; did you mean 'index_fp8'"),
                (torch.bfloat16, "dtype"),
            )
        ),
        (None, {"index_layout": "index_mxfp4"}, ArgumentError, "index_layout: .*16 dims.*multiple of 32"),
        (None, {"num_blocks": {"windows": 4}}, ArgumentError, "num_blocks: expected groups .*'windows'"),
        *(
            (None, {"backend": name}, UnknownNameError, r"\Aunknown backend 'referencee'; did you mean 'reference'.*\Z")
            for name in ("referencee", "decode=referencee", "decode=reference,prefill=referencee")
        ),
        (None, {"backend": "bf16"}, ArgumentError, r"got the layout 'bf16' -> kv_layout='bf16'\?"),
        (None, {"backend": ReferenceBackend}, ArgumentError, "backend: expected a name, a backend or None"),
        (None, {"backend": ReferenceBackend(), "deterministic": True}, ArgumentError, "deterministic=True"),
    ],
)
def test_what_cannot_be_patched_is_refused_and_stays_as_it_was(
    make: Callable[[Any], Any] | None, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    base = causal_model() if make is None else fresh()
    model = base if make is None else make(base)

    with pytest.raises(error, match=said):
        patch(model, **options)
    assert not hasattr(base, "dsv4attn")
    assert {type(layer.self_attn).__name__ for layer in base.model.layers} == {"DeepseekV4Attention"}
    assert "forward" not in base.model.__dict__


def test_a_patched_model_is_not_patched_copied_or_pickled() -> None:
    model = fresh()
    with pytest.raises(ArgumentError, match="model: expected a patched model"):
        unpatch(model)
    with patched(model):
        for again in (model, model.model):
            with pytest.raises(UnsupportedError, match=r"not patched.*unpatch"):
                patch(again)
        with pytest.raises(UnsupportedError, match=r"to copy.*unpatch\(model\) first"):
            copy.deepcopy(model)
        with pytest.raises(UnsupportedError, match="to save"):
            torch.save(model, io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())
    copy.deepcopy(model)


def test_unpatch_refuses_a_model_that_was_wrapped_since() -> None:
    model = fresh()
    patch(model, max_len=64)
    patched_forward = model.model.forward
    model.model.forward = functools.partial(patched_forward)
    with pytest.raises(UnsupportedError, match=r"model\.forward: expected that of patch"):
        unpatch(model)
    model.model.forward = patched_forward
    unpatch(model)


def test_gradients_and_dropout_are_refused() -> None:
    model = fresh(attention_dropout=0.1)
    with patched(model):
        ids = ids_of(model, 5)
        model.train()
        with pytest.raises(UnsupportedError, match=r"dropout.*model\.eval"):
            call(model, ids)
        model.eval().requires_grad_(requires_grad=True)
        with pytest.raises(UnsupportedError, match=r"no gradients.*no_grad.*generate"):
            model(input_ids=ids)
        call(model, ids)


def test_a_layer_alone_is_refused() -> None:
    model = causal_model()
    with patched(model), pytest.raises(Dsv4AttnError, match="outside of a call of the patched model"):
        model.model.layers[0].self_attn(torch.zeros(1, 3, 64))


def test_weights_of_another_dtype_while_patched_are_refused() -> None:
    model = fresh()
    with patched(model):
        model.to("cpu")
        call(model, ids_of(model, 5))
        model.to(torch.bfloat16)
        with pytest.raises(UnsupportedError, match=r"the weights that patch\(\) found.*patch it again"):
            call(model, ids_of(model, 5))
    with patched(model):
        call(model, ids_of(model, 5))


# weights in fp8


def quantised(linear: Any) -> tuple[Any, Tensor]:
    """A block-scaled module of transformers for a linear layer, and its weight in bf16."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    rows, columns = linear.weight.shape
    fp8_linear = FP8Linear(columns, rows, block_size=(128, 128))
    with torch.no_grad():
        for i in range(0, rows, 128):
            for j in range(0, columns, 128):
                block = linear.weight[i : i + 128, j : j + 128].float()
                scale = block.abs().max() / 448
                fp8_linear.weight[i : i + 128, j : j + 128] = (block / scale).to(torch.float8_e4m3fn)
                fp8_linear.weight_scale_inv[i // 128, j // 128] = scale
        scales = fp8_linear.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        dense = (fp8_linear.weight.float() * scales[:rows, :columns]).to(torch.bfloat16)
    return fp8_linear.requires_grad_(requires_grad=False), dense


@pytest.mark.matrix
def test_fp8_modules_equal_their_weights_in_bf16() -> None:
    dense, fp8 = (copy.deepcopy(causal_model(large=True)).to(torch.bfloat16) for _ in range(2))
    for plain, scaled in zip(dense.model.layers, fp8.model.layers, strict=True):
        owners: list[tuple[Any, Any, tuple[str, ...]]]
        owners = [(plain.self_attn, scaled.self_attn, ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj"))]
        if getattr(plain.self_attn.compressor, "indexer", None) is not None:
            owners.append((plain.self_attn.compressor.indexer, scaled.self_attn.compressor.indexer, ("q_b_proj",)))
        for plain_owner, fp8_owner, names in owners:
            for name in names:
                module, weight = quantised(getattr(plain_owner, name))
                getattr(plain_owner, name).weight.copy_(weight)
                setattr(fp8_owner, name, module)
    ids = ids_of(dense, 200)
    with patched(dense), patched(fp8):
        want, got = (chunked(model, ids, (150, 49, 1)) for model in (dense, fp8))
    assert torch.equal(got, want)


# backends


def test_the_backend_is_a_name_an_object_or_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_model()
    deterministic = load_backend("reference", deterministic=True)
    for choice in (None, "auto", "reference", "decode=reference,prefill=reference", deterministic):
        with patched(model, choice) as handle:
            assert handle.backend == "reference"
            assert handle.deterministic is (choice is deterministic)
    pytest.importorskip("triton", reason="needs Triton")
    with patched(model, "decode=reference,prefill=triton") as handle:
        assert handle.backend == "reference+triton"
    with patched(model, "decode=reference,prefill=triton", deterministic=True) as handle:
        assert (handle.backend, handle.deterministic) == ("reference+triton", True)
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    with patched(model, None) as handle:
        assert handle.backend == "triton"


def test_a_layout_may_be_given_and_index_keys_have_their_own() -> None:
    model = causal_model()
    layout, index = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8), KVCacheLayout.rows(8, 8, dtype=torch.float32)
    with patched(model, kv_layout=layout, index_layout=index) as handle:
        call(model, ids_of(model, 20))
        caches = handle.pages.manager.caches[1]
        assert (caches.attention.swa.layout, caches.index.layout) == (layout, index)


def test_modes_may_alternate() -> None:
    model = causal_model()
    want = call(model, ids_of(model, 20)).logits
    with torch.inference_mode():
        handle = patch(model, "reference", kv_layout="fp32", max_len=64)
    cache = None
    for mode, part in zip((torch.inference_mode, torch.no_grad) * 2, ids_of(model, 20).split(5, 1), strict=True):
        with mode():
            out = model(input_ids=part, **hf.passing(cache), use_cache=True)
        cache = hf.cache_of(out)
    unpatch(model)
    assert deviation(out.logits, want[:, -5:]) <= 1e-5
    assert repr(handle).startswith("PatchedModel(backend='reference'")


@pytest.mark.matrix
def test_a_compiled_model_runs() -> None:
    model = fresh()
    want = call(model, ids_of(model, 12)).logits
    with patched(model):
        compiled = torch.compile(model, backend="eager")
        cache, parts = None, []
        for part in ids_of(model, 12).split([9, 2, 1], 1):
            out = call(compiled, part, **hf.passing(cache), use_cache=True)
            cache = hf.cache_of(out)
            parts.append(out.logits)
    assert deviation(torch.cat(parts, 1), want) <= 1e-5

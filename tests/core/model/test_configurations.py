"""Variants of a config.json, against transformers: the same geometry and RoPE tables, or a refusal, and few exceptions.

Tables are those of the model of the release of transformers that is installed, compared to the rounding of fp32.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4attn.core.model.geometry import LayerKind, ModelGeometry, Rope, Yarn
from dsv4attn.core.model.rope import cos_sin_cache, inverse_frequencies
from dsv4attn.errors import GeometryError
from tests.core.model.test_geometry import FLASH_RATIOS as RATIOS
from tests.core.model.test_geometry import released

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")

SWA, C4A, C128A = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SCALING: dict[str, Any] = released()["rope_scaling"]
"""As in the released config.json, and as transformers spells it:"""
YARN: dict[str, Any] = {**{key: value for key, value in SCALING.items() if key != "type"}, "rope_type": "yarn"}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
MAIN: dict[str, Any] = {**PLAIN, "partial_rotary_factor": 0.125}
COMPRESS: dict[str, Any] = {**YARN, "rope_theta": 160000.0, "partial_rotary_factor": 0.125, "attention_factor": 1.0}
LAYERS: dict[str, Any] = {SWA: PLAIN, C4A: {**YARN, "rope_theta": 160000.0}, C128A: {**YARN, "rope_theta": 160000.0}}
RELEASED: dict[str, Any] = {
    **released(),
    "architectures": ["DeepseekV4ForCausalLM"],
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
}
OTHER_FIELDS: dict[str, Any] = json.loads("""{
    "vocab_size": 129280, "n_shared_experts": 1, "num_experts_per_tok": 6, "num_hash_layers": 3, "swiglu_limit": 10.0,
    "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": true,
    "hidden_act": "silu", "initializer_range": 0.02, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    "attention_bias": false, "attention_dropout": 0.0, "tie_word_embeddings": false, "use_cache": true,
    "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4", "transformers_version": "5.24.0",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
}""")
"""Fields of released and of small published configurations that do not change attention."""
LIKE_V3: dict[str, Any] = json.loads("""{
    "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 448,
    "v_head_dim": 128, "rope_interleave": true, "window_size": 128, "q_head_norm": true, "moe_layer_freq": 1,
    "kv_source_layer_ids": [], "index_source_layer_ids": [], "candidate_source_layer_id": -1, "engram_layer_ids": [],
    "candidate_topk_blocks": 0, "candidate_block_size": 0, "hc_pre_from_prev_sublayer": false, "vision_n_heads": 16,
    "index_topk_freq": 1, "mm_prefix_clamp_sliding_window": true, "swa_head_dim": 512
}""")
"""Further fields of SGLang's classes, with their values, and some that engines add."""
OUT = object()
NO_TABLE = "transformers has no such table"


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The released configuration with other fields; OUT leaves a field out."""
    return copy.deepcopy({key: value for key, value in {**RELEASED, **changes}.items() if value is not OUT})


def without(part: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in names}


def nested(main: dict[str, Any] = MAIN, compress: dict[str, Any] = COMPRESS, **rest: Any) -> dict[str, Any]:
    """Nested parameters in the place of the flat ones."""
    return {"rope_scaling": OUT, "rope_parameters": {**rest, "main": main, "compress": compress}}


def differences(ours: ModelGeometry, fields: dict[str, Any]) -> list[str]:
    """What transformers reads otherwise, from a configuration that it takes."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    config = DeepseekV4Config(**copy.deepcopy(fields))
    differing = []
    names = {"num_heads": "num_attention_heads", "rope_dim": "qk_rope_head_dim", "window": "sliding_window"}
    names |= {"eps": "rms_norm_eps", "max_position": "max_position_embeddings"}
    same = "head_dim hidden_size index_topk o_groups o_lora_rank q_lora_rank index_n_heads index_head_dim hc_mult"
    for name, theirs in {**names, **{name: name for name in (*same.split(), "hc_sinkhorn_iters", "hc_eps")}}.items():
        if getattr(ours, name) != getattr(config, theirs):
            differing.append(f"{name}: {getattr(ours, name)} and {getattr(config, theirs)}")
    kinds = {LayerKind.SWA: SWA, LayerKind.CSA: C4A, LayerKind.HCA: C128A}
    rates = {SWA: 1, **config.compress_rates}
    if [(kinds[kind], rate) for kind, rate in ours.layers] != [(kind, rates[kind]) for kind in config.layer_types]:
        differing.append("layers")
    try:
        tables = DeepseekV4RotaryEmbedding(config)
    except KeyError:
        return [NO_TABLE]
    positions = torch.arange(300)
    ropes = {"main": Rope(ours.rope_dim, ours.main_theta)}
    ropes["compress"] = Rope(ours.rope_dim, ours.compress_theta, ours.compress_yarn)
    for label, rope in ropes.items():
        cos, sin = tables(torch.zeros(1), positions[None], layer_type=label)
        table = torch.cat([cos[0], sin[0]], dim=-1)
        frequencies = getattr(tables, f"{label}_inv_freq")
        near = torch.allclose(inverse_frequencies(rope), frequencies, rtol=1e-6, atol=0)
        if not near or not torch.allclose(cos_sin_cache(rope, 300), table, rtol=0, atol=1e-4):
            differing.append(label)
    return differing


# read as transformers reads them

SAME: dict[str, dict[str, Any]] = {
    "released": {},
    "rope_type": {"rope_scaling": YARN},
    "type and rope_type": {"rope_scaling": {**YARN, "type": "yarn"}},
    "rope_type wins over type": {"rope_scaling": {**YARN, "type": "default"}},
    "no scaling": {"rope_scaling": OUT},
    "scaling null": {"rope_scaling": None},
    "scaling default": {"rope_scaling": {"type": "default"}},
    "flat parameters": {"rope_scaling": OUT, "rope_parameters": YARN},
    "flat parameters with the main theta": {"rope_scaling": OUT, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "flat parameters and an empty scaling": {"rope_scaling": {}, "rope_parameters": YARN},
    "nested": nested(),
    "nested, other thetas": nested({**MAIN, "rope_theta": 12345.0}, {**COMPRESS, "rope_theta": 67890.0}),
    "nested, without yarn": nested(MAIN, {**MAIN, "rope_theta": 160000.0}),
    "nested, a flat type left over": nested(rope_type="default"),
    "nested scaling": {"rope_scaling": {"main": MAIN, "compress": COMPRESS}},
    # partial parameters with the scaling, which does not lose its YaRN by them
    "theta beside": {"rope_parameters": {"rope_theta": 10000.0}},
    "flat default beside": {"rope_parameters": PLAIN},
    "main beside": {"rope_parameters": {"main": PLAIN}},
    "compress beside": {"rope_parameters": {"compress": {"rope_theta": 160000.0}}},
    "layer types beside": {"rope_parameters": LAYERS},
    "layer types without yarn beside": {"rope_parameters": {kind: {"rope_type": "default"} for kind in LAYERS}},
    "the same beside": {"rope_parameters": YARN},
    "the same, nested, beside": {"rope_parameters": {"main": MAIN, "compress": COMPRESS}},
    "nulls beside": {"rope_parameters": {"main": None, "factor": None}},
    "other yarn": {"rope_scaling": {**SCALING, "factor": 40, "original_max_position_embeddings": 4096}},
    "other betas": {"rope_scaling": {**SCALING, "beta_fast": 64, "beta_slow": 2}},
    "betas left out": {"rope_scaling": without(SCALING, "beta_fast", "beta_slow")},
    "betas null": {"rope_scaling": {**SCALING, "beta_fast": None, "beta_slow": None}},
    "factor 1": {"rope_scaling": {**SCALING, "factor": 1}},
    "mscale, without effect": {"rope_scaling": {**SCALING, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "attention_factor 1": {"rope_scaling": {**SCALING, "attention_factor": 1.0}},
    "truncate": {"rope_scaling": {**SCALING, "truncate": True}},
    "thetas left out": {"rope_theta": OUT, "compress_rope_theta": OUT},
    "other thetas": {"rope_theta": 5000.0, "compress_rope_theta": 80000.0},
    "a part of the head": {"qk_rope_head_dim": OUT, "partial_rotary_factor": 0.25},
    "dims and the same part": {"partial_rotary_factor": 0.125},
    "ratios without those of MTP": {"compress_ratios": RATIOS},
    "layer types": {"compress_ratios": OUT, "layer_types": [SWA, *[C4A, C128A] * 21]},
    "layer types and the same ratios": {"layer_types": [*([SWA] * 2), *[C4A, C128A] * 20, C4A]},
    "more layer types": {"compress_ratios": OUT, "layer_types": [C4A] * 44},
    "rates": {"compress_ratios": OUT, "layer_types": [C4A, *[C128A] * 42], "compress_rates": {C4A: 8, C128A: 64}},
    "older rates": {
        "compress_ratios": OUT,
        "layer_types": [C4A, *[C128A] * 42],
        "compress_rate_csa": 8,
        "compress_rate_hca": 64,
    },
    "sizes left out": dict.fromkeys(("q_lora_rank", "index_n_heads", "index_head_dim", "hc_mult", "hc_eps"), OUT),
    "eps left out": {"rms_norm_eps": OUT, "hc_sinkhorn_iters": OUT},
    "every field of the released file": OTHER_FIELDS,
    "as SGLang's class has it": {**OTHER_FIELDS, **LIKE_V3},
    "topk of Pro": {"index_topk": 1024, "num_attention_heads": 128, "o_groups": 16},
}


@pytest.mark.parametrize("name", SAME)
def test_a_variant_is_read_as_transformers_reads_it(name: str) -> None:
    fields = changed(SAME[name])
    assert differences(ModelGeometry.from_config(fields), fields) == []


@pytest.mark.parametrize("name", SAME)
def test_so_are_the_object_that_transformers_makes_of_it_and_what_that_saves(name: str, tmp_path: Path) -> None:
    from transformers import DeepseekV4Config

    fields = changed(SAME[name])
    expected = ModelGeometry.from_config(fields, name="x")
    config = DeepseekV4Config(**copy.deepcopy(fields))
    config.save_pretrained(tmp_path)
    for spelling in (config, config.to_dict(), tmp_path):
        assert ModelGeometry.from_config(spelling, name="x") == expected


# refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # YaRN would be lost, as it is in transformers
    "no type": ({"rope_scaling": without(SCALING, "type")}, "rope_scaling: 'factor' is one of YaRN's .*without YaRN"),
    "default with a factor": ({"rope_scaling": {**SCALING, "type": "default"}}, "'factor' is one of YaRN's"),
    "rope_type default, type yarn": (
        {"rope_scaling": {**SCALING, "rope_type": "default"}},
        "'factor' is one of YaRN's",
    ),
    "layer types alone": (
        {"rope_scaling": OUT, "rope_parameters": LAYERS},
        r"'main' and 'compress', or none, got \['sl",
    ),
    "compress alone": ({"rope_scaling": OUT, "rope_parameters": {"compress": COMPRESS}}, r"got \['compress'\]"),
    "main alone": ({"rope_scaling": OUT, "rope_parameters": {"main": MAIN}}, r"got \['main'\]"),
    "main and flat yarn": ({"rope_scaling": OUT, "rope_parameters": {"main": MAIN, **YARN}}, r"got \['main'\]"),
    "nested and layer types": (nested(**LAYERS), r"or none, got \['sliding_attention', "),
    # two values, of which transformers reads one
    "another factor beside": (
        {"rope_parameters": {**YARN, "factor": 8}},
        "rope_parameters: factor: expected 16, .*got 8",
    ),
    "yarn beside none": (
        {"rope_scaling": {"type": "default"}, "rope_parameters": YARN},
        "rope_parameters: rope_type: expected 'default', as was read before, got 'yarn'",
    ),
    "another theta beside": (
        {"rope_parameters": {"main": {"rope_theta": 500.0}}},
        r"rope_parameters\.main: rope_theta: expected 10000, .*got 500\.0",
    ),
    "another theta of a layer type beside": (
        {"rope_parameters": {C4A: {"rope_theta": 500.0}}},
        r"rope_parameters\.compressed_sparse_attention: rope_theta: expected 160000",
    ),
    "yarn of the main table beside": ({"rope_parameters": {SWA: YARN}}, r"sliding_attention: rope_type: expected 'def"),
    "a flat theta": (
        {"rope_scaling": {**SCALING, "rope_theta": 500}},
        "rope_theta: expected 10000 or 160000, .*got 500",
    ),
    "a flat theta beside": ({"rope_parameters": {"rope_theta": 500}}, "rope_parameters: rope_theta: expected 10000 or"),
    "nested, and another flat factor": (nested(**{**YARN, "factor": 8}), "rope_parameters: factor: expected 16"),
    "dims and another part": ({"partial_rotary_factor": 0.25}, "expected qk_rope_head_dim=64 .*which is 128 of 512"),
    "nested, another part": (
        nested({**MAIN, "partial_rotary_factor": 0.25}),
        r"main: partial_rotary_factor: .*128 of 512",
    ),
    "ratios and other rates": (
        {"compress_rates": {C4A: 8}},
        "compress_ratios: expected 4, as they say, got 8 as the rate",
    ),
    "ratios and other older rates": ({"compress_rate_hca": 64}, "compress_ratios: expected 128, .*got 64"),
    "rates and older ones": (
        {"layer_types": [C4A] * 43, "compress_rate_csa": 8, "compress_rates": {C4A: 4}},
        "compress_rate_csa=8, got 4",
    ),
    "layer types and other ratios": (
        {"layer_types": [SWA] * 43},
        r"compress_ratios\[2\]: expected 0 or 1, as layer_types\[2\]='sliding_attention' says, got 4 -> correct one",
    ),
    "layer types and the ratios of fewer layers": (
        {"layer_types": [SWA] * 43, "compress_ratios": [0] * 42},
        "expected 43 layers, as layer_types has, got 42 in compress_ratios",
    ),
    "layer types and ratios as text": ({"layer_types": [SWA] * 43, "compress_ratios": "0"}, "expected a list, got '0'"),
    "layer types and a ratio below 0": (
        {"layer_types": [SWA] * 43, "compress_ratios": [-1] * 43},
        r"compress_ratios\[0\]: expected 0 or 1, .*got -1",
    ),
    "layer types with rates and the usual ratios": (
        {"layer_types": [C4A] * 43, "compress_ratios": [4] * 43, "compress_rates": {C4A: 8}},
        r"compress_ratios\[0\]: expected 8, as layer_types\[0\]='compressed_sparse_attention' says, got 4",
    ),
    # may change attention, and is not read
    "entries of every 4th layer": ({"index_topk_freq": 4}, "'index_topk_freq': expected 1, got 4 -> this is not"),
    "a pattern of entries": ({"index_topk_pattern": "FS"}, "not read here: index_topk_pattern='FS'"),
    "a misspelt field": ({"index_nheads": 32}, r"not read here: index_nheads=32; did you mean 'index_n_heads'\?"),
    "two unread fields": (
        {"attn_logit_softcapping": 50.0, "use_sparse_mla": False},
        r"not read here: attn_logit_softcapping=50\.0, use_sparse_mla=False",
    ),
    "kinds of layers by short names": (
        {"swa_layers": [1], "csa_rate": 8, "hca_layers": [2]},
        r"not read here: swa_layers=\[1\].*, csa_rate=8.*, hca_layers=\[2\]",
    ),
    "words of other models": (
        {"nsa_block": 64, "slidingWindow": 8, "local_layers": [1]},
        r"not read here: nsa_block=64.*, slidingWindow=8.*, local_layers=\[1\]",
    ),
    "biases": ({"attention_bias": True}, "'attention_bias': expected False, got True"),
    "more heads of keys": ({"num_key_value_heads": 8}, "'num_key_value_heads': expected 1, got 8"),
    "another window": ({"window_size": 64}, "'window_size': expected 128, got 64"),
    "sources of V4.1": ({"kv_source_layer_ids": [2]}, r"'kv_source_layer_ids': expected \[\], got \[2\]"),
    "delayed mixes of V4.1": ({"hc_pre_from_prev_sublayer": True}, "'hc_pre_from_prev_sublayer': expected False"),
    # known, and not obeyed here
    "attention_factor": (
        {"rope_scaling": {**SCALING, "attention_factor": 1.27}},
        r"attention_factor: expected 1\.0, .*1\.27",
    ),
    "not truncated": ({"rope_scaling": {**SCALING, "truncate": False}}, "truncate: expected True, .*got False"),
    "yarn in the main table": (nested({**COMPRESS, "rope_theta": 10000.0}), r"main: rope_type: expected 'default'"),
    "dynamic beside": ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: rope_type: .*got 'dynamic'"),
    "factor null": ({"rope_scaling": {**SCALING, "factor": None}}, "'factor' is missing"),
    # not understood
    "unknown": (
        {"rope_scaling": {**SCALING, "fator": 1.0}},
        r"unknown key 'fator'; did you mean 'factor'\? \(known: ro",
    ),
    "unknown in a table": (nested(MAIN, {**COMPRESS, "extrapolation_factor": 1.0}), r"compress: unknown key 'extrapol"),
    "unknown beside": (
        {"rope_parameters": {"main": {"low_freq_factor": 1.0}}},
        r"\.main: unknown key 'low_freq_factor'",
    ),
    "unknown type of layers beside": ({"rope_parameters": {"full_attention": PLAIN}}, "unknown key 'full_attention'"),
    "a table that is none": ({"rope_parameters": {"main": 3}}, "unknown key 'main'"),
}
REFUSED_BY_BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "rope_type null, without type": ({"rope_scaling": {**YARN, "rope_type": None}}, "'factor' is one of YaRN's"),
    "factor left out": ({"rope_scaling": without(SCALING, "factor")}, "'factor' is missing"),
    "fewer ratios": ({"compress_ratios": RATIOS[:42]}, "42 layers are described, but num_hidden_layers is 43"),
    "another ratio": ({"compress_ratios": [8, *RATIOS[1:]]}, r"compress_ratios\[0\]: .*got 8"),
    "full attention": ({"layer_types": ["full_attention"] * 43}, r"layer_types\[0\]: expected one of"),
    "theta as text": ({"rope_theta": "10000"}, "'rope_theta': expected a positive number"),
    "eps as text": ({"rms_norm_eps": "1e-6"}, "'rms_norm_eps': expected a positive number"),
    "heads as a float": ({"num_attention_heads": 64.0}, "'num_attention_heads': expected a positive integer"),
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_BY_BOTH])
def test_a_variant_is_refused(name: str) -> None:
    changes, said = {**REFUSED, **REFUSED_BY_BOTH}[name]
    with pytest.raises(GeometryError, match=said):
        ModelGeometry.from_config(changed(changes))


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
def test_transformers_has_no_model_of_it_either(name: str) -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    # a KeyError, or one of huggingface_hub's
    with pytest.raises(Exception, match=r"\w"):
        DeepseekV4RotaryEmbedding(DeepseekV4Config(**changed(REFUSED_BY_BOTH[name][0])))


# read otherwise

PUBLISHED = Yarn(16.0, 65536)
OWN: dict[str, dict[str, Any]] = {
    # transformers has no model of these
    "rope_type null": {"rope_scaling": {**SCALING, "rope_type": None}},
    "deepseek_yarn": {"rope_scaling": {**SCALING, "rope_type": "deepseek_yarn"}},
    "deepseek_yarn as type": {"rope_scaling": {**SCALING, "type": "deepseek_yarn"}},
    "deepseek_yarn in a table": nested(MAIN, {**COMPRESS, "rope_type": "deepseek_yarn", "mscale": 0}),
    "of vLLM": {"rope_scaling": {**SCALING, "rope_type": "deepseek_yarn", "is_deepseek_v4": True, "rope_dim": 64}},
    "ratio 1 for windows": {"compress_ratios": [ratio or 1 for ratio in RATIOS]},
    "thetas null": {"rope_theta": None, "compress_rope_theta": None},
    # it has other tables for these: whole heads rotate, cosines and sines are longer, the main theta serves for both
    "nested, no part of the head": nested(PLAIN),
    "nested, no attention_factor": nested(MAIN, without(COMPRESS, "attention_factor")),
    "nested, no theta": nested(MAIN, without(COMPRESS, "rope_theta")),
    "attention_factor null": {"rope_scaling": {**SCALING, "attention_factor": None}},
}


@pytest.mark.parametrize("name", OWN)
def test_a_variant_that_transformers_reads_otherwise_has_the_published_angles(name: str) -> None:
    fields = changed(OWN[name])
    geometry = ModelGeometry.from_config(fields)

    assert [geometry.layer(i).rope for i in (0, 2)] == [Rope(64, 10000.0), Rope(64, 160000.0, PUBLISHED)]
    assert geometry.layers == ModelGeometry.from_config(RELEASED).layers
    try:
        differing = differences(geometry, fields)
    except Exception as error:  # noqa: BLE001 - a KeyError, or an error of its validation
        differing = [repr(error)]
    assert differing != []


def test_there_are_as_many_variants_as_promised() -> None:
    assert len({**SAME, **REFUSED, **REFUSED_BY_BOTH, **OWN}) >= 37


# any combination

VALUES: dict[str, list[Any]] = {
    "rope_type": ["yarn", "default", None],
    "type": ["yarn", "default"],
    "rope_theta": [10000.0, 160000.0, 500.0],
    "factor": [16, 8],
    "original_max_position_embeddings": [65536, 4096],
    "beta_fast": [32, 64, None],
    "attention_factor": [1.0, 1.27],
    "mscale": [1.0],
    "other": [1],
}
PART = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in VALUES.items()})
ROPE = PART | st.builds(lambda part: {**YARN, **part}, PART)
# transformers has a default for attention_factor, where a table has YaRN, that is not DeepSeek-V4's: see OWN
TABLE = st.builds(lambda base, part: {"attention_factor": 1.0, **base, **part}, st.sampled_from([MAIN, COMPRESS]), PART)
NESTED = st.dictionaries(st.sampled_from(["main", "compress", SWA, C4A, C128A]), TABLE)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "rope_scaling": st.none() | ROPE | NESTED,
        "rope_parameters": st.none() | ROPE | NESTED | st.builds(lambda main, part: {**main, **part}, NESTED, PART),
        "rope_theta": st.sampled_from([10000.0, 500.0]),
        "compress_rope_theta": st.sampled_from([160000.0, 500.0]),
    },
)


@pytest.mark.matrix
@settings(max_examples=300)
@given(FIELDS)
def test_any_parameters_are_read_as_transformers_reads_them_or_refused(changes: dict[str, Any]) -> None:
    fields = changed(changes)
    try:
        ours = ModelGeometry.from_config(copy.deepcopy(fields))
    except GeometryError:
        return
    differing = differences(ours, fields)
    if differing == [NO_TABLE]:
        # of a null, which is read as absent
        assert "'rope_type': None" in str(fields)
    else:
        assert differing == []

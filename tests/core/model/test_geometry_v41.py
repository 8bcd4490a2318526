"""Geometry of DeepSeek-V4.1: what its configuration says, whose caches a layer reads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.config import v41_layers
from dsv4attn.core.model.geometry import LayerKind, LayerRole, LayerSharing, LayerSources, ModelGeometry, Rope, Yarn
from dsv4attn.errors import ArgumentError, GeometryError
from tests.core.model.test_geometry import released, same

SWA, C4A = LayerKind.SWA, LayerKind.CSA
FLASH = ModelGeometry.preset("deepseek-v4.1-flash")


def text(**changes: Any) -> dict[str, Any]:
    """Return the text fields of the released V4.1-Flash that attention reads, changed; None removes a field."""
    fields: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "q_lora_rank": 1280,
        "index_n_heads": 32,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "rms_norm_eps": 1e-20,
    }
    return released(**{**fields, **changes})


def nested(**changes: Any) -> dict[str, Any]:
    """Return the file: the text fields one level down."""
    return {"model_type": "deepseek_v41", "text_config": text(**changes), "vision_config": {"hidden_size": 1024}}


def test_the_released_configuration_is_the_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nested()), encoding="utf-8")
    plain = SimpleNamespace(**{**nested(), "text_config": SimpleNamespace(to_dict=text)})

    for config in (nested(), text(), {**text(), "model_type": "deepseek_v41"}, tmp_path, plain):
        assert same(ModelGeometry.from_config(config), FLASH)


def test_layers_have_selected_entries_at_both_ratios_and_no_norm_of_q() -> None:
    window, half, full = FLASH.distinct_layers

    assert [(layer.kind, layer.compress_ratio, layer.topk) for layer in (window, half, full)] == [
        (SWA, 1, 0),
        (C4A, 2, 512),
        (C4A, 1, 512),
    ]
    assert window.rope == Rope(64, 10000.0)
    assert half.rope == full.rope == Rope(64, 160000.0, Yarn(16.0, 65536))
    assert {(layer.q_norm, layer.q_eps, layer.eps, layer.overlap) for layer in FLASH.distinct_layers} == {
        (False, None, 1e-20, False)
    }
    assert (full.entries(7), half.entries(7), window.entries(7)) == (7, 3, 0)
    assert [FLASH.count(kind) for kind in LayerKind] == [2, 38, 0]


def test_drafting_layers_are_window_only() -> None:
    assert FLASH.num_layers == 40
    assert all(FLASH.layer(i) == FLASH.layer(0) for i in (40, 41, 42))
    assert FLASH.sources(42).role is LayerRole.WINDOW_ONLY


def test_layers_past_the_list_of_ratios_are_window_only() -> None:
    model = ModelGeometry.from_config(text(compress_ratios=[0, 0, *[2] * 18, *[1] * 17]))

    assert [kind for kind, _ in model.layers[-4:]] == [C4A, SWA, SWA, SWA]


@pytest.mark.parametrize(("num_layers", "kv", "candidates"), [(24, (2, 8, 14, 20), 20), (4, (2,), -1), (2, (), -1)])
def test_a_configuration_with_fewer_layers_has_the_sources_below(
    num_layers: int, kv: tuple[int, ...], candidates: int
) -> None:
    model = ModelGeometry.from_config(nested(num_hidden_layers=num_layers))

    assert model.layers == FLASH.layers[:num_layers]
    assert model.sharing is not None
    assert (model.sharing.kv_source_layer_ids, model.sharing.index_source_layer_ids) == (kv, kv)
    assert model.sharing.candidate_source_layer_id == candidates
    assert [model.sources(i) for i in range(num_layers)] == [FLASH.sources(i) for i in range(num_layers)]


def test_sources_past_the_last_layer_are_refused_in_a_geometry() -> None:
    sharing = LayerSharing((2, 8), (2, 8), -1)
    with pytest.raises(GeometryError, match=r"^kv_source_layer_ids: .* layer 8 of 4 -> list layers from 0 to 3"):
        attrs.evolve(FLASH, layers=FLASH.layers[:4], sharing=sharing)


def test_every_layer_knows_whose_cache_and_whose_entries_it_reads() -> None:
    sources = [FLASH.sources(i) for i in range(40)]

    for i, layer_sources in enumerate(sources):
        kv = max((source for source in (2, 8, 14, 20) if source <= i), default=None)
        index = max((source for source in (2, 8, 14, 20, 24, 28, 32, 36) if source <= i), default=None)
        candidates = 20 if i in (24, 28, 32, 36) else None
        assert layer_sources == LayerSources(i, kv, index, candidates)
    roles = [source.role for source in sources]
    assert [i for i, role in enumerate(roles) if role is LayerRole.WINDOW_ONLY] == [0, 1]
    assert [i for i, role in enumerate(roles) if role is LayerRole.FULL] == [2, 8, 14, 20]
    assert [i for i, role in enumerate(roles) if role is LayerRole.REINDEX] == [24, 28, 32, 36]
    assert roles.count(LayerRole.REUSE) == 30
    assert FLASH.entries_per_token == 2.5


def test_layers_of_v4_read_their_own() -> None:
    model = ModelGeometry.preset("flash")

    assert model.sources(0) == LayerSources(0)
    assert model.sources(2) == LayerSources(2, 2, 2)
    assert model.sources(3) == LayerSources(3, 3, None)
    assert model.sources(3).role is LayerRole.FULL
    assert model.entries_per_token == 21 / 4 + 20 / 128


def test_one_kind_with_two_ratios_is_named_with_its_ratio() -> None:
    with pytest.raises(
        ArgumentError, match=r"compress_ratio: expected one of \[1, 2\], .*, got None -> name the ratio"
    ):
        FLASH.layer_of_kind("c4a")
    with pytest.raises(ArgumentError, match=r"compress_ratio: expected one of \[1, 2\], .*, got 4"):
        Problem.of(FLASH, "c4a", compress_ratio=4)

    assert FLASH.layer_of_kind("c4a", 2) == FLASH.layer(2)
    assert Problem.of(FLASH, "c4a", compress_ratio=1).layer == FLASH.layer(20)
    assert FLASH.layer_of_kind("swa") == FLASH.layer(0)


def test_tensor_parallel_ranks_share_as_the_whole_does() -> None:
    rank = FLASH.tensor_parallel(8)

    assert (rank.num_heads, rank.o_groups, rank.sharing, rank.q_norm) == (8, 1, FLASH.sharing, False)


INDEX = [2, 8, 14, 20, 24]
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"compress_ratios": [0, 0, *[4] * 38]},
        r"compress_ratios\[2\]: expected 0, 1 or 2, got 4 -> a config with ratios 4",
    ),
    ({"compress_ratios": [0, 0, True]}, r"compress_ratios\[2\]: expected 0, 1 or 2, got True"),
    ({"compress_ratios": None}, "'compress_ratios': expected a list, got None"),
    ({"kv_source_layer_ids": None}, "'kv_source_layer_ids': expected a list of layer numbers, got None ->"),
    ({"index_source_layer_ids": "2"}, "'index_source_layer_ids': expected a list of layer numbers, got '2'"),
    (
        {"kv_source_layer_ids": [2, 14, 8, 20]},
        r"^kv_source_layer_ids: expected ascending layer numbers, got \[2, 14, 8",
    ),
    ({"kv_source_layer_ids": [2, 2, 20]}, "^kv_source_layer_ids: expected ascending"),
    ({"index_source_layer_ids": [2, 20, 8, 14]}, "^index_source_layer_ids: expected ascending .* -> list each source"),
    ({"kv_source_layer_ids": [1, 2, 20]}, "^kv_source_layer_ids: expected layers with .* got layer 1, which is window"),
    (
        {"index_source_layer_ids": [-1, *INDEX]},
        "^index_source_layer_ids: expected layers .* layer -1 of 40 -> list lay",
    ),
    ({"layer_types": ["sliding_attention"] * 40}, r"not read here: layer_types=\['sliding_attention'"),
    ({"hc_pre_from_prev_sublayer": False}, "'hc_pre_from_prev_sublayer': expected True, got False -> .*V4.1's attent"),
    ({"index_source_layer_ids": [2, 8, 20]}, r"^index_source_layer_ids: .* 14 too, got \[2, 8, 20\] -> add 14"),
    (
        {"kv_source_layer_ids": [3, 20], "index_source_layer_ids": [3, 20]},
        "^kv_source.* ratio 2, as layer 2 .* got none",
    ),
    (
        {"kv_source_layer_ids": [2, 8, 14]},
        "^kv_source.* ratio 1, as layer 20 has.* got layer 14 of ratio 2 -> list the",
    ),
    (
        {"candidate_source_layer_id": 21},
        "^candidate_source_layer_id: expected one of .*, or -1 for none, got 21 -> name",
    ),
    ({"candidate_source_layer_id": -2}, "'candidate_source_layer_id': expected an integer from -1, got -2 -> leave"),
    ({"candidate_block_size": 12}, "^candidate_block_size: expected a power of two, got 12 -> or set"),
    ({"candidate_block_size": None}, "^candidate_block_size: expected a power of two, got 0"),
    ({"candidate_topk_blocks": None}, "^candidate_topk_blocks: expected at least 1, got 0"),
    ({"candidate_topk_blocks": 2.0}, "'candidate_topk_blocks': expected an integer from 0, got 2.0"),
    ({"q_head_norm": "no"}, "'q_head_norm': expected true or false, got 'no'"),
    ({"rms_norm_eps": None}, "field 'rms_norm_eps' is missing"),
    ({"index_n_heads": None}, "field 'index_n_heads' is missing"),
    ({"head_dim": None}, "field 'head_dim' is missing"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said[:48] for _, said in WRONG])
def test_a_configuration_that_contradicts_itself_is_refused_by_the_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GeometryError, match=said):
        ModelGeometry.from_config(nested(**changes))


def test_a_text_configuration_of_another_type_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"field 'text_config': expected an object, got \[1\]"):
        ModelGeometry.from_config({"model_type": "deepseek_v41", "text_config": [1]})


def test_without_a_candidate_source_no_indexer_is_restricted() -> None:
    without = {"candidate_source_layer_id": None, "candidate_topk_blocks": None, "candidate_block_size": None}
    model = ModelGeometry.from_config(text(**without))

    assert all(model.sources(i).candidates is None for i in range(40))


V4_FLASH = ModelGeometry.preset("flash")


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (
            FLASH,
            {"layers": v41_layers([0, 0, *[2] * 18, *[3] * 20])},
            "^layers: expected .* ratio 1 or 2.* ratio 3 at 20",
        ),
        (
            FLASH,
            {"layers": v41_layers([0, 3, 2]), "sharing": None},
            "^layers: expected .* got a c4a layer of ratio 3 at 1",
        ),
        (FLASH, {"layers": ((SWA, 1), (LayerKind.HCA, 2))}, "^layers: .* got a c128a layer of ratio 2 at 1 -> leave"),
        (V4_FLASH, {"shared_latent": True}, "^layers: expected .* got a c4a layer of ratio 4 at 2"),
        (FLASH, {"sharing": None}, "^sharing: expected a LayerSharing with shared_latent=True, got None -> pass"),
    ],
)
def test_a_shared_latent_is_of_ratios_1_and_2_with_sources(
    model: ModelGeometry, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(GeometryError, match=said):
        attrs.evolve(model, **changes)


def test_a_model_of_window_only_layers_may_have_a_shared_latent() -> None:
    model = attrs.evolve(FLASH, layers=v41_layers([0, 0]), sharing=LayerSharing((), ()))

    assert model.kinds == (SWA,)


def test_a_model_of_some_layers_gives_each_its_own_cache() -> None:
    model = FLASH.with_own_layers([layer.key for layer in FLASH.distinct_layers])

    assert [model.sources(i) for i in range(3)] == [LayerSources(0), LayerSources(1, 1, 1), LayerSources(2, 2, 2)]
    assert V4_FLASH.with_own_layers([(C4A, 4)]).sharing is None


def test_entries_that_do_not_overlap_are_of_a_shared_latent() -> None:
    assert [layer.shared_latent for layer in FLASH.distinct_layers] == [False, True, True]
    assert not any(layer.shared_latent for layer in V4_FLASH.distinct_layers)


def test_a_norm_of_q_is_read_where_a_configuration_says_so() -> None:
    assert ModelGeometry.from_config(text(q_head_norm=True)).layer(2).q_eps == 1e-20

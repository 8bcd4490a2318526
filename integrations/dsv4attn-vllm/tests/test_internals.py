"""The table of vLLM's names: the tested vLLM has them, the table has all that this package uses, each is missed."""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dsv4attn_vllm
import pytest
from attrs import evolve
from dsv4attn_vllm import internals
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.indexer import IndexerParts
from dsv4attn_vllm.internals import TABLE
from engine import config_of, world
from torch import nn

from dsv4attn.integrations import engine_internals
from dsv4attn.integrations.engine_internals import Called, LackingError, Named, Overridden, Stored, Written
from dsv4attn.tools.cli.engines import EngineState

VERSION = version("vllm")
HERE = [group for group in internals.parts_of(VERSION) if "rocm" not in group]
"""VLLM's modules for ROCm want a GPU when they are imported: `test_layers_for_rocm` has their groups."""
ENTRIES = [(group, entry) for group in HERE for entry in TABLE[group]]
ALL = [entry for entries in TABLE.values() for entry in entries]
OURS = sorted(Path(next(iter(dsv4attn_vllm.__path__))).glob("*.py"))


def test_the_installed_vllm_has_every_name() -> None:
    assert internals.lacking(HERE) == []


@pytest.mark.parametrize(
    ("version", "hooks"),
    [("0.33.0", "since 0.33"), ("0.100.1", "since 0.33"), ("1.0.0rc1", "since 0.33"), ("0.32.0", "before 0.33")],
)
def test_parts_of_the_table_that_a_process_needs(version: str, hooks: str) -> None:
    groups_of = partial(internals.groups_of, version=version)
    assert groups_of("v4", "cuda") == ("all", "v4", "v41", "v4 cuda", hooks)
    assert groups_of("v4", "xpu", mhc=True) == ("all", "v4", "v41", "v4 xpu", hooks, "mhc")
    assert groups_of("v41", "rocm") == ("all", "v4", "v41", "v4 rocm", "v41 rocm", hooks, f"rocm {hooks}")
    assert groups_of("v41", "cpu") == ("all", "v4", "v41", hooks)
    assert hooks in internals.parts_of(version)
    assert groups_of("v41", "cpu", entries=True)[4:] == (("entries since 0.33",) if hooks == "since 0.33" else ())
    assert not any(part.endswith("0.33") and not part.endswith(hooks) for part in internals.parts_of(version))


def test_the_page_on_engines_counts_the_names() -> None:
    state = EngineState("vLLM", "vllm", "dsv4attn-vllm", "active", "why", internals=engine_internals.listed(TABLE))
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")

    assert state.relies_on in re.sub(r"\s+", " ", page)


def owners_of(entry: Any, name: str) -> list[Any]:
    """The module or classes in which a name would have to be removed, so that it is there no more."""
    owner = entry.find()
    owners = [owner] if inspect.ismodule(owner) else [base for base in owner.__mro__ if name in vars(base)]
    return [owner for owner in owners if name in vars(owner)]


def test_each_name_is_missed_and_said() -> None:
    missed = 0
    for group, entry in ENTRIES:
        for name in entry.names():
            missed += 1
            is_enum = inspect.isclass(entry.find()) and issubclass(entry.find(), Enum)
            if isinstance(entry, Stored) or is_enum or not owners_of(entry, name):
                # it cannot be removed: another name, which nothing has
                other = {"function": "absent"} if isinstance(entry, Called) else {"attributes": ("absent",)}
                [line] = evolve(entry, **other).lacking()
                assert line.startswith(entry.owner)
                assert "absent" in line
                continue
            with pytest.MonkeyPatch.context() as patch:
                for owner in owners_of(entry, name):
                    patch.delattr(owner, name)
                assert f"{entry.owner}.{name} is not there" in [*entry.lacking()], (group, name)
    assert missed > 200


def test_a_class_or_module_that_is_not_there_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v4 import attention

    monkeypatch.delattr(attention, "DeepseekV4IndexerCache")

    assert internals.lacking(["v4"]) == ["vllm.models.deepseek_v4.attention.DeepseekV4IndexerCache is not there"]
    with pytest.raises(LackingError, match=r"^vllm.utils.deep_gem cannot be imported: No module named"):
        [*Named("vllm.utils.deep_gem", ("x",)).lacking()]


def test_a_vllm_that_lacks_hooks_is_refused_by_name_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention
    from vllm.utils import deep_gemm

    monkeypatch.delattr(DeepseekV4Attention, "_o_proj")
    monkeypatch.delattr(deep_gemm, "has_deep_gemm")

    with pytest.raises(RefusedError) as caught:
        internals.check("0.34.1", internals.groups_of("v4", "cuda", version=VERSION))

    assert str(caught.value) == (
        "dsv4attn-vllm: vLLM 0.34.1: expected all names of vLLM that dsv4attn-vllm replaces, calls, writes or reads, "
        "got "
        "vllm.utils.deep_gemm.has_deep_gemm is not there; "
        "vllm.models.deepseek_v4.attention:DeepseekV4Attention._o_proj is not there -> install vllm==0.33.0, or a "
        "dsv4attn-vllm that was tested with vLLM 0.34.1, or set DSV4ATTN_VLLM=0 to run vLLM's own attention"
    )


def test_a_hook_that_is_passed_more_or_never_called_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention

    hook = Overridden(
        "vllm.models.deepseek_v4.attention:DeepseekV4Attention", "dsv4attn_vllm.attention:Dsv4Attention", ("_o_proj",)
    )
    assert [*hook.lacking()] == []

    with monkeypatch.context() as patch:
        patch.setattr(DeepseekV4Attention, "_o_proj", lambda self, o, positions, scale: None)
        [line] = hook.lacking()
    assert "._o_proj: it gets self, o, positions, scale; dsv4attn's takes (self, o: 'Tensor'" in line
    with monkeypatch.context() as patch:
        patch.setattr(engine_internals, "_code_near", lambda owner, callers: "    def _o_proj(self, o, positions):")
        assert [*hook.lacking()] == [f"{hook.owner}._o_proj is there, but nothing calls it"]


def test_a_call_that_vllms_function_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.mla import compressor_utils

    monkeypatch.setattr(compressor_utils, "get_dspark_swa_index_width", lambda window: 0)

    [line] = internals.lacking(["all"])
    assert line.endswith("get_dspark_swa_index_width(window) cannot be called as it is: too many positional arguments")


def test_an_indexer_that_selects_by_another_class_is_refused_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's own would run in the first long request, with index keys that it does not know."""

    class Other(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    monkeypatch.setattr(IndexerParts, "_get_attn_cls", lambda self: Other)
    # vLLM 0.32 has no such method
    monkeypatch.setattr("dsv4attn_vllm.attention.indexer_globals", nullcontext)
    monkeypatch.setattr("vllm.models.deepseek_v4.attention.SparseAttnIndexer", Other)
    with world(config := config_of()):
        CUDAAttention(config, prefix="model.layers.0.attn")
        with pytest.raises(
            RefusedError, match=r"layers.1.attn.indexer: expected dsv4attn's Selector, got Other -> ins"
        ):
            CUDAAttention(config, prefix="model.layers.1.attn", topk_indices_buffer=None)


# ---------------------------------------------------------------- the table has all that this package uses


def used() -> Iterator[tuple[str, str]]:
    """(owner, name) of all that this package imports from vLLM, and of attributes of what it imported."""
    for path in OURS:
        tree, imported = ast.parse(path.read_text(encoding="utf-8")), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                for alias in node.names:
                    imported[alias.asname or alias.name] = node.module, alias.name
        for module, name in imported.values():
            yield module, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
                module, name = imported[node.value.id]
                try:
                    inner = inspect.ismodule(
                        getattr(import_module(module), name, None) or import_module(module + "." + name)
                    )
                except (ImportError, RuntimeError):  # ROCm's
                    inner = False
                yield f"{module}.{name}" if inner else f"{module}:{name}", node.attr


def listed() -> set[tuple[str, str]]:
    """(owner, name) of the table, and (module, class) of each class that owns names."""
    owners = [entry.owner.partition(":") for entry in ALL]
    names = {(entry.owner, name) for entry in ALL for name in entry.names()}
    return names | {(module, name) for module, _, name in owners if name}


def names_of(kind: type) -> set[str]:
    """Names of the entries of a kind."""
    return {name for entry in ALL if isinstance(entry, kind) for name in entry.names()}


MLA = "vllm.v1.attention.backends.mla"
BY_ANOTHER_NAME = {
    # of the platform's object, whose class is in the table
    ("vllm.platforms", "current_platform"),
    ("vllm.platforms:current_platform", "get_device_capability"),
    ("vllm.platforms:current_platform", "is_device_capability_family"),
    ("vllm.platforms:current_platform", "is_fp8_fnuz"),
    ("vllm.platforms:current_platform", "is_rocm"),
    ("vllm.platforms:current_platform", "support_deep_gemm"),
    # of every enumeration
    ("vllm.v1.attention.backends.registry:AttentionBackendEnum", "__members__"),
    # the registry that the entry point itself needs, and a dictionary
    ("vllm", "ModelRegistry"),
    ("vllm:ModelRegistry", "register_model"),
    ("vllm.model_executor.custom_op:op_registry_oot", "get"),
    ("vllm.model_executor.custom_op:op_registry_oot", "keys"),
    # objects of a class whose method is in the table
    ("vllm.models.common.ops:_FUSED_Q_KV_RMSNORM_KERNEL", "register_warmup"),
    (f"{MLA}.compressor_utils:_COMPRESSED_SLOT_MAPPING_KERNEL", "register_warmup"),
    (f"{MLA}.sparse_swa:_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL", "register_warmup"),
    (f"{MLA}.sparse_swa:_COMPUTE_PREFILL_METADATA_KERNEL", "register_warmup"),
    (f"{MLA}.sparse_swa:_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", "register_warmup"),
    # modules, whose names are in the table
    ("vllm", "envs"),
    ("vllm.models.deepseek_v4", "attention"),
    ("vllm.models.deepseek_v4", "compressor"),
    ("vllm.utils", "deep_gemm"),
    ("vllm.model_executor.layers", "mhc"),
    ("vllm.models.deepseek_v4", "sparse_mla"),
    ("vllm.models.deepseek_v41", "attention"),
    ("vllm.models.deepseek_v41", "compressor"),
    ("vllm.models.deepseek_v41", "sparse_mla"),
    ("vllm.v1.attention", "backend"),
    (MLA, "sparse_swa"),
}


def test_every_import_from_vllm_is_in_the_table() -> None:
    assert sorted(set(used()) - listed() - BY_ANOTHER_NAME) == []


def classes() -> list[type]:
    """The classes of this package that are made of vLLM's, but for ROCm's."""
    modules = [
        import_module(f"dsv4attn_vllm.{path.stem}")
        for path in OURS
        if "rocm" not in path.stem and "model" not in path.stem
    ]
    objects = {id(value): value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return [value for value in objects.values() if value.__module__.startswith("dsv4attn_vllm.")]


def test_every_method_in_place_of_one_of_vllms_is_in_the_table() -> None:
    hooks = names_of(Overridden)
    for own_class in classes():
        vllm_bases = [base for base in own_class.__mro__ if base.__module__.startswith("vllm.")]
        for name in vars(own_class):
            if not name.startswith("__") and inspect.isroutine(getattr(own_class, name)):
                assert name in hooks or not any(name in vars(base) for base in vllm_bases), (own_class, name)


def test_every_attribute_of_vllms_objects_is_in_the_table() -> None:
    """`self.name` in a class that is made of vLLM's, and the name is not this package's."""
    known = names_of(object) | names_of_ours() | OF_TORCH
    for path in OURS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or path.stem in ("internals", "guard", "replacements", "serving"):
                continue
            read = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
            }
            assert sorted(read - known) == [], (path.stem, node.name)


def test_every_attribute_of_vllms_objects_that_is_set_is_in_the_table() -> None:
    """But for the class of an object, and what classes of this package define."""
    written = names_of(Written) | OF_TORCH | OF_DSV4ATTN
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                assert node.attr in written, (path.stem, node.attr)


OF_TORCH = {"__class__"}
OF_DSV4ATTN = {"_serving", "of_dsv4attn", "cos_sin_cache"}
"""Set on objects of this package and of dsv4attn."""


def names_of_ours() -> set[str]:
    """Methods, fields and attributes that classes of this package define."""
    names = set()
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for statement in node.body:
                    names |= {getattr(statement, "name", "")}
                    if isinstance(statement, ast.AnnAssign | ast.Assign):
                        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                        names |= {target.id for target in targets if isinstance(target, ast.Name)}
                for statement in ast.walk(node):
                    if isinstance(statement, ast.Attribute) and isinstance(statement.ctx, ast.Store):
                        names.add(statement.attr)
    return names

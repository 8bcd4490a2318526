"""Our FlashMLA interface next to the newest public one, and next to SGLang's calls of it, read from their files."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.compat import flash_mla

NOT_SERVED = {"fused_norm_rope_attn_rope_cast"}
"""Names of FlashMLA's package that ours leaves out: what FlashMLA runs on SM100 and SM103 only."""


def source(package: str, path: str) -> ast.Module:
    """The syntax tree of a file of an installed package, which is not imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: `pip install --no-deps -r requirements-test.txt`")
    return ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def positional(function: ast.FunctionDef) -> list[tuple[str, Any]]:
    """(name, default) of each positional parameter; ... where there is none."""
    args = function.args
    defaults: list[Any] = [ast.literal_eval(default) for default in args.defaults]
    return list(zip([arg.arg for arg in args.args], [...] * (len(args.args) - len(defaults)) + defaults, strict=True))


FLASH_MLA = "flash_mla_interface.py"


@pytest.mark.parametrize("name", ["flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_decoding_metadata"])
def test_positional_parameters_are_flash_mlas_by_name_place_and_default(name: str) -> None:
    of_flash_mla = positional(functions(source("flash_mla", FLASH_MLA))[name])
    parameters = inspect.signature(getattr(flash_mla, name)).parameters.values()
    of_dsv4attn = [
        (p.name, ... if p.default is p.empty else p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY
    ]

    assert of_dsv4attn == of_flash_mla


def test_metadata_has_flash_mlas_fields() -> None:
    tree = source("flash_mla", FLASH_MLA)
    [meta] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FlashMLASchedMeta"]
    [config] = [node for node in meta.body if isinstance(node, ast.ClassDef)]
    fields = {
        name: [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        for name, body in (("meta", meta.body), ("config", config.body))
    }

    assert fields["meta"] == list(inspect.signature(flash_mla.FlashMLASchedMeta).parameters)
    assert fields["config"] == list(inspect.signature(flash_mla.FlashMLASchedMeta.Config).parameters)


def test_every_public_name_of_flash_mla_exists_here_or_is_known_not_to() -> None:
    tree = source("flash_mla", "__init__.py")
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]

    assert {name for name in names if not hasattr(flash_mla, name)} == NOT_SERVED
    assert set(names) - NOT_SERVED <= set(flash_mla.__all__)


def test_every_argument_of_sglangs_own_functions_is_one_of_ours() -> None:
    functions_of_sglang = functions(source("sglang", "kernels/ops/attention/flash_mla_interface.py"))
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        args = functions_of_sglang[name].args
        arguments = {arg.arg for arg in args.args + args.kwonlyargs}
        assert arguments <= set(inspect.signature(getattr(flash_mla, name)).parameters), name


def test_sglang_calls_them_by_name_with_arguments_that_we_know() -> None:
    tree = source("sglang", "srt/layers/attention/deepseek_v4_backend.py")
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "")
        in ("flash_mla_with_kvcache", "flash_mla_with_kvcache_sm120", "flash_mla_sparse_fwd")
    ]

    assert len(calls) == 3
    for call in calls:
        assert not call.args
        name = call.func.id.removesuffix("_sm120")  # type: ignore[attr-defined]
        known = inspect.signature(getattr(flash_mla, name)).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(known)

"""Reprs are one line, run no op of torch, read no tensor, and work on objects that are not complete."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dsv4attn
from dsv4attn import (
    Backend,
    CacheManager,
    DeepseekV4Attention,
    DeepseekV4MLAAttention,
    MetadataBuilder,
    SingleLayer,
    WorkspaceManager,
    load_backend,
)
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspacePlan
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.reprs import bytes_text, fields_repr, value_text
from dsv4attn.errors import ArgumentError, WorkspaceError
from tests.harness import SMALL

PACKAGE = Path(dsv4attn.__file__).parent
OF_FUNCTIONS = {"Arithmetic", "LayerOps", "_Sublayers"}
"""Classes whose fields are functions of tensors, or layers."""


class NoOps(TorchDispatchMode):
    """Raises for every op of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a repr ran {func}")


def classes_with_tensors() -> Iterator[tuple[str, str]]:
    """Module and name of every attrs class, and every NamedTuple, of the package with a field that holds a tensor."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "Tensor" in text and "class " in text else ():
            if not isinstance(node, ast.ClassDef) or node.name in OF_FUNCTIONS:
                continue
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_attrs = any(name.split("(")[0].split(".")[-1] in ("frozen", "define") for name in decorators)
            is_tuple = any("NamedTuple" in ast.unparse(base) for base in node.bases)
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            if (is_attrs or is_tuple) and any("Tensor" in ast.unparse(field.annotation) for field in fields):
                yield module, node.name


def test_the_repr_of_a_class_with_tensors_shows_shapes() -> None:
    missing = set[str]()
    for module, name in classes_with_tensors():
        try:
            cls = getattr(importlib.import_module(module), name)
        except ImportError as error:
            missing.add(str(error.name))
            continue
        if hasattr(cls, "__attrs_attrs__"):
            assert cls.__repr__ is fields_repr, name
            # of an object that has no field yet
            assert repr(object.__new__(cls)) == f"{name}()"
        else:
            value = cls(*[torch.zeros(2)] * len(cls._fields))
            assert repr(value) == f"{name}({', '.join(f'{field}=fp32[2]' for field in cls._fields)})"
    assert missing <= {"triton", "transformers"}


def test_a_tensor_is_shown_by_dtype_and_shape() -> None:
    assert value_text(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    assert value_text([torch.zeros(4, dtype=torch.int32), None]) == "[int32[4], None]"
    assert value_text({"a": torch.zeros((), device="meta")}) == "{a: fp32[] on meta}"
    assert value_text("a\nb") == "'a\\nb'"
    assert len(value_text("x" * 1000)) < 110
    assert value_text(test_a_tensor_is_shown_by_dtype_and_shape) == "test_a_tensor_is_shown_by_dtype_and_shape"
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1024: "1.0 KiB", 13107200: "12.5 MiB"}
    assert {count: bytes_text(count) for count in sizes} == sizes


@pytest.fixture
def layer() -> SingleLayer:
    return SingleLayer(SMALL, "c4a", device="cpu", backend="reference", max_requests=1, max_tokens=8, max_model_len=64)


def test_objects_of_a_layer_have_reprs_of_one_line(layer: SingleLayer) -> None:
    request = layer.new_request()
    layer.step((request, layer.random_hidden(5)))
    metadata = layer.caches.metadata(layer.caches.batch([(request, 1)]))
    attention, caches = layer.layer.attention, layer.caches
    workspace = attention.workspace
    assert workspace is not None
    objects = {
        layer: "SingleLayer ",
        layer.layer: "c4a ratio 4, ",
        attention: "backend reference, on cpu, caches bound",
        layer.layer.compressor: "Compressor c4a ratio 4",
        layer.layer.indexer: "entries of 4 tokens",
        layer.backend: "ReferenceBackend reference, ",
        workspace: "KiB on cpu, 1 arena: prefill",
        caches: "window 1 of",
        caches.builder: "at most 1 requests and 8 tokens a step",
        caches.caches[0]: "blocks=",
        caches.caches[0].attention: "LayerCaches(",
        request.tables["window"]: "1 blocks of",
        layer.layer._weights: "wq_a=",
    }
    with NoOps():  # type: ignore[no-untyped-call]
        for value, part in objects.items():
            text = repr(value)
            assert part in text
            assert "\n" not in text
            assert " at 0x" not in text
            assert "tensor(" not in text
        for text in (repr(metadata), repr(request)):
            assert "tensor(" not in text
            assert "\n" not in text


def test_a_workspace_says_that_it_is_locked_after_an_error_too() -> None:
    workspace = WorkspaceManager("cpu", debug=True)
    workspace.reserve(WorkspacePlan({"decode": 1024}))
    workspace.lock()
    with pytest.raises(WorkspaceError):
        workspace.get_simultaneous(((1 << 20,), torch.float32), arena="decode")

    assert repr(workspace) == "<WorkspaceManager 17.0 KiB on cpu, 1 arena: decode 17.0 KiB, locked, debug>"


@pytest.mark.parametrize(
    "cls", [Backend, CacheManager, DeepseekV4Attention, DeepseekV4MLAAttention, MetadataBuilder, SingleLayer]
)
def test_an_object_whose_init_raised_has_a_repr(cls: type) -> None:
    assert repr(object.__new__(cls)) == f"<{cls.__name__} incomplete>"


def test_a_layer_that_refuses_its_caches_has_a_repr(layer: SingleLayer) -> None:
    attention = layer.layer.attention
    fresh = DeepseekV4MLAAttention(
        "model.layers.3",
        attention.geometry,
        Limits(1, 8, 64),
        load_backend("reference"),
        attn_sink=None,
        cos_sin_cache=attention.cos_sin_cache,
        topk_indices_buffer=attention.topk_indices_buffer,
    )
    with pytest.raises(ArgumentError):
        fresh.bind_kv_cache(layer.caches.caches[0].attention.swa)

    heads = attention.geometry.num_heads
    assert repr(fresh) == (
        f"<DeepseekV4MLAAttention model.layers.3, c4a ratio 4, {heads} heads, backend reference, on cpu, no caches>"
    )


def test_the_repr_of_a_backend_names_its_own_ops() -> None:
    assert "layer ops: compressor indexer selection hyper_connections" in repr(load_backend("reference"))

    class NoTables(type(load_backend("reference"))):  # type: ignore[misc]
        """No table is made for a repr."""

        @property
        def layer_ops(self) -> None:
            raise AssertionError

    assert repr(NoTables()).endswith("dense indices>")


def test_builders_and_managers_say_their_model() -> None:
    geometry, limits = ModelGeometry.preset("flash"), Limits(2, 16, 256)

    assert "MetadataBuilder deepseek-v4-flash, at most 2 requests" in repr(MetadataBuilder(geometry, limits))

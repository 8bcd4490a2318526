"""`help()` shows what a field of a public class is: its name, its shape and type, and its meaning."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
from typing import Any

import attrs
import pytest

import dsv4attn
from dsv4attn.core import tensorspec
from dsv4attn.core.contract import BuilderOps, LayerOps
from dsv4attn.core.contract import backend as contract
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.metadata.metadata import Batch

FOUND = {name: getattr(module, name) for module in (dsv4attn, contract) for name in module.__all__}
TYPES = {cls for cls in (*FOUND.values(), WarmupSpec, LayerOps, BuilderOps) if isinstance(cls, type)}
CLASSES: list[type[Any]] = sorted((cls for cls in TYPES if attrs.has(cls)), key=lambda cls: cls.__name__)
NAMED = (
    "AttentionCall AttentionMetadata BackendInfo Batch WarmupSpec WindowMetadata DenseIndices DeviceFacts "
    "CompressedMetadata Capabilities GatheredKeys LayerCaches LayerGeometry Limits ModelGeometry PageTable PagedKeys "
    "Problem RaggedIndices"
)


def shown(cls: type[Any], name: str) -> str:
    """What the docstring of a class says of a field, on one line; empty if nothing."""
    text = " ".join((cls.__doc__ or "").split())
    names = "|".join(field.name for field in attrs.fields(cls))
    match = re.search(rf"(?:^|[.:;)] ){name}: (.+?)(?= (?:{names}): |$)", text)
    return match[1] if match else ""


def test_the_classes_that_people_meet_are_looked_at() -> None:
    assert set(NAMED.split()) <= {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_stands_in_the_docstring_with_its_meaning(cls: type[Any]) -> None:
    for field in attrs.fields(cls):
        if field.name.startswith("_"):
            continue
        said = shown(cls, field.name)
        if not said and callable(field.default):
            # an op of a table: its definition says what it does
            said = field.default.__doc__ or ""

        assert len(said) > 4, f"{cls.__name__}.{field.name} is not in the docstring"
        if tensorspec._KEY in field.metadata:
            shape, dtype, *_ = field.metadata[tensorspec._KEY]
            declared = f"[{', '.join(shape.split())}] {str(dtype).removeprefix('torch.')} - "
            assert said.startswith(declared), f"{cls.__name__}.{field.name}: {said}"
        elif tensorspec._SIZE in field.metadata:
            assert said.startswith(f"{field.metadata[tensorspec._SIZE]} - "), f"{cls.__name__}.{field.name}: {said}"


@pytest.mark.parametrize("cls", CLASSES)
def test_no_fact_stands_below_a_field_where_help_does_not_look(cls: type[Any]) -> None:
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    literals = [node for node in tree.body[1:] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]

    assert [ast.unparse(node) for node in literals] == []


def test_help_itself_shows_it() -> None:
    text = pydoc.render_doc(Batch, renderer=pydoc.plaintext)  # type: ignore[attr-defined]

    assert "seq_lens: [R] int32 - tokens of each request after this step" in text
    assert text.index("seq_lens: [R] int32") < text.index("Methods defined here")

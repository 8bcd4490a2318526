"""Every tensor that the package makes names its device, and its dtype where torch would choose one.

An engine may run the package under `with torch.device(...)`, `torch.set_default_device` or `torch.set_default_dtype`;
then a factory without `device=` or `dtype=` makes a tensor that does not fit the tensors that it meets. Read from the
syntax trees; nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    ROOT / "dsv4attn",
    ROOT / "integrations" / "dsv4attn-vllm" / "dsv4attn_vllm",
    ROOT / "integrations" / "dsv4attn-sglang" / "dsv4attn_sglang",
    ROOT / "integrations" / "dsv4attn-flash-mla" / "dsv4attn_flash_mla",
    ROOT / "integrations" / "dsv4attn-tokenspeed" / "dsv4attn_tokenspeed",
)

FLOATS = {"empty", "empty_permuted", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
"""Factories whose dtype is torch's default dtype."""
OF_VALUES = {"as_tensor", "asarray", "full", "scalar_tensor", "tensor"}
"""Factories whose dtype is torch's default dtype if a value is a Python float."""
INTEGERS = {"arange", "randint", "randperm", "range", "tril_indices", "triu_indices"}
"""Factories of integers, as the package calls them: int64 on every machine."""
ON_A_DEVICE = FLOATS | OF_VALUES | INTEGERS
"""Factories that obey torch's default device. `torch.from_numpy` and `torch.frombuffer` do not."""
WITHOUT_EITHER = {"Tensor", "BoolTensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor"} | {
    "LongTensor", "ShortTensor"
}  # fmt: skip
"""Constructors that cannot name a device or a dtype."""


def faults(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is missing) of every call in a file that makes a tensor where torch's defaults say."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name in WITHOUT_EITHER:
            yield node.lineno, f"torch.{name}(...) is made on the default device"
        if name in ON_A_DEVICE and "device" not in keywords:
            yield node.lineno, f"torch.{name} without device="
        if name in FLOATS | OF_VALUES and "dtype" not in keywords:
            yield node.lineno, f"torch.{name} without dtype="


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_factory_names_its_device_and_dtype(package: Path) -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted(package.rglob("*.py"))
        for line, fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.zeros(3)", 2),
        ("torch.zeros(3, device=x.device)", 1),
        ("torch.zeros(3, device=x.device, dtype=torch.int32)", 0),
        ("torch.arange(3)", 1),
        ("torch.arange(3, out=x)", 1),
        ("torch.tensor([1.0], device=x.device)", 1),
        ("torch.as_tensor(x)", 2),
        ("torch.Tensor(3)", 1),
        ("torch.zeros(3, **options)", 2),
        ("torch.zeros_like(x), x.new_zeros(3), torch.from_numpy(x)", 0),
    ],
)
def test_the_rule_sees_what_it_is_for(source: str, count: int) -> None:
    assert len([*faults(source)]) == count


def test_torch_is_reached_by_its_own_name_only() -> None:
    """The rule above looks for calls of `torch.name`; no file imports a factory or renames torch."""
    factories = ON_A_DEVICE | WITHOUT_EITHER - {"Tensor"}
    lines = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module == "torch":
                    lines += [f"{path}: {alias.name}" for alias in node.names if alias.name in factories]
                if isinstance(node, ast.Import):
                    lines += [f"{path}: torch as {a.asname}" for a in node.names if a.name == "torch" and a.asname]
    assert not lines

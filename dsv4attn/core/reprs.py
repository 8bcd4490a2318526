"""Reprs of one line, for logs, debuggers and tracebacks: `one_line` of objects, `frozen` of classes with tensors.

No repr reads a value of a tensor, so none waits for a device, and each works on an object whose `__init__` has raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

__all__ = ["bytes_text", "counted", "fields_repr", "frozen", "layer_text", "limits_text", "one_line", "value_text"]

_T = TypeVar("_T")

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_MOST_LETTERS = 100


def one_line(describe: Callable[[_T], Iterable[str]]) -> Callable[[_T], str]:
    """A `__repr__` from a method that yields parts: `<Class part, part>`. Empty parts are left out.

    Where a part cannot be told, because the object is not complete, the repr ends with "incomplete".
    """

    @wraps(describe)
    def text(self: _T) -> str:
        parts: list[str] = []
        try:
            parts.extend(filter(None, describe(self)))
        except Exception:  # noqa: BLE001 - a repr is read while another error is looked at
            parts.append("incomplete")
        return f"<{type(self).__name__} {', '.join(parts)}>"

    return text


def fields_repr(self: Any) -> str:  # noqa: ANN401 - of any class of attrs, or NamedTuple
    """The `__repr__` of a class of attrs, or of a NamedTuple, with tensors: of these dtype, shape and device."""
    attributes = getattr(type(self), "__attrs_attrs__", ())
    names = [attribute.name for attribute in attributes if attribute.repr] or [*getattr(self, "_fields", ())]
    missing = object()
    values = ((name, getattr(self, name, missing)) for name in names)
    shown = ", ".join(f"{name}={value_text(value)}" for name, value in values if value is not missing)
    return f"{type(self).__name__}({shown})"


if TYPE_CHECKING:
    from attrs import frozen
else:

    def frozen(cls: type | None = None, **options: Any) -> Any:  # noqa: ANN401 - those of attrs
        """`attrs.frozen` of classes with tensors: their `__repr__` is `fields_repr`."""
        if cls is None:
            return partial(frozen, **options)
        cls.__repr__ = fields_repr
        return attrs.frozen(cls, **options)


def value_text(value: object) -> str:
    """A value in one line: of a tensor dtype, shape and device, as in `bf16[2, 64, 512]` and `int32[8] on cuda:0`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{_DTYPES.get(name, name)}{[*value.shape]}{device}"
    if type(value) in (list, tuple):
        return f"[{', '.join(map(value_text, value))}]"  # type: ignore[call-overload]
    if type(value) is dict:
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in value.items())}}}"
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    text = repr(value)
    if hasattr(type(value), "__attrs_attrs__") or len(text) <= _MOST_LETTERS:
        return text.replace("\n", " ")
    return f"{text[:_MOST_LETTERS]}...".replace("\n", " ")


def counted(count: int, name: str, plural: str | None = None) -> str:
    """A number with what it counts: `1 layer`, `2,048 tokens`, `2 entries`."""
    return f"{count:,} {name if count == 1 else plural or name + 's'}"


def bytes_text(count: int) -> str:
    """A number of bytes with a unit: `512 bytes`, `12.5 MiB`."""
    size, unit = float(count), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{count} {_UNITS[0]}"


def layer_text(layer: Any) -> str:  # noqa: ANN401 - a LayerGeometry, of a folder that imports this file
    """Kind of a layer, and tokens of an entry: `c4a ratio 4`, `swa`."""
    return f"{layer.kind.value} ratio {layer.compress_ratio}" if layer.has_entries else layer.kind.value


def limits_text(limits: Any) -> str:  # noqa: ANN401 - Limits, likewise
    """The sizes of batches that buffers are made for."""
    step = f"{limits.max_num_reqs} requests and {limits.max_num_batched_tokens} tokens a step"
    return f"at most {step} and {limits.max_model_len} tokens a request"

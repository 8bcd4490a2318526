"""Values as files of JSON have them, and read back into attrs classes, with the field named that is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from math import isfinite
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import attrs

__all__ = ["finite", "structured"]

_NEWER = {"cores", "threads_from", "fp8_flops_s", "fp8", "records", "vs_584", "asked", "ran", "layers", "reference_ops"}
"""Fields that older files do not have."""
_WORDS = {str: "text", int: "a whole number", float: "a number from 0 on", bool: "true or false"}


def finite(values: Mapping[str, object]) -> dict[str, object]:
    """The values, with None for numbers that are not finite, which JSON does not have."""
    return {name: None if isinstance(v, float) and not isfinite(v) else v for name, v in values.items()}


def structured(kind: Any, value: Any, field: str = "") -> Any:  # noqa: ANN401 - of any type
    """A value of JSON as `kind`: an attrs class, a tuple, a Mapping, `X | None`, a plain type, or object for any value.

    field: where the value stands, as in rows[3].median. Raises ValueError, which says it, for a value of another type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if attrs.has(kind):
        hints, values = get_type_hints(kind), structured(Mapping[str, object], value, field)
        paths = {member.name: f"{field}.{member.name}".lstrip(".") for member in attrs.fields(kind)}
        missing = [path for name, path in paths.items() if name not in values and name not in _NEWER]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return kind(**{name: structured(hints[name], values[name], paths[name]) for name in paths if name in values})
    if origin is UnionType:
        return None if value is None else structured(args[0], value, field)
    if origin is tuple and isinstance(value, list):
        return tuple(structured(args[0], item, f"{field}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {name: structured(args[1], item, f"{field}.{name}") for name, item in value.items()}
    is_number = type(value) in (int, float) and 0 <= value <= sys.float_info.max
    if kind is object or (is_number if kind is float else type(value) is kind):
        return value
    expected = _WORDS.get(kind, "a list" if origin is tuple else "an object")
    raise ValueError(f"{field} is {json.dumps(value)[:40]} instead of {expected}")

"""`is_v41`: layers of ratio 1 are window-only in DeepSeek-V4, and have a compressed cache in V4.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4attn.errors import ArgumentError

__all__ = ["is_v41", "refuse_v41"]

_FIELDS = ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "engram_layer_ids")
"""Fields of DeepSeek-V4.1 configurations that those of V4 do not have."""


def is_v41(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a configuration is one of DeepSeek-V4.1, in which ratio 1 is a compressed cache.

    fields: of a Hugging Face configuration. name: of the configuration, for errors. V4.1 is recognised by `model_type`
    or `architectures`, in the nested text configuration too. Without a `model_type`, a ratio of 4 or 128 means V4;
    otherwise a field that only V4.1 has, or a ratio of 1 beside others, is an ArgumentError: it may be either.
    """
    if _said(fields) is not None:
        return True
    for each in _levels(fields):
        ratios = each.get("compress_ratios")
        numbers = [n for n in ratios if isinstance(n, int)] if isinstance(ratios, Sequence) else []
        if each.get("model_type") is not None or 4 in numbers or 128 in numbers:
            continue
        hint = "set model_type to 'deepseek_v41', where a layer of ratio 1 has a compressed cache, or to 'deepseek_v4'"
        for key in _FIELDS:
            if each.get(key) is not None:
                expected = "none without a model_type"
                raise ArgumentError(f"{name}: field {key!r}", expected=expected, actual=repr(each[key]), hint=hint)
        if 1 in numbers and len({*numbers}) > 1:
            expected, actual = "no 1 beside other ratios without a model_type", sorted({*numbers})
            raise ArgumentError(f"{name}: field 'compress_ratios'", expected=expected, actual=actual, hint=hint)
    return False


def refuse_v41(fields: Mapping[str, Any], name: str) -> None:
    """Raise ArgumentError for a configuration that says that it is DeepSeek-V4.1, where only V4 is served.

    fields: of a Hugging Face configuration. name: of the configuration, for errors.
    """
    found = _said(fields)
    if found is not None:
        hint = "DeepSeek-V4.1 is not served yet: its layers of ratio 1 have a compressed cache"
        key, value = found
        raise ArgumentError(f"{name}: field {key!r}", expected="that of DeepSeek-V4", actual=repr(value), hint=hint)


def _levels(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The fields, and those of the nested text configuration."""
    text = fields.get("text_config")
    to_dict = getattr(text, "to_dict", None)
    text = to_dict() if to_dict else text
    return [fields, text] if isinstance(text, Mapping) else [fields]


def _said(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The field, and its value, that names DeepSeek-V4.1."""
    for each in _levels(fields):
        for key in ("model_type", "architectures"):
            values = each.get(key)
            for value in values if isinstance(values, (list, tuple)) else (values,):
                if isinstance(value, str) and re.search(r"deepseek[-_]?v4[._-]?1", value, re.IGNORECASE):
                    return key, value
    return None

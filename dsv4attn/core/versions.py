"""`refuse_v41`: layers of ratio 1 are window-only in DeepSeek-V4, and have a compressed cache in V4.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4attn.errors import ArgumentError

__all__ = ["refuse_v41"]

_FIELDS = ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "engram_layer_ids")
"""Fields of DeepSeek-V4.1 configurations that those of V4 do not have."""


def refuse_v41(fields: Mapping[str, Any], name: str) -> None:
    """Raise ArgumentError for a configuration of DeepSeek-V4.1, in which ratio 1 is a compressed cache.

    fields: of a Hugging Face configuration. name: of the configuration, for errors. V4.1 is recognised by `model_type`
    or `architectures`, in the nested text configuration too. Without a `model_type`, a ratio of 4 or 128 means V4;
    otherwise a field that only V4.1 has, or a ratio of 1 beside others, means V4.1.
    """
    text = fields.get("text_config")
    layers = [fields, text] if isinstance(text, Mapping) else [fields]
    for each in layers:
        for key in ("model_type", "architectures"):
            values = each.get(key)
            for value in values if isinstance(values, (list, tuple)) else (values,):
                if isinstance(value, str) and re.search(r"deepseek[-_]?v4[._-]?1", value, re.IGNORECASE):
                    raise _refusal(f"{name}: field {key!r}", "that of DeepSeek-V4", repr(value))
    for each in layers:
        ratios = each.get("compress_ratios")
        numbers = [n for n in ratios if isinstance(n, int)] if isinstance(ratios, Sequence) else []
        if each.get("model_type") is not None or 4 in numbers or 128 in numbers:
            continue
        for key in _FIELDS:
            if each.get(key) is not None:
                raise _refusal(f"{name}: field {key!r}", "none without model_type 'deepseek_v4'", repr(each[key]))
        if 1 in numbers and len({*numbers}) > 1:
            expected = "no 1 beside other ratios without model_type 'deepseek_v4'"
            raise _refusal(f"{name}: field 'compress_ratios'", expected, sorted({*numbers}))


def _refusal(argument: str, expected: str, actual: object) -> ArgumentError:
    hint = "DeepSeek-V4.1 is not served yet: its layers of ratio 1 have a compressed cache"
    return ArgumentError(argument, expected=expected, actual=actual, hint=hint)

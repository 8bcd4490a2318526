"""Finds reprs of classes, enums and objects in text for users: messages show names, not how the code stores them."""

from __future__ import annotations

import re

_REPR = re.compile(r"\b[A-Z]\w*\(\w+=[^)]*\)?|<[\w.]+ object at 0x|<class '|<function |<[A-Z]\w*\.\w+: |torch\.Size\(")
"""A class with fields, an object, a class, a function, a member of an enum, a shape of torch."""


def reprs_in(text: str) -> list[str]:
    """All reprs in a text."""
    return [match[0] for match in _REPR.finditer(text)]

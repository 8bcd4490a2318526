"""Which versions of SGLang are served, and the environment variables that say otherwise."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

__all__ = ["ANY_VERSION", "SWITCH", "TESTED", "RefusedError", "check", "switched_off"]

TESTED = ("0.5.23",)
"""The versions of SGLang whose modules the tests of this package ran with."""

SWITCH = "DSV4ATTN_SGLANG"
"""0: SGLang runs as if this package were not installed. 1, or unset: it is used."""

ANY_VERSION = "DSV4ATTN_SGLANG_ANY_VERSION"
"""1: a version of SGLang that was not tested is tried. 0, or unset: it is refused."""


class RefusedError(RuntimeError):
    """dsv4attn cannot serve this SGLang, model or configuration. The message says what to change."""

    def __init__(self, what: str, *, expected: str, actual: object, cure: str) -> None:
        """Build the message from the name of what is wrong, the expected and the actual value, and the cure."""
        own = f"set {SWITCH}=0 to run SGLang's own attention"
        super().__init__(f"dsv4attn-sglang: {what}: expected {expected}, got {actual} -> {cure}, or {own}")


def _flag(name: str, *, default: bool) -> bool:
    """The value of a variable that is 0 or 1."""
    given = os.environ.get(name, "").strip()
    if given not in ("", "0", "1"):
        raise RefusedError(f"environment variable {name}", expected="0 or 1", actual=repr(given), cure="correct it")
    return default if not given else given == "1"


def switched_off() -> bool:
    """Whether the plugin does nothing. A switch that is neither 0 nor 1 leaves it on: `check` refuses that value."""
    return os.environ.get(SWITCH, "").strip() == "0"


def check() -> str:
    """The version of SGLang, for the log. Raises RefusedError if it was not tested, unless the variable allows any."""
    _flag(SWITCH, default=True)
    found: str | None
    try:
        found = version("sglang")
    except PackageNotFoundError:  # a source tree on the path
        found = None
    # metadata may lack a version, whatever the type of `version` says
    found = found or "an SGLang without version"
    if found.partition("+")[0] not in TESTED and not _flag(ANY_VERSION, default=False):
        cure = f"install sglang=={TESTED[-1]}, set {ANY_VERSION}=1 to try this version"
        raise RefusedError("version of SGLang", expected=" or ".join(TESTED), actual=found, cure=cure)
    return found

"""Which versions of vLLM are served, and the environment variables that say otherwise."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

__all__ = ["ANY_VERSION", "SWITCH", "TESTED", "RefusedError", "check", "switched_off"]

TESTED = ("0.33.0",)
"""The versions of vLLM whose classes the tests of this package ran with."""

SWITCH = "DSV4ATTN_VLLM"
"""0: vLLM runs as if this package were not installed. 1, or unset: it is used."""

ANY_VERSION = "DSV4ATTN_VLLM_ANY_VERSION"
"""1: a version of vLLM that was not tested is tried. 0, or unset: it is refused."""


class RefusedError(RuntimeError):
    """dsv4attn cannot serve this vLLM, model or configuration. The message says what to change."""

    def __init__(self, what: str, *, expected: str, actual: object, cure: str) -> None:
        """Build the message from the name of what is wrong, the expected and the actual value, and the cure."""
        own = f"set {SWITCH}=0 to run vLLM's own attention"
        super().__init__(f"dsv4attn-vllm: {what}: expected {expected}, got {actual} -> {cure}, or {own}")


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
    """The version of vLLM, for the log. Raises RefusedError unless it was tested or `DSV4ATTN_VLLM_ANY_VERSION=1`."""
    _flag(SWITCH, default=True)
    found: str | None
    try:
        found = version("vllm")
    except PackageNotFoundError:  # a source tree on the path
        found = None
    # metadata may lack a version, whatever the type of `version` says
    found = found or "a vLLM without version"
    if found.partition("+")[0] not in TESTED and not _flag(ANY_VERSION, default=False):
        cure = f"install vllm=={TESTED[-1]}, set {ANY_VERSION}=1 to try this version"
        raise RefusedError("version of vLLM", expected=" or ".join(TESTED), actual=found, cure=cure)
    return found

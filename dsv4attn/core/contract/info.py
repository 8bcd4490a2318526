"""`BackendInfo`: the descriptor of a backend. It is importable without torch, triton or a vendor's package."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from attrs import field, frozen

from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem, Reason
from dsv4attn.errors import ArgumentError

__all__ = ["API_VERSION", "COMPUTING", "LAYER_PARTS", "BackendInfo", "Rank"]


class Rank(IntEnum):
    """The order in which automatic selection tries backends that are native to a device, highest first."""

    REFERENCE = 0
    GENERIC = 1
    VENDOR = 2


LAYER_PARTS = "compressor", "indexer", "selection", "hyper_connections"
"""Parts of the layer around attention; `op_names.LAYER_OPS` has their ops."""

COMPUTING = frozenset({
    "quantize_and_insert_k_cache", "qnorm_rope_kv_insert", "dequantize_and_gather_k_cache", "decode", "prefill",
    "inv_rope_o_proj",
})  # fmt: skip
"""Methods of a backend that compute when they are called."""

API_VERSION = "1.0"
"""Version of this contract. A minor step only adds. A backend of another major or a newer minor version is refused."""


@frozen(kw_only=True)
class BackendInfo:
    """The descriptor of a backend: its name, where it runs, and how to make it.

    name: what users write; unique among all backends.
    factory: `package.module:callable`, imported and called with the options after the backend was chosen.
    support: returns every reason against a whole problem. No reason means yes, and a yes never fails at launch.
    summary: one line for `dsv4attn backends`.
    native: kinds or archs, as shell patterns, on which it may be chosen automatically: ("sm_12*",).
    runs_on: further kinds or archs on which it may be chosen by name.
    rank: order of automatic selection, see `Rank`.
    packages: distributions that the implementation imports; without them the backend is refused.
    options: options that the factory takes, with their defaults.
    notes: for a backend with several kernels: returns lines that say how it would serve a problem.
    api: version of the contract that the backend was written for, as a literal: "1.0".
    layer_ops: the names of `LAYER_PARTS` whose ops the backend brings; the other ops are torch's.
    """

    name: str
    factory: str
    support: Callable[[DeviceFacts, Problem], Sequence[Reason]]
    summary: str
    native: tuple[str, ...]
    runs_on: tuple[str, ...] = ("*",)
    rank: Rank = Rank.VENDOR
    packages: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(factory=dict)
    notes: Callable[[DeviceFacts, Problem], Sequence[str]] | None = None
    api: str
    layer_ops: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Check the types: descriptors come from third parties, and are not checked again."""
        for name in ("name", "factory", "summary", "api"):
            self._check(name, isinstance(getattr(self, name), str), "a string")
        for name in ("native", "runs_on", "packages", "layer_ops"):
            value = getattr(self, name)
            strings = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
            self._check(name, strings, "a tuple of strings")
        self._check("factory", re.fullmatch(r"[\w.]+:\w+", self.factory), "'package.module:callable'")
        self._check("support", callable(self.support), "a function")
        self._check("notes", self.notes is None or callable(self.notes), "a function, or None")
        self._check("layer_ops", set(self.layer_ops) <= set(LAYER_PARTS), f"names of {', '.join(LAYER_PARTS)}")
        self._check("rank", isinstance(self.rank, Rank), "a Rank")
        self._check("options", isinstance(self.options, Mapping), "a dict")

    def _check(self, name: str, holds: object, expected: str) -> None:
        if not holds:
            raise ArgumentError(f"BackendInfo.{name}", expected=expected, actual=repr(getattr(self, name)))

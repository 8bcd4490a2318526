"""Checks that `register` and `patch` share: of their `backend` argument, and of the model type."""

from __future__ import annotations

from typing import Any

from dsv4attn.core.argument_checks import shown
from dsv4attn.core.contract.backend import Backend, Phase
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.config import refuse_v41
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import explain, registered, registry_of


def checked_backend(backend: object) -> str | Backend | None:
    """Return the argument after a look-up of its names. No backend is built.

    Raises UnknownNameError for names that no backend has, NoBackendError for those of plugins that could not be loaded,
    ArgumentError for a value that is neither a name nor a backend nor None.
    """
    if isinstance(backend, str):
        layer = ModelGeometry.preset("flash").layer_of_kind(LayerKind.SWA)
        for phase in Phase:
            problem = Problem.of(layer, phase=phase.value)
            request = explain(problem, backend=backend, device="cpu", registry=registry_of("reference")).request
            if request.value != "auto":
                registered(request.value)
    elif backend is not None and not isinstance(backend, Backend):
        cure = "pass a name, or what load_backend(name) returns"
        raise ArgumentError("backend", expected="a name, a backend or None", actual=shown(backend), hint=cure)
    return backend


def config_of(module: object) -> tuple[Any, Any]:
    """The configuration of a model or of one of its modules, and its model type; None for what is missing.

    Raises ArgumentError for a configuration of DeepSeek-V4.1.
    """
    config = getattr(module, "config", None)
    fields = {name: getattr(config, name, None) for name in ("model_type", "architectures")}
    refuse_v41(fields, "config of the model")
    return config, fields["model_type"]

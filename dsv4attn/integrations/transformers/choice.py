"""`checked_backend`: the `backend` argument of `register` and `patch`, with its names looked up."""

from __future__ import annotations

from dsv4attn.core.argument_checks import shown
from dsv4attn.core.contract.backend import Backend, Phase
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import explain, registered, registry_of

__all__ = ["checked_backend"]


def checked_backend(backend: object) -> str | Backend | None:
    """The argument; nothing is built.

    Raises UnknownNameError for names that no backend has, NoBackendError for those of plugins that could not be loaded,
    ArgumentError for what is neither a name nor a backend nor None.
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

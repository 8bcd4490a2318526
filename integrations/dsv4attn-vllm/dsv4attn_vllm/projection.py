"""The output projection in fp8: an option of the backend, set where `parts` asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from dsv4attn import Backend, Problem, resolve
from dsv4attn.config import PHASES, Settings, load_settings
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.integrations.engines import VLLM
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.parts import PROJECTION, VARIABLE, is_named


def settings_for(parts: frozenset[str], problems: Sequence[Problem], device: DeviceFacts | str) -> Settings:
    """The user's settings, with `projection=fp8` for the backends that will be chosen if that part is asked for.

    A value of the option in the configuration file stays.
    """
    settings = load_settings()
    if PROJECTION not in parts:
        return settings
    options = dict(settings.options)
    for phase in PHASES:
        of_phase = [problem for problem in problems if problem.phase == phase]
        info = resolve(of_phase, device=device, settings=settings).require().info
        if PROJECTION in info.options:
            options[info.name] = {**VLLM.options, **options.get(info.name, {})}
    return evolve(settings, options=options)


def parts_with(parts: frozenset[str], backend: Backend) -> frozenset[str]:
    """The parts that run with a backend. A backend that converts `wo_a` to bf16 has no projection in fp8.

    Raises RefusedError if the variable names that part.
    """
    if PROJECTION not in parts or backend.projects_fp8:
        return parts
    if is_named(PROJECTION):
        expected, cure = f"{PROJECTION}=fp8, which {VARIABLE} asks for", f"leave {PROJECTION} out of {VARIABLE}"
        raise RefusedError(f"backend {backend.name}", expected=expected, actual="bf16", cure=cure)
    return parts - {PROJECTION}

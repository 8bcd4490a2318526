"""The names in vLLM's modules that are replaced on each platform, and what replaces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from attrs import frozen

from dsv4attn_vllm.guard import GUARD, RefusedError

_originals: dict[str, Any] = {}


@frozen
class Replacement:
    """One replaced name.

    module: the module of vLLM whose global is replaced.
    name: the global, or a method of a class, "Class.method".
    by: what replaces it, as "module:name".
    """

    module: str
    name: str
    by: str

    @property
    def is_choice(self) -> bool:
        """Whether the name is vLLM's choice of a class, which looks at `--attention-backend`."""
        return self.name == "_select_dsv4_attn_cls"

    @property
    def attribute(self) -> str:
        """The name in the object that `resolve` finds."""
        return self.name.rpartition(".")[2]

    def resolve(self) -> tuple[Any, Any]:
        """The module or class, and what will replace the name in it. Raises RefusedError if either name is missing."""
        owner, _ = self._look_up(self.module, self.name)
        module, _, name = self.by.partition(":")
        _, replacement = self._look_up(module, name)
        return owner, replacement

    def _look_up(self, module: str, name: str) -> tuple[Any, Any]:
        """The module or class that has a name, and the value of the name."""
        try:
            owner: Any = import_module(module)
            *classes, attribute = name.split(".")
            for class_name in classes:
                owner = getattr(owner, class_name)
            return owner, getattr(owner, attribute)
        except (ImportError, AttributeError) as error:
            expected, cure = f"{module}.{name}", GUARD.install
            raise RefusedError(str(self), expected=expected, actual=error, cure=cure) from error

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _draft(platform: str, model: str = "deepseek_v4") -> Replacement:
    """The insert of context keys of a DSpark draft, which vLLM's layer class has no method for."""
    module = f"vllm.models.{model}.{platform}.dspark"
    return Replacement(module, "_insert_context_kv", "dsv4attn_vllm.attention:insert_context_kv")


def _layers(platform: str, name: str, by: str, model: str = "deepseek_v4") -> Replacement:
    return Replacement(f"vllm.models.{model}.{platform}.model", name, f"dsv4attn_vllm.{by}")


def _v41(platform: str, by: str) -> tuple[Replacement, ...]:
    layers = _layers(platform, "_select_dsv4_attn_cls", f"{by}:select_v41_attention", "deepseek_v41")
    return layers, _draft(platform, "deepseek_v41")


PLATFORMS: Mapping[str, tuple[Replacement, ...]] = {
    "cuda": (_layers("nvidia", "_select_dsv4_attn_cls", "cuda:select_attention"), _draft("nvidia")),
    "rocm": (_layers("amd", "DeepseekV4ROCMAiterMLAAttention", "rocm:ROCmAttention"), _draft("amd")),
    "xpu": (_layers("xpu", "DeepseekV4XPUAttention", "xpu:XPUAttention"), _draft("xpu")),
    # vLLM has no drafts on a CPU
    "cpu": (_layers("cpu", "DeepseekV4CPUAttention", "cpu:CPUAttention"),),
}
"""By platform, in vLLM's sense: every platform but the last three takes vLLM's modules for CUDA."""

V41_PLATFORMS: Mapping[str, tuple[Replacement, ...]] = {
    "cuda": _v41("nvidia", "cuda"),
    "rocm": _v41("amd", "rocm"),
}
"""The same for DeepSeek-V4.1, for which vLLM has no modules for Intel GPUs and CPUs."""


def original(name: str) -> Any:  # noqa: ANN401 - a class or a function of vLLM
    """What vLLM had under a replaced name, "module.name"."""
    return _originals[name]


def platform_name() -> str:
    """The platform of this process, as `vllm.models.deepseek_v4` chooses it."""
    from vllm.platforms import current_platform

    for name in ("rocm", "xpu", "cpu"):
        if getattr(current_platform, f"is_{name}")():
            return name
    return "cuda"


def replace(replacements: Sequence[Replacement]) -> None:
    """Replace names, or none of them if one cannot be; a second call changes nothing. Imports vLLM's modules.

    Raises RefusedError as `Replacement.resolve` does.
    """
    resolved = [(replacement, *replacement.resolve()) for replacement in replacements]
    for replacement, owner, value in resolved:
        _originals.setdefault(str(replacement), getattr(owner, replacement.attribute))
        setattr(owner, replacement.attribute, value)


def restore(replacements: Sequence[Replacement]) -> None:
    """Give vLLM its own under these names again."""
    for replacement in replacements:
        owner, _ = replacement.resolve()
        setattr(owner, replacement.attribute, _originals[str(replacement)])

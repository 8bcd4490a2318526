"""The contract between core and a backend.

A vendor's wheel imports it as `from dsv4attn.core.contract import Backend, BackendInfo, LayerOps`. A module is loaded
when one of its names is asked for: descriptors load where torch is not installed, and tables of ops need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4attn.core.contract.builder_ops import BuilderOps as BuilderOps
    from dsv4attn.core.contract.index_ops import IndexOps as IndexOps
    from dsv4attn.core.contract.layer_ops import LayerOps as LayerOps
    from dsv4attn.core.contract.rank_ops import RankOps as RankOps
    from dsv4attn.core.torch_ops.arguments import EntryNorm as EntryNorm
    from dsv4attn.core.torch_ops.arguments import MixWeights as MixWeights
    from dsv4attn.core.torch_ops.arguments import StatePages as StatePages
    from dsv4attn.core.torch_ops.arguments import TokenMap as TokenMap

_NEED_TORCH = {
    "LayerOps": "contract.layer_ops",
    "BuilderOps": "contract.builder_ops",
    "IndexOps": "contract.index_ops",
    "RankOps": "contract.rank_ops",
    "EntryNorm": "torch_ops.arguments",
    "MixWeights": "torch_ops.arguments",
    "StatePages": "torch_ops.arguments",
    "TokenMap": "torch_ops.arguments",
}
"""Names that need torch, and the modules of core that have them. `contract.backend` has every other public name."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of a package
    """A public name of the contract."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dsv4attn.core.{_NEED_TORCH.get(name, 'contract.backend')}"), name)

"""`TorchOps`: torch's layer ops as a class, for tests that change one of them; `table()` makes the `LayerOps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import fields

from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.torch_ops.indexer import IndexQuery


class TorchOps:
    """Each op is a static method; a subclass or an instance may have another, and `table` takes that."""

    if TYPE_CHECKING:
        compress_norm_rope_store: Callable[..., None]
        save_partial_states: Callable[..., None]
        indexer_q_rope_quant: Callable[..., IndexQuery]

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def table(self) -> LayerOps:
        """The ops as a backend has them."""
        return LayerOps(**{field.name: getattr(self, field.name) for field in fields(LayerOps)})


for _field in fields(LayerOps):
    setattr(TorchOps, _field.name, staticmethod(_field.default) if callable(_field.default) else _field.default)

"""Protocol of metadata extensions, which a backend may implement. Part of the contract."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["MetadataExtension"]

_Window = TypeVar("_Window")
_Compressed = TypeVar("_Compressed")


class MetadataExtension(Protocol[_Window, _Compressed]):
    """A backend's own fields of metadata, in buffers that live as long as the builder. Called once a step.

    Generic in the classes of the window's and of the compressed part's metadata, which stand above the contract.
    """

    def extend_swa(self, swa: _Window) -> _Window:
        """Metadata of the windows, in a class of the backend's own.

        swa: what core has built. Its tensors are read, not changed.
        """

    def extend_compressed(self, compressed: _Compressed) -> _Compressed:
        """The same for the compressed part of one kind of layers.

        compressed: what core has built for the layers of one kind and ratio.
        """

"""`WrappedBackend`: a backend around another one, for tools that watch or change what a backend does."""

from __future__ import annotations

from dsv4attn.core.contract.backend import OPTIONAL_MEMBERS, REQUIRED_MEMBERS, Backend

__all__ = ["WrappedBackend"]


class WrappedBackend(Backend):
    """A backend that has all members of another one, except for those that a subclass defines.

    wrapped: the other backend. Its members are read when the wrapper is made.
    """

    def __init__(self, wrapped: Backend) -> None:
        self.wrapped = wrapped
        classes = type(self).__mro__[: type(self).__mro__.index(WrappedBackend)]
        for name in (*REQUIRED_MEMBERS, *OPTIONAL_MEMBERS):
            if not any(name in vars(cls) for cls in classes):
                setattr(self, name, getattr(wrapped, name))

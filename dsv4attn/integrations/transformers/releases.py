"""`check_release`: refuses a transformers that was not tested; `ModelArguments`: the names that its model has for them.

transformers 5.24 renamed the argument `past_key_values` of every model to `cache`, and the same field of outputs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from dsv4attn.config import switched_on
from dsv4attn.core.argument_checks import shown
from dsv4attn.core.contract.device import release_of, version_of
from dsv4attn.errors import ArgumentError, UnsupportedError
from dsv4attn.integrations.variables import TRANSFORMERS_ANY_VERSION

TESTED = (5, 23), (5, 24)
"""The releases of transformers that the tests run with, oldest first. The extra `transformers` installs no other."""
RANGE = "transformers>={}.{},<{}.{}".format(*TESTED[0], TESTED[-1][0], TESTED[-1][1] + 1)
"""The requirement of the extra `transformers`."""
_NAMES_OF_CACHE = ("cache", "past_key_values")
"""Names of the argument that takes the cache, newest first. A model of a release has one of them."""


def check_release() -> None:
    """Raise UnsupportedError if the installed transformers was not tested, unless the variable allows any version."""
    version = version_of("transformers")
    if release_of(version) in TESTED or switched_on(TRANSFORMERS_ANY_VERSION):
        return
    raise UnsupportedError(
        "transformers",
        expected=f"release {' or '.join(f'{major}.{minor}' for major, minor in TESTED)}, which were tested",
        actual=version or "one without a version",
        hint=f"pip install '{RANGE}', or set {TRANSFORMERS_ANY_VERSION}=1 to try this version",
    )


@frozen
class ModelArguments:
    """The arguments of the forward of a model, as its release of transformers names them.

    order: names of all that it takes by position, in this order.
    cache: the name of the cache, one of `order`; outputs have the cache as a field of this name.
    """

    order: tuple[str, ...]
    cache: str

    @classmethod
    def of(cls, model: type) -> ModelArguments:
        """Read the signature of a class of models. Raises UnsupportedError if none of its arguments is a cache."""
        signature = inspect.signature(model.forward)  # type: ignore[attr-defined]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        _, *order = (name for name, parameter in signature.parameters.items() if parameter.kind in by_position)
        for name in _NAMES_OF_CACHE:
            if name in order:
                return cls(tuple(order), name)
        expected = f"an argument named {' or '.join(_NAMES_OF_CACHE)}"
        hint = f"pip install '{RANGE}', and patch a model whose forward was not replaced"
        actual = ", ".join(order) or "none by name"
        raise UnsupportedError(f"{model.__name__}.forward", expected=expected, actual=actual, hint=hint)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name.

        Raises TypeError for too many arguments and for one that is passed twice, and ArgumentError as `renamed` does.
        """
        if len(args) > len(self.order):
            raise TypeError(f"forward takes {len(self.order)} arguments by position, got {len(args)}")
        bound_arguments = dict(zip(self.order, args, strict=False))
        kwargs = self.renamed(kwargs)
        repeated = next((name for name in kwargs if name in bound_arguments), None)
        if repeated is not None:
            raise TypeError(f"forward got multiple values for argument {repeated!r}")
        return {**bound_arguments, **kwargs}

    def renamed(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments with the cache under the name that the model has for it.

        The older name is taken with a FutureWarning, as transformers does; the newer name wins over it. Raises
        ArgumentError for the newer name in a release that has the older one: transformers would ignore the cache.
        """
        arguments = dict(kwargs)
        newest = _NAMES_OF_CACHE[0]
        if self.cache == newest:
            for name in _NAMES_OF_CACHE[1:]:
                if name in arguments:
                    message = f"`{name}` is deprecated: this transformers calls the cache `{newest}`"
                    warnings.warn(message, FutureWarning, stacklevel=2)
                    older = arguments.pop(name)
                    arguments.setdefault(newest, older)
        elif arguments.get(newest) is not None:
            expected = f"none: transformers {version_of('transformers')} calls the cache {self.cache}"
            hint = f"pass {self.cache}=..."
            raise ArgumentError(newest, expected=expected, actual=shown(arguments[newest]), hint=hint)
        return arguments

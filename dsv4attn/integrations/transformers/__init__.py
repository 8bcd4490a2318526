"""Runs the DeepSeek-V4 of Hugging Face transformers on this package's backends.

    from dsv4attn.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="dsv4attn")

Or puts the whole attention of a loaded model on paged caches:

    from dsv4attn.integrations.transformers import patch

    patch(model, max_batch=4, max_len=8192)
    tokens = model.generate(**inputs)

Importing this module raises ImportError unless transformers 5.23 or newer is installed: the extra
`dsv4attn[transformers]`. transformers itself is imported by the first call of a function, or use of
`DeepseekV4PagedCache`. `patch` and `register` refuse a release that was not tested: see `releases.TESTED`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dsv4attn.core.contract.device import release_of, version_of
from dsv4attn.integrations.transformers.attention import register
from dsv4attn.integrations.transformers.entries import replay_entries
from dsv4attn.integrations.transformers.patching import patch, unpatch
from dsv4attn.integrations.transformers.releases import TESTED

if TYPE_CHECKING:
    from dsv4attn.integrations.transformers.paged_cache import DeepseekV4PagedCache

__all__ = ["DeepseekV4PagedCache", "patch", "register", "replay_entries", "unpatch"]


def _require_transformers() -> None:
    """Raise ImportError unless transformers is installed and new enough. A source tree without a version passes."""
    version = version_of("transformers") if find_spec("transformers") else "none"
    release = release_of(version)
    if version == "none" or (release is not None and release < TESTED[0]):
        needed = "transformers >= {}.{}, the first release that it is tested with".format(*TESTED[0])
        cure = "pip install 'dsv4attn[transformers]', with Python 3.11 or newer"
        raise ImportError(f"dsv4attn.integrations.transformers needs {needed}, found {version} -> {cure}")


if not TYPE_CHECKING:
    # hidden from type checkers, for which it would mean that every name exists.
    def __getattr__(name: str) -> object:
        """Import the class that imports transformers when it is used first."""
        if name != "DeepseekV4PagedCache":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dsv4attn.integrations.transformers.paged_cache import DeepseekV4PagedCache

        return DeepseekV4PagedCache


_require_transformers()

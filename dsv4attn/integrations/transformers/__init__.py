"""Runs the DeepSeek-V4 of Hugging Face transformers on this package's backends.

    from dsv4attn.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="dsv4attn")

Importing this module raises ImportError unless transformers 5.23 or newer is installed: the extra
`dsv4attn[transformers]`. transformers itself is imported by the first call of a function.
"""

from __future__ import annotations

from importlib.util import find_spec

from dsv4attn.core.device import release_of, version_of
from dsv4attn.integrations.transformers.attention import register

__all__ = ["register"]

_OLDEST = 5, 23
"""The first release whose `deepseek_v4` the tests compare with."""


def _require_transformers() -> None:
    """Raise ImportError unless transformers is installed and new enough. A source tree without a version passes."""
    version = version_of("transformers") if find_spec("transformers") else "none"
    release = release_of(version)
    if version == "none" or (release is not None and release < _OLDEST):
        needed = "transformers >= 5.23, the first release that it is tested with"
        cure = "pip install 'dsv4attn[transformers]', with Python 3.11 or newer"
        raise ImportError(f"dsv4attn.integrations.transformers needs {needed}, found {version} -> {cure}")


_require_transformers()

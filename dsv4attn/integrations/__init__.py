"""Parts of this package that plug into other libraries. These libraries do not import dsv4attn.

`dsv4attn.integrations.transformers` runs the DeepSeek-V4 of Hugging Face transformers. A library is imported only with
the module named after it. No other module of the package imports this one.
"""

from __future__ import annotations

"""`python -m dsv4attn`."""

from __future__ import annotations

from dsv4attn.tools.cli import main

main()

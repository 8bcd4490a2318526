"""`python -m dsv4attn`."""

from __future__ import annotations

from dsv4attn.cli import main

main()

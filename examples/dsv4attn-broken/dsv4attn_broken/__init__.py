"""Fails as a wheel does whose driver is not installed."""

from __future__ import annotations

raise ImportError("libbroken.so.3: cannot open shared object file")

"""Replay of a request trace through the attention: `trace` reads the requests, `scheduler` orders them into steps.

Both use plain integers; torch is not needed before a step runs.
"""

from __future__ import annotations

"""Replay of a request trace through the attention: what to serve (`trace`) and in which order (`scheduler`).

A trace is read and a schedule is planned with plain integers; torch is not needed before a step is run.
"""

from __future__ import annotations

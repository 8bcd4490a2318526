"""Replay of a request trace through the attention: `trace` reads the requests, and `engine` serves and checks them.

This module and `trace` use no torch, so that a command line can list and read what they have.
"""

from __future__ import annotations

CACHES = ("fp8_ds_mla", "bf16", "fp32")
"""Names of `ReplayConfig.cache`. With `fp32`, hidden states, queries and keys are fp32 too: no format rounds."""

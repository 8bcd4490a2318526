"""Words of a replay's settings. They stand alone, so that a command line can list them without importing torch."""

from __future__ import annotations

CACHES = ("fp8_ds_mla", "bf16", "fp32")
"""Names of `ReplayConfig.cache`. With `fp32`, hidden states, queries and keys are fp32 too: no format rounds."""

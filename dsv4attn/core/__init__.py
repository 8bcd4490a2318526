"""The device-neutral part of attention: shapes, bytes, index arithmetic, memory, orchestration.

Reading order: `model` (geometry and weights), `cache` (layouts), `metadata` (batches), `memory` (workspace and chunks),
`contract` (backends), `attention`, `layer` (the run of a layer), `context_parallel`.
"""

from __future__ import annotations

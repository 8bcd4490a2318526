"""The device-neutral part of attention: shapes, bytes, index arithmetic, memory, orchestration.

Reading order: `geometry` (models), `layout` (caches), `metadata` and `builder` (batches), `workspace` and `chunking`
(memory), `contract` (backends), `forward` (the run of a layer).
"""

from __future__ import annotations

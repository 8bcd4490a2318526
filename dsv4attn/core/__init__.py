"""Everything that is the same on every device: shapes, bytes, index arithmetic, memory, orchestration.

Reading order: `geometry` (what a model is), `layout` (what a cache is), `metadata` and `builder` (what a batch is),
`workspace` and `chunking` (how memory is bounded), `contract` (what a backend brings), `forward` (how a layer runs).
"""

from __future__ import annotations

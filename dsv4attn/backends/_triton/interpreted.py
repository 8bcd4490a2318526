"""Whether Triton's interpreter runs the kernels of this process. The import needs a Triton that is new enough."""

from __future__ import annotations

import triton

from dsv4attn.backends._triton.support import require_release

require_release()

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Read once: Triton decides it when a kernel is defined."""

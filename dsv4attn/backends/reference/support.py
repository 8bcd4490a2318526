"""What the reference accepts: everything the contract can say. Reasons here would be gaps in the definition."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.core.cache.key_records import Coding
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem, Reason, layout_reasons, layouts_coded_by


def support(device: DeviceFacts, problem: Problem) -> Sequence[Reason]:
    """All reasons why not."""
    reasons = [*layout_reasons(problem, layouts_coded_by(tuple(Coding)), rounds_to_fp4=True)]
    if problem.q_dtype not in ("bfloat16", "float32"):
        reasons.append(Reason("Q_DTYPE", problem.q_dtype, "bfloat16 or float32", "cast q"))
    if problem.capture:
        cure = "capture with another backend, or run eagerly"
        reasons.append(Reason("CAPTURE", "a captured graph", "eager calls: it reads lengths on the host", cure))
    return reasons

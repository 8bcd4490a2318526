"""Every form of the indexer's scores, compiled for Hopper: limits it breaks, and programs of a multiprocessor, as JSON.

So are the kernel that selects too, for the numbers of entries that arguments are, and the kernels that select by
groups: with "all" every form. A program of its own, since a process that interprets
kernels cannot compile them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from dsv4attn.backends._triton.compiling.aot import Outcome, compile_all, cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.selection import group_select, index_select
from dsv4attn.backends.sm90.tuning import MOST_BY_GROUPS
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.tools.cli.common import geometry_of
from dsv4attn.tools.cli.compile import bounds_of

ACCESS = re.compile(r"(?:ld|st|red|atom|cp\.async\S*)\.(?:\w+\.)*global")
LETS = "griddepcontrol.launch_dependents;"


def read(outcome: Outcome) -> dict[str, object]:
    programs = outcome.resources.occupancy if outcome.resources else 0
    # from Triton's cache
    kernel = cross_compile(outcome.variant, TARGETS["sm_90"])
    head, waits, rest = kernel.asm["ptx"].partition(".entry")[2].partition("griddepcontrol.wait;")
    early = len(ACCESS.findall(head)) + head.count(LETS)
    waits_first = bool(waits) and early == 0 and rest.count(LETS) > 0 and kernel.metadata.launch_pdl
    reasons = [*map(str, outcome.reasons), *([] if waits_first else ["does not wait before it touches memory"])]
    return {"reasons": reasons, "programs": programs}


def foreseen() -> bool:
    """Whether the backend names the forms that selection can ask for, which are then compiled before the first step."""
    bounds, facts = bounds_of(geometry_of("flash"), "e4m3fn"), DeviceFacts.named("sm_90")
    longest = max(layer.entries(bounds.limits.max_model_len) for layer in bounds.layers if layer.topk == 512)
    needed = {*index_logits.variants(), *index_select.variants(512), *group_select.variants(512, longest, arch="sm_90")}
    deterministic = {*Sm90Backend(deterministic=True).kernel_variants(bounds, facts)}
    return needed <= {*Sm90Backend().kernel_variants(bounds, facts)} and not needed & deterministic


def by_groups(topk: int, *, every: bool) -> Iterator[Variant]:
    """Forms of the kernels that select by groups; without `every`: for 32,768 entries, of which groups are chosen."""
    for variant in group_select.variants(topk, 262_144 if every else MOST_BY_GROUPS, arch="sm_90"):
        groups = dict(variant.constants).get("GROUPS", MOST_BY_GROUPS // 8)
        if every or (groups == MOST_BY_GROUPS // 8 and dict(variant.types)["MAXIMA"] != "none"):
            yield variant


if __name__ == "__main__":
    forms = [read(outcome) for outcome in compile_all(index_logits.variants(logits=True), TARGETS["sm_90"])]
    topks, every = [int(word) for word in sys.argv[1:] if word != "all"], "all" in sys.argv
    selecting = [variant for topk in topks for variant in index_select.variants(topk)]
    selected = [read(outcome) for outcome in compile_all(selecting, TARGETS["sm_90"])]
    grouped = dict.fromkeys(variant for topk in topks for variant in by_groups(topk, every=every))
    groups = [read(outcome) for outcome in compile_all(grouped, TARGETS["sm_90"])]
    print(json.dumps({"foreseen": foreseen(), "forms": forms, "selecting": selected, "groups": groups}))

"""What is launched around FlashInfer, compiled for its cards: limits it breaks, and whether it moves 16 bytes."""

from __future__ import annotations

import json
import re

from dsv4attn.backends._triton.compiling.aot import compile_all, cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends.sm120.flashinfer_launches import variants

TARGET = TARGETS["sm_120"]

if __name__ == "__main__":
    both = False, True
    forms = [
        form
        for padded in both
        for copies in both
        for form in variants(both, both, padded=padded, copies=copies, aligned=False)
    ]
    results = {}
    for outcome in compile_all(dict.fromkeys(forms), TARGET):
        form = outcome.variant
        types, constants = dict(form.types), dict(form.constants)
        heads = "moves heads" if "*bf16" in (types.get("wide_q"), types.get("wide_out")) else "none"
        given = "".join("1" if kind.startswith("*") else "0" for _, kind in form.types)
        text = cross_compile(form, TARGET).asm["ptx"]
        wide = all(re.search(rf"{move}\.global.*\.v4\.b32", text) for move in ("ld", "st"))
        name = f"{form.name} {constants['UNIT']} {heads} {given}"
        results[name] = {"reasons": [str(reason) for reason in outcome.reasons], "wide": wide}
    print(json.dumps(results))

#!/usr/bin/env bash
# tl.atomic_add becomes a compare-and-swap loop on some devices, fp32 on gfx90a among them.
#
# Expectation: fp32 additions are one instruction everywhere, and only bf16 on old devices needs a loop.
# Behaviour: gfx90a gets a loop around cmpswap for fp32, fp16, bf16 and fp64 alike, in both versions; gfx1201 for fp64
#   only; sm_80 for bf16 only. gfx942, gfx950, sm_90 and sm_120 add all four in one instruction.
# Who is hurt: split-K and partial sums on MI200: each element costs a load, a compare and retries under contention.
# Versions: triton 3.6.0 and 3.9.0. Seen on 2026-11-28 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
pip="${PYTHON:-python3} -m pip --disable-pip-version-check install --quiet --no-compile --no-deps"
$pip --target t3.6.0 triton==3.6.0
$pip --target t3.9.0 triton==3.9.0

cat > probe.py <<'PROBE'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, arguments, target, constants=None, **options):
    """The text of a kernel for a target, as PTX or AMD assembly. Pointers are multiples of 16 bytes, as torch's are."""
    signature = arguments | dict.fromkeys(constants or {}, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants or {}, attrs=attributes)
    amd = target.startswith("gfx")
    place = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32) if amd else GPUTarget("cuda", int(target), 32)
    return triton.compile(source, target=place, options=options)


def text_of(result):
    return result.asm["ptx" if "ptx" in result.asm else "amdgcn"]


@triton.jit
def add(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out + i, tl.load(x + i))


for target in ("80", "90", "120", "gfx90a", "gfx942", "gfx950", "gfx1201"):
    loops = []
    for dtype in ("fp32", "fp16", "bf16", "fp64"):
        text = text_of(compiled(add, {"x": "*" + dtype, "out": "*" + dtype}, target, {"N": 1024}))
        loops.append(f"{dtype} {'loop' if re.search(r'cmpswap|[.]cas[.]', text) else 'one instruction'}")
    print(triton.__version__, target, ", ".join(loops))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen

cat > expected <<'EXPECTED'
3.6.0 80 fp32 one instruction, fp16 one instruction, bf16 loop, fp64 one instruction
3.6.0 90 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.6.0 120 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.6.0 gfx90a fp32 loop, fp16 loop, bf16 loop, fp64 loop
3.6.0 gfx942 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.6.0 gfx950 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.6.0 gfx1201 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 loop
3.9.0 80 fp32 one instruction, fp16 one instruction, bf16 loop, fp64 one instruction
3.9.0 90 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.9.0 120 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.9.0 gfx90a fp32 loop, fp16 loop, bf16 loop, fp64 loop
3.9.0 gfx942 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.9.0 gfx950 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 one instruction
3.9.0 gfx1201 fp32 one instruction, fp16 one instruction, bf16 one instruction, fp64 loop
EXPECTED
cat seen
diff expected seen
echo "unchanged"

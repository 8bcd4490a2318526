#!/usr/bin/env bash
# tl.clamp of NaN uses other instructions on sm_90 than on sm_80 and AMD, if the limits are symmetric.
#
# Expectation: tl.clamp(NaN, -2, 2) is one of the two limits, the same on every device and for any limits.
# Behaviour: from sm_90 on, limits of equal size become one minimum of absolute values that keeps the sign.
#   What that gives for NaN only a GPU shows (docs/numerics.md has it). Other limits, and sm_80, use a maximum and then
#   a minimum, and so give the lower limit: the maximum of NaN and -2 is -2. AMD's compiler folds the clamp to the lower
#   limit for any limits. min(max(x, low), high) gives the lower limit everywhere.
# Who is hurt: quantisers that clamp before a cast: NaN becomes another limit by the device.
# Versions: triton 3.9.0. Seen on 2026-11-28 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
pip="${PYTHON:-python3} -m pip --disable-pip-version-check install --quiet --no-compile --no-deps"
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
def clamp(x, out, LOW: tl.constexpr, HIGH: tl.constexpr):
    i = tl.arange(0, 128)
    tl.store(out + i, tl.clamp(tl.load(x + i), LOW, HIGH))


@triton.jit
def clamp_nan(out, LOW: tl.constexpr, HIGH: tl.constexpr):
    tl.store(out + tl.arange(0, 1), tl.clamp(tl.full([1], float("nan"), tl.float32), LOW, HIGH))


for low, high in ((-2.0, 2.0), (-3.0, 2.0)):
    for target in ("80", "90", "120"):
        text = text_of(compiled(clamp, {"x": "*fp32", "out": "*fp32"}, target, {"LOW": low, "HIGH": high}))
        print(f"clamp to {low}, {high} on sm_{target}:", ", ".join(re.findall(r"\b(?:min|max)\.\S*f32", text)))
    for target in ("gfx942", "gfx1201"):
        text = text_of(compiled(clamp_nan, {"out": "*fp32"}, target, {"LOW": low, "HIGH": high}))
        folded = re.findall(r"v\d+, (-?\d\.0|0x[c4]0[0-9a-f]+)\b", text)
        print(f"clamp of NaN to {low}, {high} folded for {target}:", ", ".join(folded))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py > seen

cat > expected <<'EXPECTED'
clamp to -2.0, 2.0 on sm_80: max.f32, min.f32
clamp to -2.0, 2.0 on sm_90: min.xorsign.abs.f32
clamp to -2.0, 2.0 on sm_120: min.xorsign.abs.f32
clamp of NaN to -2.0, 2.0 folded for gfx942: -2.0
clamp of NaN to -2.0, 2.0 folded for gfx1201: -2.0
clamp to -3.0, 2.0 on sm_80: max.f32, min.f32
clamp to -3.0, 2.0 on sm_90: max.f32, min.f32
clamp to -3.0, 2.0 on sm_120: max.f32, min.f32
clamp of NaN to -3.0, 2.0 folded for gfx942: 0xc0400000
clamp of NaN to -3.0, 2.0 folded for gfx1201: 0xc0400000
EXPECTED
cat seen
diff expected seen
echo "unchanged"

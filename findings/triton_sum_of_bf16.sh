#!/usr/bin/env bash
# tl.sum of bf16 and fp16 adds in 16 bits, at every step, on every device.
#
# Expectation: a sum of 1,024 bf16 values is taken in fp32 and rounded once, as torch does, or at least in one way on
#   all devices.
# Behaviour: every partial sum is a bf16 value: by add.bf16 on sm_90 and sm_120, by fma.rn.bf16 on sm_80, and on
#   gfx942 by an fp32 addition whose result is rounded to bf16 before the next one (v_bfe_u32 is part of that
#   rounding). 1,024 ones are right only because a tree adds equal halves; 256 + 1 + 1 is 256 or 258, depending on who
#   holds which element. An integer input is promoted, bf16 and fp16 are not: `tl.sum(x.to(tl.float32))` is needed.
# Who is hurt: norms, softmax sums and logits of kernels that load bf16 and sum without a cast.
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
def total(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N))).to(tl.float32))


NAMES = r"add\.(?:rn\.)?(?:bf16|f16|f32)(?:x2)?|fma\.rn\.(?:bf16|f32)(?:x2)?|cvt\.rn\.bf16\w*\.f32|v_(?:pk_)?add_f(?:16|32)|v_bfe_u32"
for dtype in ("bf16", "fp16", "i8"):
    for target in ("80", "90", "120", "gfx942"):
        result = compiled(total, {"x": "*" + dtype, "out": "*fp32"}, target, {"N": 1024})
        reduced = re.search(r"tt\.reduce.*?\}\) : \(tensor<1024x(\w+)>", result.asm["ttir"], re.DOTALL)[1]
        names = set(re.findall(NAMES, text_of(result)))
        print(dtype, target, "reduces", reduced, "by", ", ".join(sorted(names)) if dtype != "i8" else "integer additions")
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py > seen

cat > expected <<'EXPECTED'
bf16 80 reduces bf16 by fma.rn.bf16, fma.rn.bf16x2
bf16 90 reduces bf16 by add.bf16, add.bf16x2
bf16 120 reduces bf16 by add.bf16, add.bf16x2
bf16 gfx942 reduces bf16 by v_add_f32, v_bfe_u32
fp16 80 reduces f16 by add.f16, add.f16x2
fp16 90 reduces f16 by add.f16, add.f16x2
fp16 120 reduces f16 by add.f16, add.f16x2
fp16 gfx942 reduces f16 by v_add_f16, v_pk_add_f16
i8 80 reduces i32 by integer additions
i8 90 reduces i32 by integer additions
i8 120 reduces i32 by integer additions
i8 gfx942 reduces i32 by integer additions
EXPECTED
cat seen
diff expected seen
echo "unchanged"

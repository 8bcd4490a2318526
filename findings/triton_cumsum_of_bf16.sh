#!/usr/bin/env bash
# The sums of tl.cumsum over bf16 are fp32 in Triton 3.6 and bf16 in Triton 3.9.
#
# Expectation: a running sum of bf16 is added in fp32 in every version, and has one type.
# Behaviour: 3.6 promotes the input, so the result has type fp32 and the sums are exact far beyond 256. 3.9 keeps
#   bf16: the result has type bf16, and sm_90 adds bf16 to bf16, so that a running count of ones stops at 256. A
#   kernel that compiles with both gives other numbers, without a warning. In 3.9's interpreter the same line gives
#   garbage, where 3.6's was right.
# Who is hurt: whoever moves a kernel with a running sum, such as a compaction or a sampler, from torch's Triton 3.6
#   to 3.9.
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
def running_sum(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.cumsum(tl.load(x + i))
    tl.static_assert(total.dtype == tl.float32 or total.dtype == tl.bfloat16)
    tl.store(out + i, total.to(tl.uint16 if total.dtype == tl.bfloat16 else tl.uint32, bitcast=True).to(tl.int32))


for target in ("90", "gfx942"):
    result = compiled(running_sum, {"x": "*bf16", "out": "*i32"}, target, {"N": 1024})
    scan = re.search(r"tt\.scan.*?\}\) : \(tensor<1024x(\w+)>", result.asm["ttir"], re.DOTALL)[1]
    additions = sorted(set(re.findall(r"add\.(?:rn\.)?(?:bf16|f32)|fma\.rn\.bf16|v_(?:pk_)?add_f32", text_of(result))))
    print(triton.__version__, target, "the scan has type", scan, "and adds by", ", ".join(additions))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen

cat > expected <<'EXPECTED'
3.6.0 90 the scan has type f32 and adds by add.f32
3.6.0 gfx942 the scan has type f32 and adds by v_add_f32
3.9.0 90 the scan has type bf16 and adds by add.bf16
3.9.0 gfx942 the scan has type bf16 and adds by v_add_f32, v_pk_add_f32
EXPECTED
cat seen
diff expected seen
echo "unchanged"

#!/usr/bin/env bash
# tl.dot of int8: the old matrix unit on sm_100 with Triton 3.6, and sums that saturate on some devices only.
#
# Expectation: int8 products use the newest matrix unit of each device, and int32 sums wrap everywhere.
# Behaviour: for sm_100 Triton 3.6 emits mma.sync, the instruction of Ampere, and 3.9 tcgen05 kind::i8; both use
#   tcgen05 for fp8. mma.sync is emitted with satfinite, so sums beyond 2^31 stay at the limit on sm_80, sm_120 and
#   (3.6) sm_100, and the wgmma of sm_90 and tcgen05 carry no such flag.
# Who is hurt: W8A8 kernels on B200 with the Triton that torch 2.11 brings, and whoever compares overflowing sums of
#   two devices.
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
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    sums = tl.zeros([M, N], ACC)
    for i in range(0, 16):
        x = tl.load(a + m[:, None] * (K * 16) + i * K + k[None, :])
        y = tl.load(b + (i * K + k[:, None]) * N + n[None, :])
        sums = tl.dot(x, y, sums, out_dtype=ACC)
    tl.store(out + m[:, None] * N + n[None, :], sums)


SIZES = {"M": 128, "N": 64, "K": 64}
for name, dtype, sums, accumulator in (("int8", "i8", "i32", tl.int32), ("e4m3", "fp8e4nv", "fp32", tl.float32)):
    for target in ("80", "90", "100", "120"):
        if (dtype, target) in {("fp8e4nv", "80"), ("fp8e4nv", "120")}:
            continue
        arguments = {"a": "*" + dtype, "b": "*" + dtype, "out": "*" + sums}
        result = compiled(product, arguments, target, {**SIZES, "ACC": accumulator}, num_warps=4)
        found = re.findall(r"(tcgen05\.mma|wgmma\.mma_async|mma\.sync)\S*?(\.satfinite)?[.\s]", text_of(result))
        unit = sorted({a for a, _ in found})
        print(triton.__version__, name, "sm_" + target, ", ".join(unit), "satfinite" if ".satfinite" in text_of(result) else "")
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen

cat > expected <<'EXPECTED'
3.6.0 int8 sm_80 mma.sync satfinite
3.6.0 int8 sm_90 wgmma.mma_async 
3.6.0 int8 sm_100 mma.sync satfinite
3.6.0 int8 sm_120 mma.sync satfinite
3.6.0 e4m3 sm_90 wgmma.mma_async 
3.6.0 e4m3 sm_100 tcgen05.mma 
3.9.0 int8 sm_80 mma.sync satfinite
3.9.0 int8 sm_90 wgmma.mma_async 
3.9.0 int8 sm_100 tcgen05.mma 
3.9.0 int8 sm_120 mma.sync satfinite
3.9.0 e4m3 sm_90 wgmma.mma_async 
3.9.0 e4m3 sm_100 tcgen05.mma 
EXPECTED
cat seen
diff expected seen
echo "unchanged"

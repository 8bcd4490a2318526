#!/usr/bin/env bash
# warp_specialize=True takes the software pipeline away on sm_80, instead of being ignored.
#
# Expectation: tl.range(warp_specialize=True) is ignored where warps cannot be specialised (sm_80, sm_120, gfx942),
#   and works on sm_100.
# Behaviour: on sm_80 the flag keeps the warps as they are and drops the pipeline: no asynchronous copies are left (48
#   without the flag), and half of the shared memory. On sm_120 it is not ignored: 8 warps, and 98,556 of the 101,376
#   bytes that a block may have. On sm_90 it makes 12 warps. gfx942 ignores it. No device warns.
# Who is hurt: kernels tuned on Hopper or Blackwell and run on an A100: loads are no longer hidden.
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
def product(a, b, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPECIALIZE: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    left = tl.make_tensor_descriptor(a, [M, K * steps], [K * steps, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [K * steps, N], [N, 1], [K, N])
    sums = tl.zeros([M, N], tl.float32)
    for i in tl.range(0, steps, warp_specialize=SPECIALIZE):
        sums = tl.dot(left.load([0, i * K]), right.load([i * K, 0]), sums)
    tl.store(out + m[:, None] * N + n[None, :], sums)


for target in ("80", "90", "120", "gfx942"):
    for flag in (False, True):
        constants = {"M": 128, "N": 128, "K": 64, "SPECIALIZE": flag}
        arguments = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "steps": "i32"}
        result = compiled(product, arguments, target, constants, num_warps=4, num_stages=3)
        copies = len(re.findall(r"cp\.async\.c[ag]", text_of(result)))
        print(triton.__version__, target, f"warp_specialize={flag}: {result.metadata.num_warps} warps, {copies} cp.async")
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen

cat > expected <<'EXPECTED'
3.6.0 80 warp_specialize=False: 4 warps, 48 cp.async
3.6.0 80 warp_specialize=True: 4 warps, 0 cp.async
3.6.0 90 warp_specialize=False: 4 warps, 0 cp.async
3.6.0 90 warp_specialize=True: 12 warps, 0 cp.async
3.6.0 120 warp_specialize=False: 4 warps, 0 cp.async
3.6.0 120 warp_specialize=True: 8 warps, 0 cp.async
3.6.0 gfx942 warp_specialize=False: 4 warps, 0 cp.async
3.6.0 gfx942 warp_specialize=True: 4 warps, 0 cp.async
3.9.0 80 warp_specialize=False: 4 warps, 48 cp.async
3.9.0 80 warp_specialize=True: 4 warps, 0 cp.async
3.9.0 90 warp_specialize=False: 4 warps, 0 cp.async
3.9.0 90 warp_specialize=True: 12 warps, 0 cp.async
3.9.0 120 warp_specialize=False: 4 warps, 0 cp.async
3.9.0 120 warp_specialize=True: 8 warps, 0 cp.async
3.9.0 gfx942 warp_specialize=False: 4 warps, 0 cp.async
3.9.0 gfx942 warp_specialize=True: 4 warps, 0 cp.async
EXPECTED
cat seen
diff expected seen
echo "unchanged"

#!/usr/bin/env bash
# A row-major fp8 operand of tl.dot keeps wgmma on sm_90, and loses its asynchronous copies.
#
# Expectation: fp8 wants both operands with contiguous k; for a row-major B Triton transposes in shared memory or
#   gives up wgmma.
# Behaviour: wgmma stays, so the usual check passes. But B is loaded into registers, permuted bytewise (48 PRMT, 64
#   more shared stores) and no longer loaded ahead: 4 plain loads in place of 12 asynchronous copies, and a third less
#   shared memory. bf16 has none of this. On sm_120 the cost is 96 PRMT and 128 more shared loads.
# Who is hurt: fp8 weights stored [K, N]: the loop waits for every load of B.
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

import os
import subprocess
from collections import Counter

NVDISASM = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")


@triton.jit
def product(a, b, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROW_MAJOR: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    sums = tl.zeros([M, N], tl.float32)
    for i in range(0, steps):
        x = tl.load(a + m[:, None] * 4096 + i * K + k[None, :])
        if ROW_MAJOR:
            y = tl.load(b + (i * K + k[:, None]) * N + n[None, :])
        else:
            y = tl.load(b + n[:, None] * 4096 + (i * K + k)[None, :]).T
        sums = tl.dot(x, y, sums)
    tl.store(out + m[:, None] * N + n[None, :], sums)


for target in ("90", "120"):
    for dtype in ("fp8e4nv", "bf16"):
        for row_major in (False, True):
            constants = {"M": 128, "N": 128, "K": 64, "ROW_MAJOR": row_major}
            arguments = {"a": "*" + dtype, "b": "*" + dtype, "out": "*fp32", "steps": "i32"}
            result = compiled(product, arguments, target, constants, num_warps=4, num_stages=3)
            with open("kernel.cubin", "wb") as file:
                file.write(result.asm["cubin"])
            listing = subprocess.run([NVDISASM, "-c", "kernel.cubin"], capture_output=True, text=True, check=True).stdout
            counts = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", listing, re.MULTILINE))
            names = ("QGMMA", "HGMMA", "QMMA", "HMMA", "LDGSTS", "LDG", "PRMT", "LDS", "STS")
            shown = " ".join(f"{name} {counts[name]}" for name in names if counts[name])
            print(target, dtype, "row-major" if row_major else "k-major", f"shared {result.metadata.shared}:", shown)
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py > seen

cat > expected <<'EXPECTED'
90 fp8e4nv k-major shared 49152: QGMMA 4 LDGSTS 24 LDS 32 STS 32
90 fp8e4nv row-major shared 32768: QGMMA 4 LDGSTS 12 LDG 4 PRMT 48 LDS 32 STS 96
90 bf16 k-major shared 98304: HGMMA 8 LDGSTS 48 LDS 32 STS 32
90 bf16 row-major shared 98304: HGMMA 8 LDGSTS 48 LDS 32 STS 32
120 fp8e4nv k-major shared 32768: QMMA 64 LDGSTS 24 LDS 32 STS 32
120 fp8e4nv row-major shared 32768: QMMA 64 LDGSTS 36 PRMT 96 LDS 160 STS 32
120 bf16 k-major shared 65536: HMMA 128 LDGSTS 48 LDS 32 STS 32
120 bf16 row-major shared 65536: HMMA 128 LDGSTS 48 LDS 32 STS 32
EXPECTED
cat seen
diff expected seen
echo "unchanged"

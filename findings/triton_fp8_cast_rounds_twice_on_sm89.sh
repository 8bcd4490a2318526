#!/usr/bin/env bash
# Triton 3.6 casts fp32 to e4m3 in two steps on sm_89 (RTX 4090, L4, L40), and rounds 1.0625 + 2^-12 to 1.
#
# Expectation: sm_89 has an instruction that rounds fp32 to e4m3 once, and a cast uses it, as on sm_90.
# Behaviour: Triton 3.6 cuts fp32 to fp16 first (cvt.rz.f16.f32), then rounds fp16 to nearest even. A value just above a
#   tie becomes the tie and goes to the even neighbour: 1.0625 + 2^-12 gives 1.0, and 1.125 is nearer. 3.9 rounds once.
#   e5m2 in 3.6 is cast in the same two steps on sm_89, and by bit operations that round ties up and do not saturate on
#   sm_80. 3.9 rounds once on sm_89, and to odd and then to even on sm_80, which is right. Each process here compiles for
#   one device only, because 3.6 chooses for e5m2 when it first converts, and keeps that for all devices of the process:
#   a process that compiles for sm_89 first gives ptxas an instruction that sm_80 does not have.
# Who is hurt: kernels whose codes are compared between an L40 and an H100, or with torch.
# Versions: triton 3.6.0 and 3.9.0, numpy 2.4.6, ml_dtypes 0.6.0. Seen on 2026-11-29 with Python 3.11, without a GPU: the
#   instructions are read in PTX, and their rounding is computed by numpy and ml_dtypes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
pip="${PYTHON:-python3} -m pip --disable-pip-version-check install --quiet --no-compile --no-deps"
$pip --target t3.6.0 triton==3.6.0
$pip --target t3.9.0 triton==3.9.0
$pip --target numbers numpy==2.4.6 ml_dtypes==0.6.0

cat > probe.py <<'PROBE'
import contextlib
import io
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def cast(x, out, FORMAT: tl.constexpr):
    i = tl.arange(0, 512)
    tl.store(out + i, tl.load(x + i).to(FORMAT).to(tl.uint8, bitcast=True))


def conversions(target, format_):
    """The instructions that convert or change bits, in their order."""
    source = ASTSource(
        cast, {"x": "*fp32", "out": "*u8", "FORMAT": "constexpr"}, constexprs={"FORMAT": format_},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(2)},
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            text = triton.compile(source, target=GPUTarget("cuda", target, 32)).asm["ptx"]
    except Exception as error:
        return type(error).__name__
    found = re.findall(r"\bcvt\.r[nz]\.\S+|\bmin\.f16x2|\badd\.u32\s[^;]*0x00\w{6}", text)
    return "; ".join(dict.fromkeys(" ".join(word.split()) for word in found))


targets = [int(target) for target in sys.argv[1].split(",")]
for target in targets:
    for format_ in (tl.float8e4nv, tl.float8e5) if len(targets) == 1 and target > 80 else (tl.float8e5,):
        print(triton.__version__, f"{format_}, sm_{target} in a process for {sys.argv[1]}:", conversions(target, format_))
PROBE
cat > rounding.py <<'PROBE'
import ml_dtypes
import numpy as np

x = np.array([1.0625 + 2.0**-12], dtype=np.float32)
cut = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # 10 fraction bits, as cvt.rz.f16.f32 leaves them
once, twice = (float(y.astype(ml_dtypes.float8_e4m3fn)[0]) for y in (x, cut))
print(f"1.0625 + 2^-12 to e4m3fn: {once} in one step, {twice} in two")
PROBE
for version in t3.6.0 t3.9.0; do
    for targets in 80 89 90 89,80; do
        TRITON_CACHE_DIR="$folder/cache/$version/$targets" PYTHONPATH=$version "${PYTHON:-python3}" probe.py $targets >> seen 2> log || { cat log; exit 1; }
    done
done
PYTHONPATH=numbers "${PYTHON:-python3}" rounding.py >> seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
3.6.0 fp8e5, sm_80 in a process for 80: cvt.rz.f16.f32; add.u32 a0, a0, 0x00800080; add.u32 a1, a1, 0x00800080
3.6.0 fp8e4nv, sm_89 in a process for 89: cvt.rz.f16.f32; cvt.rn.satfinite.e4m3x2.f16x2
3.6.0 fp8e5, sm_89 in a process for 89: cvt.rz.f16.f32; cvt.rn.satfinite.e5m2x2.f16x2
3.6.0 fp8e4nv, sm_90 in a process for 90: cvt.rn.satfinite.e4m3x2.f32
3.6.0 fp8e5, sm_90 in a process for 90: cvt.rn.satfinite.e5m2x2.f32
3.6.0 fp8e5, sm_89 in a process for 89,80: cvt.rz.f16.f32; cvt.rn.satfinite.e5m2x2.f16x2
3.6.0 fp8e5, sm_80 in a process for 89,80: PTXASError
3.9.0 fp8e5, sm_80 in a process for 80: cvt.rz.f16x2.f32; min.f16x2; add.u32 a0, a0, 0x007f007f; add.u32 a1, a1, 0x007f007f
3.9.0 fp8e4nv, sm_89 in a process for 89: cvt.rn.satfinite.e4m3x2.f32
3.9.0 fp8e5, sm_89 in a process for 89: cvt.rn.satfinite.e5m2x2.f32
3.9.0 fp8e4nv, sm_90 in a process for 90: cvt.rn.satfinite.e4m3x2.f32
3.9.0 fp8e5, sm_90 in a process for 90: cvt.rn.satfinite.e5m2x2.f32
3.9.0 fp8e5, sm_89 in a process for 89,80: cvt.rn.satfinite.e5m2x2.f32
3.9.0 fp8e5, sm_80 in a process for 89,80: cvt.rz.f16x2.f32; min.f16x2; add.u32 a0, a0, 0x007f007f; add.u32 a1, a1, 0x007f007f
1.0625 + 2^-12 to e4m3fn: 1.125 in one step, 1.0 in two
EXPECTED
cat seen
diff expected seen
echo "unchanged"

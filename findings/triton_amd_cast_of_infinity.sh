#!/usr/bin/env bash
# For AMD, Triton casts infinity to the largest e4m3fn, and to NaN in e4m3fnuz.
#
# Expectation: a cast of infinity to an 8-bit float gives NaN in both forms of e4m3, as ml_dtypes does, or saturates
#   in both.
# Behaviour: the OCP forms saturate infinity (e4m3fn 0x7e, e5m2 0x7b, although e5m2 has an infinity), and the FNUZ
#   forms saturate finite numbers but give NaN (0x80) for infinity. The values are read from constants that the
#   compiler folded, where it converts in software.
# Who is hurt: guards that look for NaN after a cast: they see an overflow on an MI200 with FNUZ bytes, and none with
#   OCP bytes.
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
def cast(out, VALUE: tl.constexpr, D: tl.constexpr):
    byte = tl.full([1], VALUE, tl.float32).to(D).to(tl.uint8, bitcast=True)
    tl.store(out + tl.arange(0, 1), byte.to(tl.int32) * 65536 + 1)


def folded(value, dtype):
    """The byte of a constant that is cast, from the word that the kernel stores."""
    text = text_of(compiled(cast, {"out": "*i32"}, "gfx90a", {"VALUE": value, "D": dtype}))
    words = [int(word, 0) for word in re.findall(r"v_mov_b32_e32 v\d+, (0x[0-9a-f]+|\d+)", text)]
    [word] = [word for word in words if word % 65536 == 1]
    return f"0x{word >> 16:02x}"


for dtype in (tl.float8e4nv, tl.float8e5, tl.float8e4b8, tl.float8e5b16):
    values = (464.0, 500.0, 61440.0, float("inf"), float("nan"))
    print(dtype, ", ".join(f"{value}: {folded(value, dtype)}" for value in values))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py > seen

cat > expected <<'EXPECTED'
fp8e4nv 464.0: 0x7e, 500.0: 0x7e, 61440.0: 0x7e, inf: 0x7e, nan: 0x7f
fp8e5 464.0: 0x5f, 500.0: 0x60, 61440.0: 0x7b, inf: 0x7b, nan: 0x7e
fp8e4b8 464.0: 0x7f, 500.0: 0x7f, 61440.0: 0x7f, inf: 0x80, nan: 0x80
fp8e5b16 464.0: 0x63, 500.0: 0x64, 61440.0: 0x7f, inf: 0x80, nan: 0x80
EXPECTED
cat seen
diff expected seen
echo "unchanged"

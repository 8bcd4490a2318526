#!/usr/bin/env bash
# tl.multiple_of of pointers counts bytes, not elements.
#
# Expectation: tl.multiple_of(pointers, 4) says that a pointer to int32 is a multiple of four elements, so loads have
#   16 bytes.
# Behaviour: for pointers the number is in bytes. With 4 the loads of int32 stay 4 bytes wide, with 16 they become 16
#   bytes. For uint8 both readings agree, so a kernel that was written for bytes and then takes words loses its wide
#   loads: four times as many instructions, and nothing says so.
# Who is hurt: gathers of cache records whose row offset is not known to the compiler.
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
def copy(x, out, offset, N: tl.constexpr, MULTIPLE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(tl.multiple_of(x + offset + i, MULTIPLE)))


for dtype in ("i32", "bf16", "u8"):
    found = []
    for multiple in (2, 4, 8, 16):
        arguments = {"x": "*" + dtype, "out": "*" + dtype, "offset": "i32"}
        text = text_of(compiled(copy, arguments, "90", {"N": 2048, "MULTIPLE": multiple}))
        loads = re.findall(r"ld\.global\.(?:v(\d)\.)?b(\d+)", text)
        found.append(f"{multiple}: {len(loads)} loads of {max(int(v or 1) * int(bits) // 8 for v, bits in loads)} bytes")
    print(triton.__version__, dtype, "; ".join(found))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen

cat > expected <<'EXPECTED'
3.6.0 i32 2: 16 loads of 4 bytes; 4: 16 loads of 4 bytes; 8: 8 loads of 8 bytes; 16: 4 loads of 16 bytes
3.6.0 bf16 2: 16 loads of 2 bytes; 4: 8 loads of 4 bytes; 8: 4 loads of 8 bytes; 16: 2 loads of 16 bytes
3.6.0 u8 2: 8 loads of 2 bytes; 4: 4 loads of 4 bytes; 8: 2 loads of 8 bytes; 16: 1 loads of 16 bytes
3.9.0 i32 2: 16 loads of 4 bytes; 4: 16 loads of 4 bytes; 8: 8 loads of 8 bytes; 16: 4 loads of 16 bytes
3.9.0 bf16 2: 16 loads of 2 bytes; 4: 8 loads of 4 bytes; 8: 4 loads of 8 bytes; 16: 2 loads of 16 bytes
3.9.0 u8 2: 8 loads of 2 bytes; 4: 4 loads of 4 bytes; 8: 2 loads of 8 bytes; 16: 1 loads of 16 bytes
EXPECTED
cat seen
diff expected seen
echo "unchanged"

#!/usr/bin/env bash
# A gather by tensor descriptor compiles for sm_80 and sm_100, and for sm_90 it does not.
#
# Expectation: descriptors are portable: where the hardware cannot gather, Triton emits ordinary loads, as it does for
#   sm_80 and gfx942.
# Behaviour: the ordinary loads are only for devices without any TMA. sm_90 has TMA without a gather of rows, and the
#   assembler refuses what Triton emits; sm_120 gathers but does not scatter. The error is raised at the first launch
#   and names a PTX feature, not the line.
# Who is hurt: kernels that read pages by index, written on B200 or A100 and run on an H100 or RTX 5090.
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

import contextlib
import io


@triton.jit
def gather(table, rows, out, R, C):
    pages = tl.make_tensor_descriptor(table, [R, C], [C, 1], [1, 64])
    i, j = tl.arange(0, 32), tl.arange(0, 64)
    tl.store(out + i[:, None] * 64 + j[None, :], pages.gather(tl.load(rows + i), 0))


@triton.jit
def scatter(table, rows, out, R, C):
    pages = tl.make_tensor_descriptor(table, [R, C], [C, 1], [1, 64])
    i, j = tl.arange(0, 32), tl.arange(0, 64)
    pages.scatter(tl.load(out + i[:, None] * 64 + j[None, :]), tl.load(rows + i), 0)


for kernel in (gather, scatter):
    answers = []
    for target in ("80", "90", "100", "120", "gfx942"):
        arguments = {"table": "*bf16", "rows": "*i32", "out": "*bf16", "R": "i32", "C": "i32"}
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                compiled(kernel, arguments, target)
            answers.append(f"{target} compiles")
        except Exception as error:
            answers.append(f"{target} {type(error.__cause__ or error).__name__}")
    print(triton.__version__, kernel.__name__ + ":", ", ".join(answers))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen 2> log || { cat log; exit 1; }
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
3.6.0 gather: 80 compiles, 90 PTXASError, 100 compiles, 120 compiles, gfx942 compiles
3.6.0 scatter: 80 compiles, 90 PTXASError, 100 compiles, 120 PTXASError, gfx942 compiles
3.9.0 gather: 80 compiles, 90 PTXASError, 100 compiles, 120 compiles, gfx942 compiles
3.9.0 scatter: 80 compiles, 90 PTXASError, 100 compiles, 120 PTXASError, gfx942 compiles
EXPECTED
cat seen
diff expected seen
echo "unchanged"

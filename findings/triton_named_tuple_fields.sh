#!/usr/bin/env bash
# A field of a constexpr named tuple is a plain number in Triton 3.6, which four functions refuse.
#
# Expectation: settings of a kernel can travel in one constexpr named tuple, and a field of it is a constexpr wherever
#   one is asked for.
# Behaviour: in 3.6.0 the field is a plain int. tl.arange, tl.full, tl.reshape, axes and branches take it, but
#   tl.multiple_of, tl.max_contiguous, tl.zeros and tl.static_range raise: "'int' object is not iterable" is all that
#   two of them say. A field that is a named tuple itself cannot be handed to a function, neither as a plain parameter nor as a constexpr.
#   3.9.0 takes all of them. In 3.6.0 a local `A: tl.constexpr = F.align`, or a field that is given as
#   tl.constexpr(16), helps.
# Who is hurt: libraries whose kernels are written with a newer Triton than torch 2.11 installs.
# Versions: triton 3.6.0 and 3.9.0. Seen on 2026-11-29 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
pip="${PYTHON:-python3} -m pip --disable-pip-version-check install --quiet --no-compile --no-deps"
$pip --target t3.6.0 triton==3.6.0
$pip --target t3.9.0 triton==3.9.0

cat > probe.py <<'PROBE'
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Form(NamedTuple):
    size: Any
    align: Any
    axis: Any


class Tile(NamedTuple):
    form: Any


@triton.jit
def multiple_of(out, offset, F: tl.constexpr):
    tl.store(out + tl.multiple_of(offset, F.align), 1.0)


@triton.jit
def max_contiguous(out, offset, F: tl.constexpr):
    tl.store(out + tl.max_contiguous(offset + tl.arange(0, 16), F.align), 1.0)


@triton.jit
def zeros(out, offset, F: tl.constexpr):
    tl.store(out + tl.arange(0, 16), tl.zeros([F.size], tl.float32))


@triton.jit
def static_range(out, offset, F: tl.constexpr):
    for i in tl.static_range(F.align):
        tl.store(out + i, 1.0)


@triton.jit
def arange(out, offset, F: tl.constexpr):
    tl.store(out + tl.arange(0, F.size), 1.0)


@triton.jit
def full(out, offset, F: tl.constexpr):
    tl.store(out + tl.arange(0, 16), tl.full([F.size], F.align, tl.float32))


@triton.jit
def total(out, offset, F: tl.constexpr):
    tl.store(out, tl.sum(tl.load(out + tl.arange(0, 16)), F.axis))


@triton.jit
def local(out, offset, F: tl.constexpr):
    A: tl.constexpr = F.align
    tl.store(out + tl.multiple_of(offset, A), 1.0)


@triton.jit
def write(out, F: tl.constexpr):
    tl.store(out + tl.arange(0, F.size), 1.0)


@triton.jit
def tuple_handed_on(out, offset, F: tl.constexpr):
    write(out, F.form)


@triton.jit
def whole_handed_on(out, offset, F: tl.constexpr):
    write(out, F)


def answer(kernel, form):
    signature = {"out": "*fp32", "offset": "i32", "F": "constexpr"}
    try:
        triton.compile(ASTSource(kernel, signature, constexprs={"F": form}), target=GPUTarget("cuda", 90, 32))
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error.__cause__ or error).splitlines()[-1]}"
    return "compiles"


for kernel in (multiple_of, max_contiguous, zeros, static_range, arange, full, total, local):
    print(triton.__version__, kernel.__name__, answer(kernel, Form(16, 4, 0)))
wrapped = Form(tl.constexpr(16), tl.constexpr(4), tl.constexpr(0))
print(triton.__version__, "tuple_handed_on", answer(tuple_handed_on, Tile(Form(16, 4, 0))))
print(triton.__version__, "whole_handed_on", answer(whole_handed_on, Form(16, 4, 0)))
print(triton.__version__, "multiple_of, fields are tl.constexpr", answer(multiple_of, wrapped))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen

cat > expected <<'EXPECTED'
3.6.0 multiple_of raises CompilationError: 'int' object is not iterable
3.6.0 max_contiguous raises CompilationError: 'int' object is not iterable
3.6.0 zeros raises CompilationError: AttributeError("'int' object has no attribute 'type'")
3.6.0 static_range raises CompilationError: AssertionError('4 used as tl.static_range start value is not a constexpr')
3.6.0 arange compiles
3.6.0 full compiles
3.6.0 total compiles
3.6.0 local compiles
3.6.0 tuple_handed_on raises CompilationError: AttributeError("'int' object has no attribute 'type'")
3.6.0 whole_handed_on compiles
3.6.0 multiple_of, fields are tl.constexpr compiles
3.9.0 multiple_of compiles
3.9.0 max_contiguous compiles
3.9.0 zeros compiles
3.9.0 static_range compiles
3.9.0 arange compiles
3.9.0 full compiles
3.9.0 total compiles
3.9.0 local compiles
3.9.0 tuple_handed_on compiles
3.9.0 whole_handed_on compiles
3.9.0 multiple_of, fields are tl.constexpr compiles
EXPECTED
cat seen
diff expected seen
echo "unchanged"

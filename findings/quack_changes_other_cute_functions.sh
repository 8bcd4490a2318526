#!/usr/bin/env bash
# Importing quack-kernels changes how CuTe DSL compiles the functions of every other library in the process.
#
# Expectation: a function of CuTe DSL means the same whatever else is imported.
# Behaviour: quack replaces a method of CuTe's preprocessor. An `if` whose test begins with const_expr(...) and goes on with
#   `and` or `or` is one dynamic branch without quack, and a static branch around a dynamic one with it. Of two functions
#   below, the first compiles only without quack: with it, CuTe says that y, which only branches assign, is None on one
#   path. The second compiles only with it: x is not defined after a dynamic branch.
# Who is hurt: whoever tests CuTe functions alone and ships them beside quack. vLLM 0.33.0 requires quack, and imports it
#   when some of its functions first run. So what was compiled before works, and the same function raises if it is
#   compiled later. A function that assigns every variable before such an `if` is safe.
# Versions: nvidia-cutlass-dsl 4.8.0, quack-kernels 0.6.5, torch 2.13.0. Seen on 2026-11-30 with Python 3.11, without a GPU:
#   the functions run on the host
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

"${PYTHON:-python3}" -m venv venv
pip="venv/bin/pip --disable-pip-version-check install --quiet --no-compile"
$pip torch==2.13.0 numpy==2.4.6 protobuf==7.36.2
$pip --no-deps nvidia-cutlass-dsl==4.8.0 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.0 quack-kernels==0.6.5 \
  triton==3.9.0 apache-tvm-ffi==0.1.11 torch-c-dlpack-ext==0.1.5 einops==0.8.2 cuda-bindings==13.5.0 cuda-pathfinder==1.9.1

cat > probe.py <<'PROBE'
import sys

if sys.argv[1:] == ["quack"]:
    import quack.dsl

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def first(n: Int32, always: cutlass.Constexpr):
    x = Int32(0)
    if const_expr(always) or n > 0:
        y = Int32(1)
        x = y + 1
    if n > 5:
        y = Int32(3)
        x = x + y
    cute.printf("first: {}\n", x)


@cute.jit
def second(n: Int32, sometimes: cutlass.Constexpr):
    if const_expr(sometimes) and n > 0:
        x = Int32(1)
    else:
        x = Int32(2)
    cute.printf("second: {}\n", x)


for function in (first, second):
    try:
        function(Int32(3), False)
    except Exception as error:
        print(f"{function.__name__}: {type(error).__name__}", flush=True)
PROBE

for with in nothing quack; do
  echo "with $with" >> seen
  # no GPU says which architecture it is
  CUTE_DSL_ARCH=sm_90a venv/bin/python -W ignore probe.py "$with" 2> log | grep . >> seen || { cat log; exit 1; }
done

cat > expected <<'EXPECTED'
with nothing
first: 2
second: DSLUserCodeError
with quack
first: DSLUserCodeError
second: 2
EXPECTED
cat seen
diff expected seen
echo "unchanged"

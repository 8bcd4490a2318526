#!/usr/bin/env bash
# do_not_specialize of Triton does not reach into a tuple: its numbers decide which variant is compiled.
#
# Expectation: a parameter that do_not_specialize names has one variant for all values, whether it is a number or a
#   named tuple of numbers.
# Behaviour: 7, 1, 32 and 2**40 as plain arguments have one type each (i32, or i64 for the last) and no attribute. In a
#   tuple that do_not_specialize names, 1 is compiled into the code, and 32 is known to be a multiple of 16 ("D"). So the
#   strides of a kernel, gathered in a tuple, compile again for every kind of value.
# Who is hurt: servers that compile all variants before the first request, and then move strides or lengths into tuples.
# Versions: triton 3.6.0 and 3.9.0. Seen on 2026-11-29 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
pip="${PYTHON:-python3} -m pip --disable-pip-version-check install --quiet --no-compile --no-deps"
$pip --target t3.6.0 triton==3.6.0
$pip --target t3.9.0 triton==3.9.0

cat > probe.py <<'PROBE'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature


@triton.jit(do_not_specialize=["plain", "pair"])
def kernel(plain, pair):
    tl.device_print("", plain + pair[0] + pair[1])


bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
for number in (7, 1, 32, 2**40):
    _, (plain, pair), _ = bind(number, (number, 7))
    types, attributes = pair
    print(f"{number}: plain {plain[0]} {plain[1] or '-'}, in a tuple {types[0]} {attributes[0] or '-'}")
PROBE
for release in 3.6.0 3.9.0; do
  echo "triton $release"
  PYTHONPATH=t$release "${PYTHON:-python3}" probe.py
done > seen

cat > expected <<'EXPECTED'
triton 3.6.0
7: plain i32 -, in a tuple i32 -
1: plain i32 -, in a tuple constexpr 1
32: plain i32 -, in a tuple i32 D
1099511627776: plain i64 -, in a tuple i64 D
triton 3.9.0
7: plain i32 -, in a tuple i32 -
1: plain i32 -, in a tuple constexpr 1
32: plain i32 -, in a tuple i32 D
1099511627776: plain i64 -, in a tuple i64 D
EXPECTED
cat seen
diff expected seen
echo "unchanged"

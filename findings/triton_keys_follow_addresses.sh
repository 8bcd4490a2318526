#!/usr/bin/env bash
# In Triton 3.6 the same kernel may have one of two keys in each process, and is compiled again.
#
# Expectation: Triton's disk cache finds a kernel that another process has compiled from the same files: its key is a hash
#   of sources, constants and versions.
# Behaviour: the key also has the constexpr globals of the kernel and of all functions that it calls. Where two modules have
#   a constexpr of the same name and different values, 3.6 orders the two by the addresses of the modules' dictionaries,
#   and then hashes only names and values. So the kernel has two keys, and the order in which a program happens to
#   allocate its modules decides. Nothing says so. 3.9 orders them by name and value, and has one key.
# Who is hurt: whoever compiles kernels ahead, into a container image or a shared cache. A server that imports more than the
#   program that compiled may look for another key, and compiles the kernel at its start or in its first request.
# Versions: triton 3.6.0 and 3.9.0. Seen on 2026-11-29 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

cat > helper.py <<'PY'
import triton
import triton.language as tl

FEW = tl.constexpr(2048)


@triton.jit
def is_few(n):
    return n < FEW
PY

cat > kernel.py <<'PY'
import triton
import triton.language as tl
from helper import is_few

FEW = tl.constexpr(16)


@triton.jit
def kernel(out, n):
    if is_few(n):
        tl.store(out, n + FEW)
PY

cat > probe.py <<'PROBE'
from importlib.util import module_from_spec, spec_from_file_location

import triton

# the same file many times, in dictionaries before and after that of the helper
specs = [spec_from_file_location(f"kernel{i}", "kernel.py") for i in range(400)]
modules = [module_from_spec(spec) for spec in specs[:200]]
import helper

# a function without a key would leave its constant out of the kernel's first key
helper.is_few.cache_key
modules += [module_from_spec(spec) for spec in specs[200:]]
keys = {True: set(), False: set()}
for spec, module in zip(specs, modules):
    spec.loader.exec_module(module)
    keys[id(vars(module)) < id(vars(helper))].add(module.kernel.cache_key)
assert all(len(of_order) == 1 for of_order in keys.values()), keys
print(f"triton {triton.__version__}: keys of one kernel: {len(keys[True] | keys[False])}")
PROBE

pip="${PYTHON:-python3} -m pip --disable-pip-version-check install --quiet --no-compile --no-deps"
for version in 3.6.0 3.9.0; do
  $pip --target "t$version" "triton==$version"
  PYTHONPATH="t$version" "${PYTHON:-python3}" -W ignore probe.py >> seen 2> log || { cat log; exit 1; }
done

cat > expected <<'EXPECTED'
triton 3.6.0: keys of one kernel: 2
triton 3.9.0: keys of one kernel: 1
EXPECTED
cat seen
diff expected seen
echo "unchanged"

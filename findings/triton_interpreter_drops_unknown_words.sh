#!/usr/bin/env bash
# Triton's interpreter drops keyword arguments that the kernel does not have, where a compiled launch refuses them.
#
# Expectation: a launch with a keyword that is neither a parameter nor an option of the compiler raises, interpreted too:
#   the interpreter calls a Python function, and Python refuses unknown keywords.
# Behaviour: the interpreter drops every keyword that the function has no parameter for, so that options such as
#   num_warps do no harm. A misspelt constant is dropped as well, and its default is used: the kernel writes other
#   numbers. A compiled launch raises KeyError, both in 3.6.0 and 3.9.0.
# Who is hurt: projects whose CI has no GPU and runs kernels in the interpreter. A constant that is renamed in the kernel
#   and not in one of its launches passes there where the default gives the right answer, and each such launch on a GPU fails.
# Versions: triton 3.6.0 and 3.9.0, torch 2.13.0 (CPU). Seen on 2026-11-29 with Python 3.11, without a GPU: kernels are
#   compiled for a described sm_90 by `warmup`, which launches nothing
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
pip="venv/bin/pip --disable-pip-version-check install --quiet --no-compile"
$pip torch==2.13.0 numpy==2.4.6
$pip --no-deps --target t3.6.0 triton==3.6.0
$pip --no-deps --target t3.9.0 triton==3.9.0

cat > probe.py <<'PROBE'
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

INTERPRETED = triton.knobs.runtime.interpret


class Hopper:
    """A driver of a device that is only described."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@triton.jit
def fill(out, N: tl.constexpr, VALUE: tl.constexpr = 1.0):
    tl.store(out + tl.arange(0, N), VALUE)


def answer(words):
    out = torch.zeros(2)
    try:
        if INTERPRETED:
            fill[(1,)](out, N=2, **words)
            return f"interpreted: writes {out.tolist()}"
        fill.warmup(out, N=2, grid=(1,), **words)
    except Exception as error:
        return f"compiled: raises {type(error).__name__}: {error}"
    return "compiled: no error"


if not INTERPRETED:
    triton.runtime.driver.set_active(Hopper())
for words in ({"VALUE": 2.0}, {"VALUES": 2.0}, {"value": 2.0}, {"num_warps": 8}, {"num_warp": 8}):
    print(triton.__version__, words, answer(words))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
for version in 3.6.0 3.9.0; do
  for interpreted in 1 0; do
    TRITON_INTERPRET=$interpreted PYTHONPATH=t$version venv/bin/python probe.py
  done
done > seen

cat > expected <<'EXPECTED'
3.6.0 {'VALUE': 2.0} interpreted: writes [2.0, 2.0]
3.6.0 {'VALUES': 2.0} interpreted: writes [1.0, 1.0]
3.6.0 {'value': 2.0} interpreted: writes [1.0, 1.0]
3.6.0 {'num_warps': 8} interpreted: writes [1.0, 1.0]
3.6.0 {'num_warp': 8} interpreted: writes [1.0, 1.0]
3.6.0 {'VALUE': 2.0} compiled: no error
3.6.0 {'VALUES': 2.0} compiled: raises KeyError: 'Keyword argument VALUES was specified but unrecognised'
3.6.0 {'value': 2.0} compiled: raises KeyError: 'Keyword argument value was specified but unrecognised'
3.6.0 {'num_warps': 8} compiled: no error
3.6.0 {'num_warp': 8} compiled: raises KeyError: 'Keyword argument num_warp was specified but unrecognised'
3.9.0 {'VALUE': 2.0} interpreted: writes [2.0, 2.0]
3.9.0 {'VALUES': 2.0} interpreted: writes [1.0, 1.0]
3.9.0 {'value': 2.0} interpreted: writes [1.0, 1.0]
3.9.0 {'num_warps': 8} interpreted: writes [1.0, 1.0]
3.9.0 {'num_warp': 8} interpreted: writes [1.0, 1.0]
3.9.0 {'VALUE': 2.0} compiled: no error
3.9.0 {'VALUES': 2.0} compiled: raises KeyError: 'Keyword argument VALUES was specified but unrecognised'
3.9.0 {'value': 2.0} compiled: raises KeyError: 'Keyword argument value was specified but unrecognised'
3.9.0 {'num_warps': 8} compiled: no error
3.9.0 {'num_warp': 8} compiled: raises KeyError: 'Keyword argument num_warp was specified but unrecognised'
EXPECTED
cat seen
diff expected seen
echo "unchanged"

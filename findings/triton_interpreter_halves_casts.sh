#!/usr/bin/env bash
# Triton's interpreter halves some values when it casts them to an 8-bit float: 1.97 to e4m3fn is 1.0.
#
# Expectation: a cast in the interpreter rounds to one of the two neighbours, 1.875 or 2.0.
# Behaviour: half a unit is added to the fraction. If the sum carries out of the fraction, the carry is OR-ed into the
#   exponent instead of added to it. Where the biased exponent is odd, its lowest bit is 1 already, so the carry is lost:
#   the fraction becomes 0 at the old exponent. Of values spread evenly in each power of two 3.1 % are halved in e4m3fn
#   and 6.5 % in e5m2. 500 becomes 256 for the same reason. No error and no NaN shows it.
# Who is hurt: tests of quantising kernels that run in the interpreter: a few values in a hundred are wrong by a factor
#   of two, and a tolerance that is widened for them hides real faults.
# Versions: triton 3.9.0, torch 2.13.0 (CPU), ml_dtypes 0.6.0. Seen on 2026-11-29 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 triton==3.9.0 numpy==2.4.6 ml_dtypes==0.6.0

cat > probe.py <<'PROBE'
import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, out, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, tl.load(x + i).to(FORMAT).to(tl.uint8, bitcast=True))


def casts(values, format_, known):
    """What the interpreter makes of values, as numbers."""
    x = torch.from_numpy(np.asarray(values, dtype=np.float32))
    out = torch.zeros(len(x), dtype=torch.uint8)
    cast[(1,)](x, out, COUNT=len(x), FORMAT=format_)
    return out.numpy().view(known).astype(np.float32)


for format_, known in ((tl.float8e4nv, ml_dtypes.float8_e4m3fn), (tl.float8e5, ml_dtypes.float8_e5m2)):
    values = [0.97, 1.97, 3.9, 7.9, 15.9, 31.9, 464.0, 500.0]
    print(format_, ", ".join(f"{value}: {got}" for value, got in zip(values, casts(values, format_, known))))
    limits = ml_dtypes.finfo(known)
    halved = total = 0
    for exponent in range(limits.minexp, limits.maxexp - 1):
        values = ((1 + np.arange(4096) / 4096) * 2.0**exponent).astype(np.float32)
        halved += (casts(values, format_, known) == values.astype(known).astype(np.float32) / 2).sum()
        total += len(values)
    print(f"{format_} halves {100 * halved / total:.1f} % of normal values")
PROBE
TRITON_INTERPRET=1 venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
fp8e4nv 0.97: 1.0, 1.97: 1.0, 3.9: 4.0, 7.9: 4.0, 15.9: 16.0, 31.9: 16.0, 464.0: nan, 500.0: 256.0
fp8e4nv halves 3.1 % of normal values
fp8e5 0.97: 1.0, 1.97: 1.0, 3.9: 4.0, 7.9: 4.0, 15.9: 16.0, 31.9: 16.0, 464.0: 448.0, 500.0: 256.0
fp8e5 halves 6.5 % of normal values
EXPECTED
cat seen
diff expected seen
echo "unchanged"

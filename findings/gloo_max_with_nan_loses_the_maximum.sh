#!/usr/bin/env bash
# A gloo all_reduce of MAX with one NaN can return a number that is smaller than another rank's.
#
# Expectation: one NaN among the ranks makes the maximum NaN, or is ignored and the largest number is returned.
# Behaviour: neither: each rank holds its number, one of them NaN. With the NaN on rank 3 a single element is 2, which
#   is right; on rank 1 it is 0, although ranks 2 and 3 hold more. In a tensor of 4,096 elements the same case gives
#   0, 3 and NaN side by side: NaN replaced the numbers that came before it, and was itself replaced by the next one.
#   Which of the three an element gets depends on its place.
# Who is hurt: global maxima for quantisation scales and for numerically safe softmax: a scale of 0 or a too small
#   one, with no NaN left to see.
# Versions: torch 2.13.0 (CPU), four processes. Seen on 2026-11-28 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6

cat > probe.py <<'PROBE'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4


def main(rank, path):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=RANKS)
    lines = []
    for bad in range(RANKS):
        for elements in (1, 4096):
            x = torch.full((elements,), float("nan") if rank == bad else float(rank))
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            found = sorted({str(value) for value in x.tolist()})
            lines.append(f"NaN on rank {bad}, {elements} elements: maxima {', '.join(found)}")
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, lines)
    if rank == 0:
        print("\n".join(lines))
        print("all ranks have the same results:", all(other == lines for other in everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (os.path.join(tempfile.mkdtemp(dir=os.getcwd()), "store"),), RANKS)
PROBE
venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
NaN on rank 0, 1 elements: maxima nan
NaN on rank 0, 4096 elements: maxima 3.0, nan
NaN on rank 1, 1 elements: maxima 0.0
NaN on rank 1, 4096 elements: maxima 0.0, 3.0, nan
NaN on rank 2, 1 elements: maxima 1.0
NaN on rank 2, 4096 elements: maxima 1.0, 3.0, nan
NaN on rank 3, 1 elements: maxima 2.0
NaN on rank 3, 4096 elements: maxima 2.0, nan
all ranks have the same results: True
EXPECTED
cat seen
diff expected seen
echo "unchanged"

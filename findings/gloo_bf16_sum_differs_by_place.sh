#!/usr/bin/env bash
# One gloo all_reduce of bf16 gives equal elements of one tensor different sums.
#
# Expectation: every rank holds 256 or 1 in all its elements, so all elements of the result are equal: 256 (bf16 loses
#   ones) or 259 rounded to 260.
# Behaviour: elements of one result are 256 and 260 side by side, on all ranks alike, because chunks of a tensor meet
#   the ranks in different orders and each step rounds to bf16. A single element gives 260 or 256 by the rank that
#   holds the 256. fp32 is exact. So a tensor-parallel sum on a CPU depends on the place in the tensor, and on the
#   size of the batch.
# Who is hurt: tests that compare rows of a batch, or a batch with a single row, bit for bit after an all_reduce.
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
    for values in ((256.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 256.0)):
        for dtype in (torch.bfloat16, torch.float32):
            for elements in (1, 4, 4096):
                x = torch.full((elements,), values[rank], dtype=dtype)
                dist.all_reduce(x)
                sums, counts = x.float().unique(return_counts=True)
                found = ", ".join(f"{n} x {s:.0f}" for s, n in zip(sums.tolist(), counts.tolist()))
                lines.append(f"{str(dtype):15} ranks hold {values}: {elements} elements: {found}")
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
torch.bfloat16  ranks hold (256.0, 1.0, 1.0, 1.0): 1 elements: 1 x 260
torch.bfloat16  ranks hold (256.0, 1.0, 1.0, 1.0): 4 elements: 2 x 256, 2 x 260
torch.bfloat16  ranks hold (256.0, 1.0, 1.0, 1.0): 4096 elements: 2048 x 256, 2048 x 260
torch.float32   ranks hold (256.0, 1.0, 1.0, 1.0): 1 elements: 1 x 259
torch.float32   ranks hold (256.0, 1.0, 1.0, 1.0): 4 elements: 4 x 259
torch.float32   ranks hold (256.0, 1.0, 1.0, 1.0): 4096 elements: 4096 x 259
torch.bfloat16  ranks hold (1.0, 1.0, 1.0, 256.0): 1 elements: 1 x 256
torch.bfloat16  ranks hold (1.0, 1.0, 1.0, 256.0): 4 elements: 4 x 256
torch.bfloat16  ranks hold (1.0, 1.0, 1.0, 256.0): 4096 elements: 2048 x 256, 2048 x 260
torch.float32   ranks hold (1.0, 1.0, 1.0, 256.0): 1 elements: 1 x 259
torch.float32   ranks hold (1.0, 1.0, 1.0, 256.0): 4 elements: 4 x 259
torch.float32   ranks hold (1.0, 1.0, 1.0, 256.0): 4096 elements: 4096 x 259
all ranks have the same results: True
EXPECTED
cat seen
diff expected seen
echo "unchanged"

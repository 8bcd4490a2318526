#!/usr/bin/env bash
# gloo refuses to move 8-bit floats, even where nothing is computed.
#
# Expectation: all_reduce of fp8 is refused, since nobody defines its sum; broadcast, gather and all-to-all move bytes
#   and work.
# Behaviour: every collective raises 'Invalid scalar type' for every float of 8 and 4 bits and for uint16 and uint32,
#   broadcasts and gathers too. bool and bfloat16 work. A view as uint8 moves the same bytes.
# Who is hurt: tests of tensor or context parallelism on CPUs, and hosts that exchange quantised caches over gloo:
#   code for NCCL fails here.
# Versions: torch 2.13.0 (CPU), two processes. Seen on 2026-11-28 with Python 3.11, without a GPU
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

RANKS = 2
NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "bool", "bfloat16", "uint8")


def answer(call):
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0].strip()
    return "works"


def main(rank, path):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=RANKS)
    for name in NAMES:
        def fresh():
            return torch.ones(8, dtype=torch.uint8).view(getattr(torch, name))

        calls = {
            "broadcast": lambda: dist.broadcast(fresh(), 0),
            "all_gather": lambda: dist.all_gather([fresh() for _ in range(RANKS)], fresh()),
            "all_to_all": lambda: dist.all_to_all_single(fresh(), fresh()),
            "all_reduce": lambda: dist.all_reduce(fresh()),
        }
        found = ", ".join(f"{label} {answer(call)}" for label, call in calls.items())
        if rank == 0:
            print(f"{name}: {found}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (os.path.join(tempfile.mkdtemp(dir=os.getcwd()), "store"),), RANKS)
PROBE
venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
float8_e4m3fn: broadcast Invalid scalar type, all_gather Invalid scalar type, all_to_all Invalid scalar type, all_reduce Invalid scalar type
float8_e5m2: broadcast Invalid scalar type, all_gather Invalid scalar type, all_to_all Invalid scalar type, all_reduce Invalid scalar type
float8_e8m0fnu: broadcast Invalid scalar type, all_gather Invalid scalar type, all_to_all Invalid scalar type, all_reduce Invalid scalar type
float4_e2m1fn_x2: broadcast Invalid scalar type, all_gather Invalid scalar type, all_to_all Invalid scalar type, all_reduce Invalid scalar type
uint16: broadcast Invalid scalar type, all_gather Invalid scalar type, all_to_all Invalid scalar type, all_reduce Invalid scalar type
bool: broadcast works, all_gather works, all_to_all works, all_reduce works
bfloat16: broadcast works, all_gather works, all_to_all works, all_reduce works
uint8: broadcast works, all_gather works, all_to_all works, all_reduce works
EXPECTED
cat seen
diff expected seen
echo "unchanged"

#!/usr/bin/env bash
# A TokenSpeed plugin that selects entries never learns that its block table is compact.
#
# Expectation: the op dsv4_decode_topk passes every argument of its caller to the kernel that it chooses, whatever the
#   kernel is called; a kernel that cannot take one of them is not chosen, or fails.
# Behaviour: the op passes block_table_base_offsets to a kernel only if the kernel was registered under the solution
#   "triton" or "gluon". For a kernel of any other solution the op drops the argument. A kernel whose signature requires it
#   would fail; one with a default, as the op itself has, returns numbers that count from the wrong entry. Kernels of
#   plugins win over TokenSpeed's own by their priority, and a plugin names a solution of its own. The docstrings of
#   register_kernel and of the op do not say so.
# Who is hurt: whoever brings an indexer's top-k to TokenSpeed as a plugin. Tests with whole tables pass. With a compact
#   table attention reads other entries of the cache, without an error.
# Versions: tokenspeed_kernel 0.1.4, tokenspeed-triton 3.8.10.post20260920, torch 2.13.0 (CPU). Seen on 2026-11-28 with
#   Python 3.11, without a GPU: a platform is set by hand, and packages on the way to the op are left empty
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6 packaging==26.2 psutil==7.2.2
venv/bin/pip --disable-pip-version-check install --quiet --no-compile --no-deps \
  tokenspeed_kernel==0.1.4 tokenspeed-triton==3.8.10.post20260920

cat > probe.py <<'PROBE'
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

root = Path(find_spec("tokenspeed_kernel").origin).parent
# their __init__ import libraries for GPUs
for name in ("", ".ops", ".ops.attention", ".ops.attention.dsa", ".ops.attention.mla"):
    package = ModuleType("tokenspeed_kernel" + name)
    package.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[package.__name__] = package
platform = import_module("tokenspeed_kernel.platform")
numbers = dict.fromkeys(("device_count", "total_memory", "sm_count", "max_threads_per_sm", "max_shared_memory_per_sm"), 1)
platform.Platform.override(platform.PlatformInfo(
    vendor="nvidia", arch_version=platform.ArchVersion(8, 0), device_name="none", memory_bandwidth=1.0, **numbers,
))
op = import_module("tokenspeed_kernel.ops.attention.dsv4").dsv4_decode_topk
from tokenspeed_kernel.registry import Priority, register_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature

uint8 = dense_tensor_format(torch.uint8)
signature = format_signature(q=uint8, weights=dense_tensor_format(torch.float32), index_k_cache=uint8)


def best(context_lens, out, block_table_base_offsets=None, **rest):
    """Selects the first entry of each token's table, whose number is the base of the table."""
    base = 0 if block_table_base_offsets is None else block_table_base_offsets * rest["page_size"]
    return torch.zeros(len(context_lens), dtype=torch.int32) + base


for solution in ("acme", "triton"):
    register_kernel(
        "attention", "dsv4_decode_topk", name="acme_topk", solution=solution, signatures={signature},
        priority=Priority.PLUGIN,
    )(best)
    chosen = op(
        (torch.zeros(2, 32, 64, dtype=torch.uint8), torch.zeros(2, 32, dtype=torch.int32)), torch.zeros(2, 32),
        torch.zeros(9, 64 * 68, dtype=torch.uint8), torch.full((2, 1), 64, dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.int32), page_size=64, topk=512, max_context_len=64, plan=None,
        block_table_base_offsets=torch.tensor([3, 5]),
    )
    print(f"bases of pages 3 and 5, solution {solution!r}: first entries {chosen.tolist()}")
PROBE
venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
bases of pages 3 and 5, solution 'acme': first entries [0, 0]
bases of pages 3 and 5, solution 'triton': first entries [192, 320]
EXPECTED
cat seen
diff expected seen
echo "unchanged"

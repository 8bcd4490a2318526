#!/usr/bin/env bash
# safetensors hands out fp8 tensors at odd addresses, and torch's view as int32 accepts them.
#
# Expectation: a loaded tensor has an allocation of its own, aligned as torch aligns memory; a view of misaligned
#   bytes as int32 raises.
# Behaviour: load_file and safe_open place a tensor where it lies in the file: after a neighbour of 3 bytes it begins
#   at an address that is 3 more than a multiple of 16. Each has a storage of its own with offset 0, so torch's check
#   of view(int32) passes. The same bytes through safetensors.torch.load are aligned, and a slice of a larger torch
#   tensor at byte 3 is refused. Sizes and order of the other tensors in the file decide.
# Who is hurt: kernels for CPUs and bindings that read 4, 8 or 16 bytes at a time and trust torch's allocator, and
#   compilers that specialise on addresses divisible by 16.
# Versions: torch 2.13.0 (CPU), safetensors 0.8.0. Seen on 2026-11-28 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6 safetensors==0.8.0

cat > probe.py <<'PROBE'
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

codes = torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn)


def told(label, tensor):
    try:
        words = tensor.view(torch.int32).numel()
        view = f"view as int32 gives {words} words"
    except RuntimeError as error:
        view = f"view as int32 raises: {str(error).split(',')[0]}"
    print(f"{label}: address modulo 16 is {tensor.data_ptr() % 16}, storage_offset {tensor.storage_offset()}, {view}")


for neighbour in (16, 3):
    save_file({"a": codes[:neighbour].clone(), "b": codes.clone()}, "probe.safetensors")
    told(f"load_file after a tensor of {neighbour} bytes", load_file("probe.safetensors")["b"])
with safe_open("probe.safetensors", "pt") as file:
    told("safe_open after 3 bytes", file.get_tensor("b"))
with open("probe.safetensors", "rb") as file:
    told("load(bytes) after 3 bytes", load(file.read())["b"])
told("a slice of one torch tensor", torch.zeros(32, dtype=torch.uint8)[3:19].view(torch.float8_e4m3fn))
PROBE
venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
load_file after a tensor of 16 bytes: address modulo 16 is 0, storage_offset 0, view as int32 gives 4 words
load_file after a tensor of 3 bytes: address modulo 16 is 3, storage_offset 0, view as int32 gives 4 words
safe_open after 3 bytes: address modulo 16 is 3, storage_offset 0, view as int32 gives 4 words
load(bytes) after 3 bytes: address modulo 16 is 0, storage_offset 0, view as int32 gives 4 words
a slice of one torch tensor: address modulo 16 is 3, storage_offset 3, view as int32 raises: self.storage_offset() must be divisible by 4 to view Float8_e4m3fn as Int (different element sizes)
EXPECTED
cat seen
diff expected seen
echo "unchanged"

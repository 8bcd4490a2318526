#!/usr/bin/env bash
# torch.compile makes a padded allocation dense as soon as the graph fills it with one value.
#
# Expectation: torch.empty_strided keeps its strides under torch.compile, whatever is done with the tensor.
# Behaviour: zero_() and fill_() of a fresh padded tensor are replaced by a dense tensor of the same shape: aot_eager
#   and inductor both hand 584-byte tokens at a page stride of 37,376 bytes to a custom op, and return it, where eager
#   mode has 37,440. A copy_ into the same allocation keeps the padding, and so does a custom op that fills it. The
#   stride is no error for torch: the op just reads other memory than a kernel with a fixed page stride expects.
# Who is hurt: code that allocates cache pages with padding inside a compiled region, such as warm-up or a first step.
# Versions: torch 2.13.0 (CPU). Seen on 2026-11-28 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6

cat > probe.py <<'PROBE'
import torch

SHAPE, STRIDES = (4, 64, 584), (37440, 584, 1)
seen = []


@torch.library.custom_op("probe::read_pages", mutates_args=("out",))
def read_pages(pages: torch.Tensor, out: torch.Tensor) -> None:
    seen.append(pages.stride(0))
    out.fill_(pages.stride(0))


def allocated(fill):
    def step(values):
        pages = torch.empty_strided(SHAPE, STRIDES, dtype=torch.uint8)
        fill(pages, values)
        out = torch.empty(1)
        read_pages(pages, out)
        return pages, out

    return step


FILLS = {
    "zero_()": lambda pages, values: pages.zero_(),
    "fill_(7)": lambda pages, values: pages.fill_(7),
    "copy_(values)": lambda pages, values: pages.copy_(values),
}
for name, fill in FILLS.items():
    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        seen.clear()
        pages, _ = torch.compile(allocated(fill), backend=backend, fullgraph=True)(torch.ones(584, dtype=torch.uint8))
        print(f"{name:14} {backend:10} page stride returned {pages.stride(0)}, seen by the op {seen[-1]}")
PROBE
venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
zero_()        eager      page stride returned 37440, seen by the op 37440
zero_()        aot_eager  page stride returned 37376, seen by the op 37376
zero_()        inductor   page stride returned 37376, seen by the op 37376
fill_(7)       eager      page stride returned 37440, seen by the op 37440
fill_(7)       aot_eager  page stride returned 37376, seen by the op 37376
fill_(7)       inductor   page stride returned 37376, seen by the op 37376
copy_(values)  eager      page stride returned 37440, seen by the op 37440
copy_(values)  aot_eager  page stride returned 37440, seen by the op 37440
copy_(values)  inductor   page stride returned 37440, seen by the op 37440
EXPECTED
cat seen
diff expected seen
echo "unchanged"

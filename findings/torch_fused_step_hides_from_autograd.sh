#!/usr/bin/env bash
# After a step of a fused optimizer a backward pass takes the new weights for the old ones, and nothing is raised.
#
# Expectation: loss.backward() after optimizer.step() raises, because the step changed weights that the backward pass
#   needs: "modified by an inplace operation". fused=True is about speed alone.
# Behaviour: with fused=False it raises. With fused=True the step does not count as a write (Tensor._version stays), so
#   autograd does not see it: the gradient of w * w, which is 2 w, is computed with the weights after the step.
# Who is hurt: loops with several losses and optimizers (adversarial training, meta-learning), in which the order of step
#   and backward is wrong: they raise on one machine and train on wrong gradients where fused is chosen. Also caches of
#   converted weights that ask _version whether a weight has changed.
# Versions: torch 2.13.0. Seen on 2026-11-29 with Python 3.11, on a CPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6

cat > probe.py <<'PROBE'
import torch

for name in ("SGD", "Adam", "AdamW", "Adagrad"):
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.tensor([3.0, 5.0]))
        optimizer = getattr(torch.optim, name)([weight], lr=1.0, weight_decay=0.0, fused=fused)
        loss = (weight * weight).sum()
        weight.grad = torch.ones(2)
        before = weight._version
        optimizer.step()
        written = "counted" if weight._version > before else "not counted"
        weight.grad = None
        try:
            loss.backward()
            end = f"gradient {[round(value, 3) for value in weight.grad.tolist()]}, not [6.0, 10.0]"
        except RuntimeError:
            end = "RuntimeError"
        print(f"{name}, fused={fused}: write {written}, backward: {end}")
PROBE
venv/bin/python -W ignore probe.py > seen

cat > expected <<'EXPECTED'
SGD, fused=False: write counted, backward: RuntimeError
SGD, fused=True: write not counted, backward: gradient [4.0, 8.0], not [6.0, 10.0]
Adam, fused=False: write counted, backward: RuntimeError
Adam, fused=True: write not counted, backward: gradient [4.0, 8.0], not [6.0, 10.0]
AdamW, fused=False: write counted, backward: RuntimeError
AdamW, fused=True: write not counted, backward: gradient [4.0, 8.0], not [6.0, 10.0]
Adagrad, fused=False: write counted, backward: RuntimeError
Adagrad, fused=True: write not counted, backward: gradient [4.0, 8.0], not [6.0, 10.0]
EXPECTED
cat seen
diff expected seen
echo "unchanged"

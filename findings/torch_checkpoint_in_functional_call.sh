#!/usr/bin/env bash
# Checkpointed modules that are called with other parameters give the gradients of the wrong parameters.
#
# Expectation: torch.func.functional_call(module, parameters, x) of a module that checkpoints its block has the
#   gradients that it has without checkpoints, or raises.
# Behaviour: the block runs again in the backward pass, when the module has its own parameters back. Nothing is raised.
#   With use_reentrant=False the given parameters and x get gradients that are computed with the module's own ones. With
#   use_reentrant=True the given parameters get none, and those of the module get them. The loss is right in both, so
#   only training that does not learn tells. The same holds for whatever else is replaced for the forward pass alone,
#   a function of the module for example: checkpoints restore autocast and random states, and nothing else.
# Who is hurt: ensembles, meta-learning and per-sample gradients over models with activation checkpoints, and libraries
#   that replace attention while a model runs.
# Versions: torch 2.13.0. Seen on 2026-11-29 with Python 3.11, on a CPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6

cat > probe.py <<'PROBE'
import torch
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.reentrant = reentrant

    def block(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def gradients(reentrant):
    torch.manual_seed(0)
    model = Model(reentrant)
    given = {name: torch.randn(4, 4, requires_grad=True) for name, _ in model.named_parameters()}
    x = torch.randn(3, 4, requires_grad=True)
    loss = torch.func.functional_call(model, given, (x,)).sum()
    loss.backward()
    return loss, [x.grad, *(parameter.grad for parameter in given.values())], [p.grad for p in model.parameters()]


loss, right, _ = gradients(None)
for reentrant in (False, True):
    also, found, own = gradients(reentrant)
    same = ["none" if g is None else "right" if torch.allclose(g, r) else "wrong" for g, r in zip(found, right)]
    text = "none" if own[0] is None else "some"
    print(f"use_reentrant={reentrant}: loss {'right' if torch.equal(loss, also) else 'wrong'};", end=" ")
    print(f"gradients of x {same[0]}, of the given parameters {same[1]}, {same[2]}; of the module's own: {text}")
PROBE
venv/bin/python -W ignore probe.py > seen

cat > expected <<'EXPECTED'
use_reentrant=False: loss right; gradients of x wrong, of the given parameters wrong, wrong; of the module's own: none
use_reentrant=True: loss right; gradients of x wrong, of the given parameters none, none; of the module's own: some
EXPECTED
cat seen
diff expected seen
echo "unchanged"

#!/usr/bin/env bash
# With SGLang's dummy weights all tokens of a layer of DeepSeek-V4 go to the same few experts.
#
# Expectation: --load-format dummy makes random weights, "for accurate performance measurements", as its docstring says.
#   A router with random weights sends 512 random tokens, each to 6 of 256 experts, to all experts.
# Behaviour: weights are between -0.001 and 0.001, those of norms too, which are near 1 in a real model. The input of a
#   learned router is so small that the logits of a token differ by about 0.0001. The bias of each expert, which only
#   serves to choose, differs by up to 0.002, and so it decides nearly alone: 512 tokens share 10 experts. With the
#   norm's weight at 1 they go to all 256.
# Who is hurt: whoever measures a mixture of experts with dummy weights: a step reads 10 of 256 experts, and few ranks of
#   expert parallelism have all the work. SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS=1 spreads the tokens.
# Versions: sglang 0.5.23, torch 2.13.0 (CPU). Seen on 2026-11-29 with Python 3.11, without a GPU: packages that SGLang
#   imports on the way to these two functions are left empty
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6
venv/bin/pip --disable-pip-version-check install --quiet --no-compile --no-deps sglang==0.5.23

cat > probe.py <<'PROBE'
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

root = Path(find_spec("sglang").origin).parent
WANTED = "sglang.srt.model_loader.weight_utils", "sglang.srt.layers.moe.topk"


class Nothing(ModuleType):
    """An empty package and all that it holds: false, and a decorator that changes nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __bool__(self):
        return False

    def __mro_entries__(self, bases):
        return ()


EMPTY = "sglang", "sgl_kernel", "triton", "filelock", "huggingface_hub", "pydantic", "safetensors", "tqdm"


class Empty:
    """Empties the packages that these two modules import, but not the two modules."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EMPTY and name not in WANTED:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Nothing(spec.name)
        module.__path__ = [str(root.joinpath(*spec.name.split(".")[1:]))]
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Empty())
# it would ask the empty triton
torch.compile = lambda function=None, **options: function or (lambda compiled: compiled)
from sglang.srt.layers.moe.topk import biased_topk_impl
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights


class Router(nn.Module):
    """The norm and the router of a layer of DeepSeek-V4-Flash."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(4096, eps=1e-6, dtype=torch.bfloat16)
        self.gate = nn.Linear(4096, 256, bias=False, dtype=torch.bfloat16)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(256))

    @torch.no_grad()
    def forward(self, tokens):
        x = self.norm(tokens)
        bias = self.e_score_correction_bias
        return biased_topk_impl(x, self.gate(x).float(), bias, 6, True, scoring_func="sqrtsoftplus")[1]


router = Router()
initialize_dummy_weights(router)
torch.manual_seed(0)
tokens = torch.randn(512, 4096).bfloat16()
print("dummy weights: experts", router(tokens).unique().numel())
router.norm.weight.data.fill_(1)
print("norm of 1: experts", router(tokens).unique().numel())
PROBE
venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
dummy weights: experts 10
norm of 1: experts 256
EXPECTED
cat seen
diff expected seen
echo "unchanged"

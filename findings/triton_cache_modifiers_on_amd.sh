#!/usr/bin/env bash
# On AMD, a load with cache_modifier ".cg" is non-temporal, and a store with ".cg" is an ordinary one.
#
# Expectation: hints of NVIDIA are dropped on AMD, or both directions get the same bit.
# Behaviour: `.cg`, which on NVIDIA means to keep a line in L2, becomes `nt` for loads, the hint that data is used
#   once. For stores `.cg` and `.wb` are dropped, `.cs` becomes `nt`. eviction_policy is dropped always. Triton 3.6
#   refuses `.cs` for loads for AMD with an error of compilation, and 3.9 takes it.
# Who is hurt: kernels that mark weights read by many programs with .cg: on MI300 they are marked as read once.
# Versions: triton 3.6.0 and 3.9.0. Seen on 2026-11-28 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
pip="${PYTHON:-python3} -m pip --disable-pip-version-check install --quiet --no-compile --no-deps"
$pip --target t3.6.0 triton==3.6.0
$pip --target t3.9.0 triton==3.9.0

cat > probe.py <<'PROBE'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, arguments, target, constants=None, **options):
    """The text of a kernel for a target, as PTX or AMD assembly. Pointers are multiples of 16 bytes, as torch's are."""
    signature = arguments | dict.fromkeys(constants or {}, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants or {}, attrs=attributes)
    amd = target.startswith("gfx")
    place = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32) if amd else GPUTarget("cuda", int(target), 32)
    return triton.compile(source, target=place, options=options)


def text_of(result):
    return result.asm["ptx" if "ptx" in result.asm else "amdgcn"]


@triton.jit
def copy(x, out, N: tl.constexpr, LOAD: tl.constexpr, EVICT: tl.constexpr, STORE: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, cache_modifier=LOAD, eviction_policy=EVICT), cache_modifier=STORE)


CASES = [(load, "", "") for load in ("", ".cg", ".cs", ".cv")] + [("", "evict_first", ""), ("", "evict_last", "")]
CASES += [("", "", store) for store in (".cg", ".wb", ".cs", ".wt")]
for target in ("gfx942", "gfx1201"):
    for load, evict, store in CASES:
        constants = {"N": 1024, "LOAD": load, "EVICT": evict, "STORE": store}
        case = f"{triton.__version__} {target} load {load or '-'} {evict or '-'} store {store or '-'}:"
        try:
            text = text_of(compiled(copy, {"x": "*fp32", "out": "*fp32"}, target, constants))
        except Exception as error:
            print(case, type(error).__name__)
            continue
        lines = re.findall(r"^\t(?:global|buffer)_(load|store)_\S+(.*)$", text, re.MULTILINE)
        hints = {kind: " ".join(re.findall(r"\bnt\b|\bsc[01]\b|th:\S+|scope:\S+", rest)) or "-" for kind, rest in lines}
        print(case, ", ".join(f"{kind} {hint}" for kind, hint in sorted(hints.items())))
PROBE
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
PYTHONPATH=t3.6.0 "${PYTHON:-python3}" probe.py > seen
PYTHONPATH=t3.9.0 "${PYTHON:-python3}" probe.py >> seen

cat > expected <<'EXPECTED'
3.6.0 gfx942 load - - store -: load -, store -
3.6.0 gfx942 load .cg - store -: load nt, store -
3.6.0 gfx942 load .cs - store -: CompilationError
3.6.0 gfx942 load .cv - store -: load sc0 sc1, store -
3.6.0 gfx942 load - evict_first store -: load -, store -
3.6.0 gfx942 load - evict_last store -: load -, store -
3.6.0 gfx942 load - - store .cg: load -, store -
3.6.0 gfx942 load - - store .wb: load -, store -
3.6.0 gfx942 load - - store .cs: load -, store nt
3.6.0 gfx942 load - - store .wt: load -, store sc0 sc1
3.6.0 gfx1201 load - - store -: load -, store -
3.6.0 gfx1201 load .cg - store -: load th:TH_LOAD_NT, store -
3.6.0 gfx1201 load .cs - store -: CompilationError
3.6.0 gfx1201 load .cv - store -: load th:TH_LOAD_NT scope:SCOPE_SYS, store -
3.6.0 gfx1201 load - evict_first store -: load -, store -
3.6.0 gfx1201 load - evict_last store -: load -, store -
3.6.0 gfx1201 load - - store .cg: load -, store -
3.6.0 gfx1201 load - - store .wb: load -, store -
3.6.0 gfx1201 load - - store .cs: load -, store th:TH_STORE_NT
3.6.0 gfx1201 load - - store .wt: load -, store th:TH_STORE_NT scope:SCOPE_SYS
3.9.0 gfx942 load - - store -: load -, store -
3.9.0 gfx942 load .cg - store -: load nt, store -
3.9.0 gfx942 load .cs - store -: load nt, store -
3.9.0 gfx942 load .cv - store -: load sc0 sc1, store -
3.9.0 gfx942 load - evict_first store -: load -, store -
3.9.0 gfx942 load - evict_last store -: load -, store -
3.9.0 gfx942 load - - store .cg: load -, store -
3.9.0 gfx942 load - - store .wb: load -, store -
3.9.0 gfx942 load - - store .cs: load -, store nt
3.9.0 gfx942 load - - store .wt: load -, store sc0 sc1
3.9.0 gfx1201 load - - store -: load -, store -
3.9.0 gfx1201 load .cg - store -: load th:TH_LOAD_NT, store -
3.9.0 gfx1201 load .cs - store -: load th:TH_LOAD_NT, store -
3.9.0 gfx1201 load .cv - store -: load th:TH_LOAD_NT scope:SCOPE_SYS, store -
3.9.0 gfx1201 load - evict_first store -: load -, store -
3.9.0 gfx1201 load - evict_last store -: load -, store -
3.9.0 gfx1201 load - - store .cg: load -, store -
3.9.0 gfx1201 load - - store .wb: load -, store -
3.9.0 gfx1201 load - - store .cs: load -, store th:TH_STORE_NT
3.9.0 gfx1201 load - - store .wt: load -, store th:TH_STORE_NT scope:SCOPE_SYS
EXPECTED
cat seen
diff expected seen
echo "unchanged"

"""Every kernel that this wheel launches compiles in a process of vLLM: Hopper's for Hopper, others for an older GPU.

That a kernel compiles for every GPU the project's own tests show. Here it is compiled next to what vLLM has imported.
"""

from __future__ import annotations

from pathlib import Path

from test_plugin import run

CODE = f"""
import os, tempfile
del os.environ["TRITON_INTERPRET"]
sys.path.append({str(Path(__file__).parents[3])!r})
# all that vLLM imports on a GPU
from vllm.compilation.compiler_interface import initialize_inductor_cache
from vllm.v1.worker import gpu_worker
import dsv4attn_vllm.attention
from dsv4attn import KVCacheLayout, Limits, ModelGeometry, load_backend
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn_vllm.serving import Serving
from dsv4attn_vllm.parts import COMPRESSOR, INDEXER, PARTS
from tests.backends._triton.compiling.each_kernel import compile_each
from triton import knobs
from dsv4attn.integrations.engines import VLLM
from dsv4attn.tools.cli.compile import bounds_of
assert os.environ.get("TRITON_CACHE_DIR") or knobs.cache.dir == str(VLLM.kernel_folder())
said, done, folder = {{}}, set(), os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
initialize_inductor_cache(tempfile.mkdtemp())
assert os.environ["TRITON_CACHE_DIR"] == folder, "docs/engines.md says that vLLM keeps it"
for target, name in (("sm_80", "triton"), ("sm_90", "sm90")):
    backend, variants, image = load_backend(name, projection="fp8"), [], []
    layout, index, limits = KVCacheLayout.fp8_ds_mla(), KVCacheLayout.index_fp8(), Limits(64, 1024, 2**20, 2)
    for model, parts in (("flash", PARTS), ("deepseek-v4.1-flash", (COMPRESSOR, INDEXER))):
        sizes = ModelGeometry.preset(model), limits, "cuda"
        served = Serving(*sizes, backend, layout, layout, index, frozenset(parts))
        device = DeviceFacts.named(target)
        variants += backend.kernel_variants(served.bounds(), device)
        # what `dsv4attn compile` puts into an image
        image += backend.kernel_variants(bounds_of(ModelGeometry.preset(model), "e4m3fn", None, 2), device)
    assert {{*variants}} <= {{*image}}
    said[target] = compile_each([variant for variant in variants if variant.kernel not in done], target)
    done |= {{variant.kernel for variant in variants}}
print()
print(json.dumps(said))
"""


KERNELS = {
    "sm_80": {"attention", "insert_kernel", "norm_kernel", "store_kernel", "project_codes_kernel"},
    "sm_90": {"attention", "score_index", "select_index", "project_many_kernel"},
}
"""Some of those that are compiled for a target."""


def test_every_kernel_compiles_in_a_process_of_vllm(tmp_path: Path) -> None:
    told, _ = run(tmp_path / "compiles.py", CODE)

    assert told.keys() == KERNELS.keys()
    for target, names in KERNELS.items():
        assert {name: error for name, error in told[target].items() if error} == {}
        assert {name.rpartition(".")[2] for name in told[target]} >= names

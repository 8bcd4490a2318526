#!/usr/bin/env bash
# In vLLM a prompt of DeepSeek-V4 holds eighty times the memory of its keys while it is computed.
#
# Expectation: a prompt of 8,192 tokens needs 31 MiB for compressed and index keys in all layers of Flash, as 8,192 tokens
#   of context do, and a few MiB for its windows. So 8 GiB of caches hold hundreds of such prompts.
# Behaviour: vLLM gives pages to the states of the compressors, 2 to 8 kB in fp32 for each token and layer, of all tokens
#   that a step computes, and to their window keys. They are free again after the step, except for those of the last
#   window. While a step computes 8,192 tokens of a prompt, 2.50 of its 2.53 GiB are such pages. Afterwards 18 MiB of them
#   are left. The line "GPU KV cache size: ... tokens" of vLLM's log counts a request at its largest, and so says 20,882
#   tokens for 8 GiB, which held 201 to 226 requests of 1,024 tokens and a part of their answers of 64 (Flash's 43
#   layers on an H200, 2026-11-30).
# Who is hurt: whoever sizes a server by bytes for each token of context, or by that line. Prompts wait although most of
#   the memory is free a step later. A smaller max_num_batched_tokens costs less: 1,024 tokens hold 0.3 GiB.
# Versions: vllm 0.33.0, torch 2.13.0 (CPU). Seen on 2026-11-30 with Python 3.11, without a GPU. The caches are described
#   as vllm/models/deepseek_v4 does (attention.py, compressor.py): kinds, sizes of blocks, and bytes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile \
    torch==2.13.0 numpy==2.4.6 packaging==26.2 psutil==7.2.2 regex==2026.5.9
venv/bin/pip --disable-pip-version-check install --quiet --no-compile --no-deps vllm==0.33.0

cat > probe.py <<'PROBE'
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec


def keys(ratio, head_size=512, **more):
    return MLAAttentionSpec(256, num_kv_heads=1, head_size=head_size, dtype=torch.uint8, tokens_per_state=ratio,
                            alignment=576, **more)


def states(block, values, window):
    return SlidingWindowMLASpec(block, num_kv_heads=1, head_size=values, dtype=torch.float32, sliding_window=window,
                                alignment=576)


FP8 = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4", "state_content_bytes": 584}
window = SlidingWindowMLASpec(64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128, alignment=576,
                              **FP8)
# layers, and what each of them has
CONTEXT = (21, keys(4, **FP8)), (20, keys(128, **FP8)), (21, keys(4, 132))
WINDOWS = ((43, window),)
STATES = (21, states(4, 2048, 8)), (21, states(4, 512, 8)), (20, states(8, 1024, 128))


def of_context(tokens):
    return sum(layers * -(-tokens // spec.block_size) * spec.page_size_bytes for layers, spec in CONTEXT) / 2**20


def in_flight(specs, tokens):
    """Pages that vLLM reckons with for a request of which a step computes so many tokens."""
    pages = [spec.max_admission_blocks_per_request(tokens, 2**20) * spec.page_size_bytes for _, spec in specs]
    return sum(layers * size for (layers, _), size in zip(specs, pages)) / 2**20


for tokens in (1, 1024, 8192):
    parts = of_context(tokens), in_flight(WINDOWS, tokens), in_flight(STATES, tokens)
    print(f"{tokens} tokens: context {parts[0]:.0f} MiB, windows {parts[1]:.0f} MiB, states {parts[2]:.0f} MiB")
PROBE
VLLM_TARGET_DEVICE=cpu venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
1 tokens: context 1 MiB, windows 5 MiB, states 13 MiB
1024 tokens: context 4 MiB, windows 29 MiB, states 306 MiB
8192 tokens: context 31 MiB, windows 201 MiB, states 2355 MiB
EXPECTED
cat seen
diff expected seen
echo "unchanged"

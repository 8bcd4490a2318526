#!/usr/bin/env bash
# A left-padded row of DeepSeek-V4 in transformers computes other logits than the same row alone.
#
# Expectation: with an attention mask (and position_ids) a left-padded batch gives each row the logits that it has
#   alone, as every decoder of transformers does.
# Behaviour: the windows that become compressed entries are cut from the padded sequence, padding included, and the
#   mask does not reach them. Five padding tokens move the logits of a tiny random model by more than a tenth of the
#   largest one; right padding moves nothing.
# Who is hurt: generate() with prompts of different lengths, which pads on the left: each prompt's text depends on the
#   longest of its batch.
# Versions: transformers 5.24.0, torch 2.13.0 (CPU). Seen on 2026-11-28 with Python 3.11, without a GPU
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip --disable-pip-version-check install --quiet --no-compile torch==2.13.0 numpy==2.4.6 transformers==5.24.0

cat > probe.py <<'PROBE'
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
config = DeepseekV4Config(
    vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=24, num_experts_per_tok=2, n_routed_experts=4,
    n_shared_experts=1, layer_types=KINDS, compress_rates=dict(zip(KINDS[1:], (4, 16))), mlp_layer_types=["moe"] * 3,
    sliding_window=8, o_groups=2, o_lora_rank=16, index_n_heads=16, index_head_dim=16, index_topk=3, hc_mult=4,
    max_position_embeddings=4096, pad_token_id=0, attn_implementation="eager",
)
torch.manual_seed(0)
model = DeepseekV4ForCausalLM(config).float().eval()
ids = torch.randint(1, 64, (2, 37))
PADS = 5
padding = torch.zeros(2, PADS, dtype=torch.long)
with torch.no_grad():
    alone = model(ids, use_cache=False).logits
    for side in ("left", "right"):
        parts = (padding, ids) if side == "left" else (ids, padding)
        mask = torch.cat([torch.full_like(part, int(part is ids)) for part in parts], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(torch.cat(parts, 1), attention_mask=mask, position_ids=positions, use_cache=False).logits
        logits = logits[:, PADS:] if side == "left" else logits[:, :-PADS]
        share = ((logits - alone).abs().max() / alone.abs().max()).item()
        print(f"{PADS} padding tokens on the {side}: logits move by", "more than 10 %" if share > 0.1 else "less than 0.01 %" if share < 1e-4 else "some")
PROBE
venv/bin/python -W ignore probe.py > seen 2> log || { cat log; exit 1; }

cat > expected <<'EXPECTED'
5 padding tokens on the left: logits move by more than 10 %
5 padding tokens on the right: logits move by less than 0.01 %
EXPECTED
cat seen
diff expected seen
echo "unchanged"

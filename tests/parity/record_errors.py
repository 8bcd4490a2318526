"""What each record costs: errors of keys and of layers' outputs of transformers' DeepSeek-V4 with V4's own key dims.

`python -m tests.parity.record_errors` prints the table of docs/records.md. The model is random, as no weights are
needed: norms of keys, their rotation, and the attention around them are those of the model. The oracle stores the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.key_records import KEY_RECORDS
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.testing.kit.tolerances import read_row, written
from tests.parity import hf

TOKENS, SEEDS, ROPE = 320, (0, 1), 64
DIMS: dict[str, Any] = {"HEAD_DIM": 512, "ROPE_DIM": ROPE, "WINDOW": 128, "HEADS": 8, "LONGEST": TOKENS}


def traces() -> Iterator[hf.Trace]:
    """Each layer of a model, for each seed."""
    sizes = {"hidden_size": 512, "q_lora_rank": 64, "o_lora_rank": 32, "index_topk": 32, "index_head_dim": 128}
    configuration = hf.config(head_dim=512, qk_rope_head_dim=ROPE, num_attention_heads=8, sliding_window=128, **sizes)
    with mock.patch.multiple(hf, **DIMS), mock.patch.object(hf, "config", return_value=configuration):
        hf.model.cache_clear()
        for seed in SEEDS:
            yield from hf.run(hf.model(seed), hf.prompt(seed))
        hf.model.cache_clear()


def stored(keys: Tensor, layout: KVCacheLayout) -> Tensor:
    """Keys [J, D] as float64 after a stay in a cache."""
    rows = keys.double().numpy()
    return torch.from_numpy(np.stack([read_row(written(row, layout), layout) for row in rows]))


def share(off: Tensor, true: Tensor) -> float:
    """The 2-norm of a difference as a share of that of the true values."""
    return float(off.norm() / true.norm())


def main() -> None:
    """Print the table."""
    seen = [*traces()]
    true = [hf.with_keys(trace, trace.keys) for trace in seen]
    layouts = {name: KVCacheLayout.of_record(name) for name in KEY_RECORDS}
    layouts["rows of bf16"] = KVCacheLayout.rows()
    print("| record | bytes | keys, without RoPE | keys | outputs of layers |\n| --- | --- | --- | --- | --- |")
    for name, layout in layouts.items():
        kept = [stored(trace.keys, layout) for trace in seen]
        off = [new - trace.keys.double() for new, trace in zip(kept, seen, strict=True)]
        plain = np.mean([share(o[:, :-ROPE], t.keys[:, :-ROPE].double()) for o, t in zip(off, seen, strict=True)])
        whole = np.mean([share(o, t.keys.double()) for o, t in zip(off, seen, strict=True)])
        outputs = [share(hf.with_keys(t, new) - out, out) for t, new, out in zip(seen, kept, true, strict=True)]
        errors = " | ".join(f"{100 * error:.2f} %" for error in (plain, whole, np.mean(outputs)))
        print(f"| `{name}` | {layout.record_bytes} | {errors} |", flush=True)


if __name__ == "__main__":
    main()

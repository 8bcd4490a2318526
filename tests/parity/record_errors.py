"""What each record costs: errors of keys and of layers' outputs of transformers' DeepSeek-V4 with V4's own key dims.

`python -m tests.parity.record_errors` prints the tables of docs/records.md. The model is random, as no weights are
needed: norms of keys, their rotation, and the attention around them are those of the model. The oracle stores the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.key_records import KEY_RECORDS
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.testing.oracle import E2M1_VALUES, encode_e2m1
from dsv4attn.testing.tolerances import F64, read_row, written
from tests.parity import hf

TOKENS, SEEDS, ROPE = 320, (0, 1), 64
DIMS: dict[str, Any] = {"HEAD_DIM": 512, "ROPE_DIM": ROPE, "WINDOW": 128, "HEADS": 8, "LONGEST": TOKENS}
EXPONENTS: dict[str, Callable[[F64], F64]] = {
    "none is cut (ours)": lambda top: np.ceil(np.log2(top / 6)),
    "nearest exponent (SGLang)": lambda top: np.rint(np.log2(top / 6)),
    "exponent of the largest, less 2 (OCP MX)": lambda top: np.floor(np.log2(top)) - 2,
}
"""Rules for the scales of MXFP4."""


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


def rule_error(keys: Tensor, rule: Callable[[F64], F64]) -> float:
    """Error of keys without their rotated dims in MXFP4, for a rule of scales."""
    rows = keys[:, :-ROPE].double().numpy()
    groups = rows.reshape(len(rows), -1, 32)
    scale = 2.0 ** rule(np.abs(groups).max(-1, keepdims=True))
    codes = encode_e2m1(groups / scale)
    values = np.where(codes & 8, -1, 1) * E2M1_VALUES[codes & 7] * scale
    return share(torch.from_numpy(values.reshape(rows.shape) - rows), torch.from_numpy(rows))


def main() -> None:
    """Print both tables."""
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
    print("\n| scale of MXFP4 | keys, without RoPE |\n| --- | --- |")
    for name, rule in EXPONENTS.items():
        print(f"| {name} | {100 * np.mean([rule_error(trace.keys, rule) for trace in seen]):.2f} % |")


if __name__ == "__main__":
    main()

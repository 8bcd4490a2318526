"""`PlantedBackend`: a backend of another vendor that is the reference, but for one op that computes wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, fields
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract import BuilderOps
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.contract.info import COMPUTING
from dsv4attn.core.contract.op_names import LAYER_OPS
from tests.vendor_wheel import VendorWheels, plugin


def install_planted(wheels: VendorWheels) -> None:
    """Install the backend as `acme`, with the option `bug`."""
    source = plugin(factory="tests.selection.planted_ops:PlantedBackend", options={"bug": ""})
    parts = f'layer_ops={tuple(LAYER_OPS)!r}, summary="'
    wheels.install("dsv4attn-acme", source.replace('summary="', parts))


def _after(change: Callable[..., None]) -> Callable[[Any], Any]:
    """An op that changes what the right op has written, by its arguments."""

    def planted(op: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            result = op(*args, **options)
            change(*args, **options)
            return result

        return run

    return planted


def _scaled(op: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        return op(*args, **options) * 2

    return run


def _shifted_first(op: Any) -> Any:
    def run(first: Tensor, *args: Any, **options: Any) -> Any:
        return op(first + 1, *args, **options)

    return run


def _no_entry(*args: Any, **options: Any) -> None:
    [out for out in args if isinstance(out, Tensor)][-1].fill_(-1)


def _no_key(*args: Any, out: tuple[Tensor, Tensor], **options: Any) -> None:
    out[1].fill_(0)


def _doubled_out(call: AttentionCall) -> None:
    call.out.mul_(2)


def _doubled_rows(out: Tensor, *args: Any) -> None:
    out.mul_(2)


def _doubled_q(q: Tensor, *args: Any) -> None:
    q.mul_(2)


def _wrong_slots(*args: Any, out: tuple[Tensor, Tensor], **options: Any) -> None:
    out[0].clamp_(max=0)


def _negative_weights(op: Any) -> Any:
    def run(q: Tensor, weights: Tensor, *args: Any, **options: Any) -> Any:
        return op(q, -weights, *args, **options)

    return run


BUGS: dict[str, Callable[[Any], Any]] = {
    "decode": _after(_doubled_out),
    "prefill": _after(_doubled_out),
    "qnorm_rope_kv_insert": _after(_doubled_q),
    "dequantize_and_gather_k_cache": _after(_doubled_rows),
    "inv_rope_o_proj": _scaled,
    "save_partial_states": _shifted_first,
    "indexer_q_rope_quant": _negative_weights,
    "select_topk": _after(_no_entry),
    "combine_topk_swa_indices": _after(_no_key),
    "compute_global_topk_indices_and_lens": _after(_no_key),
    "build_window_indices": _after(_wrong_slots),
}
"""What is wrong with an op, by its name: a function from the right op to the wrong one."""


def _same(op: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        return op(*args, **options)

    return run


class PlantedBackend(ReferenceBackend):
    """The reference under another name. bug: the op that is wrong; "" for none."""

    name = "acme"

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        planted = {bug: BUGS[bug]} if bug else {}
        layer_ops, index_ops, builder_ops = super().layer_ops, super().index_ops, BuilderOps()
        of_layer = [op for ops in LAYER_OPS.values() for op in ops]
        self.layer_ops = evolve(layer_ops, **{op: planted.get(op, _same)(getattr(layer_ops, op)) for op in of_layer})
        of_index = [op for op in planted if hasattr(index_ops, op)]
        self.index_ops = evolve(index_ops, **{op: planted[op](getattr(index_ops, op)) for op in of_index})
        names = [each.name for each in fields(BuilderOps) if each.name in planted and each.name not in of_index]
        self.builder_ops = evolve(builder_ops, **{op: planted[op](getattr(builder_ops, op)) for op in names})
        # no method calls another one of this object: prefill of the reference calls decode
        right = ReferenceBackend()
        for op in COMPUTING:
            setattr(self, op, planted.get(op, _same)(getattr(right, op)))

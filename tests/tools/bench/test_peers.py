"""Other libraries are called by their public names, on our inputs as they are."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.compat import flash_mla
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.errors import UnsupportedError
from dsv4attn.tools.bench.accuracy import error
from dsv4attn.tools.bench.attention_peers import FlashInfer
from dsv4attn.tools.bench.cases import PRESETS, KernelCase
from dsv4attn.tools.bench.contenders import expected_attention, make_task
from dsv4attn.tools.bench.inputs import LAYOUT, make_inputs
from dsv4attn.tools.bench.peers import PEERS

CPU = torch.device("cpu")
MODULES = {"flash_mla": "flash_mla", "vllm": "vllm.v1.attention.ops.flashmla", "flashinfer": "flashinfer.mla"}


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> ModuleType:
    """A module of this dotted name, and the packages it is in."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, function in functions.items():
        setattr(module, key, function)
    return module


def flash_functions() -> dict[str, Any]:
    """FlashMLA's functions, with its signature, on the reference."""
    return {
        "flash_mla_with_kvcache": partial(flash_mla.flash_mla_with_kvcache, backend="reference"),
        "flash_mla_sparse_fwd": partial(flash_mla.flash_mla_sparse_fwd, backend="reference", need_max_logits=False),
        "get_mla_metadata": flash_mla.get_mla_metadata,
    }


def case(kernel: str, preset: str) -> KernelCase:
    requests = ((300, 1), (90, 1)) if kernel == "decode" else ((300, 2), (90, 1))
    return KernelCase(kernel, PRESETS[preset], "toy", requests, seed=4)


@pytest.mark.parametrize("preset", ["flash_c4", "flash_c128", "flash_swa"])
@pytest.mark.parametrize("kernel", ["decode", "prefill", "prefill-rows"])
@pytest.mark.parametrize("name", ["flash_mla", "vllm"])
def test_flash_mla_gets_what_its_signature_says(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: str, preset: str
) -> None:
    install(monkeypatch, MODULES[name], **flash_functions())
    task = make_task(case(kernel, preset), CPU)
    peer = PEERS[name].contender(task, [ReferenceBackend()])
    assert peer is not None

    assert PEERS[name].available() is None
    peer.run()
    assert error([(peer.results()[0], task.expected[0])]).within(1e-2)
    peer.reset()
    assert bool(peer.results()[0].isnan().all())


def sparse_mla(**arguments: Any) -> None:
    """What FlashInfer's function is asked for, computed from its own arguments."""
    assert arguments["workspace_buffer"].dtype == torch.uint8
    assert arguments["bmm2_scale"] == 1.0
    pairs = [(arguments["swa_kv_cache"], arguments["sparse_indices"], arguments["swa_topk_lens"])]
    if "compressed_kv_cache" in arguments:
        pairs.append(
            (arguments["compressed_kv_cache"], arguments["extra_sparse_indices"], arguments["extra_sparse_topk_lens"])
        )
    from dsv4attn.tools.bench.inputs import read_records

    for t, q in enumerate(arguments["query"].float()):
        # [pages, 1, page, 584]: heads second
        keys = torch.cat([read_records(PagedKVCache(cache, LAYOUT), i[t, : int(n[t])]) for cache, i, n in pairs])
        z = torch.cat([q @ keys.T * arguments["bmm1_scale"], arguments["sinks"][:, None]], 1)
        arguments["out"][t] = torch.softmax(z, 1)[:, :-1] @ keys


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("preset", ["flash_c4", "flash_swa"])
def test_flashinfer_gets_what_its_signature_says(monkeypatch: pytest.MonkeyPatch, preset: str, kernel: str) -> None:
    install(monkeypatch, MODULES["flashinfer"], trtllm_batch_decode_sparse_mla_dsv4=sparse_mla)
    inputs = make_inputs(case(kernel, preset), CPU)
    peer = FlashInfer()

    assert peer.available() is None
    assert inputs.rows is None or inputs.rows.dim() == 3
    call = peer.decode(inputs) if kernel == "decode" else peer.prefill(inputs, torch.empty(0))
    assert error([(call(), expected_attention(inputs))]).within(1e-2)


def test_flashinfer_takes_no_gathered_rows() -> None:
    task = make_task(case("prefill-rows", "flash_swa"), CPU)
    with pytest.raises(UnsupportedError, match="gathered rows"):
        PEERS["flashinfer"].contender(task, [])


def test_no_backend_gathers_for_a_peer_if_none_of_ours_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_mla", **flash_functions())
    with pytest.raises(UnsupportedError, match="a backend that gathers"):
        PEERS["flash_mla"].contender(make_task(case("prefill", "flash_swa"), CPU), [])


@pytest.mark.parametrize("name", MODULES)
def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name].partition(".")[0], None)

    why = PEERS[name].available()
    assert why is not None
    assert "not installed" in why


def test_a_peer_that_breaks_when_it_is_imported_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcudart.so.13: cannot open')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    assert PEERS["flash_mla"].available() == "cannot be imported: OSError: libcudart.so.13: cannot open"


def test_a_peer_of_another_version_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_mla", get_mla_metadata=None)

    assert PEERS["flash_mla"].available() == "flash_mla has no flash_mla_with_kvcache, flash_mla_sparse_fwd"


def test_vllm_is_asked_whether_it_was_built_for_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_supported() -> tuple[bool, str]:
        return False, "only on Hopper"

    install(monkeypatch, MODULES["vllm"], **flash_functions(), is_flashmla_sparse_supported=is_supported)
    assert PEERS["vllm"].available() == "only on Hopper"

"""The plugin as TokenSpeed finds it, and when it registers nothing."""

from __future__ import annotations

from pathlib import Path

import dsv4attn_tokenspeed
import pytest
import tokenspeed_python

from integrations.environment import check_wheel

CODE = """
import tokenspeed_python, torch
tokenspeed_python.load()
from tokenspeed_kernel.plugins import discover_plugins
from tokenspeed_kernel.selection import select_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature
plugins = [[info.name, info.package, info.num_kernels] for info in discover_plugins()]
bf16 = dense_tensor_format(torch.bfloat16)
traits = {"head_dim": 512, "cache_layout": "dense_workspace", "sinks": True}
chosen = select_kernel("attention", "dsv4_prefill", format_signature(q=bf16, kv=bf16), traits=traits).name
result = [plugins, chosen]
"""
"""In a process of TokenSpeed: plugins, and the kernel that an op chooses."""


def test_an_installed_wheel_is_found_and_chosen_and_an_uninstalled_one_leaves_nothing(tmp_path: Path) -> None:
    used = [[["dsv4attn", "dsv4attn-tokenspeed", len(dsv4attn_tokenspeed.OPS)]], "dsv4attn_dsv4_prefill"]
    unused = [[], "triton_dsv4_prefill"]
    check_wheel("dsv4attn-tokenspeed", tmp_path, CODE, Path(__file__).parent, used=used, unused=unused)


def test_an_untested_version_is_refused_and_the_switch_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenspeed_python.load()
    from tokenspeed_kernel.registry import KernelRegistry

    before = KernelRegistry.get()._by_name
    monkeypatch.setattr(KernelRegistry.get(), "_by_name", {})
    monkeypatch.setattr(dsv4attn_tokenspeed, "version", lambda _: "0.2.0")
    with pytest.raises(
        RuntimeError, match=r"expected 0\.1\.4, got 0\.2\.0 -> install tokenspeed_kernel==0\.1\.4, or set"
    ):
        dsv4attn_tokenspeed.register()
    monkeypatch.setenv("DSV4ATTN_TOKENSPEED", "off")
    with pytest.raises(RuntimeError, match="DSV4ATTN_TOKENSPEED: expected 0 or 1"):
        dsv4attn_tokenspeed.register()
    monkeypatch.setenv("DSV4ATTN_TOKENSPEED", "0")
    dsv4attn_tokenspeed.register()
    assert KernelRegistry.get()._by_name == {}
    monkeypatch.setenv("DSV4ATTN_TOKENSPEED", "1")
    monkeypatch.setenv("DSV4ATTN_TOKENSPEED_ANY_VERSION", "1")
    dsv4attn_tokenspeed.register()
    assert sorted(KernelRegistry.get()._by_name) == sorted(f"dsv4attn_{op}" for op in dsv4attn_tokenspeed.OPS)
    assert before is not KernelRegistry.get()._by_name

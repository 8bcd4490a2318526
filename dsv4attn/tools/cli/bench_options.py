"""Options that the commands of `dsv4attn bench` share: lists of numbers, the file of `--json`, the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli.conform import target_file

if TYPE_CHECKING:
    import torch

__all__ = ["STDOUT", "device_named", "device_of_rank", "file_or_stdout", "numbers"]

STDOUT = "-"
"""Of `--json` without a file."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Kinds of torch devices that ranks may have, with the backend of their process group."""


def file_or_stdout(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | Path | None:
    """The file of `--json`, or STDOUT."""
    from dsv4attn.tools.bench.cases import MEASUREMENTS

    if value in MEASUREMENTS:
        raise click.BadParameter(f"{value!r} would be its file: put --json last, or name a file", param=parameter)
    return value if value in (None, STDOUT) else target_file(ctx, parameter, value)


def numbers(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`8,64,256`."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r}: expected numbers above 0 with commas, as in 8,64,256", param=parameter)
    return tuple(int(part) for part in parts)


def device_named(name: str | None) -> torch.device:
    """The named device, which must exist here, or the first accelerator, or the CPU."""
    import torch

    from dsv4attn.core.contract.device import DeviceFacts

    if name is not None:
        facts = DeviceFacts.here(name)
        return torch.device("cpu" if facts.kind == "cpu" else name)
    accelerator = torch.accelerator.current_accelerator() if DeviceFacts.here().kind != "cpu" else None
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def device_of_rank(name: str | None) -> tuple[torch.device, str]:
    """The device of this rank, by its number on this host, which becomes current; and its process group's backend.

    name: a kind of device. Raises ArgumentError on all ranks of a host that has fewer such devices than ranks.
    """
    import torch

    if name is not None and ":" in name:
        expected = "a kind of device: rank r of a host has its device number r"
        raise ArgumentError("--device", expected=expected, actual=name, hint=f"type: --device {name.partition(':')[0]}")
    kind = device_named(name).type
    if kind not in _BACKENDS:
        raise ArgumentError("--device", expected=" or ".join(_BACKENDS), actual=kind)
    if kind == "cpu":
        return torch.device("cpu"), _BACKENDS[kind]
    ranks, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if ranks > found:
        expected = f"{ranks} devices on this host, one for each of its ranks"
        raise ArgumentError("--device", expected=expected, actual=found, hint=f"type: --nproc-per-node {found}")
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.get_device_module(place).set_device(place)
    return place, _BACKENDS[kind]

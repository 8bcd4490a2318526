"""The device of `dsv4attn bench`, and of each rank of `dsv4attn bench-context`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dsv4attn.errors import ArgumentError

if TYPE_CHECKING:
    import torch

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Kinds of torch devices that ranks may have, with the backend of their process group."""


def device_named(name: str | None) -> torch.device:
    """The device of this machine with torch's name for it, such as cuda:1, or the first accelerator, or the CPU.

    Raises ArgumentError, which lists the devices of this machine, if there is no such device.
    """
    import torch

    from dsv4attn.core.contract.device import DeviceFacts

    if name is not None:
        return torch.device("cpu" if DeviceFacts.here(name).kind == "cpu" else name)
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
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if ranks > devices:
        expected = f"{ranks} devices on this host, one for each of its ranks"
        raise ArgumentError("--device", expected=expected, actual=devices, hint=f"type: --nproc-per-node {devices}")
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.get_device_module(place).set_device(place)
    return place, _BACKENDS[kind]

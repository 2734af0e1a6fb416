"""Where the GPUs of a machine are: their PCI addresses, and the NUMA nodes that they are next to."""

from __future__ import annotations

from pathlib import Path

from longshore.machine.limits import text_of

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


def pci_address(properties: object) -> str:
    """``0000:3b:00.0`` of what ``torch.cuda.get_device_properties`` gives."""
    domain, bus, device = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def pci_folder(address: str, root: Path = Path("/")) -> Path:
    """Where Linux tells about a PCI device."""
    return root / "sys/bus/pci/devices" / address


def numa_node_of(address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node that a PCI device is next to; None: not told, or the machine has but one (-1)."""
    node = text_of(pci_folder(address, root) / "numa_node").strip()
    return int(node) if node.isdigit() else None


def visible_gpus() -> dict[str, str]:
    """PCI addresses of the CUDA devices that this process sees, by name (``cuda:0``); imports torch."""
    import torch

    if not torch.cuda.is_available():
        return {}
    count = torch.cuda.device_count()
    return {f"cuda:{index}": pci_address(torch.cuda.get_device_properties(index)) for index in range(count)}


def all_gpus(root: Path = Path("/")) -> list[str]:
    """PCI addresses of the machine's NVIDIA GPUs, also of those that a container or a variable hides."""
    found = []
    for folder in sorted(root.glob("sys/bus/pci/devices/*")):
        is_display = text_of(folder / "class").startswith(_DISPLAY_CLASS)
        if is_display and text_of(folder / "vendor").strip() == _NVIDIA:
            found.append(folder.name)
    return found

"""``longshore report``: one page of facts about this machine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from longshore.byte_sizes import format_byte_size
from longshore.cli.terminal import make_console, quantity

if TYPE_CHECKING:
    from longshore.report import Figures, Finding, Gpu, Machine

_QUICK_NUMEL = 1 << 22
_NOT_TOLD = "not told"


def report(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure memory, the host step and copies too (seconds)."),
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Measure with small arrays, which caches may hold.")] = False,
) -> None:
    """Print what matters to training on this machine, and what will slow it down, for bug reports.

    The page names no host, user or folder.
    """
    from longshore.report import findings_of, read_machine
    from longshore.report import measure as measured

    console = make_console()
    load = os.getloadavg()[0]
    machine, figures = read_machine(), None
    if measure:
        with console.status("measuring") as status:  # shown on a terminal only
            note = status.update
            figures = measured(_QUICK_NUMEL, note=note) if quick else measured(note=note)
    findings = findings_of(machine, figures, load)
    if as_json:
        content = {
            "machine": dataclasses.asdict(machine),
            "figures": None if figures is None else dataclasses.asdict(figures),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        console.print(json.dumps(content, indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    for line in page(machine, figures, findings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def page(machine: Machine, figures: Figures | None, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of the page."""
    sections = {
        "software": _software(machine),
        "CPU": _cpu(machine),
        "memory": _memory(machine),
        **{f"cuda:{index}": _gpu(gpu) for index, gpu in enumerate(machine.gpus)},
        "measured": [] if figures is None else _figures(figures),
    }
    width = max(len(label) for rows in sections.values() for label, _ in rows)
    for title, rows in sections.items():
        if rows:
            yield title
            yield from (f"  {label:{width}}  {value}" for label, value in rows)
    if not findings:
        yield "no likely problems"
        return
    yield "likely problems"
    for finding in findings:
        yield f"  - {finding.what}"
        yield f"    {finding.do}"


def _software(machine: Machine) -> list[tuple[str, str]]:
    software = machine.software
    cuda = f"CUDA {software.cuda}" if software.cuda else "for the CPU"
    return [
        ("longshore", software.longshore),
        ("torch", f"{software.torch}, {cuda}, {software.torch_threads} threads"),
        ("Python", f"{software.python}, {software.system}"),
        ("also", ", ".join(f"{name} {version}" for name, version in software.packages.items()) or "nothing"),
        ("set", " ".join(f"{name}={value}" for name, value in software.environment.items()) or "nothing"),
    ]


def _cpu(machine: Machine) -> list[tuple[str, str]]:
    cpu = machine.cpu
    quota = "" if cpu.quota is None else f", {cpu.quota:g} CPUs' worth of time"
    return [
        ("name", cpu.name),
        ("CPUs", f"{len(cpu.usable)} of {cpu.logical} usable{quota}"),
        ("instructions", f"{cpu.instruction_set} (torch: {cpu.torch_instruction_set})"),
        ("caches", ", ".join(f"{name} {size >> 10} KiB" for name, size in cpu.caches.items()) or _NOT_TOLD),
        ("NUMA nodes", "; ".join(f"{node}: {cpus}" for node, cpus in cpu.numa_nodes.items()) or _NOT_TOLD),
    ]


def _memory(machine: Machine) -> list[tuple[str, str]]:
    memory = machine.memory
    locked, shared = memory.locked_limit_bytes, memory.shared_free_bytes
    rows = [
        ("free", f"{format_byte_size(memory.available_bytes)} of {format_byte_size(memory.total_bytes)}"),
        ("container", "no limit" if memory.limit_bytes is None else format_byte_size(memory.limit_bytes)),
        ("may be locked", "any amount" if locked is None else format_byte_size(locked)),
        ("/dev/shm", _NOT_TOLD if shared is None else f"{format_byte_size(shared)} free"),
        ("huge pages", memory.huge_pages or _NOT_TOLD),
    ]
    return [*rows, ("swapped out", format_byte_size(memory.swap_used_bytes))] if memory.swap_used_bytes else rows


def _gpu(gpu: Gpu) -> list[tuple[str, str]]:
    node = "" if gpu.numa_node is None else f", next to NUMA node {gpu.numa_node}"
    return [
        ("name", f"{gpu.name}, compute capability {gpu.capability}"),
        ("free", f"{format_byte_size(gpu.free_bytes)} of {format_byte_size(gpu.total_bytes)}"),
        ("link", f"{gpu.link or _NOT_TOLD}{node}"),
        ("reaches", ", ".join(f"cuda:{peer}" for peer in gpu.peers) or "no other"),
    ]


def _figures(figures: Figures) -> list[tuple[str, str]]:
    rows = [
        ("memory, read", _rate(figures.memory_read_bytes_per_s)),
        ("memory, copy", f"{_rate(figures.memory_copy_bytes_per_s)} read and written"),
        (
            "AdamW on the host",
            f"{quantity(figures.step_numel_per_s)} elements/s, {_rate(figures.step_bytes_per_s)}, "
            f"{figures.threads} threads",
        ),
    ]
    copies = zip(figures.to_device_bytes_per_s, figures.from_device_bytes_per_s, strict=True)
    return [*rows, *((f"cuda:{i}", f"{_rate(up)} to it, {_rate(down)} from it") for i, (up, down) in enumerate(copies))]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"

"""``longshore report``: one page of facts about this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic_core import to_jsonable_python

from longshore.cli.terminal import make_console, print_lines, quantity
from longshore.seam import default_tile_numel, format_byte_size

if TYPE_CHECKING:
    from longshore.report import Figures, Finding, Machine

    Rows = list[tuple[str, str]]

_QUICK_NUMEL = 1 << 22
_UNKNOWN = "unknown"
_PLACES = {
    "here": "on the CPU",
    "offloaded": "weights on a GPU",
    "streamed": "--stream",
}


def report(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure memory, the host step and copies too (seconds)."),
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Measure with small arrays, which caches may hold.")] = False,
) -> None:
    """Print the facts of this machine for training, and causes of slow training, for bug reports.

    The page names no host, user or folder.
    """
    from longshore.report import findings_of, largest_models, read_machine
    from longshore.report import measure as measured

    load = os.getloadavg()[0]
    machine, figures = read_machine(), None
    if measure:
        with make_console().status("measuring") as status:  # shown on a terminal only
            note = status.update
            figures = measured(_QUICK_NUMEL, note=note) if quick else measured(note=note)
    findings = findings_of(machine, figures, load)
    if as_json:
        largest = largest_models(machine)
        content = to_jsonable_python(
            {"machine": machine, "figures": figures, "largest_models": largest, "findings": findings}
        )
        print_lines([json.dumps(content, indent=2)])
    else:
        print_lines(_page(machine, figures, findings))


def _page(machine: Machine, figures: Figures | None, findings: Sequence[Finding]) -> Iterator[str]:
    from longshore.report import largest_models

    sections = _sections(machine)
    sections["largest models, about: bf16, AdamW, one process; longshore plan counts yours"] = [
        (_PLACES[place], f"{quantity(numel)} parameters") for place, numel in largest_models(machine).items()
    ]
    if figures is not None:
        sections["measured"] = _figures(figures)
    width = max(len(label) for rows in sections.values() for label, _ in rows)
    for title, rows in sections.items():
        yield title
        yield from (f"  {label:{width}}  {value}" for label, value in rows)
    yield "likely problems" if findings else "no likely problems"
    for finding in findings:
        yield f"  - {finding.what}"
        yield f"    {finding.do}"


def _sections(machine: Machine) -> dict[str, Rows]:
    software, cpu, memory = machine.software, machine.cpu, machine.memory
    cuda = f"CUDA {software.cuda}" if software.cuda else "for the CPU"
    quota = "" if cpu.quota is None else f", {cpu.quota:g} CPUs' worth of time"
    locked, shared, swapped = memory.locked_limit_bytes, memory.shared_free_bytes, memory.swap_used_bytes
    sections = {
        "software": [
            ("longshore", software.longshore),
            ("torch", f"{software.torch}, {cuda}, {software.torch_threads} threads"),
            ("Python", f"{software.python}, {software.system}"),
            ("also", ", ".join(f"{name} {version}" for name, version in software.packages.items()) or "nothing"),
            ("set", " ".join(f"{name}={value}" for name, value in software.environment.items()) or "nothing"),
        ],
        "CPU": [
            ("name", cpu.name),
            ("CPUs", f"{len(cpu.usable)} of {cpu.logical} usable{quota}"),
            ("instructions", f"{cpu.instruction_set} (torch: {cpu.torch_instruction_set})"),
            ("tiles", _tiles(len(cpu.usable))),
            ("caches", ", ".join(f"{name} {size >> 10} KiB" for name, size in cpu.caches.items()) or _UNKNOWN),
            ("NUMA nodes", "; ".join(f"{node}: {cpus}" for node, cpus in cpu.numa_nodes.items()) or _UNKNOWN),
        ],
        "memory": [
            ("free", f"{format_byte_size(memory.available_bytes)} of {format_byte_size(memory.total_bytes)}"),
            ("container", "no limit" if memory.limit_bytes is None else format_byte_size(memory.limit_bytes)),
            ("may be locked", "any amount" if locked is None else format_byte_size(locked)),
            ("/dev/shm", _UNKNOWN if shared is None else f"{format_byte_size(shared)} free"),
            ("huge pages", memory.huge_pages or _UNKNOWN),
            *([("swapped out", format_byte_size(swapped))] if swapped else []),
        ],
    }
    for index, gpu in enumerate(machine.gpus):
        node = "" if gpu.numa_node is None else f", next to NUMA node {gpu.numa_node}"
        sections[f"cuda:{index}"] = [
            ("name", f"{gpu.name}, compute capability {gpu.capability}"),
            ("free", f"{format_byte_size(gpu.free_bytes)} of {format_byte_size(gpu.total_bytes)}"),
            ("link", f"{gpu.link or _UNKNOWN}{node}"),
            ("reaches", ", ".join(f"cuda:{peer}" for peer in gpu.peers) or "no other"),
        ]
    return sections


def _tiles(threads: int) -> str:
    here, copied = (default_tile_numel(staged, threads) >> 20 for staged in (False, True))
    return f"of {here} Mi elements, {copied} Mi where they are copied from a device, for {threads} threads"


def _figures(figures: Figures) -> Rows:
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

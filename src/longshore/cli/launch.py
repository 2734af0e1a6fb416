"""``longshore launch``: torchrun, with CPUs, NUMA nodes and threads for each rank."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from longshore.cli.terminal import CommandError, SettingsError, print_lines, warn
from longshore.seam import RankBinding, RankDevice, binding_wanted, machine, plan_ranks, unbound

RAW_ARGUMENTS: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""typer settings with which torchrun's own parser reads all arguments, --help too."""

_ABOUT = """torchrun, set up for training with host memory: each rank is bound to CPUs of the NUMA node of its GPU,
before torch is imported; torch and the host step get threads for these CPUs (OMP_NUM_THREADS is set, unless
you set it); limits on locked and shared memory are checked. All options of torchrun work as they do there.
LONGSHORE_BIND=0 turns binding off."""


def launch(context: typer.Context) -> None:
    """Run a script on several ranks: torchrun, with CPUs and threads chosen for each rank."""
    arguments = _parsed(context.args)
    # The part of the command before the script, as in torchrun.
    program = [os.environ.get("PYTHON_EXEC", sys.executable), "-u", *(["-m"] if arguments.module else [])]
    program = [] if arguments.no_python else program
    bindings = _bindings(arguments.nproc_per_node, os.environ)
    gpus = any(each.device != "cpu" for each in bindings)
    if len(bindings) > 1 or gpus:
        from longshore.report import limit_findings

        for finding in limit_findings(machine.shared_free_bytes(), machine.locked_limit_bytes(), gpus):
            warn(f"{finding.what}: {finding.do}")
    missing = not (arguments.module or arguments.no_python or os.path.exists(arguments.training_script))
    if arguments.dry_run:
        if missing:
            warn(f"there is no script {arguments.training_script} here")
        print_lines(_page(bindings, [*program, arguments.training_script, *arguments.training_script_args]))
        return
    if missing:
        raise CommandError(f"there is no script {arguments.training_script}")
    _run(arguments, program, bindings)


def _page(bindings: Sequence[RankBinding], command: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table with the device, CPUs and threads of each rank, and the command that all run."""
    rows = [("rank", "device", "NUMA node", "CPUs", "torch threads", "host threads", "why")]
    for rank, each in enumerate(bindings):
        nodes, cpus = machine.cpu_list(each.nodes) or "-", machine.cpu_list(each.cpus) or "any"
        threads = str(each.torch_threads), str(each.host_threads)
        rows.append((str(rank), each.device, nodes, cpus, *threads, each.reasons))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    yield f"each runs: {shlex.join(command)}"


def _parsed(arguments: Sequence[str]) -> Namespace:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "longshore launch"
    parser.description = _ABOUT
    about = "Short for --nproc-per-node."
    parser.add_argument("--nproc", dest="nproc_per_node", default=SUPPRESS, metavar="N", help=about)
    about = "Print what each rank would get and start nothing."
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help=about)
    parsed = parser.parse_args(arguments)
    for option, given, why in (
        ("--run-path", parsed.run_path, "starts ranks that have torch already, too late to bind them"),
        ("--numa-binding", getattr(parsed, "numa_binding", None), "binds ranks too"),
    ):
        if given:
            raise SettingsError(f"{option} {why}: leave it out, or use torchrun")
    if parsed.no_python and parsed.module:
        raise SettingsError("--no-python runs a program and --module a module of Python: leave one of them out")
    return parsed


def _bindings(processes: str, environ: Mapping[str, str]) -> list[RankBinding]:
    from torch.distributed.run import determine_local_world_size

    try:
        count = determine_local_world_size(processes)
    except ValueError as error:
        raise SettingsError(f"--nproc {processes}: {error}") from error
    if count < 1:
        raise SettingsError(f"--nproc must be at least 1, not {count}")
    try:
        wanted = binding_wanted(environ)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    visible = machine.visible_gpus()
    if visible and count > len(visible):
        warn(f"{count} ranks and {len(visible)} CUDA devices: the others are planned as if they trained on the CPU")
    devices, hidden = devices_of(count, visible)
    bindings = plan_ranks(machine.read_topology(), devices, hidden, environ.get("OMP_NUM_THREADS"))
    return [unbound(each, "LONGSHORE_BIND=0") if wanted is False else each for each in bindings]


def devices_of(
    count: int, visible: Mapping[str, str | None], root: Path = Path("/")
) -> tuple[list[RankDevice], list[RankDevice]]:
    """Return the device of each rank, by local rank, and the GPUs that are not visible to this run.

    Args:
        count: the number of ranks on this machine.
        visible: PCI addresses of CUDA devices, by name; None: not known.
        root: the folder that has ``sys``.
    """
    seen = [RankDevice(name, address, machine.numa_node_of(address, root)) for name, address in visible.items()]
    devices = [*seen[:count], *(RankDevice() for _ in range(count - len(seen)))]
    unseen = machine.hidden_gpus(visible.values(), root)
    return devices, [RankDevice("unseen", address, machine.numa_node_of(address, root)) for address in unseen]


def _run(arguments: Namespace, program: Sequence[str], bindings: Sequence[RankBinding]) -> None:
    """Call torchrun. Each rank begins with ``machine/start.py``, which becomes the rank's program."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.run import run

    from longshore.seam import start

    # Otherwise torchrun sets the variable to 1, and prints that; each rank sets its own value.
    os.environ.setdefault("OMP_NUM_THREADS", str(bindings[0].torch_threads))
    # An engine has more streams than CUDA has hardware queues by default, and two in one queue wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    content = {"program": list(program), "bindings": [json.loads(each.to_json()) for each in bindings]}
    os.environ["LONGSHORE_LAUNCH"] = json.dumps(content)
    folder = str(Path(start.__file__).parent)
    # Attached to -c, so that the script is the first argument without a dash, after which torchrun names its reports.
    code = f"-cimport sys; sys.path.append({folder!r}); import start; start.main(sys.argv[1:])"
    script = [arguments.training_script, *arguments.training_script_args]
    arguments.training_script = sys.executable
    arguments.training_script_args = ["-I", "-S", code, f"--rank={macros.local_rank}", *script]
    arguments.no_python, arguments.module = True, False
    try:
        record(run)(arguments)
    except ChildFailedError as failure:
        # Print what torchrun prints below its own traceback, and end with its exit code.
        print(failure, file=sys.stderr, flush=True)
        raise typer.Exit(1) from None
    except SignalException as ended:
        raise CommandError(f"ended by {ended.sigval.name}; so were all ranks") from ended

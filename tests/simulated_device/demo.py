"""``make demo``, second part: a model larger than its device is trained on the simulated one, whose memory is limited.

The exit code is 1 if any weight differs in any bit from plain PyTorch's, which has a device that is large enough, or if
the small one is large enough without ``--stream``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from longshore.byte_sizes import format_byte_size
from longshore.cli.output import RUN, WEIGHTS

BUDGET = 1_300_000
"""Bytes of the small device. The parameters take 1,474,688."""
_LARGE = 1 << 32
MODEL = ["--hidden-size", "64", "--intermediate-size", "176", "--layers", "14", "--heads", "2", "--dtype", "bf16"]
MODEL += ["--seq-len", "16"]
_RUN = [
    "--batch-size",
    "1",
    "--steps",
    "20",
    "--warmup",
    "0",
    "--eval-every",
    "0",
    "--clip",
    "0",
    "--max-bytes",
    "100000",
]


def start(budget: int, *arguments: object) -> subprocess.Popen[str]:
    """Start longshore's command line in a process of its own, on a simulated device with so many bytes."""
    return subprocess.Popen(
        [sys.executable, "-m", "simulated_device.command_line", str(budget), *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end; return the exit code, what was printed, and the lines of its error."""
    out, errors = process.communicate(timeout=300)
    lines = [line for line in errors.splitlines() if line.startswith(("longshore", "Traceback"))]
    return process.returncode, out, "\n".join(lines)


def main() -> int:
    console = Console()
    console.print(
        f"\nA model larger than its device, which is simulated; with more than {format_byte_size(BUDGET)} it fails.\n"
    )
    table = Table("run", "limit", "loss", "on the device", "on the host", "equal")
    whole: dict[str, torch.Tensor] = {}
    as_expected = True
    with tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
        for name, budget, options in (
            ("plain PyTorch", _LARGE, ["--plain"]),
            ("longshore", BUDGET, ["--release-gradients"]),
            ("longshore --stream", BUDGET, ["--stream"]),
        ):
            out = Path(folder, str(table.row_count))
            code, _, errors = finished(start(budget, "train", *MODEL, *_RUN, "--out", out, *options))
            limit = format_byte_size(budget)
            if code:
                fits_not = "out of memory" in errors
                table.add_row(name, limit, "out of memory" if fits_not else errors, "", "", "")
                as_expected &= fits_not and name == "longshore"
                continue
            result, weights = json.loads((out / RUN).read_text())["result"], load_file(out / WEIGHTS)
            same = all(torch.equal(weight, whole.setdefault(key, weight)) for key, weight in weights.items())
            as_expected &= same and name != "longshore"
            memory = [format_byte_size(result[key]) for key in ("device_bytes", "host_bytes")]
            table.add_row(name, limit, f"{result['train_loss']:.6f}", *memory, "yes" if same else "NO")
    console.print(table)
    parameters = sum(weight.nbytes for weight in whole.values())
    console.print(
        f"parameters: {format_byte_size(parameters)} in bf16; optimizer state is on the device by plain PyTorch"
    )
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())

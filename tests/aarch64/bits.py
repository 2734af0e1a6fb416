"""Steps of all rules, written on one processor and compared with those of another, bit for bit.

    python -m aarch64.bits write FILE
    python -m aarch64.bits check FILE       # on the other processor

The file has the random numbers, too: ``torch.randn`` gives other last bits on each kind of processor.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoint import golden_cases as golden
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import longshore
from longshore.kernels import HostKernels, Scale

STEPS = 4
SHAPES = {"wide": (80, 64), "narrow": (33, 17), "bias": (5,)}
"""The first is large enough for states of 8 bits; the others end within a vector."""
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AdamW": (longshore.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW-beta1-0.4": (longshore.AdamW, {"lr": 1e-2, "betas": (0.4, 0.9)}),
    "Adam": (longshore.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Lion": (longshore.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adagrad": (longshore.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (longshore.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    "SGD-nesterov": (longshore.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
FORMATS = ("fp32", "bf16", "8bit")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN_STEPS, PLAIN_NUMEL = 7, 4096

Take = Callable[..., Tensor]
"""Random float32 numbers of a name and a shape: new ones (the third argument, if there is one), or those of a file."""


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Normal numbers of sizes from 1e-6 to 1e2; the name is their seed."""
    random = torch.Generator().manual_seed(int.from_bytes(name.encode()[-6:], "little"))
    return torch.randn(shape, generator=random) * 10.0 ** torch.empty(shape).uniform_(-6, 2, generator=random)


def trained(kind: str, format: str, dtype: torch.dtype, take: Take) -> dict[str, Tensor]:
    """Weights and states after some steps, in tiles that are smaller than the parameters."""
    make, options = OPTIMIZERS[kind]
    parameters = {name: nn.Parameter(take(f"start.{name}", shape).to(dtype)) for name, shape in SHAPES.items()}
    offload = longshore.Offload(tile_numel=2048, threads=2, states=format)
    optimizer = make(list(parameters.items()), offload=offload, **options)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = take(f"gradient.{step}.{name}", SHAPES[name]).to(dtype)
        optimizer.step()
    found = {f"weight.{name}": parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            found[f"{key}.{name}"] = torch.as_tensor(value).clone()
    return found


def norms(take: Take) -> dict[str, Tensor]:
    """Sums of squares of gradients, scaled and not."""
    kernels = HostKernels(threads=2)
    found = {}
    for label, dtype in DTYPES.items():
        gradients = [[take(f"gradient.0.{name}", shape).to(dtype).view(-1)] for name, shape in SHAPES.items()]
        for scale in (Scale(), Scale(0.7, 1 / 3)):
            sums = kernels.block_sums(gradients, scale)
            found[f"{label}.{scale.first}"] = torch.tensor(sums, dtype=torch.float64)
    return found


def continued(case: str, take: Take) -> dict[str, Tensor]:
    """A checkpoint that is kept of a release, and what follows it with the gradients of the machine that wrote it."""
    model, optimizer = golden.loop_of(case)
    kept = golden.GOLDEN / "0.1.0" / case
    with tempfile.TemporaryDirectory() as folder:  # a copy, since others may read it
        longshore.load(shutil.copytree(kept / "checkpoint", Path(folder, "checkpoint")), model, optimizer)
    found = golden.found_in_loop(model, optimizer)
    expected = json.loads((kept / "expected.json").read_text())
    assert golden.digests(found) == expected["loaded"], f"{case}: a checkpoint has other bits once it is loaded"
    if case in golden.WITHOUT_MORE:
        return found
    for step in range(golden.STEPS, golden.STEPS + golden.MORE):
        random = torch.Generator().manual_seed(step)
        for name in ("wide", "narrow", "bias"):
            parameter = model.get_parameter(name)
            factors = torch.randn(parameter.shape, generator=random)  # as golden_cases.Numbers does
            parameter.grad = take(f"{case}.{step}.{name}", tuple(factors.shape), factors).to(parameter.dtype)
        model.calls += 1
        optimizer.step()
        optimizer.zero_grad()
    found = golden.found_in_loop(model, optimizer)
    assert golden.digests(found) == expected["continued"], f"{case}: a checkpoint goes on with other bits"
    return found


def cases(take: Take) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Everything that is compared, by name."""
    for kind in OPTIMIZERS:
        for format in FORMATS:
            for label, dtype in DTYPES.items():
                yield f"{kind}.{format}.{label}", trained(kind, format, dtype, take)
    yield "norms", norms(take)
    for case in golden.LOOPS:
        yield f"golden.{case}", continued(case, take)
    for name in ("start", *(f"gradient.{step}" for step in range(PLAIN_STEPS))):
        take(f"plain.{name}", (PLAIN_NUMEL,))  # for plain.py


def write(file: str) -> None:
    tensors: dict[str, Tensor] = {}

    def take(name: str, shape: tuple[int, ...], values: Tensor | None = None) -> Tensor:
        if f"in.{name}" not in tensors:
            tensors[f"in.{name}"] = numbers(name, shape) if values is None else values
        return tensors[f"in.{name}"].clone()

    for case, found in cases(take):
        tensors |= {f"out.{case}.{name}": value.contiguous() for name, value in found.items()}
    save_file(tensors, file, {"processor": platform.machine()})


def check(file: str) -> None:
    """Raise AssertionError with the first array whose bits differ."""
    tensors = load_file(file)
    seen, elements = set(), 0

    def take(name: str, shape: tuple[int, ...], values: Tensor | None = None) -> Tensor:
        del values
        assert tensors[f"in.{name}"].shape == shape
        return tensors[f"in.{name}"].clone()

    for case, found in cases(take):
        for name, value in found.items():
            seen.add(f"out.{case}.{name}")
            expected = tensors[f"out.{case}.{name}"]
            assert value.dtype == expected.dtype and value.shape == expected.shape, f"{case}: {name}"
            bytes_of = [each.contiguous().view(-1).view(torch.uint8) for each in (value, expected)]
            assert torch.equal(*bytes_of), f"{case}: {name} has other bits on {platform.machine()}"
            elements += value.numel()
    assert seen == {name for name in tensors if name.startswith("out.")}, "the file has other cases"
    print(
        f"{len(seen)} arrays, {elements} elements of all optimizers and formats: the same bits on {platform.machine()}"
    )


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](sys.argv[2])

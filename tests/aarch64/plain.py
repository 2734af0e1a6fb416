"""How far torch's fused optimizers on this processor are from longshore's: ``python -m aarch64.plain FILE``.

Asserts what docs/arithmetic.md says of torch on aarch64, for the build of its kernels that torch has chosen. FILE has
the numbers, as :mod:`aarch64.bits` writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import longshore
from aarch64.bits import PLAIN_STEPS
from longshore.kernels.reference import divide, fma, root
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.adam import AdamRule

BUILD = torch.backends.cpu.get_cpu_capability()
"""DEFAULT is NEON; with SVE registers of 32 bytes, SVE256."""
SEPARATE = BUILD == "SVE256"
"""Whether torch's compiler left products and sums apart, as in its build for SVE256."""

Step = Callable[[int, Tensor, list[Tensor]], list[Tensor]]
"""From the step's number, the gradient, and master and states, to the new ones."""


def scalars_of(rule: Any) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64).float() for value in rule.scalars]


def sum_of_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` as the compiler of this build of torch makes it."""
    return a * b + c if SEPARATE else fma(a, b, c)


def torchs_adam(weight_decay: float, decoupled: bool) -> Step:
    """torch's fused Adam on aarch64. With NEON its compiler contracts the other product of the second moment."""

    def step(number: int, g: Tensor, arrays: list[Tensor]) -> list[Tensor]:
        rule = AdamRule(1e-2, 0.9, 0.999, 1e-8, weight_decay, step=number, decoupled=decoupled)
        decay, l2, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, negative_step = scalars_of(rule)
        p, m, v = arrays
        if decoupled:
            p = p * decay
        elif weight_decay:
            g = sum_of_product(p, l2, g)
        m = fma(one_minus_beta1, g - m, m)
        v = sum_of_product(v, beta2, one_minus_beta2 * g * g)
        p = p + divide(negative_step * m, divide(root(v), root_correction) + eps)
        return [p, m, v]

    return step


def torchs_adagrad(number: int, g: Tensor, arrays: list[Tensor]) -> list[Tensor]:
    rule = AdagradRule(lr=1e-2, lr_decay=0.0, eps=1e-10, weight_decay=0.1, step=number)
    l2, eps, step_size = scalars_of(rule)
    p, total = arrays
    g = sum_of_product(p, l2, g)
    total = sum_of_product(g, g, total)
    return [p + divide(step_size * g, root(total) + eps), total]


def torchs_sgd(number: int, g: Tensor, arrays: list[Tensor]) -> list[Tensor]:
    """With momentum 0.9 and dampening 0.3; only the last operation differs between torch's builds."""
    lr, momentum, one_minus_dampening = (torch.tensor(value).float() for value in (-1e-2, 0.9, 0.7))
    p, buffer = arrays
    buffer = g if number == 1 else fma(one_minus_dampening, g, buffer * momentum)
    return [sum_of_product(buffer, lr, p), buffer]


CASES: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...], Step]] = {
    "AdamW": (
        longshore.AdamW,
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1},
        ("exp_avg", "exp_avg_sq"),
        torchs_adam(0.1, True),
    ),
    "Adam": (
        longshore.Adam,
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1},
        ("exp_avg", "exp_avg_sq"),
        torchs_adam(0.1, False),
    ),
    "Adagrad": (
        longshore.Adagrad,
        torch.optim.Adagrad,
        {"lr": 1e-2, "weight_decay": 0.1},
        ("sum",),
        torchs_adagrad,
    ),
    "SGD": (
        longshore.SGD,
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3},
        ("momentum_buffer",),
        torchs_sgd,
    ),
}
EQUAL = () if SEPARATE else ("Adagrad", "SGD")
"""Optimizers whose bits are torch's on this processor, as on x86-64."""


def differing(a: Tensor, b: Tensor) -> int:
    return int((a.detach() != b.detach()).sum())


def compare(name: str, start: Tensor, gradients: list[Tensor]) -> str:
    """Step by torch, by longshore, and by what is stated of torch; return how many elements differ in the end."""
    make, twin, options, states, stated = CASES[name]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    pair = make([ours], **options), twin([theirs], fused=True, **options)
    arrays = [start, *(torch.zeros_like(start) for _ in states)]
    for number, gradient in enumerate(gradients, start=1):
        arrays = stated(number, gradient, arrays)
        for parameter, optimizer in zip((ours, theirs), pair, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
        torchs = [theirs.detach(), *(pair[1].state[theirs][key] for key in states)]
        for array, torchs_array in zip(arrays, torchs, strict=True):
            assert torch.equal(array, torchs_array), f"{name}: torch's {BUILD} kernel is not what is stated of it"
    counts = {"weights": differing(ours, theirs)}
    counts |= {key: differing(pair[0].state[ours][key], pair[1].state[theirs][key]) for key in states}
    assert (name in EQUAL) == (not any(counts.values())), f"{name}: {counts}"
    far = (ours - theirs).abs().max().item()
    said = ", ".join(f"{count} {key}" for key, count in counts.items() if count)
    return f"{name}: {said} differ of {start.numel()}, weights by {far:.1e} at most" if said else f"{name}: equal"


def muon(start: Tensor, gradients: list[Tensor]) -> str:
    """torch's Muon is compared where there is one: since 2.9."""
    if not hasattr(torch.optim, "Muon"):
        return "Muon: not in this torch"
    ours, theirs = (nn.Parameter(start.view(64, 64).clone()) for _ in range(2))
    pair = longshore.Muon([ours], lr=1e-2), torch.optim.Muon([theirs], lr=1e-2)
    for gradient in gradients:
        for parameter, optimizer in zip((ours, theirs), pair, strict=True):
            parameter.grad = gradient.view(64, 64).clone()
            optimizer.step()
    assert torch.equal(ours, theirs), "Muon differs from torch's"
    assert differing(ours, start.view(64, 64)) > 4000
    return "Muon: equal"


def main(file: str) -> None:
    tensors = load_file(file)
    start = tensors["in.plain.start"]
    gradients = [tensors[f"in.plain.gradient.{step}"] for step in range(PLAIN_STEPS)]
    said = [compare(name, start, gradients) for name in CASES]
    said.append(muon(start, gradients))
    print(f"torch {torch.__version__}'s {BUILD} kernels, {PLAIN_STEPS} steps: " + "; ".join(said))


if __name__ == "__main__":
    main(sys.argv[1])

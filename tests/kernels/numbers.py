"""What the kernel tests share: comparison of bits, and tensors with awkward values."""

from __future__ import annotations

import torch
from torch import Tensor

from longshore.kernels import UNSCALED, Rule, Scale
from longshore.kernels.reference import canonical, rule_step
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.adam import AdamRule
from longshore.optim.rules.lion import LionRule
from longshore.optim.rules.muon import MomentumRule, UpdateRule
from longshore.optim.rules.sgd import SGDRule

INFINITY, LARGEST = float("inf"), 3.4028234663852886e38
ZEROS_AND_DENORMALS = (0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126)
SPECIALS = (*ZEROS_AND_DENORMALS, 1e-20, 0.5, 1e20, -1e20, LARGEST, -LARGEST, INFINITY, -INFINITY, float("nan"))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, those of zero and of NaN included."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """The same, but any NaN equals any other: for what torch computes, which leaves the processor's."""
    return same_bits(canonical(a), canonical(b))


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a kernel outputs: torch's own conversion may give another NaN."""
    return canonical(values.to(dtype))


def awkward(numel: int, seed: int, size: float = 1.0) -> Tensor:
    """Normal float32 numbers, one in eight replaced by a special value."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * size
    special = torch.tensor(SPECIALS)[torch.randint(0, len(SPECIALS), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.125, special, values)


def buffer_of(numel: int, seed: int, arrays: int = 3) -> Tensor:
    """Master and states, float32 ``[arrays, numel]``."""
    buffer = [awkward(numel, seed), awkward(numel, seed + 1, 0.01), awkward(numel, seed + 2, 1e-4).abs()]
    return torch.stack(buffer[:arrays])


def arrays_of(rule: Rule) -> int:
    """How many arrays the buffer of such a rule has."""
    return 1 + len(rule.states) - rule.optional_states


def stepped_buffer(
    buffer: Tensor, gradient: Tensor, rule: Rule, scale: Scale = UNSCALED, parameter: Tensor | None = None
) -> Tensor:
    """The oracle's new buffer."""
    return torch.stack(rule_step(buffer.unbind(), gradient, rule, scale, parameter))


def written(master: Tensor, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The parameter of a master, in which somebody wrote every third element, special values among them."""
    others = awkward(master.numel(), 70 + seed)
    return torch.where(torch.arange(master.numel()) % 3 == 1, others, master).to(dtype)


RULES = (
    AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, decoupled=True),
    AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, decoupled=False),
    AdamRule(lr=0.1, beta1=0.0, beta2=0.95, eps=0.0, weight_decay=0.0, step=1, decoupled=True, maximize=True),
    AdamRule(lr=3e-4, beta1=0.5, beta2=0.5, eps=1e-40, weight_decay=0.1, step=2**24, decoupled=True),
    AdamRule(lr=3e-4, beta1=0.4, beta2=0.0, eps=1e-3, weight_decay=0.0, step=1000, decoupled=False),
    AdamRule(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2, decoupled=True, bias_correction=False),
)

OTHER_RULES = (
    LionRule(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1),
    LionRule(lr=0.1, beta1=0.0, beta2=0.5, weight_decay=0.0, maximize=True),
    AdagradRule(lr=1e-2, lr_decay=0.1, eps=1e-10, weight_decay=0.01, step=3),
    AdagradRule(lr=1e-2, lr_decay=0.0, eps=0.0, weight_decay=0.0, step=1, maximize=True),
    SGDRule(lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.01, nesterov=False, first=False),
    SGDRule(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True, first=False, maximize=True),
    SGDRule(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.1, nesterov=True, first=True),
    SGDRule(lr=1e-2, momentum=0.0, dampening=0.0, weight_decay=0.1, nesterov=False, first=True),
    UpdateRule(lr=2e-2, decay=0.998),
)

MOMENTUM_RULES = (
    MomentumRule(momentum=0.95, nesterov=True),
    MomentumRule(momentum=0.4, nesterov=True, maximize=True),
    MomentumRule(momentum=0.95, nesterov=False),
)
"""Their output is no array of the buffer."""

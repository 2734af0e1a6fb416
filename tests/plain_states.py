"""Training whose states are not float32, in plain torch: whole parameters and the oracle's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longshore.kernels import Rule, Scale
from longshore.kernels.buffers import SIGNED, UNSIGNED, EncodedBuffer, decode_bytes, encode_bytes, new_buffer
from longshore.kernels.reference import encoded_step
from longshore.layout.formats import NEVER_NEGATIVE, Coding, StateFormat, parse_state_format, stream_of
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.adam import AdamRule
from longshore.optim.rules.lion import LionRule
from longshore.optim.rules.sgd import SGDRule

DEFAULTS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "decoupled_weight_decay": True},
    "Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "initial_accumulator_value": 0.0},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}
STATES = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "Lion": ("exp_avg",),
    "Adagrad": ("sum",),
    "SGD": ("momentum_buffer",),
}


def rule_of(kind: str, group: Mapping[str, Any], step: int, first: bool) -> Rule:
    """The step number ``step`` of a parameter by an optimizer of this name with these options; ``first``: SGD's first
    with momentum."""
    lr, decay = float(group["lr"]), group["weight_decay"]
    maximize = group.get("maximize", False)
    if kind in ("AdamW", "Adam"):
        decoupled = group["decoupled_weight_decay"]
        beta1, beta2 = group["betas"]
        return AdamRule(lr, beta1, beta2, group["eps"], decay, decoupled, step=step, maximize=maximize)
    if kind == "Lion":
        beta1, beta2 = group["betas"]
        return LionRule(lr, beta1, beta2, decay, step=step, maximize=maximize)
    if kind == "Adagrad":
        return AdagradRule(lr, group["lr_decay"], group["eps"], decay, step=step, maximize=maximize)
    momentum, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
    return SGDRule(lr, momentum, dampening, decay, nesterov, first, step=step, maximize=maximize)


class _Kept:
    """What is kept of one parameter.

    Attributes:
        step: its steps so far.
        has_states: whether a step has written them, which those of SGD without momentum do not.
        buffer: its master and states, all elements.
    """

    def __init__(self, parameter: nn.Parameter, names: Sequence[str], coding: Coding) -> None:
        self.names, self.coding, self.step, self.has_states = names, coding, 0, False
        made = new_buffer(coding.format, 1 + len(names), parameter.numel(), False, torch.zeros)
        assert isinstance(made, EncodedBuffer), "states=fp32 has plain loops of its own"
        self.buffer = made
        self.buffer.master.copy_(parameter.detach().reshape(-1))

    @property
    def everything(self) -> slice:
        return slice(0, self.buffer.shape[1])

    def read(self, name: str) -> Tensor:
        return self.buffer.decoded(self.names.index(name), self.everything, name in NEVER_NEGATIVE)

    def write(self, name: str, values: Tensor) -> None:
        """To nearest."""
        self.buffer.encode(self.names.index(name), self.everything, name in NEVER_NEGATIVE, values.reshape(-1))


class StatesLoop:
    """One of our optimizers on whole parameters, used as a :class:`support.PlainLoop` is.

    Args:
        groups: parameters, or torch's groups. The parameters are updated.
        names: of the parameters, without the parts of wrappers.
        kind: the optimizer's name.
        states: the format, as ``longshore.Offload`` has it; ``seed`` is its ``states_seed``.
        options: of all groups that have no others.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        names: Iterable[tuple[str, nn.Parameter]],
        kind: str = "AdamW",
        states: str = "bf16",
        seed: int = 0,
        **options: Any,
    ) -> None:
        entries = list(groups)
        if not isinstance(entries[0], dict):
            entries = [{"params": entries}]
        named = {id(parameter): name for name, parameter in names}
        format = parse_state_format(states)
        self._kind = kind
        self.param_groups: list[dict[str, Any]] = []
        self.parameters: list[nn.Parameter] = []
        self.kept: list[_Kept] = []
        self._group_of: list[dict[str, Any]] = []
        for entry in entries:
            group = {**DEFAULTS[kind], **options, **entry}
            self.param_groups.append(group)
            for parameter in group["params"]:
                coding = Coding(format.of_parameter(parameter.shape), stream_of(seed, named[id(parameter)]))
                kept = _Kept(parameter, STATES[kind], coding)
                if kind == "Adagrad":
                    initial = float(group["initial_accumulator_value"])
                    kept.write("sum", torch.full((parameter.numel(),), initial))
                self.parameters.append(parameter)
                self.kept.append(kept)
                self._group_of.append(group)

    def state(self, index: int, name: str) -> Tensor:
        """One of a parameter's states, decoded, in its shape."""
        return self.kept[index].read(name).view(self.parameters[index].shape)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """One step on these gradients, multiplied in float32 by ``scale``; None: idle."""
        for parameter, kept, group, gradient in zip(self.parameters, self.kept, self._group_of, gradients, strict=True):
            if gradient is None:
                continue
            kept.step += 1
            rule = rule_of(self._kind, group, kept.step, not kept.has_states)
            kept.has_states |= group.get("momentum") != 0.0
            flat = gradient.detach().cpu().reshape(-1)
            kept.buffer, master = encoded_step(kept.buffer, flat, rule, kept.coding, Scale(scale))
            parameter.copy_(master.view(parameter.shape))

    def step_on_grads(self, scale: float = 1.0) -> None:
        """One step on the parameters' ``.grad``, which is then cleared."""
        self.step([parameter.grad for parameter in self.parameters], scale)
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def refresh_all(self) -> None:
        """Take each element of a parameter that is not its rounded master as the master."""
        for parameter, kept in zip(self.parameters, self.kept, strict=True):
            flat, master = parameter.detach().reshape(-1).cpu(), kept.buffer.master
            master.copy_(torch.where(master.to(flat.dtype) == flat, master, flat.float()))


def to_nearest(values: Tensor, states: str, name: str) -> Tensor:
    """One state of a whole parameter, in its shape, rounded to nearest."""
    format = parse_state_format(states).of_parameter(values.shape)
    if format is StateFormat.FP32:
        return values
    if format is StateFormat.BF16:
        return values.bfloat16().float()
    code = UNSIGNED if name in NEVER_NEGATIVE else SIGNED
    return decode_bytes(*encode_bytes(values.reshape(-1), code, None), code).view(values.shape)


def mixed_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """With ``states="8bit"``, two of its matrices have states of 8 bits, and the rest bfloat16."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 72),
        nn.Tanh(),
        nn.Linear(72, 64, bias=False),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.Linear(64, 5),
    ).to(dtype)

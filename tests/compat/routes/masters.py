"""A plain optimizer for bfloat16 weights: torch's AdamW on float32 masters, and several ranks by hand.

One process runs the micro batches of all ranks in turn: its accumulation steps are theirs, times their number. The
Trainer then divides losses by the product, as the ranks' mean does (both are powers of two).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class MasterArguments:
    by_hand: bool = field(default=False, metadata={"help": "train bfloat16 weights with float32 masters"})
    ranks: int = field(default=1, metadata={"help": "as on so many ranks"})
    stage: int = field(default=2, metadata={"help": "add a rank's backwards first (1), or a backward's ranks (2, 3)"})
    clip: float = field(default=0.0, metadata={"help": "largest norm; 0: any"})


class ByHand(torch.optim.Optimizer):
    """AdamW on float32 copies of the parameters.

    Args:
        named: names and parameters, which become bfloat16.
        arguments: how the gradients of a step's backwards are added, and clipped.
        options: those of torch's AdamW.
    """

    def __init__(self, named: dict[str, Tensor], arguments: MasterArguments, **options: Any) -> None:
        round_parameters(*named.values())
        super().__init__([*named.values()], options)
        self._arguments = arguments
        self.masters = {name: each.detach().float().clone() for name, each in named.items()}
        self._named = named
        self._inner = torch.optim.AdamW([*self.masters.values()], fused=True, **options)
        self._arrived: dict[str, list[Tensor]] = {name: [] for name in named}
        for name, each in named.items():
            each.register_post_accumulate_grad_hook(lambda each, name=name: self._take(name, each))

    def _take(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._arrived[name].append(parameter.grad.float())
        parameter.grad = None

    def _sum(self, arrived: list[Tensor]) -> Tensor:
        ranks, first = self._arguments.ranks, self._arguments.stage == 1
        backwards = len(arrived) // ranks
        outer, inner = (ranks, backwards) if first else (backwards, ranks)
        # Backwards of all ranks in turn: the one of rank r and micro batch m is number m * ranks + r.
        place = (lambda rank, micro: micro * ranks + rank) if first else (lambda micro, rank: micro * ranks + rank)
        total: Tensor | None = None
        for i in range(outer):
            part = arrived[place(i, 0)].clone()
            for j in range(1, inner):
                part += arrived[place(i, j)]
            total = part if total is None else total + part
        assert total is not None
        return total

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        sums = {name: self._sum(arrived) for name, arrived in self._arrived.items() if arrived}
        if self._arguments.clip:
            squares = sum(float(each.double().square().sum()) for each in sums.values())
            norm = torch.tensor(squares**0.5, dtype=torch.float64).float()
            coefficient = (self._arguments.clip / (norm + 1e-6)).clamp(max=1.0)
            assert coefficient < 1, "nothing was clipped"
            sums = {name: each * coefficient for name, each in sums.items()}
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        for name, master in self.masters.items():
            master.grad = sums.get(name)
        self._inner.step()
        for name, parameter in self._named.items():
            if name in sums:
                parameter.copy_(self.masters[name])
            self._arrived[name].clear()


def round_parameters(*parameters: Tensor) -> None:
    """As DeepSpeed, with buffers (such as rotary frequencies) left as they are."""
    for each in parameters:
        each.data = each.data.bfloat16()


def trainable(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def train_by_hand(trainer: Any, arguments: MasterArguments) -> None:
    """Give a plain Trainer the optimizer; groups as its own are not needed where nothing decays."""
    args = trainer.args
    assert args.weight_decay == 0
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    round_parameters(*trainer.model.parameters())
    if getattr(trainer, "ref_model", None) is not None:
        round_parameters(*trainer.ref_model.parameters())
    trainer.optimizer = ByHand(trainable(trainer.model), arguments, **options, weight_decay=0.0)


def save_masters(trainer: Any, arguments: MasterArguments) -> None:
    """Save the float32 masters of a Trainer's model after training."""
    if arguments.by_hand:
        found = trainer.optimizer.optimizer.masters
    elif trainer.args.deepspeed:
        found = masters_of(trainer.model)
    else:
        return
    if trainer.args.process_index == 0:
        torch.save(found, os.path.join(trainer.args.output_dir, "masters.pt"))


def masters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The float32 masters in DeepSpeed's engine; all ranks have to call this."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(each).cpu() for name, each in trainable(model).items()}

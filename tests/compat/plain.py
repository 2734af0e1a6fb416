"""The trainings of ``scripts/`` in plain PyTorch, in one process for all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support import PlainLoop
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from compat.scripts.toy import Net, batch, samples, seeded_net

Gradients = list[Tensor]


def gradients_of(net: nn.Module, *losses: Callable[[], Tensor]) -> Gradients:
    """The sum over these backwards, in float32."""
    sums: Gradients = []
    for loss in losses:
        found = torch.autograd.grad(loss(), list(net.parameters()))
        sums = [each.float() for each in found] if not sums else [a + b for a, b in zip(sums, found, strict=True)]
    return sums


def mean(of_ranks: list[Gradients]) -> Gradients:
    sums = [each.clone() for each in of_ranks[0]]
    for gradients in of_ranks[1:]:
        sums = [a + b for a, b in zip(sums, gradients, strict=True)]
    return [each / len(of_ranks) for each in sums]


def masters(loop: PlainLoop, net: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    found = zip(net.named_parameters(), loop.masters, strict=True)
    return {
        f"{prefix}{name}": master[: each.numel()].view(each.shape).detach().clone() for (name, each), master in found
    }


def finetune(ranks: int, config: dict[str, Any]) -> dict[str, Any]:
    net, data = seeded_net(1), samples(64)
    loop = PlainLoop(net.parameters(), **config["optimizer"]["params"])
    steps_of = 16 // (4 * ranks)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    applied = 0
    for _ in range(2):
        orders = [list(DistributedSampler(data, ranks, rank, seed=0)) for rank in range(ranks)]
        batches = [[order[at : at + 4] for at in range(0, len(order), 4)] for order in orders]
        for window in range(0, len(batches[0]), steps_of):
            sums: Gradients = []
            for place in range(window, window + steps_of):
                of_ranks = []
                for rank in range(ranks):
                    x, y = (each[batches[rank][place]] for each in data.tensors)
                    loss = F.mse_loss(net(x), y)
                    losses[rank].append(loss.item())
                    of_ranks.append([*torch.autograd.grad(loss / steps_of, list(net.parameters()))])
                here = mean(of_ranks)
                sums = here if not sums else [a + b for a, b in zip(sums, here, strict=True)]
            norm = math.sqrt(sum(each.double().square().sum().item() for each in sums))
            norm32 = torch.tensor(norm, dtype=torch.float64).float()
            coefficient = (config["gradient_clipping"] / (norm32 + 1e-6)).clamp(max=1.0)
            assert coefficient < 1  # clipping bites
            lr = 2e-3 * min(1.0, math.log(max(applied, 1)) / math.log(4))
            for group in loop.optimizer.param_groups:
                group["lr"] = lr
            loop.step(sums, coefficient.item())
            applied += 1
    return {"losses": losses, "weights": masters(loop, net)}


def client_optimizer(ranks: int) -> dict[str, Any]:
    net = seeded_net(2).bfloat16()
    named = list(net.parameters())
    groups = [
        {"params": [each for each in named if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in named if each.ndim <= 1], "weight_decay": 0.0},
    ]
    loop = PlainLoop(groups, lr=3e-3, betas=(0.9, 0.95))
    data = samples(32, seed=5)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(6):
        of_ranks = []
        for rank in range(ranks):
            own = range(rank, 32, ranks)
            start = 4 * step % len(own)
            x, y = (each[list(own[start : start + 4])].bfloat16() for each in data.tensors)
            loss = F.mse_loss(net(x), y)
            losses[rank].append(loss.item())
            of_ranks.append([each.float() for each in torch.autograd.grad(loss, loop.parameters)])
        for group in loop.optimizer.param_groups:
            group["lr"] = 3e-3 * (min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / 6)))
        loop.step(mean(of_ranks))
    order = {id(each): name for name, each in net.named_parameters()}
    weights = {
        order[id(each)]: master[: each.numel()].view(each.shape).detach()
        for each, master in zip(loop.parameters, loop.masters, strict=True)
    }
    return {"losses": losses, "weights": weights}


def several_engines(ranks: int) -> dict[str, Any]:
    policy, critic, reference = seeded_net(3), seeded_net(4), seeded_net(3)
    loops = [PlainLoop(policy.parameters(), lr=1e-3, weight_decay=0.01)]
    loops.append(PlainLoop(critic.parameters(), lr=2e-3, weight_decay=0.01))
    for step in range(5):
        of_policy, of_critic = [], []
        for rank in range(ranks):
            x, y = batch(step, rank)
            with torch.no_grad():
                kept, wanted = reference(x), y + 0.1 * (y - critic(x))

            def actor_loss(x: Tensor = x, wanted: Tensor = wanted, kept: Tensor = kept) -> Tensor:
                return F.mse_loss(policy(x), wanted) + 0.2 * F.mse_loss(policy(x), kept)

            def critic_loss(x: Tensor = x, y: Tensor = y) -> Tensor:
                return F.smooth_l1_loss(critic(x), y)

            of_policy.append(gradients_of(policy, actor_loss))
            of_critic.append(gradients_of(critic, critic_loss))
        # Two steps of warmup, logarithmic, of which the first begins at 0; then down to 0 at the eighth.
        rate = 2e-3 * (0.0 if step < 2 else 1.0 if step == 2 else max(0.0, (8 - (step - 1)) / (8 - 2)))
        loops[1].optimizer.param_groups[0]["lr"] = rate
        loops[0].step(mean(of_policy))
        loops[1].step(mean(of_critic))
    return {"weights": masters(loops[0], policy, "policy.") | masters(loops[1], critic, "critic.")}


def own_backward(ranks: int) -> dict[str, Any]:
    net = seeded_net(5).half()
    loop = PlainLoop(net.parameters(), lr=2e-3, weight_decay=0.01)
    losses: list[list[list[float]]] = [[] for _ in range(ranks)]
    for step in range(4):
        of_ranks = []
        for rank in range(ranks):
            x, y = (each.half() for each in batch(step, rank))
            both = F.mse_loss(net(x), y), F.l1_loss(net(x), y)
            losses[rank].append([each.item() for each in both])
            of_ranks.append(gradients_of(net, *(lambda loss=loss: loss.float() * 128 for loss in both)))
        loop.step(mean(of_ranks), 1 / 128)
    return {"losses": losses, "weights": masters(loop, net)}


def gan(ranks: int) -> dict[str, Any]:
    generator, discriminator = seeded_net(6), seeded_net(7)
    options = {"lr": 2e-3, "betas": (0.5, 0.999)}
    loops = [PlainLoop(net.parameters(), torch.optim.Adam, **options) for net in (generator, discriminator)]
    criterion = nn.BCEWithLogitsLoss()

    def against(logits: Tensor, label: float) -> Tensor:
        return criterion(logits, torch.full_like(logits, label))

    for step in range(4):
        first, second = [], []
        pairs = [batch(step, rank) for rank in range(ranks)]
        fakes = [generator(noise) for noise, _ in pairs]
        for (_, real), fake in zip(pairs, fakes, strict=True):
            first.append(gradients_of(discriminator, lambda real=real: against(discriminator(real), 1.0)))
            second.append(gradients_of(discriminator, lambda fake=fake: against(discriminator(fake.detach()), 0.0)))
        # At stage 2 each backward is reduced, and the means are added.
        sums = [a + b for a, b in zip(mean(first), mean(second), strict=True)]
        loops[1].step(sums)
        of_generator = [gradients_of(generator, lambda fake=fake: against(discriminator(fake), 1.0)) for fake in fakes]
        loops[0].step(mean(of_generator))
    return {"weights": masters(loops[0], generator, "G.") | masters(loops[1], discriminator, "D.")}


def export(ranks: int) -> dict[str, Any]:
    torch.manual_seed(8)
    net = Net()
    nn.init.normal_(net.last.weight, std=0.02)
    nn.init.zeros_(net.last.bias)
    net.bfloat16()
    loop = PlainLoop(net.parameters(), lr=3e-3, weight_decay=0.0)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(4):
        of_ranks = []
        for rank in range(ranks):
            x, y = (each.bfloat16() for each in batch(step, rank))
            loss = F.mse_loss(net(x), y)
            losses[rank].append(loss.item())
            of_ranks.append([each.float() for each in torch.autograd.grad(loss, list(net.parameters()))])
        loop.step(mean(of_ranks))
    return {"losses": losses, "weights": masters(loop, net)}

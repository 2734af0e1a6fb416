"""The trainings of ``scripts/``, written against longshore."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import longshore
from compat.scripts.toy import Net, batch, samples, seeded_net
from longshore.engine.config import WarmupDecayLRConfig
from longshore.engine.schedules import make_schedule
from longshore.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _masters(**nets: nn.Module) -> dict[str, Any]:
    return {
        f"{which}.{name}" if which != "only" else name: safe_get_full_fp32_param(each)
        for which, net in nets.items()
        for name, each in net.named_parameters()
    }


def finetune(out: str, config: str) -> None:
    with open(config) as file:
        settings = json.load(file)
    model = seeded_net(1)
    engine, _, loader, schedule = longshore.initialize(model=model, training_data=samples(64), config=settings)
    losses, rates = [], []
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(engine(x), y)
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                rates.append(schedule.get_last_lr()[0])
            engine.step()
            losses.append(loss.item())
    torch.save({"losses": losses, "rates": rates, "weights": _masters(only=model)}, f"{out}.{_rank()}")
    engine.destroy()


def client_optimizer(out: str) -> None:
    config = longshore.Config(micro_batch_size=4, dtype="bf16", stage=2)
    model = seeded_net(2).bfloat16()
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    engine, _, _, schedule = longshore.initialize(
        model=model,
        optimizer=longshore.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / 6))
        ),
        config=config,
    )
    data = samples(32, seed=5)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, _ranks(), _rank(), shuffle=False))
    losses = []
    while len(losses) < 6:
        for x, y in loader:
            if len(losses) == 6:
                break
            loss = F.mse_loss(engine(x.bfloat16()), y.bfloat16())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    moment = safe_get_full_optimizer_state(model.first.weight, "exp_avg")
    saved = {"losses": losses, "weights": _masters(only=model), "moment": moment, "lr": schedule.get_last_lr()}
    torch.save(saved, f"{out}.{_rank()}")
    engine.destroy()


def several_engines(out: str) -> None:
    policy_net, critic_net, reference = seeded_net(3), seeded_net(4), seeded_net(3)
    options = {"lr": 1e-3, "weight_decay": 0.01}
    policy = longshore.initialize(
        model=policy_net, config=longshore.Config(stage=2, optimizer={"type": "AdamW", **options}, micro_batch_size=4)
    ).engine
    critic = longshore.initialize(
        model=critic_net,
        optimizer=longshore.AdamW(critic_net.parameters(), lr=2e-3, weight_decay=0.01),
        config=longshore.Config(stage=1, micro_batch_size=4),
        lr_scheduler=lambda optimizer: make_schedule(
            WarmupDecayLRConfig(total_num_steps=8, warmup_max_lr=2e-3, warmup_num_steps=2), optimizer
        ),
    ).engine
    losses = []
    for step in range(5):
        x, y = batch(step, _rank())
        with torch.no_grad():
            kept = reference(x)
            advantage = y - critic(x)
        actor_loss = F.mse_loss(policy(x), y + 0.1 * advantage) + 0.2 * F.mse_loss(policy(x), kept)
        policy.backward(actor_loss)
        policy.step()
        critic_loss = F.smooth_l1_loss(critic(x), y)
        critic.backward(critic_loss)
        critic.step()
        mean = torch.stack([actor_loss.detach(), critic_loss.detach()])
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append((mean / _ranks()).tolist())
    weights = _masters(policy=policy_net, critic=critic_net)
    torch.save({"losses": losses, "weights": weights, "lr": critic.lr_scheduler.get_last_lr()}, f"{out}.{_rank()}")
    policy.destroy()
    critic.destroy()


def own_backward(out: str) -> None:
    config = longshore.Config(
        micro_batch_size=4,
        stage=1,
        dtype="fp16",
        loss_scaling={"scale": 128},
        optimizer={"type": "AdamW", "lr": 2e-3, "weight_decay": 0.01},
    )
    engine = longshore.initialize(model=seeded_net(5), config=config).engine
    losses, norms = [], []
    for step in range(4):
        x, y = (each.half() for each in batch(step, _rank()))
        with engine.no_sync():
            first = F.mse_loss(engine(x), y)
            engine.backward(first)
        second = F.l1_loss(engine(x), y)
        engine.backward(second)
        norms.append(safe_get_full_grad(engine.module.last.bias).norm().item())
        engine.step()
        losses.append([first.item(), second.item()])
    torch.save({"losses": losses, "weights": _masters(only=engine.module), "norms": norms}, f"{out}.{_rank()}")
    engine.destroy()


def gan(out: str, stage: str = "2") -> None:
    nets = {"G": seeded_net(6), "D": seeded_net(7)}
    config = longshore.Config(
        micro_batch_size=4, stage=int(stage), optimizer={"type": "Adam", "lr": 2e-3, "betas": (0.5, 0.999)}
    )
    generator, discriminator = (longshore.initialize(model=net, config=config).engine for net in nets.values())
    criterion = nn.BCEWithLogitsLoss()
    losses = []
    for step in range(4):
        noise, real = batch(step, _rank())
        logits = discriminator(real)
        of_real = criterion(logits, torch.ones_like(logits))
        discriminator.backward(of_real)
        fake = generator(noise)
        logits = discriminator(fake.detach())
        of_fake = criterion(logits, torch.zeros_like(logits))
        discriminator.backward(of_fake)
        discriminator.step()
        # The discriminator's weights are not what this backward is for.
        with _frozen(nets["D"]):
            logits = discriminator(fake)
            of_generator = criterion(logits, torch.ones_like(logits))
            generator.backward(of_generator)
        generator.step()
        losses.append([of_real.item(), of_fake.item(), of_generator.item()])
    torch.save({"losses": losses, "weights": _masters(**nets)}, f"{out}.{_rank()}")
    generator.destroy()
    discriminator.destroy()


@contextlib.contextmanager
def _frozen(net: nn.Module) -> Any:
    net.requires_grad_(False)
    try:
        yield
    finally:
        net.requires_grad_(True)


def export(out: str) -> None:
    torch.manual_seed(8)
    model = Net()
    nn.init.normal_(model.last.weight, std=0.02)
    nn.init.zeros_(model.last.bias)
    config = longshore.Config(
        micro_batch_size=4, stage=3, dtype="bf16", optimizer={"type": "AdamW", "lr": 3e-3, "weight_decay": 0.0}
    )
    engine = longshore.initialize(model=model, config=config).engine
    losses = []
    for step in range(4):
        x, y = (each.bfloat16() for each in batch(step, _rank()))
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "weights": _masters(only=model)}, f"{out}.{_rank()}")
    engine.destroy()

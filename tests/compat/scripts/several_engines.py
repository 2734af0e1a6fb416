"""A policy and a critic, each with its engine, and a frozen reference, in the manner of reinforcement learning."""

import argparse

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed.utils import safe_get_full_fp32_param
from toy import batch, seeded_net


def settings(stage, rate=None):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 600},
    }
    if rate is not None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}}
    return config


def train(args):
    deepspeed.init_distributed()
    rank = dist.get_rank()
    policy_net, critic_net, reference = seeded_net(3), seeded_net(4, 16, 32, 16), seeded_net(3).eval()
    optimizer = FusedAdam(critic_net.parameters(), lr=2e-3, weight_decay=0.01)
    policy, *_ = deepspeed.initialize(
        model=policy_net, model_parameters=policy_net.parameters(), config=settings(2, 1e-3)
    )
    critic, _, _, schedule = deepspeed.initialize(
        model=critic_net,
        optimizer=optimizer,
        lr_scheduler=WarmupDecayLR(optimizer, total_num_steps=8, warmup_max_lr=2e-3, warmup_num_steps=2),
        config=settings(1),
    )
    losses = []
    for step in range(args.steps):
        x, y = batch(step, rank)
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
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        losses.append((mean / dist.get_world_size()).tolist())
    dist.barrier()
    assert isinstance(schedule, WarmupDecayLR)
    nets = {"policy": policy.module, "critic": critic.module}
    weights = {
        f"{which}.{name}": safe_get_full_fp32_param(each)
        for which, net in nets.items()
        for name, each in net.named_parameters()
    }
    torch.save({"losses": losses, "weights": weights, "lr": schedule.get_last_lr()}, f"{args.out}.{rank}")
    policy.destroy()
    critic.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=5)
    train(parser.parse_args())

"""A generator and a discriminator with an engine and an optimizer each."""

import argparse

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from toy import batch, seeded_net


def engine_of(net, stage):
    config = {
        "train_batch_size": 4 * torch.distributed.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999))
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[:2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stage", type=int, default=2)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    netG, _ = engine_of(seeded_net(6), args.stage)
    netD, optimizerD = engine_of(seeded_net(7), args.stage)
    criterion = nn.BCEWithLogitsLoss()
    losses = []
    for step in range(args.steps):
        noise, real = batch(step, rank)
        # D: real ones, then fake ones; what G's last backward left in D does not count.
        netD.zero_grad()
        optimizerD.zero_grad()
        logits = netD(real)
        errD_real = criterion(logits, torch.ones_like(logits))
        netD.backward(errD_real)
        fake = netG(noise)
        logits = netD(fake.detach())
        errD_fake = criterion(logits, torch.zeros_like(logits))
        netD.backward(errD_fake)
        netD.step()
        # G: through D.
        netG.zero_grad()
        logits = netD(fake)
        errG = criterion(logits, torch.ones_like(logits))
        netG.backward(errG)
        netG.step()
        losses.append([errD_real.item(), errD_fake.item(), errG.item()])
    nets = {"G": netG.module, "D": netD.module}
    weights = {
        f"{which}.{name}": safe_get_full_fp32_param(each)
        for which, net in nets.items()
        for name, each in net.named_parameters()
    }
    torch.save({"losses": losses, "weights": weights}, f"{args.out}.{rank}")


if __name__ == "__main__":
    main()

"""Fine-tuning with a file of settings: ``--deepspeed_config``, the loader of ``initialize()``, checkpoints."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist, logger, safe_get_full_fp32_param
from toy import samples, seeded_net


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", required=True)
    parser.add_argument("--checkpoints")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    if args.local_rank == -1:
        device = torch.device(get_accelerator().device_name())
    else:
        get_accelerator().set_device(args.local_rank)
        device = torch.device(get_accelerator().device_name(), args.local_rank)
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()

    model = seeded_net(1)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=samples(64)
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(optimizer, torch.optim.Optimizer)
    log_dist(f"batch sizes {tuple(engine.get_batch_info())}", ranks=[0])
    losses, rates = [], []
    for epoch in range(args.epochs):
        engine.train()
        for x, y in loader:
            loss = F.mse_loss(engine(x.to(device)), y.to(device))
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                rates.append(scheduler.get_last_lr()[0])
            engine.step()
            losses.append(loss.item())
        if args.checkpoints:
            engine.save_checkpoint(args.checkpoints, tag=f"epoch{epoch}", client_state={"epoch": epoch})
    if rank == 0:
        logger.info(f"{engine.global_steps} steps, last loss {losses[-1]:.4f}")
    weights = {name: safe_get_full_fp32_param(each) for name, each in engine.module.named_parameters()}
    torch.save({"losses": losses, "rates": rates, "weights": weights}, f"{args.out}.{rank}")
    engine.destroy()


if __name__ == "__main__":
    main()

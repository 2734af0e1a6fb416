"""docs/engine.md: an engine from a configuration as DeepSpeed's file has it, and from a typed one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import longshore
from longshore.engine.config import AdamWConfig, LossScaling, WarmupLRConfig

FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
TYPED = longshore.Config(
    micro_batch_size=8,
    stage=1,
    offload_device="cpu",
    gradient_clipping=1.0,
    loss_scaling=LossScaling(scale=128.0),
    optimizer=AdamWConfig(lr=1e-4, weight_decay=0.01),
    scheduler=WarmupLRConfig(warmup_num_steps=100),
)


def train(config: dict[str, Any] | longshore.Config) -> float | None:
    data = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    engine, optimizer, loader, scheduler = longshore.initialize(model=model, training_data=data, config=config)
    for x, label in loader:
        loss: Tensor = nn.functional.cross_entropy(engine(x.to(engine.device)), label.to(engine.device))
        engine.backward(loss)
        engine.step()
    assert engine.global_steps > 0 and len(engine.get_lr()) == len(optimizer.param_groups)
    print(engine.explain(False))
    with longshore.gather(model) as whole:
        numel: int = sum(each.numel() for each in whole)
    assert numel > 0 and (scheduler is None) == isinstance(config, dict)
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm


def main() -> None:
    for config in (FILE, TYPED):
        try:
            assert train(config) is not None
        except longshore.ConfigError as error:
            print(error)
            raise


if __name__ == "__main__":
    main()

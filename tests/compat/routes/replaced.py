"""Accelerate with offload in the file, which replaces the script's optimizer by DeepSpeed's Adam; prints the result."""

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin


class Inherits(torch.optim.AdamW):
    def group_names(self) -> list[str]:
        return [str(position) for position, _ in enumerate(self.param_groups)]


class Backwards(torch.optim.AdamW):
    """Steps uphill."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = -parameter.grad
        return super().step(closure)


file = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1e6,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=file))
model = torch.nn.Linear(4, 4)
kind = {"Inherits": Inherits, "Backwards": Backwards}[sys.argv[1]]
optimizer = kind(model.parameters(), lr=0.1)
try:
    engine = accelerator.prepare(model, optimizer)[0]
except ValueError as error:
    print(f"refused: {error}")
else:
    print(f"stepped by {type(engine.optimizer).__name__}, as {optimizer.group_names()}")
accelerator.end_training()

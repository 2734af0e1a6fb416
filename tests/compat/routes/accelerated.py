"""A loop with Accelerate as its documentation has it; ``--deepspeed STAGE`` adds a DeepSpeedPlugin.

Under ``accelerate launch`` with a DeepSpeed YAML, Accelerate makes the plugin itself.
"""

import argparse
import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from masters import ByHand, MasterArguments, masters_of, trainable
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", type=int, help="a stage")
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--clip", type=float, default=1e6, help="no step has such a norm")
parser.add_argument("--dummies", action="store_true", help="the optimizer and its schedule are in the file")
parser.add_argument("--state", help="save to this folder half way, train on, load it, and train on again")
parser.add_argument("--load", help="load this folder, and train on from it as with --state")
parser.add_argument("--bf16", action="store_true", help="bfloat16 weights; without DeepSpeed, in one process by hand")
parser.add_argument("--as-on", type=int, default=1, help="by hand, as on so many ranks")
parser.add_argument("--as-stage", type=int, default=2, help="by hand, as at this stage")
parser.add_argument("--out", required=True)
args = parser.parse_args()

plugin = None
if args.deepspeed is not None and args.dummies:
    optimizer_section = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": args.clip,
            "zero_optimization": {"stage": args.deepspeed},
            "optimizer": optimizer_section,
        }
    )
elif args.deepspeed is not None:
    plugin = DeepSpeedPlugin(
        zero_stage=args.deepspeed,
        gradient_accumulation_steps=args.accumulation,
        gradient_clipping=args.clip,
        zero3_save_16bit_model=True,
        zero3_init_flag=False,
    )
uses_deepspeed = plugin is not None or "ACCELERATE_USE_DEEPSPEED" in os.environ
# Without CUDA, Accelerate counts one process under DeepSpeed unless a backend is named.
world_size = int(os.environ.get("WORLD_SIZE", "1"))
backend = [InitProcessGroupKwargs(backend="gloo")] if world_size > 1 else []
accelerator = Accelerator(
    cpu=not uses_deepspeed,
    mixed_precision="bf16" if args.bf16 and uses_deepspeed else None,
    gradient_accumulation_steps=args.accumulation,
    deepspeed_plugin=plugin,
    kwargs_handlers=backend,
)
assert accelerator.num_processes == world_size
assert uses_deepspeed == (accelerator.distributed_type == "DEEPSPEED")
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
data = TensorDataset(torch.randn(64, 16), torch.randn(64, 16))
# Two ranks shuffle otherwise than the one process that stands for them, and from a generator that no folder holds.
loader = DataLoader(data, batch_size=4, shuffle=not (args.bf16 or args.state or args.load))


# Accelerate steps a schedule once for each process, but one that is made through a DummyScheduler once for all.
steps = accelerator.num_processes if uses_deepspeed and args.dummies else args.as_on
by_hand = args.bf16 and not uses_deepspeed


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * steps))


if uses_deepspeed and args.dummies:
    from accelerate.utils import DummyOptim, DummyScheduler

    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = DummyScheduler(optimizer, lr_scheduler_callable=schedule_of)
elif by_hand:
    arguments = MasterArguments(True, args.as_on, args.as_stage, args.clip if args.clip < 1e6 else 0.0)
    optimizer = ByHand(trainable(model), arguments, lr=1e-2, weight_decay=0.01)
    schedule = schedule_of(optimizer)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    schedule = schedule_of(optimizer)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
dtype = torch.bfloat16 if args.bf16 else torch.float32
losses: list[float] = []


def epoch() -> None:
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients and args.clip:
                accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


if not args.load:
    epoch()
if args.state:
    accelerator.save_state(args.state)
    epoch()
if args.state or args.load:
    accelerator.load_state(args.state or args.load)
    set_seed(1)
epoch()
model.eval()
with torch.no_grad():
    assert torch.isfinite(accelerator.gather(model(torch.ones(2, 16, dtype=dtype)))).all()
accelerator.wait_for_everyone()
weights = accelerator.get_state_dict(model)
if uses_deepspeed:
    masters = masters_of(accelerator.unwrap_model(model))
elif by_hand:
    masters = optimizer.optimizer.masters
print(f"\nlosses of rank {accelerator.process_index}: {losses}\n", end="", flush=True)
if accelerator.is_main_process:
    if uses_deepspeed or by_hand:
        torch.save(masters, f"{args.out}.masters")
    torch.save({name.removeprefix("module."): tensor for name, tensor in weights.items()}, args.out)
accelerator.end_training()

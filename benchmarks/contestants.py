"""Ways to train one Llama on one rank or several, each as people write it, to be timed beside each other.

DeepSpeed's may be another interpreter, without longshore: nothing here imports
either of them before it is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from benchmarks.floor import NotAvailable
from benchmarks.llama import LlamaSize, make_llama, make_tokens

MAX_NORM = 1.0
LEARNING_RATE = 1e-5

FORWARD_BACKWARD = "forward and backward alone"
ONE_LINE = "one-line optimizer"
ENGINE = "engine"
SIMULATED = "engine on a simulated device"
DEEPSPEED = "DeepSpeed"
ENGINE_3 = "engine, stage 3"
DEEPSPEED_3 = "DeepSpeed, stage 3"
ENGINE_RESTING = "engine, stage 3, offload_param"
DEEPSPEED_RESTING = "DeepSpeed, stage 3, offload_param"
FSDP2_RESTING = "FSDP2, CPUOffloadPolicy"


@dataclass(frozen=True)
class Setup:
    """What all contestants have in common; ``threads`` are those of one rank."""

    hidden_size: int
    layers: int
    intermediate_size: int
    tokens: int
    threads: int
    bucket_numel: int

    def llama(self) -> nn.Module:
        """Raises NotAvailable without transformers."""
        if importlib.util.find_spec("transformers") is None:
            raise NotAvailable("transformers is not installed: pip install transformers")
        return make_llama(LlamaSize(self.hidden_size, self.layers, self.intermediate_size, self.tokens))


class Training(NamedTuple):
    """``backward``: forward and backward of the batch. ``finish``: what follows. ``engine``: whose they are, if any."""

    backward: Callable[[], None]
    finish: Callable[[], None]
    engine: Any = None

    def run(self) -> None:
        self.backward()
        self.finish()


def start(name: str, setup: Setup, model: nn.Module) -> Training:
    """The contestant, which trains ``model``.

    Raises:
        NotAvailable: a package is missing, or does not work.
    """
    return _START[name](model, setup)


def prepare(name: str) -> None:
    """Import and join what the contestant needs, ahead of its memory being measured.

    Raises:
        NotAvailable: a package is missing.
    """
    if name in (DEEPSPEED, DEEPSPEED_3, DEEPSPEED_RESTING):
        load_deepspeed("cpu").init_distributed(dist_backend="gloo", verbose=False)
    else:
        importlib.import_module("longshore")


def zero_config(
    bucket_numel: int,
    learning_rate: float = LEARNING_RATE,
    backwards: int = 1,
    stage: int = 2,
    resting: bool = False,
) -> dict[str, Any]:
    """The same file for both engines, ``backwards`` to a step; with ``resting``, parameters rest on the host.

    DeepSpeed is spared its check for overflows, which ours does not make either.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": backwards,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": learning_rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu"},
            **({"offload_param": {"device": "cpu"}} if resting else {}),
            "reduce_bucket_size": bucket_numel,
            "allgather_bucket_size": bucket_numel,
            "overlap_comm": True,
        },
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "gradient_clipping": MAX_NORM,
    }


def _forward_backward(model: nn.Module, setup: Setup) -> Training:
    tokens = make_tokens(setup.tokens)
    return Training(lambda: model(input_ids=tokens, labels=tokens).loss.backward(), model.zero_grad)


def _one_line(model: nn.Module, setup: Setup) -> Training:
    import longshore

    optimizer = longshore.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, offload=longshore.Offload(threads=setup.threads)
    )

    def finish() -> None:
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _forward_backward(model, setup)._replace(finish=finish)


def _engine(model: nn.Module, setup: Setup, simulated: bool = False, stage: int = 2, resting: bool = False) -> Training:
    import longshore

    # Copies on a device's streams are never instant; so they wait here, up to 2 ms each.
    transfer = longshore.SimulatedTransfer() if simulated else None
    offload = longshore.Offload(threads=setup.threads, transfer=transfer)
    engine, *_ = longshore.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=zero_config(setup.bucket_numel, stage=stage, resting=resting),
        offload=offload,
    )
    return _training_of(engine, setup)


def _start_deepspeed(model: nn.Module, setup: Setup, stage: int = 2, resting: bool = False) -> Training:
    deepspeed = load_deepspeed("cpu")
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=zero_config(setup.bucket_numel, stage=stage, resting=resting),
        )
    except Exception as failure:
        raise NotAvailable(f"DeepSpeed does not start: {type(failure).__name__}: {failure}"[:300]) from failure
    return _training_of(engine, setup)


def _fsdp2(model: nn.Module, setup: Setup) -> Training:
    """With float32 parameters that are cast when they are gathered: FSDP2 has no other masters."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model.float()
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _forward_backward(model, setup)._replace(finish=finish)


def load_deepspeed(accelerator: str) -> Any:
    """The package, told to use this accelerator (``cpu`` or ``cuda``); raises NotAvailable where there is none."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotAvailable(f"not installed: DS_BUILD_OPS=0 DS_ACCELERATOR={accelerator} pip install deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", accelerator)
    # Its extension is built at first use, by the ninja of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    warnings.simplefilter("ignore")
    return importlib.import_module("deepspeed")


def _training_of(engine: Any, setup: Setup) -> Training:
    tokens = make_tokens(setup.tokens)
    return Training(lambda: engine.backward(engine(input_ids=tokens, labels=tokens).loss), engine.step, engine)


_START: dict[str, Callable[[nn.Module, Setup], Training]] = {
    FORWARD_BACKWARD: _forward_backward,
    ONE_LINE: _one_line,
    ENGINE: _engine,
    SIMULATED: lambda model, setup: _engine(model, setup, simulated=True),
    DEEPSPEED: _start_deepspeed,
    ENGINE_3: lambda model, setup: _engine(model, setup, stage=3),
    DEEPSPEED_3: lambda model, setup: _start_deepspeed(model, setup, stage=3),
    ENGINE_RESTING: lambda model, setup: _engine(model, setup, stage=3, resting=True),
    DEEPSPEED_RESTING: lambda model, setup: _start_deepspeed(model, setup, stage=3, resting=True),
    FSDP2_RESTING: _fsdp2,
}

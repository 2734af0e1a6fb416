"""What else scripts ask of an engine, under DeepSpeed's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from longshore.engine.batch_sizes import BatchSizes
from longshore.engine.config import Config
from longshore.engine.data import TrainingLoader, make_loader
from longshore.engine.precision import DTYPES
from longshore.engine.ranks import Ranks
from longshore.engine.weight_files import load_weights, save_weights, whole_weights
from longshore.optim.host_optimizer import HostOptimizer

_NO_PARTITION = "longshore frees what it gathers by itself; leave the call out"
INSTEAD = {
    "offload_states": 'optimizer states are where offload_optimizer says; "cpu" keeps them off the device for good',
    "reload_states": "nothing was offloaded for a while; leave the call out",
    "load_universal_checkpoint": "load_checkpoint() takes a checkpoint of any number of ranks",
    "allreduce_gradients": "engine.step() reduces what is left; between backwards longshore.utils.safe_get_full_grad "
    "does",
    "empty_partition_cache": _NO_PARTITION,
    "compile_autosp": "longshore shards over data-parallel ranks only; use engine.compile()",
    "compile_autotp": "longshore shards over data-parallel ranks only; use engine.compile()",
    "tput_timer": "engine.global_samples counts samples; longshore.trace() measures",
    "flops_profiler": "use torch.utils.flop_counter",
    "monitor": "write figures with the logger of your choice after engine.step()",
}
"""Calls that this engine has not."""


class BatchInfo(NamedTuple):
    """Samples a step, samples a backward and rank, backwards a step."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


class DeepSpeedCalls:
    """Of an engine, which has these."""

    module: nn.Module
    optimizer: HostOptimizer
    config: Config
    ranks: Ranks
    _sizes: BatchSizes

    # -- weights --------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights in the dtype that they train in, on rank 0; at stage 3 all ranks have to call.

        Args:
            save_dir: made where it is not there.
            save_filename: safetensors where it ends so, else what ``torch.load`` reads.
            exclude_frozen_parameters: leave those out.

        Returns:
            True.
        """
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            save_weights(weights, save_dir, save_filename)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Whole weights on the CPU, on rank 0; None on the others. At stage 3 all ranks have to call."""
        return whole_weights(self.module, keep=self.ranks.rank == 0, trainable_only=exclude_frozen_parameters)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's own ``state_dict()``; at stage 3 on several ranks it has shards (``DTensor``)."""
        frozen = {id(each) for each in self.module.parameters() if not each.requires_grad}
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=True)
        for name in list(state):
            if exclude_frozen_parameters and id(state[name]) in frozen:
                del state[name]
            elif isinstance(state[name], torch.Tensor) and not keep_vars:
                state[name] = state[name].detach()
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load whole weights, the same on all ranks, at any stage; masters follow at the next step.

        Args:
            checkpoint: a state dict of the model; or what ``save_checkpoint`` of others writes, which has one as
                ``"module"``.
            strict: as in torch.
            custom_load_fn: called with ``src`` and ``dst``, the state dict and the model, in place of torch's loading.
        """
        state = checkpoint.get("module", checkpoint)
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            load_weights(self.module, state, strict)

    # -- numbers --------------------------------------------------------------

    def get_batch_info(self) -> BatchInfo:
        """The three numbers that multiply out with the number of ranks."""
        return BatchInfo(self._sizes.train_batch_size, self._sizes.micro_batch_size, self._sizes.accumulation_steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Samples a backward and rank from now on, as the engine counts them; ``training_dataloader`` keeps its own.

        The accumulation steps stay, so the train batch changes with it.
        """
        self._sizes = self._sizes.with_micro_batch_size(micro_batch_size)

    @property
    def dp_world_size(self) -> int:
        """Ranks that run other batches."""
        return self._sizes.world_size

    @property
    def mp_world_size(self) -> int:
        """Ranks that run each batch together."""
        return self.ranks.world_size // self._sizes.world_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """All ranks; None for one rank that needs no group."""
        return self.ranks.group

    # -- what the configuration says ------------------------------------------

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of parameters, and of gradients as they are added."""
        parameters = DTYPES[self.config.dtype] if self.config.dtype else torch.float32
        return parameters, DTYPES[self.config.accumulation_dtype]

    @property
    def communication_data_type(self) -> torch.dtype:
        """Of gradients on the wire."""
        name = self.config.communication_dtype
        return DTYPES[name] if name else self.get_data_types()[0]

    def optimizer_name(self) -> str:
        return type(self.optimizer).__name__

    def optimizer_params(self) -> dict[str, Any] | None:
        """Of the configuration; None where the optimizer was passed."""
        return None if self.config.optimizer is None else dict(self.config.optimizer.arguments())

    def scheduler_name(self) -> str | None:
        """Of the configuration; None where it names none."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        return None if self.config.scheduler is None else dict(self.config.scheduler.arguments())

    def zero_optimization(self) -> bool:
        return self.config.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.config.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.config.stage >= 3

    def zero_cpu_offload(self) -> bool:
        return self.config.offload_device == "cpu"

    def gradient_predivide_factor(self) -> float:
        return self.config.gradient_predivide_factor

    def wall_clock_breakdown(self) -> bool:
        return self.config.wall_clock_breakdown

    # -- data -----------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> TrainingLoader[Any]:
        """A loader of this rank's part of a dataset, as ``training_data`` gives one.

        Args:
            batch_size: samples a batch; None: the micro batch size.
            route: ``"train"`` shuffles, ``"eval"`` and ``"predict"`` keep the order.
            pin_memory: accepted; batches for a CUDA device are pinned.
            data_sampler: refused.
            num_local_io_workers: processes that read ahead; None: none.

        Raises:
            ValueError: a sampler, or another route.
        """
        if data_sampler is not None:
            raise ValueError(
                "deepspeed_io() splits the data over the ranks itself; with a sampler of your own make a "
                "torch.utils.data.DataLoader"
            )
        if route not in ("train", "eval", "predict"):
            raise ValueError(f"route is 'train', 'eval' or 'predict', not {route!r}")
        size = self._sizes.micro_batch_size if batch_size is None else batch_size
        workers = num_local_io_workers or 0
        drop = self.config.drop_last
        return make_loader(dataset, size, self.ranks, collate_fn, drop, workers, shuffle=route == "train")

    @property
    def is_compiled(self) -> bool:
        return getattr(self.module, "_compiled_call_impl", None) is not None

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Compile the model's forward, in place, as ``torch.compile`` does.

        Args:
            backend: of ``torch.compile``.
            compile_kwargs: its other arguments, which may be given by name as well.
        """
        self.module.compile(backend=backend, **(compile_kwargs or {}), **more)

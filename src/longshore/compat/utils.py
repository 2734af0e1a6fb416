"""DeepSpeed's helpers that scripts use: the accelerator, logging, seeds, memory, loaders, gradients, weights."""

from __future__ import annotations

import logging
import os
import random
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.compat.absent import attribute_error
from longshore.seam import parse_byte_size
from longshore.utils import safe_get_full_grad, safe_set_full_grad

_GIB = 2**30
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _StdoutHandler(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """A handler that looks up ``sys.stdout`` at each call, since it may have been replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _make_logger() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = _StdoutHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False  # a script that has handlers of its own would see each line twice
    return made


logger = _make_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all if ``ranks`` is None or contains -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, f"[Rank {rank}] {message}")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level ``"debug"``, ``"info"``, ``"warning"``, ``"error"`` or ``"critical"``; ValueError for others."""
    level = _LEVELS.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is not a valid level; use one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(level)


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random number generators."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log, on rank 0, the memory allocated where the model trains, in GiB; only with ``force``, as in DeepSpeed."""
    if not force:
        return
    device = get_accelerator()
    now, most = device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB
    log_dist(f"{message}: {now:.2f} GiB allocated, {most:.2f} GiB at most", ranks=[0])


class RepeatingLoader:
    """An endless loader: iterates over ``loader`` again and again. Calling ``set_epoch`` is left to the script."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Return the number of batches until the loader starts again."""
        return len(self.loader)  # pyright: ignore[reportArgumentType]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Any], Tensor]
) -> None:
    """Replace each parameter's gradient of this accumulation window by ``update_func(gradient, parameter)``.

    Parameters without a gradient are left out. All ranks have to call it.
    """
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested dicts, lists and tuples with their tensors copied to ``device``.

    A tensor that is met twice, such as a tied weight, is copied once, so that it is saved once.
    """
    copies: dict[int, Tensor] = {}

    def copied(each: Any) -> Any:
        if isinstance(each, Tensor):
            if id(each) not in copies:
                copies[id(each)] = each.detach().to(device, copy=True)
            return copies[id(each)]
        if isinstance(each, Mapping):
            return type(each)({key: copied(value) for key, value in each.items()})  # pyright: ignore[reportCallIssue]
        return type(each)(map(copied, each)) if isinstance(each, (list, tuple)) else each

    return copied(item)


# -- the accelerator: CUDA, or the CPU if there is none -------------------------


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _most_resident_bytes() -> int:
    # The kernel updates the peak later than the current figure.
    return max(_resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _method(name: str, on_cpu: Callable[[], Any]) -> Callable[..., Any]:
    """Return a method that calls ``torch.cuda``'s function of that name, or ``on_cpu`` if there is no CUDA.

    Its argument is the number of the device; None: the current one.
    """

    def method(self: DeepSpeedAccelerator, device_index: int | None = None) -> Any:
        if not self._cuda:
            return on_cpu()
        return getattr(torch.cuda, name)(*([] if device_index is None else [device_index]))

    return method


class DeepSpeedAccelerator:
    """The kind of device that the run trains on: CUDA if there is any, otherwise the CPU.

    On the CPU, allocated memory is the process's resident memory, and nothing can be reset. The current device and the
    number of devices are the rank's number and the number of ranks on its machine, as in DeepSpeed.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()

    def __getattr__(self, name: str) -> Any:
        raise attribute_error("accelerator", name)

    set_device = _method("set_device", lambda: None)
    current_device = _method("current_device", lambda: int(os.environ.get("LOCAL_RANK", "0")))
    device_count = _method("device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    synchronize = _method("synchronize", lambda: None)
    initial_seed = _method("initial_seed", torch.initial_seed)
    get_rng_state = _method("get_rng_state", torch.get_rng_state)
    is_bf16_supported = _method("is_bf16_supported", lambda: True)
    memory_allocated = _method("memory_allocated", _resident_bytes)
    memory_reserved = _method("memory_reserved", _resident_bytes)
    max_memory_allocated = _method("max_memory_allocated", _most_resident_bytes)
    max_memory_reserved = _method("max_memory_reserved", _most_resident_bytes)
    empty_cache = _method("empty_cache", lambda: None)
    reset_peak_memory_stats = reset_max_memory_allocated = _method("reset_peak_memory_stats", lambda: None)

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``"cuda"``, or ``"cuda:1"``; on the CPU ``"cpu"``, whatever the number."""
        if not self._cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        """Return the current device's name, as ``Tensor.to()`` takes it."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Pin the tensor; return it unchanged on the CPU, where nothing is copied to a device."""
        return tensor.pin_memory() if self._cuda else tensor

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if not self._cuda:
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model can train in."""
        return [torch.float32, torch.float16] + [torch.bfloat16] * self.is_bf16_supported()

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the device or, on the CPU, of the machine."""
        if self._cuda:
            return torch.cuda.get_device_properties(self.device(device_index)).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process; the same object at every call."""
    return DeepSpeedAccelerator()


# -- whole float32 weights of a checkpoint, longshore's or DeepSpeed's ----------


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return whole float32 weights (masters) on the CPU, by name; tied ones are one tensor under all their names.

    Args:
        checkpoint_dir, tag: as for ``save_checkpoint``, longshore's or DeepSpeed's (ZeRO 1, 2 and 3); without a tag,
            the latest.
        exclude_frozen_parameters: leave frozen parameters out.
        lazy_mode: refused; ``convert_zero_checkpoint_to_fp32_state_dict`` needs memory for one tensor at a time.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or does not have the whole model.
        ValueError: ``lazy_mode`` is set, or there is no tag.
    """
    from longshore.seam import is_deepspeed, whole_state_dict

    if lazy_mode:
        raise ValueError(
            "lazy_mode is not supported; use convert_zero_checkpoint_to_fp32_state_dict(..., safe_serialization=True), "
            "which needs memory for one tensor at a time"
        )
    root = Path(checkpoint_dir).absolute()
    if not is_deepspeed(root, tag):
        return whole_state_dict(root, tag, exclude_frozen_parameters)
    from longshore.compat.checkpoint.importing import import_deepspeed

    with tempfile.TemporaryDirectory(prefix="longshore-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are about values that are not weights
        imported = import_deepspeed(root, Path(folder), tag)
        return whole_state_dict(imported, exclude_frozen=exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the whole float32 weights into a model, moved to the CPU as in DeepSpeed; return the model."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole float32 weights into a folder that is new or empty.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as in :func:`get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: gets ``pytorch_model.bin``, or ``model.safetensors`` (several with an index, one tensor in memory
            at a time).
        max_shard_size: maximum size of a safetensors file: bytes, or ``"5GB"``; None: one file. ``pytorch_model.bin``
            is one file.
        safe_serialization: write safetensors.

    Raises:
        ValueError: ``max_shard_size`` is not a valid size.
    """
    from longshore.compat.engine import save_weights
    from longshore.seam import export

    try:
        max_bytes = 1 << 62 if max_shard_size is None else parse_byte_size(max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size: {error}") from error
    if safe_serialization and not exclude_frozen_parameters:
        export(checkpoint_dir, output_dir, max_bytes, torch.float32, tag=tag)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    save_weights(state, Path(output_dir) / ("model.safetensors" if safe_serialization else "pytorch_model.bin"))

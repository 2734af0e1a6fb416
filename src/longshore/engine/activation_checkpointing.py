"""Activation checkpointing on ``torch.utils.checkpoint``, with the calls of ``deepspeed.checkpointing``.

Everything that a checkpointed function computes is dropped after forward and computed again in backward; only its
inputs are kept, on their device or, with ``cpu_checkpointing``, in host memory. Gradients are the same bits either way,
and the random state is that of the first run. An input comes back from the host with the values, the strides and the
alignment that it had, so that the recomputation runs the same kernels on it and gives the same bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from longshore.engine.wording import did_you_mean, is_integer, shown

SECTION = "activation_checkpointing"

CANNOT_CHANGE_RESULTS: dict[str, str] = {
    "partition_activations": "it splits saved inputs over model-parallel ranks, and there are none",
    "contiguous_memory_optimization": "it says where saved inputs lie in memory, which torch's allocator decides here",
    "number_checkpoints": "it sizes the buffer of contiguous_memory_optimization",
    "synchronize_checkpoint_boundary": "it waits for the device, and what is computed stays the same",
    "profile": "it logs times; torch.profiler shows them here",
}
"""Keys that are accepted and do nothing, each with the reason."""

_ALIGNMENT_BYTES = 256
"""Matrix libraries choose kernels by how well their operands are aligned, up to this."""


# -- settings ----------------------------------------------------------------------

_on_host: bool | None = None
"""Whether inputs of checkpointed functions are kept in host memory; None: never configured."""
_nesting = threading.local()


def install(cpu_checkpointing: bool | None) -> None:
    """Set where every :func:`checkpoint` from now on keeps inputs; None: as if never configured."""
    global _on_host
    _on_host = cpu_checkpointing


def is_configured() -> bool:
    """Whether :func:`configure`, or the engine's configuration, set where inputs are kept."""
    return _on_host is not None


def reset() -> None:
    """Do nothing: saved inputs live exactly as long as the graph that they belong to, so a forward that is not followed
    by a backward frees them with its outputs. Settings stay."""


def section_problems(section: Any) -> list[tuple[str, str]]:
    """Everything that is wrong with the section ``activation_checkpointing`` of a configuration, as (key, problem)."""
    if not isinstance(section, Mapping):
        return [("", f"must be a table, and is {shown(section)}")]
    known = {"cpu_checkpointing", *CANNOT_CHANGE_RESULTS}
    problems = [(str(key), f"is not known; {did_you_mean(key, known)}") for key in section if key not in known]
    for key in sorted(known & set(section)):
        value = section[key]
        if key == "number_checkpoints":
            if value is not None and not (is_integer(value) and value >= 0):
                problems.append((key, f"must be an integer that is not negative, and is {shown(value)}"))
        elif not isinstance(value, bool):
            problems.append((key, f"must be true or false, and is {shown(value)}"))
    return problems


def configure(
    mpu_: Any = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure :func:`checkpoint`, with the arguments of ``deepspeed.checkpointing.configure``.

    Args:
        mpu_: a model-parallel unit; accepted when it has one model-parallel rank.
        deepspeed_config: a path or a dict, of which ``activation_checkpointing`` is read.
        partition_activations: overrides its key there. Like ``contiguous_checkpointing``, ``num_checkpoints``,
            ``synchronize`` and ``profile`` it is checked, and changes nothing (:data:`CANNOT_CHANGE_RESULTS`
            says why).
        contiguous_checkpointing: overrides ``contiguous_memory_optimization``.
        num_checkpoints: overrides ``number_checkpoints``.
        checkpoint_in_cpu: overrides ``cpu_checkpointing``.
        synchronize: overrides ``synchronize_checkpoint_boundary``.
        profile: overrides its key there.

    Raises:
        ValueError: all that is wrong with the section and the arguments; a file that is no JSON object;
            several model-parallel ranks.
        OSError: a file that cannot be read.
    """
    _check_model_parallel(mpu_)
    section = _section_of(deepspeed_config)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    if isinstance(section, Mapping):
        section = {**section, **{key: value for key, value in given.items() if value is not None}}
    problems = section_problems(section)
    if problems:
        lines = (f"\n  {SECTION}{'.' * bool(key)}{key}: {problem}" for key, problem in problems)
        raise ValueError("activation checkpointing cannot be configured:" + "".join(lines))
    install(section.get("cpu_checkpointing", False))


def _check_model_parallel(mpu: Any) -> None:
    if mpu is None:
        return
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(mpu, name, None)
        if size is not None:
            if size() != 1:
                raise ValueError(
                    f"activation checkpointing does not keep the random states of model-parallel ranks, "
                    f"and mpu_.{name}() is {size()}: use one model-parallel rank, and mpu_=None"
                )
            return
    raise ValueError(
        f"mpu_ must have get_model_parallel_world_size(), and {type(mpu).__name__} does not: use mpu_=None"
    )


def _section_of(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Any:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        path = config
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} must contain a JSON object, and contains {shown(config)}")
    return config.get(SECTION, {})


# -- the call ----------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)``, and compute it again in backward instead of keeping what it computes.

    With ``cpu_checkpointing`` the tensors among the arguments (not those inside containers) are copied to host memory,
    once for each call, and brought back for backward. A checkpoint within a checkpointed function keeps nothing: it is
    part of what the outer one computes again.

    Args:
        function: gives the same outputs for the same inputs and random state.
        *args: passed to ``function``; tensors among them may require gradients.
        **kwargs: likewise.

    Returns:
        What ``function`` returns.

    Raises:
        TypeError: ``function`` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"checkpoint takes a function and its arguments, and {shown(function)} cannot be called")
    names, positional = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        with _nested():
            return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

    # Keyword arguments go by position: torch saves only positional tensors as autograd does, with a version.
    values = (*args, *kwargs.values())
    # Nested calls, in forward and in the recomputation alike, must be seen by the outer checkpoint's own hooks.
    with save_on_host() if _on_host and not getattr(_nesting, "depth", 0) else contextlib.nullcontext():
        return torch.utils.checkpoint.checkpoint(run, *values, use_reentrant=False)


@contextlib.contextmanager
def _nested() -> Iterator[None]:
    depth = getattr(_nesting, "depth", 0)
    _nesting.depth = depth + 1
    try:
        yield
    finally:
        _nesting.depth = depth


# -- inputs in host memory ---------------------------------------------------------


class HostInput:
    """A copy of one tensor in host memory, which is pinned if the tensor was on a CUDA device.

    Args:
        tensor: copied, and not kept. A dense tensor is copied as it lies in memory, an expanded one without its
            repetitions, and one with gaps without them; a sparse tensor or a subclass as torch copies it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._size, self._stride = tensor.size(), None
        with torch.no_grad():
            plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            if not plain or tensor.is_nested:
                self._host = tensor.detach().to("cpu", copy=True)
                return
            self._stride = tensor.stride()
            self._phase = tensor.data_ptr() % _ALIGNMENT_BYTES // tensor.element_size()
            self._extent = _extent(self._size, self._stride)
            self._has_gaps = self._extent > tensor.numel() and _has_no_overlap(self._size, self._stride)
            source = tensor.detach()
            if not self._has_gaps:
                source = source.as_strided((self._extent,), (1,), tensor.storage_offset())
            pinned = tensor.device.type == "cuda"
            host = torch.empty(source.size(), dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            # torch's pinned allocator does not hand the block out again before this copy is done.
            self._host = host.copy_(source, non_blocking=pinned)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self._host.numel() * self._host.element_size()

    def restore(self) -> Tensor:
        """Return a new tensor on the device that the input came from, equal to it bit for bit."""
        with torch.no_grad():
            if self._stride is None:
                return self._host.to(self._device, copy=True)
            # The copy is enqueued on the current stream. Whoever may read the input there is ordered
            # after the stream that was current when it was saved, and so after the copy to the host.
            memory = torch.empty(self._phase + self._extent, dtype=self._host.dtype, device=self._device)
            restored = memory.as_strided(self._size, self._stride, self._phase)
            target = restored if self._has_gaps else memory[self._phase :]
            target.copy_(self._host, non_blocking=self._host.is_pinned())
            return restored


def _extent(size: torch.Size, stride: tuple[int, ...]) -> int:
    """Elements from the first to the last in memory."""
    if 0 in size:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def _has_no_overlap(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether certainly no two elements share memory."""
    end = 1
    for step, count in sorted((step, count) for count, step in zip(size, stride, strict=True) if count > 1):
        if step < end:
            return False
        end += (count - 1) * step
    return True


_alive: WeakSet[HostInput] = WeakSet()


def save_on_host() -> AbstractContextManager[Any]:
    """Context in which autograd saves tensors to host memory. CPU tensors are copied too, so that a CPU run does what a
    CUDA run does."""
    return saved_tensors_hooks(_pack, lambda packed: packed.restore())


def _pack(tensor: Tensor) -> HostInput:
    packed = HostInput(tensor)
    _alive.add(packed)
    return packed


def held_host_bytes() -> int:
    """Bytes of host memory that saved inputs take at the moment, until their backward or the end of their graph."""
    return sum(packed.host_bytes for packed in list(_alive))

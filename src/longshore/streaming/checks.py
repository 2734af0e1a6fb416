"""Checks of a model before any part of it is moved, and while it is called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from longshore.byte_sizes import format_byte_size
from longshore.errors import LongshoreError, ParameterError
from longshore.machine import available_bytes
from longshore.units import module_that_cannot

Checkpoint = Literal[False, True, "cpu"]
"""Whether blocks are computed again in backward, and where their inputs are kept."""


def nbytes(parameters: Iterable[Tensor]) -> int:
    return sum({id(parameter): parameter.nbytes for parameter in parameters}.values())


def check_fits(model: nn.Module, device: torch.device, contents: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError if the device has no room for two blocks and the gradients of one; ``contents`` are their
    parameters, the model's own last."""
    *blocks, kept = map(nbytes, contents)
    two, largest = sum(sorted(blocks)[-2:]), max(blocks)
    gradients = max(nbytes(each for each in block if each.requires_grad) for block in contents[:-1])
    needed = kept + two + gradients
    free, _ = torch.get_device_module(device).mem_get_info(device)
    if needed > free:
        smaller = "choose smaller blocks" if two + gradients > kept else "choose blocks that have more of it"
        raise ValueError(
            f"{type(model).__name__} needs at least {format_byte_size(needed)} on {device}, where "
            f"{format_byte_size(free)} are free and {format_byte_size(needed - free)} are missing: "
            f"{format_byte_size(kept)} that are in no block, {format_byte_size(two)} for two blocks, and "
            f"{format_byte_size(gradients)} for the gradients of one; {smaller} (blocks=1_000_000 makes one of each "
            "module with a million elements), or free memory there"
        )
    # The parameters are moved block by block, each of which is there twice meanwhile.
    if largest > (available := available_bytes()):
        raise ValueError(
            f"the largest block has {format_byte_size(largest)}, and {format_byte_size(available)} of host memory are "
            "available to move it to pinned memory: free memory, or choose smaller blocks"
        )


def check_parameters(model: nn.Module) -> None:
    ends: list[tuple[int, int, str]] = []
    if cannot := module_that_cannot(model):
        raise ParameterError(f"{cannot}; leave it out of the model that is streamed")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ParameterError(f"parameter {name} has no shape yet; call the model once before longshore.stream(...)")
        if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
            kind = type(parameter).__name__ if parameter.layout == torch.strided else str(parameter.layout)
            raise ParameterError(f"parameter {name} is a {kind}; only plain dense parameters can be streamed")
        if parameter.device.type != "cpu":
            raise ParameterError(
                f"parameter {name} is on {parameter.device}, and longshore.stream takes a model on the CPU; move it "
                "there first"
            )
        if parameter.is_inference():
            raise ParameterError(
                f"parameter {name} was made in inference mode and cannot be trained; make the model outside of it"
            )
        if getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype:
            raise ParameterError(
                f"parameter {name} has grad_dtype = {parameter.grad_dtype}, in which its gradients cannot be added on "
                f"the device; leave it {parameter.dtype}"
            )
        if parameter.numel():
            reach = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
            begin = parameter.data_ptr()
            ends.append((begin, begin + (1 + reach) * parameter.element_size(), name))
    ends.sort()
    for (_, end, other), (begin, _, name) in itertools.pairwise(ends):
        if begin < end:
            raise ParameterError(
                f"parameters {other} and {name} share memory and are not one parameter, so their values would part; "
                "set one of them in both modules"
            )


def check_checkpoint(model: nn.Module, checkpoint: Checkpoint) -> None:
    if checkpoint not in (False, True, "cpu"):
        raise ValueError(f"checkpoint is False, True or 'cpu' (with the inputs in host memory), not {checkpoint!r}")
    normed = [name for name, module in model.named_modules() if _keeps_statistics(module)]
    if checkpoint is not False and normed:
        raise ValueError(
            f"{normed[0]} keeps running statistics, which would be updated twice where backward computes it again: "
            f"leave out checkpoint={checkpoint!r}"
        )
    itself = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    if checkpoint is not False and itself:
        raise ValueError(
            f"{type(model).__name__} checkpoints its blocks itself, so that backward would compute them twice: call "
            f"model.gradient_checkpointing_disable(), or leave out checkpoint={checkpoint!r}"
        )


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and bool(module.track_running_stats)  # pyright: ignore


def cache_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of an argument of a language model's block to which the block writes; None: there is none."""
    named = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
    for name, value in named.items():
        by_name = ("cache" in name or "past" in name) and not isinstance(value, (bool, Tensor, type(None)))
        if by_name or hasattr(value, "get_seq_length"):
            return name
    return None


# -- while the model is called ------------------------------------------------------


def replaced(name: str, found: Tensor | None, block: nn.Module) -> ParameterError:
    """Return the error for a parameter of a block in whose place its module has something else."""
    kinds = {type(found), *(kind for module in block.modules() for kind in type(module).__mro__)}
    instead = ""
    if {kind.__name__ for kind in kinds} & {"DTensor", "FSDPModule"}:
        instead = (
            "; fully_shard and longshore.stream exclude each other: several ranks stream with longshore.initialize, "
            "stage 3 and offload_param"
        )
    elif found is not None and found.device.type != "cpu":
        instead = "; leave the model where it is (no model.to(...)): it computes on the device by itself"
    return ParameterError(
        f"parameter {name} was replaced after longshore.stream(...), which streams the former one; copy values into it "
        f"(p.data.copy_(...)), or replace it before{instead}"
    )


def check_selected(parameters: Mapping[int, str]) -> None:
    """Raise LongshoreError if a policy of selective checkpointing keeps the memory of one of these parameters, given by
    address: backward would get that, and the block's parameters have other memory by then."""
    for mode in _get_current_dispatch_mode_stack():
        for kept in tree_leaves(vars(mode)["storage"]) if type(mode).__name__ == "_CachingTorchDispatchMode" else ():
            value = getattr(kept, "val", None)
            if isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
                name = parameters.get(value.untyped_storage().data_ptr())
                if name is not None:
                    raise LongshoreError(
                        f"selective checkpointing keeps a view of parameter {name}, whose memory on the device others "
                        "get before backward: let the policy save what is computed (mm, attention), and return "
                        "PREFER_RECOMPUTE for views (t, view, transpose, detach)"
                    )


_TWO_DEVICES = re.compile("same device|type and weight type|weight type .* should be the same")


def explain_devices(
    error: RuntimeError,
    name: str,
    model: nn.Module,
    device: torch.device,
    is_streamed: Callable[[Tensor], bool],
    given: Any,
) -> LongshoreError | None:
    """Return the error that says why a module of a streamed model found tensors of two devices; None: it is another
    error.

    Args:
        error: the error of torch.
        name: of the module in the model.
        model: that is streamed.
        device: where it computes.
        is_streamed: whether a parameter is streamed.
        given: the arguments of the call.
    """
    if isinstance(error, LongshoreError) or not _TWO_DEVICES.search(str(error)):
        return None
    name = name or "the model"
    for each in tree_leaves(given):
        if isinstance(each, Tensor) and each.device != device and each.dim():
            return LongshoreError(
                f"{name} was called with a tensor on {each.device}, and a streamed model computes on {device}: move "
                f"its inputs there (batch.to({str(device)!r}))"
            )
    for kind, found in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for late, each in found:
            if each.device != device and not is_streamed(each):
                return LongshoreError(
                    f"{kind} {late} came after longshore.stream(...) and is on {each.device}, from where nothing "
                    f"copies it to {device}: call close() of the stream before modules or adapters (LoRA) are added or "
                    f"replaced, and longshore.stream(...) again afterwards; or move it to {device}, where it stays"
                )
    return LongshoreError(
        f"{name} uses a tensor that is not on {device}: a parameter is there only while forward of its own block runs, "
        "so a module that uses a parameter of another one has to be in one block with it; choose a module around both "
        "in blocks="
    )

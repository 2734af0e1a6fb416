"""Optimizers of other libraries and of users: their arguments' names, their replacements of ours, and which one of ours
stands for one that it took over from (``engine/optimizers.py``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch.optim import Optimizer

_FORMAT = 'the format of the states is chosen by offload=longshore.Offload(states="8bit"), or "bf16": give that instead'


_HERE = {
    # our own, in the wrong place
    "states": _FORMAT,
    "states_seed": "give offload=longshore.Offload(states=..., states_seed=...)",
    # torchao
    "offload_gradients": "that is release_gradients here",
    "block_size": _FORMAT,
    "bf16_stochastic_round": "bf16 parameters are float32 masters, rounded to the nearest: leave it out",
    "minimal_size": "small parameters share a tile: leave it out (Offload(ratio=...) keeps a share on the device)",
    # bitsandbytes
    "optim_bits": _FORMAT,
    "min_8bit_size": _FORMAT,
    "block_wise": _FORMAT,
    "is_paged": "all of the state is in host memory, whatever the device has free: leave it out",
    "args": "bitsandbytes' settings of 8-bit states have no meaning: leave it out",
    "percentile_clipping": "clip with optimizer.clip_grad_norm_(max_norm): leave it out",
    # lion-pytorch
    "use_triton": "steps run where the state is, Offload(device='none') steps on the device by Triton: leave it out",
    "decoupled_weight_decay": "for True pass weight_decay divided by the first lr; leave it out",
    "cautious_factor": "the cautious update is not supported: leave it out",
    # apex
    "adam_w_mode": "longshore.AdamW is what apex calls True, longshore.Adam is False: leave it out",
    # trainers of language models
    "correct_bias": "that is bias_correction here",
}


_AS_HERE: dict[str, tuple[str, Any]] = {
    "bf16_stochastic_round": ("TiledOptimizer", False),
    "args": ("TiledOptimizer", None),
    "optim_bits": ("TiledOptimizer", 32),
    # A norm is at most the largest of the last ones: nothing is clipped.
    "percentile_clipping": ("TiledOptimizer", 100),
    "use_triton": ("Lion", False),
    # lion-pytorch multiplies by 1 - lr * weight_decay, as Lion here.
    "decoupled_weight_decay": ("Lion", False),
}
"""The optimizers and the value of an argument with which it asks for what they do anyway: most are its defaults."""


def _as_here(kind: type, name: str, value: Any) -> bool:
    """Return whether an argument of another library's optimizer asks for the behaviour that ``kind`` has anyway."""
    if name not in _AS_HERE:
        return False
    base, same = _AS_HERE[name]
    return type(value) is type(same) and value == same and any(each.__name__ == base for each in kind.__mro__)


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of the constructor of an optimizer ``kind``, by name.

    In Python 3.10 ``inspect.signature(kind)`` gives those of ``__new__`` if a subclass has no constructor of its own.
    """
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    return {parameter.name: parameter for parameter in parameters}


def without_words(kind: type, build: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor ``build`` of ``kind``, which leaves out words that :func:`check_words` lets pass."""
    known = inspect.signature(build).parameters

    @functools.wraps(build)  # its signature stays the table of options
    def built(self: Any, *args: Any, **named: Any) -> None:
        own = {name: value for name, value in named.items() if name in known or not _as_here(kind, name, value)}
        build(self, *args, **own)

    return built


def check_words(kind: type, known: Mapping[str, Any], positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Check the arguments of an optimizer ``kind``, whose signature has the parameters ``known``.

    Raises:
        TypeError: one is an argument of another library's optimizer, and asks for something that ``kind`` does not do;
            the message has its name here.
    """
    if (len(positional) > 1 and isinstance(positional[1], type)) or "optimizer_class" in named:
        raise TypeError(
            f"{kind.__name__} takes no optimizer class: the name of the longshore optimizer says which step it makes "
            "(longshore.from_client() converts an optimizer of torch)"
        )
    for name in named:
        if name in _HERE and name not in known and not _as_here(kind, name, named[name]):
            raise TypeError(f"{kind.__name__} takes no {name}: {_HERE[name]}")


def check_group_words(kind: type, group: Mapping[str, Any]) -> None:
    """Check that a group of an optimizer ``kind`` does not ask for a format of its states, which is one for all groups.

    Raises:
        ValueError: it does.
    """
    for name in ("states", "states_seed", "optim_bits"):
        if isinstance(group, Mapping) and name in group and not _as_here(kind, name, group[name]):
            raise ValueError(
                f"a group has {name!r}, and the states of all groups of {kind.__name__} have one format: give "
                "offload=longshore.Offload(states=...), or parameters with another format an optimizer of their own"
            )


def is_accelerates_mapping(caller: FrameType) -> bool:
    """Return whether ``caller`` is where Accelerate puts DeepSpeed's optimizers in the place of others."""
    return caller.f_code.co_name == "map_pytorch_optim_to_deepspeed"


def check_not_replaced(kind: type) -> None:
    """Check who reads the defaults of an optimizer ``kind``; to be called by the property that returns them.

    Under a DeepSpeed file Accelerate builds DeepSpeed's Adam from the rate and the decay of any optimizer that it does
    not know: betas and eps are lost, and decay becomes L2.

    Raises:
        ValueError: Accelerate does.
    """
    if is_accelerates_mapping(sys._getframe(2)):
        raise ValueError(
            f"Accelerate would replace longshore.{kind.__name__} by DeepSpeed's Adam, which steps differently. To "
            "train with longshore, leave the DeepSpeed file out of Accelerate's settings; or keep it with "
            '"zero_force_ds_cpu_optimizer": false and start the script with longshore run-deepspeed. To train with '
            "DeepSpeed, use torch.optim.AdamW"
        )


TAKEN_BY = "_longshore_optimizer"
"""Name of the attribute of a user's optimizer in which the one is that took over from it."""


IN_PLACE_OF = "_longshore_in_place_of"
"""Name of the attribute of an optimizer in which the user's own is if a library made it in that one's place."""


def stands_for(optimizer: Any) -> Any:
    """Return the optimizer that took over from this one; this one if none did."""
    return getattr(optimizer, "__dict__", {}).get(TAKEN_BY, optimizer)


def check_no_own_step(optimizer: Optimizer) -> None:
    """Check that the optimizer itself was given no ``step``, which would not be called any more.

    A wrapper that names its function passes: torch's schedulers count steps with one, ``torch.compile`` returns one.

    Raises:
        ValueError: it was given one.
    """
    found = vars(optimizer).get("step")
    if found is not None and inspect.unwrap(_function(found)) is not inspect.unwrap(_function(type(optimizer).step)):
        name = type(optimizer).__name__
        raise ValueError(
            f"this {name} has a step() of its own (optimizer.step = ...), which longshore would not call; pass the "
            f"optimizer as {name} made it, and register a step_pre_hook or step_post_hook for what is to happen there"
        )


def steps_as(kind: type, base: type) -> bool:
    """Return whether optimizers of class ``kind`` step as those of ``base``, a class of torch, do."""
    return issubclass(kind, base) and all(
        _without_hooks(getattr(kind, name)) is _without_hooks(getattr(base, name)) for name in _STEP
    )


_STEP = ("step", "_init_group")
"""The methods of a class of torch that make a step; ``_init_group`` collects what is stepped."""


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _without_hooks(step: Any) -> Any:
    """Return the function that torch's wrapper calls, which runs a step's hooks; it wraps the step of each class when
    its first optimizer is made, unless a base's is wrapped already."""
    wrappers = Optimizer.profile_hook_step.__code__.co_consts
    while getattr(step, "__code__", None) in wrappers:
        step = step.__wrapped__
    return step

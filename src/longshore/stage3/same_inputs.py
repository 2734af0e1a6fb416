"""One tensor that a unit is given twice stays one tensor: FSDP2 makes a new tensor of each input that has a gradient.

So ``q is k``, which attention asks, would have another answer than in a model that is not sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class _Same:
    """Stands for an input that is the one at ``place`` among all inputs, flat, while FSDP2 sees them."""

    place: int


def keep_same_inputs(module: nn.Module) -> list[RemovableHandle]:
    """Have FSDP2 see each input of a unit once; the hooks that are returned do so."""
    return [
        module.register_forward_pre_hook(_leave_out, prepend=True, with_kwargs=True),  # before FSDP2's own
        module.register_forward_pre_hook(_put_back, with_kwargs=True),
    ]


@_disable_dynamo
def _leave_out(_: nn.Module, args: Any, kwargs: Any) -> Any:
    inputs, form = tree_flatten((args, kwargs))
    tensors = [id(each) for each in inputs if isinstance(each, Tensor)]
    if len(set(tensors)) == len(tensors):
        return None
    first: dict[int, int] = {}
    for place, each in enumerate(inputs):
        if isinstance(each, Tensor) and first.setdefault(id(each), place) != place:
            inputs[place] = _Same(first[id(each)])
    return tree_unflatten(inputs, form)


@_disable_dynamo
def _put_back(_: nn.Module, args: Any, kwargs: Any) -> Any:
    inputs, form = tree_flatten((args, kwargs))
    if not any(isinstance(each, _Same) for each in inputs):
        return None
    return tree_unflatten([inputs[each.place] if isinstance(each, _Same) else each for each in inputs], form)

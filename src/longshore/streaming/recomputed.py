"""What backward computes again inside of a streamed model: with the inputs, parameters and buffers that forward had."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from longshore.errors import LongshoreError
from longshore.streaming.parameters import StreamedParameter

_OF_HOOKS = ("longshore.streaming.blocks", "torch._dynamo.eval_frame")
"""Modules whose functions are between the one that saves and :func:`keep_input`: hooks, one inside of another, and what
keeps them from being compiled."""


class _WithInputs:
    """What a checkpoint computes again, with inputs of the call in the place of those that autograd made of them.

    Args:
        compute: called with the inputs.
        count: how many inputs the call has.
    """

    def __init__(self, compute: Callable[..., None], count: int) -> None:
        self._compute = compute
        self.inputs: list[Tensor | None] = [None] * count

    def __call__(self, *args: Any) -> None:
        self._compute(*(arg if own is None else own for arg, own in zip(args, self.inputs, strict=True)))


def keep_input() -> None:
    """Where a tensor is being saved as an input of a checkpoint, let the checkpoint compute again with that tensor.

    ``torch.utils.checkpoint`` lets autograd save each input. Without hooks, autograd returns the tensor that it saved;
    with hooks it makes a new one of it each time. So an input that is given twice, or again by name or in a container,
    would be two tensors where backward computes the call again, and ``q is k`` have another answer than in forward.

    To be called from the hook that saves it, which keeps its memory, and checks its version before.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OF_HOOKS:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        return
    # Up to Python 3.11 its comprehension over the inputs has a frame of its own.
    saving = frame if frame.f_code.co_name == "save_inputs" else frame.f_back
    if saving is None or saving.f_code.co_name != "save_inputs":
        return
    tensor, inputs, call = frame.f_locals["arg"], saving.f_locals["args"], saving.f_locals["self"]
    if not isinstance(call.recompute_fn, _WithInputs):
        call.recompute_fn = _WithInputs(call.recompute_fn, len(inputs))
    for index, each in enumerate(inputs):
        if each is tensor:
            call.recompute_fn.inputs[index] = each


class Unwritten:
    """What a block computes with besides its inputs, as it is now: with other values backward would compute another
    block again than forward had.

    Args:
        name: of the block in the model.
        module: the block.
        parameters: all of the block and of the modules inside of it.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Sequence[StreamedParameter]) -> None:
        self._name = name
        self._parameters = [parameter.watch() for parameter in parameters]
        self._buffers = [
            (inside, each, each._version) for inside, each in module.named_buffers() if not each.is_inference()
        ]

    def _written_buffer(self) -> str | None:
        return next((f"{self._name}.{name}" for name, each, version in self._buffers if each._version != version), None)

    def check_after_forward(self) -> None:
        """Raise LongshoreError if the block has written to its buffers, which it would do again in backward."""
        if (name := self._written_buffer()) is not None:
            raise LongshoreError(
                f"{self._name} writes to its buffer {name} in forward, and would write to it again where backward "
                "computes it again: leave out checkpoint= in longshore.stream(...)"
            )

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, if a parameter or a buffer was written since."""
        for check in self._parameters:
            check()
        if (name := self._written_buffer()) is not None:
            raise RuntimeError(
                f"buffer {name} is needed for gradient computation, and has been modified by an inplace operation "
                f"since forward, so that backward would compute {self._name} again with other values: write to it "
                "after backward()"
            )

"""``engine.half()``, ``.to(...)``, ``.cuda()``: refused at once where they would change what is stepped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from longshore.errors import ParameterError
from longshore.optim.parameters import ParameterRecord


@torch.no_grad()
def leaves_as_is(module: nn.Module, records: Iterable[ParameterRecord], convert: Callable[[Tensor], Tensor]) -> bool:
    """Whether ``convert`` returns every parameter and buffer itself, so that nothing is left to do.

    Args:
        module: whose tensors are to be converted; they are not changed here.
        records: of the parameters that an optimizer steps.
        convert: what ``nn.Module._apply`` gets.

    Raises:
        ParameterError: it would change a parameter that is stepped, by name; nothing was converted.
    """
    for record in records:
        found = convert(record.parameter)
        if (found.dtype, found.device) != (record.dtype, record.device):
            raise ParameterError(
                f"the engine steps {record.name} as {record.dtype} on {record.device}, and this would make it "
                f"{found.dtype} on {found.device}; set fp16 or bf16 in the configuration, or convert and move the "
                "model before initialize() (engine.destroy() ends this engine)"
            )
    return all(convert(tensor) is tensor for tensor in itertools.chain(module.parameters(), module.buffers()))

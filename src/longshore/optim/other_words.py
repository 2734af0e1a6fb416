"""What other libraries call the arguments of optimizers, and what they make of ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

_NO_EIGHT_BITS = "states are float32 in host memory, never 8-bit: leave it out"
_HERE = {
    # torchao
    "offload_gradients": "that is release_gradients here",
    "minimal_size": "small parameters share a tile: leave it out (Offload(ratio=...) keeps a share on the device)",
    # bitsandbytes
    "optim_bits": _NO_EIGHT_BITS,
    "min_8bit_size": _NO_EIGHT_BITS,
    "block_wise": _NO_EIGHT_BITS,
    "is_paged": "all of the state is in host memory, whatever the device has free: leave it out",
    "args": "bitsandbytes' settings of 8-bit states have no meaning: leave it out",
    "percentile_clipping": "clip with optimizer.clip_grad_norm_(max_norm): leave it out",
    # lion-pytorch
    "use_triton": "steps run where the state is, Offload(device='none') steps on the device by Triton: leave it out",
    "decoupled_weight_decay": "for True pass weight_decay divided by the first lr; leave it out",
    "cautious_factor": "the cautious update is not supported: leave it out",
}


def check_words(kind: type, known: Mapping[str, Any], positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Check the arguments of an optimizer ``kind``, whose signature has the parameters ``known``.

    Raises:
        TypeError: one is an argument of another library's optimizer; the message says what it is here.
    """
    if (len(positional) > 1 and isinstance(positional[1], type)) or "optimizer_class" in named:
        raise TypeError(
            f"{kind.__name__} takes no optimizer class: the name of the longshore optimizer says which step it makes "
            "(longshore.from_client() converts an optimizer of torch)"
        )
    for name in named:
        if name in _HERE and name not in known:
            raise TypeError(f"{kind.__name__} takes no {name}: {_HERE[name]}")


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

"""How large a model may be on a machine, by rules of thumb; ``longshore plan`` counts a model's bytes exactly."""

from __future__ import annotations

from collections.abc import Mapping

from longshore.report.facts import Machine

HOST_BYTES = {"here": 16, "offloaded": 14, "streamed": 16}
"""Host bytes a parameter of bfloat16 with float32 masters and AdamW: 12 of state and 2 of a gradient, and 2 of the
parameter where it rests there."""
DEVICE_BYTES = 2
_DEVICE_SHARE = 0.75
"""The share of a device's free memory for parameters; the rest is for activations and gradients under way."""
_HOST_SHARE = 0.95


def largest_models(machine: Machine) -> Mapping[str, int]:
    """Return numbers of parameters, for one process.

    ``"here"``: trained on the CPU. On a machine with a GPU ``"offloaded"``: parameters on the largest one, states in
    host memory; and ``"streamed"``: the parameters in host memory as well, in blocks of which two fit on the device.
    """
    memory = machine.memory
    limits = [memory.available_bytes, *([] if memory.limit_bytes is None else [memory.limit_bytes])]
    host = int(_HOST_SHARE * min(limits))
    if not machine.gpus:
        return {"here": host // HOST_BYTES["here"]}
    device = int(_DEVICE_SHARE * max(gpu.free_bytes for gpu in machine.gpus))
    return {
        "offloaded": min(device // DEVICE_BYTES, host // HOST_BYTES["offloaded"]),
        "streamed": host // HOST_BYTES["streamed"],
    }

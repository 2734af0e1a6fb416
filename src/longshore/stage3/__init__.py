"""ZeRO-3: FSDP2 gathers parameters, and gradients are taken before it reduces them."""

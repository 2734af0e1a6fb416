"""Host and device kernels, and their oracle in :mod:`longshore.kernels.reference`."""

from longshore.kernels._native import InstructionSet, supported_instruction_sets
from longshore.kernels.base import NORM_BLOCK_NUMEL, Kernels, total_of_blocks
from longshore.kernels.device import DeviceKernels
from longshore.kernels.host import SUPPORTED_DTYPES, HostKernels
from longshore.kernels.rules import (
    UNSCALED,
    AdagradRule,
    AdamRule,
    HostRule,
    LionRule,
    Rule,
    Scale,
    SGDRule,
    TileSegment,
    TorchRule,
)
from longshore.kernels.torch_rules import next_scalars
from longshore.machine import usable_cpus

__all__ = [
    "NORM_BLOCK_NUMEL",
    "SUPPORTED_DTYPES",
    "UNSCALED",
    "AdagradRule",
    "AdamRule",
    "DeviceKernels",
    "HostKernels",
    "HostRule",
    "InstructionSet",
    "Kernels",
    "LionRule",
    "Rule",
    "SGDRule",
    "Scale",
    "TileSegment",
    "TorchRule",
    "next_scalars",
    "supported_instruction_sets",
    "total_of_blocks",
    "usable_cpus",
]

"""Kernels that step a tile by any rule, on the host and on a CUDA device, and their oracle in plain torch,
:mod:`longshore.kernels.reference`."""

from longshore.kernels._native import InstructionSet, Outputs, SegmentTable, supported_instruction_sets
from longshore.kernels.base import (
    NORM_BLOCK_NUMEL,
    SUPPORTED_DTYPES,
    UNSCALED,
    HostRule,
    MatrixRule,
    OneElement,
    Rule,
    Scale,
    TileSegment,
    TorchRule,
    total_of_blocks,
)
from longshore.kernels.device import DeviceKernels, Kernels, block_sums_on, checksums_on
from longshore.kernels.host import HostKernels
from longshore.kernels.newton_schulz import newton_schulz, newton_schulz_bytes
from longshore.kernels.torch_rules import next_scalars, torch_options
from longshore.machine import usable_cpus

__all__ = [
    "NORM_BLOCK_NUMEL",
    "SUPPORTED_DTYPES",
    "UNSCALED",
    "DeviceKernels",
    "HostKernels",
    "HostRule",
    "InstructionSet",
    "Kernels",
    "MatrixRule",
    "OneElement",
    "Outputs",
    "Rule",
    "Scale",
    "SegmentTable",
    "TileSegment",
    "TorchRule",
    "block_sums_on",
    "checksums_on",
    "newton_schulz",
    "newton_schulz_bytes",
    "next_scalars",
    "supported_instruction_sets",
    "torch_options",
    "total_of_blocks",
    "usable_cpus",
]

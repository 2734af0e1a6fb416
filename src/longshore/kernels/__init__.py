"""Host and device kernels, and their oracle in :mod:`longshore.kernels.reference`."""

from longshore.kernels._native import InstructionSet, supported_instruction_sets
from longshore.kernels.base import Kernels
from longshore.kernels.device import DeviceKernels
from longshore.kernels.host import SUPPORTED_DTYPES, HostKernels, TileSegment, default_threads
from longshore.kernels.rules import UNSCALED, AdagradRule, AdamRule, LionRule, Rule, Scale, SGDRule

__all__ = [
    "SUPPORTED_DTYPES",
    "UNSCALED",
    "AdagradRule",
    "AdamRule",
    "DeviceKernels",
    "HostKernels",
    "InstructionSet",
    "Kernels",
    "LionRule",
    "Rule",
    "SGDRule",
    "Scale",
    "TileSegment",
    "default_threads",
    "supported_instruction_sets",
]

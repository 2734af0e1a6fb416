"""Describe this machine: facts, measured figures, and causes of slow training."""

from longshore.report.facts import Cpu, Figures, Gpu, HostMemory, Machine, Software, measure, read_machine
from longshore.report.findings import Finding, findings_of, limit_findings
from longshore.report.sizes import largest_models

__all__ = [
    "Cpu",
    "Figures",
    "Finding",
    "Gpu",
    "HostMemory",
    "Machine",
    "Software",
    "findings_of",
    "largest_models",
    "limit_findings",
    "measure",
    "read_machine",
]

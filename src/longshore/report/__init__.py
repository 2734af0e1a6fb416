"""Describe this machine: facts, measured figures, and what will slow training down."""

from longshore.report.facts import Cpu, Gpu, HostMemory, Machine, Software, read_machine
from longshore.report.figures import Figures, measure
from longshore.report.findings import Finding, findings_of, limit_findings

__all__ = [
    "Cpu",
    "Figures",
    "Finding",
    "Gpu",
    "HostMemory",
    "Machine",
    "Software",
    "findings_of",
    "limit_findings",
    "measure",
    "read_machine",
]

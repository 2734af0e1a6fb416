"""What of a machine matters to training here: facts, figures that are measured, and what will hurt."""

from longshore.report.facts import Cpu, Gpu, Machine, Memory, Software, read_machine
from longshore.report.figures import Figures, measure
from longshore.report.findings import Finding, findings_of, limit_findings

__all__ = [
    "Cpu",
    "Figures",
    "Finding",
    "Gpu",
    "Machine",
    "Memory",
    "Software",
    "findings_of",
    "limit_findings",
    "measure",
    "read_machine",
]

"""The tests bite: changes that break the code, and the tests that have to fail for each (``make test-mutants``)."""

from mutants import (
    checkpoint,
    device,
    export,
    former,
    fully_sharded,
    host,
    muon,
    others,
    planning,
    sharding,
    speculation,
    states,
    transfer,
    writes,
)
from mutants.mutant import ROOT, Mutant

__all__ = ["MUTANTS", "ROOT", "Mutant"]

MUTANTS = [
    *host.MUTANTS,
    *muon.MUTANTS,
    *states.MUTANTS,
    *speculation.MUTANTS,
    *transfer.MUTANTS,
    *device.MUTANTS,
    *writes.MUTANTS,
    *sharding.MUTANTS,
    *fully_sharded.MUTANTS,
    *former.MUTANTS,
    *checkpoint.MUTANTS,
    *export.MUTANTS,
    *planning.MUTANTS,
    *others.MUTANTS,
]

"""Mutants of how writes to parameters, and conversions of models, are found."""

from __future__ import annotations

from mutants.mutant import UNSEEN_WRITES, Mutant

RELEASED = "tests/optim/test_released.py"

MUTANTS = [
    Mutant(
        "the step does not compare parameters with their masters",
        "Tier.__init__",
        "self._outputs = Outputs.COMPARED if settings.detect_writes and (not streams.publishes) else Outputs.WRITTEN",
        "self._outputs = Outputs.WRITTEN",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a tile that is stepped ahead has its masters in the parameters",
        "Tier.__init__",
        "self._own_masters = not (kernels.asynchronous or streams.publishes or ahead)",
        "self._own_masters = not (kernels.asynchronous or streams.publishes)",
        ("tests/optim/test_own_masters.py",),
    ),
    Mutant(
        "the master of a parameter that is its own is written with a loaded state",
        "RangeStates.write",
        "elif not tile.own_master:",
        "elif tile.own_master and self._tiles.values_of is not None:\n"
        "    segment.part_of(self._tiles.values_of(key)).copy_(part)\n"
        "else:",
        ("tests/optim/test_own_masters.py",),
    ),
    Mutant(
        "a step ahead is kept although its parameter was written",
        "Speculator.verdict",
        "if bet.scale == scale and bet.rules == rules and (not (written or bet.spent)):",
        "if bet.scale == scale and bet.rules == rules and (not bet.spent):",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a tile stepped ahead is compared with its new master",
        "InPlace._written",
        "master, reconcile = (master_of(tile.buffer), self._tier.kernels.reconcile)",
        "master, reconcile = (master_of(tile.spare), self._tier.kernels.reconcile)",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "the whole parameter is adopted, not the element",
        "step_by_torch",
        "master.copy_(adopted(master, output))",
        "master.copy_(output)",
        ("tests/kernels/test_torch_rules.py",),
    ),
    Mutant(
        "torch's own optimizers leave the processor's NaN in their states",
        "_Stepper.step_rows",
        "states[row - 1] = canonical(state[name][:numel])",
        "states[row - 1] = state[name][:numel]",
        ("tests/kernels/test_nan.py",),
    ),
    Mutant(
        "a device leaves its own NaN in a state",
        "step_tile",
        "first = canonical(first)",
        "",
        ("tests/kernels/test_nan.py",),
    ),
    Mutant(
        "a write found by its checksum is adopted whole",
        "WriteDetector.adopt",
        "store.states.adopt(record.index, steps[record.index].target, keep_matching=record.has_master)",
        "store.states.adopt(record.index, steps[record.index].target, keep_matching=False)",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "checksums are not compared",
        "WriteDetector._written",
        "return unknown + [record for record, wrote in zip(known, differs.tolist(), strict=True) if wrote]",
        "return unknown + [record for record, wrote in zip(known, differs.tolist(), strict=True) if wrote and False]",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "the checksum is that of the values before the step",
        "OptimizerCore.step",
        "def published() -> None:\n"
        "    first = [records[index] for index in steps if not records[index].has_state]\n"
        "    for index, step in steps.items():\n"
        "        records[index].publish(step.target, histories[index])\n"
        "    for index in steps:\n"
        "        records[index].mark_published()\n"
        "    self._writes.published(store, records, steps)",
        "self._writes.published(store, records, steps)\n"
        "def published() -> None:\n"
        "    first = [records[index] for index in steps if not records[index].has_state]\n"
        "    for index, step in steps.items():\n"
        "        records[index].publish(step.target, histories[index])\n"
        "        records[index].mark_published()\n"
        "    self._writes._identities.update((index, records[index].published) for index in steps)",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a checksum outlives the values that it is of",
        "WriteDetector._written",
        "(known if self._identities.get(record.index) is record.published else unknown).append(record)",
        "(known if record.index in self._identities else unknown).append(record)",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a checksum has no places",
        "checksum",
        "mixed = (places << 32 | part.long() & mask) * CHECKSUM_FACTOR",
        "mixed = (places * 0 | part.long() & mask) * CHECKSUM_FACTOR",
        ("tests/kernels/test_device.py",),
    ),
    # -- released.py -----------------------------------------------------------
    Mutant(
        "two threads in one parameter are not noticed",
        "ReleasedGradients._before",
        "if self._entered.setdefault(index, thread) != thread:",
        "if self._entered.setdefault(index, thread) is None:",
        ("tests/optim/test_released.py::test_two_threads_in_one_parameter_at_once_are_told",),
    ),
    Mutant(
        "a gradient that torch would have rounded counts",
        "ReleasedGradients._resolve",
        "is_ours = gradient is not None and gradient is self._placeholders.get(index) and (not is_converted(gradient))",
        "is_ours = gradient is not None and gradient is self._placeholders.get(index)",
        (RELEASED,),
    ),
    Mutant(
        "the hooks of a swapped parameter are not set again",
        "ReleaseHooks.follow",
        "leaf._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks",
        "",
        (RELEASED,),
    ),
    Mutant(
        "a parameter that became expanded is stepped",
        "WriteDetector.adopt",
        "check_parameter(record.parameter, record.name, record.device, shards=True)",
        "pass",
        (RELEASED,),
    ),
]

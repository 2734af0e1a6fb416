"""Mutants of how writes to parameters, and conversions of models, are found."""

from __future__ import annotations

from mutants.mutant import UNSEEN_WRITES, Mutant

RELEASED = "tests/optim/test_released.py"

MUTANTS = [
    Mutant(
        "the step does not compare parameters with their masters",
        "tiles/backend.py",
        "Outputs.COMPARED if detect_writes and not transfer.publishes else Outputs.WRITTEN",
        "Outputs.WRITTEN",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a tile that is stepped ahead has its masters in the parameters",
        "tiles/backend.py",
        "not transfer.publishes and not ahead\n",
        "not transfer.publishes\n",
        ("tests/optim/test_own_masters.py",),
    ),
    Mutant(
        "the master of a parameter that is its own is written with a loaded state",
        "tiles/backends.py",
        "            elif not tile.own_master:\n"
        "                master_of(buffer)[segment.layout.in_buffer].copy_(part)\n",
        "            elif tile.own_master and self._values_of is not None:\n"
        "                segment.part_of(self._values_of(parameter)).copy_(part)\n"
        "            else:\n                master_of(buffer)[segment.layout.in_buffer].copy_(part)\n",
        ("tests/optim/test_own_masters.py",),
    ),
    Mutant(
        "a step ahead is kept although its parameter was written",
        "tiles/speculation.py",
        "not (written or bet.spent)",
        "not bet.spent",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a tile stepped ahead is compared with its new master",
        "tiles/backend.py",
        "        master, reconcile = master_of(tile.buffer), self.kernels.reconcile\n",
        "        master, reconcile = master_of(tile.spare), self.kernels.reconcile\n",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "the whole parameter is adopted, not the element",
        "kernels/torch_rules.py",
        "                master.copy_(adopted(master, output))\n",
        "                master.copy_(output)\n",
        ("tests/kernels/test_torch_rules.py",),
    ),
    Mutant(
        "a write found by its checksum is adopted whole",
        "optim/adoption.py",
        "keep_matching=record.has_master)\n            record.has_master = True",
        "keep_matching=False)\n            record.has_master = True",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "checksums are not compared",
        "optim/adoption.py",
        "zip(known, differs.tolist(), strict=True) if wrote]",
        "zip(known, differs.tolist(), strict=True) if wrote and False]",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "the checksum is that of the values before the step",
        "optim/core.py",
        "        def published() -> None:\n"
        "            for index in steps:\n"
        "                if not records[index].has_state:\n"
        "                    self.handed_out.came(records[index])\n"
        "            for index, step in steps.items():\n"
        "                records[index].publish(step.target, histories[index])\n"
        "            for index in steps:  # after all: slices of one tensor count each other's writes\n"
        "                records[index].mark_published()\n"
        "            self._adoption.published(store, records, steps)\n",
        "        self._adoption.published(store, records, steps)\n\n"
        "        def published() -> None:\n"
        "            for index, step in steps.items():\n"
        "                records[index].publish(step.target, histories[index])\n"
        "                records[index].mark_published()\n"
        "            self._adoption._identities.update((index, records[index].published) for index in steps)\n",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a checksum outlives the values that it is of",
        "optim/adoption.py",
        "self._identities.get(record.index) is record.published",
        "record.index in self._identities",
        (UNSEEN_WRITES,),
    ),
    Mutant(
        "a checksum has no places",
        "kernels/reference.py",
        "((places << 32) | (part.long() & mask))",
        "((places * 0) | (part.long() & mask))",
        ("tests/kernels/test_device.py",),
    ),
    # -- released.py -----------------------------------------------------------
    Mutant(
        "two threads in one parameter are not noticed",
        "optim/released_gradients.py",
        "        if self._entered.setdefault(index, thread) != thread:\n",
        "        if self._entered.setdefault(index, thread) is None:\n",
        ("tests/optim/test_released.py::test_two_threads_in_one_parameter_at_once_are_told",),
    ),
    Mutant(
        "a gradient that torch would have rounded counts",
        "optim/released_gradients.py",
        " and not is_converted(gradient)\n",
        "\n",
        (RELEASED,),
    ),
    Mutant(
        "the hooks of a swapped parameter are not set again",
        "optim/released.py",
        "        leaf._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks\n",
        "",
        (RELEASED,),
    ),
    Mutant(
        "a parameter that became expanded is stepped",
        "optim/adoption.py",
        "            check_parameter(record.parameter, record.name, record.device, shards=True)\n",
        "            pass\n",
        (RELEASED,),
    ),
]

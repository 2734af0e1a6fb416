"""Mutants of the planner, of the bytes that it counts and of the step that it simulates."""

from __future__ import annotations

from mutants.mutant import PLAN_MEMORY, PLANNER, SIMULATION, Mutant

MUTANTS = [
    Mutant(
        "ranks of a host do not add up",
        "plan/planner.py",
        "host * machine.ranks_per_host - int(",
        "host - int(",
        (PLANNER,),
    ),
    Mutant(
        "the last of equal choices is recommended",
        "plan/planner.py",
        'min(good, key=lambda choice: (choice.offload != "none", bool(choice.speculation), choice.ratio < 1))',
        "good[-1]",
        (PLANNER,),
    ),
    Mutant(
        "state that is all on the device counts as a part of it",
        "plan/planner.py",
        "return next(fitting, 1.0) or 1.0  #",
        "return next(fitting, 1.0)  #",
        (PLANNER,),
    ),
    Mutant(
        "stage 3 shards a single number",
        "plan/planner.py",
        "        stages = range(3)\n",
        "",
        (PLANNER,),
    ),
    Mutant(
        "accumulators are not counted",
        "plan/layout.py",
        "        if arrivals > 1:\n            accumulators +=",
        "        if False:\n            accumulators +=",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "more spares are planned than are granted",
        "plan/layout.py",
        "granted = min(count, budget // (state + output))",
        "granted = count",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "every tile is staged at once",
        "plan/layout.py",
        "min(PIPELINE_DEPTH, tiles)",
        "tiles",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "a simulated step leaves out the backwards between the first and the last",
        "plan/simulation.py",
        "step, computed = self._time.end + skipped, ends[-1] + skipped",
        "step, computed = self._time.end, ends[-1]",
        (SIMULATION,),
    ),
    Mutant(
        "a simulated commit does not wait for passes that were put off",
        "plan/simulation.py",
        "                delayed.append(tile)\n",
        "                pass\n",
        (SIMULATION,),
    ),
    Mutant(
        "units are gathered as early as one likes",
        "plan/simulation.py",
        "free = used[-2] if len(used) > 1 else 0.0",
        "free = 0.0",
        (SIMULATION,),
    ),
]

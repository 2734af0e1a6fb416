"""Mutants of the planner, of the bytes that it counts and of the step that it simulates."""

from __future__ import annotations

from mutants.mutant import PLAN_MATRICES, PLAN_MEMORY, PLANNER, SIMULATION, Mutant

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
        "plan/memory.py",
        "        if arrivals > 1:\n            accumulators +=",
        "        if False:\n            accumulators +=",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "more spares are planned than are granted",
        "plan/memory.py",
        "granted = min(count, budget // (state + output))",
        "granted = count",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "every tile is staged at once",
        "plan/memory.py",
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
    Mutant(
        "matrices are planned with the arrays of AdamW",
        "plan/matrices.py",
        "MATRIX_ARRAYS = 2",
        "MATRIX_ARRAYS = 3",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "small matrices are planned to share tiles with others",
        "plan/layout.py",
        "plain = [(index, each) for index, each in enumerate(owned) if not is_matrix[index]]",
        "plain = list(enumerate(owned))",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "matrices and others are each planned all of the memory for spares",
        "plan/memory.py",
        'layout.speculation, matrices["spares"])',
        "layout.speculation)",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "parameters are laid out in the order of the model, and not of Muon's groups",
        "plan/matrices.py",
        "key=lambda index: model.trainable[index].group)",
        "key=lambda index: 0)",
        (PLAN_MEMORY,),
    ),
    Mutant(
        "every matrix is planned to travel",
        "plan/layout.py",
        "return max(first, min(numel - first, shard_numel))",
        "return first - 1",
        (PLAN_MATRICES,),
    ),
    Mutant(
        "the passes after a transformation are planned before it",
        "plan/simulation.py",
        "self._time.run(STEP_IN_PLACE, key, seconds, not_before=ready)",
        "self._time.run(STEP_IN_PLACE, key, seconds)",
        (PLAN_MATRICES,),
    ),
    Mutant(
        "all of a step of matrices is planned ahead of the verdict",
        "plan/simulation.py",
        "{matrix.tiles.key: matrix.first_bytes for",
        "{matrix.tiles.key: matrix.tiles.num_bytes for",
        (PLAN_MATRICES,),
    ),
]

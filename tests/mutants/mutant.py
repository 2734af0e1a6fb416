"""What a mutant is, and the tests that mutants name."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

MEMORY = "tests/tiles/test_memory.py"
NORMS = "tests/tiles/test_early_norms.py"
SNAPSHOT = "tests/tiles/test_snapshot.py"
STEPPING = "tests/tiles/test_stepping.py"
ARRIVALS = "tests/tiles/test_arrivals.py"
STORE = "tests/tiles/test_store.py"
WORKER = "tests/tiles/test_worker.py"
SIMULATED = "tests/transfer/test_simulated.py"
SPECULATION = "tests/optim/test_speculation.py"
UNSEEN_WRITES = "tests/optim/test_unseen_writes.py"
COLLECTIVES = "tests/sharding/test_collective_thread.py"
ROUNDS = "tests/sharding/test_rounds.py"
TABLE = "tests/engine/test_table.py"
FAILURES = "tests/engine/test_failures.py"
ONE_SIDED = "tests/engine/test_one_sided.py"
REDUCTION = "tests/engine/test_reduction.py"
CLOSING = "tests/engine/test_closing.py"
PENDING = "tests/sharding/test_pending_gradients.py"
PRESENCE = "tests/sharding/test_presence.py"
GATHERING = "tests/sharding/test_gathering.py"
SHARED_MEMORY = "tests/sharding/test_shared_memory.py"
FSDP = "tests/optim/test_fsdp.py"
FULLY_SHARDED = "tests/engine/test_fully_sharded.py"
KEPT = "tests/engine/test_kept_objects.py"
GATHER = "tests/engine/test_gather.py"
TENSOR_PARALLEL = "tests/engine/test_tensor_parallel.py"
SPLIT = "tests/optim/test_split.py"
ASYNC = "tests/checkpoint/test_async.py"
FOLDER = "tests/checkpoint/test_folder.py"
ONE_LINE = "tests/checkpoint/test_one_line.py"
RESHARDING = "tests/checkpoint/test_resharding.py"
RESUME = "tests/checkpoint/test_resume.py"
EXPORT = "tests/checkpoint/test_export.py"
DEEPSPEED = "tests/checkpoint/test_deepspeed.py"
PLANNER = "tests/plan/test_planner.py"
PLAN_MEMORY = "tests/plan/test_memory.py"
PLAN_MATRICES = "tests/plan/test_matrices.py"
PLAN_STATES = "tests/plan/test_states.py"
SIMULATION = "tests/plan/test_simulation.py"
COMPAT_NAMES = "tests/compat/test_names.py"
COMPAT_SURFACE = "tests/compat/test_surface.py"
TRAINER = "tests/integrations/transformers/test_trainer.py"
LIGHTNING = "tests/integrations/lightning/test_training.py"
FABRIC = "tests/integrations/lightning/test_fabric.py"
LIGHTNING_CHECKPOINTS = "tests/integrations/lightning/test_checkpoints.py"


@dataclass(frozen=True)
class Mutant:
    """One change that breaks the code.

    Attributes:
        name: what it breaks.
        file: under ``src/longshore``.
        source: text that occurs once in the file.
        replacement: what stands there in the mutant.
        tests: what has to catch it: files or node ids, the quickest first.
        on_device: whether they run on the simulated accelerator.
    """

    name: str
    file: str
    source: str
    replacement: str
    tests: tuple[str, ...]
    on_device: bool = False

    def applied_to(self, text: str) -> str:
        """The file's text, mutated.

        Raises:
            ValueError: the source text does not occur exactly once.
        """
        found = text.count(self.source)
        if found != 1:
            raise ValueError(
                f"a mutant's source text has to occur once in its file; that of {self.name!r} occurs {found} times in "
                f"src/longshore/{self.file}: write it anew"
            )
        return text.replace(self.source, self.replacement)


def what_does_not_apply(mutants: Iterable[Mutant]) -> list[str]:
    """A line for each mutant that cannot be played: its text or its tests are gone, or nothing changes."""
    return [f"{mutant.name}: {said}" for mutant in mutants if (said := _what_is_wrong(mutant))]


def _what_is_wrong(mutant: Mutant) -> str:
    for test in mutant.tests:
        file, _, name = test.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        if not (ROOT / file).exists() or f"def {function}" not in (ROOT / file).read_text():
            return f"there is no {test}"
    path = ROOT / "src" / "longshore" / mutant.file
    if not path.exists():
        return f"there is no src/longshore/{mutant.file}"
    text = path.read_text()
    try:
        mutated = ast.parse(mutant.applied_to(text))
    except (ValueError, SyntaxError) as error:
        return str(error)
    return "it changes nothing" if ast.dump(mutated) == ast.dump(ast.parse(text)) else ""

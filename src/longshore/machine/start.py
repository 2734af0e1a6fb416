"""What ``longshore launch`` starts for each rank: binds itself, then becomes the rank's own program.

The first argument is ``--rank=LOCAL_RANK``, the others are the script's name and arguments. In the variable
``LONGSHORE_LAUNCH`` is a JSON object: ``program``, what comes before the script (``python -u``), and ``bindings``, a
list by local rank.

It is run by its path and knows nothing of longshore or torch: affinities and variables outlive ``exec``, so the
program starts as if the shell had started it, and no thread or page of it was ever elsewhere. The process stays the
same, so signals and exit codes are the launcher's business alone.
"""

import json
import os
import sys


def main(arguments: list[str]) -> None:
    """Does not return."""
    local_rank = int(arguments[0].partition("=")[2])
    told = json.loads(os.environ.pop("LONGSHORE_LAUNCH"))
    binding = told["bindings"][local_rank]
    if binding["cpus"]:
        try:
            os.sched_setaffinity(0, binding["cpus"])
        except (OSError, AttributeError) as error:  # a CPU went away; a system without affinities
            sys.stderr.write(f"longshore: local rank {local_rank} is not bound to CPUs: {error}\n")
            binding.update(cpus=[], nodes=[], why=[f"binding failed: {error}"])
    os.environ["OMP_NUM_THREADS"] = str(binding["torch_threads"])
    os.environ["LONGSHORE_BINDING"] = json.dumps(binding)
    program = [*told["program"], *arguments[1:]]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"longshore: {program[0]}: {error.strerror}")

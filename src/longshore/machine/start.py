"""Program that ``longshore launch`` starts for each rank: it binds itself to CPUs, then executes the rank's program.

The first argument is ``--rank=LOCAL_RANK``; the others are the script's name and its arguments. The environment
variable ``LONGSHORE_LAUNCH`` has a JSON object: ``program``, the words before the script (``python -u``), and
``bindings``, a list indexed by local rank.

This file is run by its path and imports neither longshore nor torch. Affinities and environment variables survive
``exec``, so the program is bound before it starts any thread or touches any memory. The process ID stays the same, so
the launcher handles signals and exit codes as usual.
"""

import json
import os
import sys


def main(arguments: list[str]) -> None:
    """Bind this process and execute the program; this function does not return."""
    local_rank = int(arguments[0].partition("=")[2])
    launch = json.loads(os.environ.pop("LONGSHORE_LAUNCH"))
    binding = launch["bindings"][local_rank]
    if binding["cpus"]:
        try:
            os.sched_setaffinity(0, binding["cpus"])
        except (OSError, AttributeError) as error:  # a CPU was taken offline, or the system has no affinities
            sys.stderr.write(f"longshore: local rank {local_rank} is not bound to CPUs: {error}\n")
            binding.update(cpus=[], nodes=[], why=[f"binding failed: {error}"])
    os.environ["OMP_NUM_THREADS"] = str(binding["torch_threads"])
    os.environ["LONGSHORE_BINDING"] = json.dumps(binding)
    program = [*launch["program"], *arguments[1:]]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"longshore: {program[0]}: {error.strerror}")

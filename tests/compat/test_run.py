"""``longshore run-deepspeed`` is ``python SCRIPT``, but for what ``import deepspeed`` gives."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compat.running import SCRIPTS
from longshore.compat.absent import VERSION

RUN = [sys.executable, "-m", "longshore", "run-deepspeed"]
FORMER = [*RUN[:-1], "run", "--as-deepspeed"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *RUN[2:]]
SAYS = """
import atexit, json, os, pickle, sys

class Mine:
    pass

here = pickle.loads(pickle.dumps(Mine())).__class__ is Mine  # __main__ is this module
names = []
def annotated(x: names.append("evaluated")): pass  # unless someone's __future__ import says otherwise
atexit.register(lambda: print("at exit", Mine.__name__))
import neighbour
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, here, names, neighbour.__name__, __package__]))
"""


def run(*command: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    without = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    env = {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environ}
    return subprocess.run([*command], capture_output=True, text=True, timeout=300, cwd=cwd, env=env, check=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "neighbour.py").write_text("")
    (folder / "script.py").write_text(SAYS)
    return folder / "script.py"


def test_what_a_script_sees_is_what_python_shows_it(script: Path, tmp_path: Path) -> None:
    arguments = ["theirs/script.py", "--as-deepspeed", "-m", "--", "--help", "x y"]
    theirs = run(sys.executable, *arguments, cwd=tmp_path)
    ours = run(*RUN, *arguments, cwd=tmp_path)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert theirs.stdout == ours.stdout and ours.stdout.endswith("at exit Mine\n")


def test_a_module(script: Path) -> None:
    theirs = run(sys.executable, "-m", "script", "-m", "a", cwd=script.parent)
    ours = run(*RUN, "-m", "script", "-m", "a", cwd=script.parent)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert theirs.stdout.splitlines()[0] == ours.stdout.splitlines()[0]


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "body",
    ["raise SystemExit(7)", "import sys; sys.exit('words')", "def f(): raise OSError(2, 'no', 'x')\nf()", "x ="],
    ids=["code", "words", "error", "syntax"],
)
def test_how_a_script_ends(tmp_path: Path, body: str) -> None:
    path = tmp_path / "ends.py"
    path.write_text(body)
    theirs, ours = run(sys.executable, str(path)), run(*RUN, str(path))
    assert ours.returncode == theirs.returncode != 0
    assert ours.stderr.splitlines() == theirs.stderr.splitlines()


@pytest.mark.slow
def test_a_program_on_the_path(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, deepspeed\n"
        "print(deepspeed.__version__, sys.argv, os.environ['LONGSHORE_PYTHON'])\n"
    )
    program.chmod(0o755)
    done = run(*RUN, "tool", "a", cwd=tmp_path.parent, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{VERSION} {[str(program), 'a']} {sys.executable}\n"
    former = run(*RUN, "tool", cwd=tmp_path.parent, PATH=str(tmp_path), PYTHON_EXEC="/a/python")
    assert former.stdout.endswith(" /a/python\n")
    program.write_text("#!/bin/sh\nexit 0\n")
    refused = run(*RUN, "tool", cwd=tmp_path.parent, PATH=str(tmp_path))
    assert refused.returncode == 2 and "is not a Python script" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("as_module", [False, True])
def test_ranks_that_a_script_starts(as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "ranked.py").write_text(
        "import os, sys, deepspeed\nprint(deepspeed.__version__, os.environ['RANK'], sys.argv[1:])\n"
    )
    what = ["--module", "ranked"] if as_module else [str(tmp_path / "ranked.py")]
    (tmp_path / "starts.py").write_text(
        f"from torch.distributed.run import main\nmain(['--standalone', '--nproc-per-node=2', *{what}, '-m', 'b'])\n"
    )
    done = run(*RUN, str(tmp_path / "starts.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{VERSION} {rank} ['-m', 'b']" for rank in range(2)]


def test_a_launcher_of_several_machines_is_refused() -> None:
    from longshore.compat.deepspeed.launcher.runner import (  # pyright: ignore[reportMissingImports]
        DEEPSPEED_ENVIRONMENT_NAME,
    )

    with pytest.raises(ValueError, match="deepspeed_multinode_launcher standard"):
        os.fspath(DEEPSPEED_ENVIRONMENT_NAME)  # what open() does


def test_what_is_refused(tmp_path: Path) -> None:
    missing = run(*RUN, str(tmp_path / "nothing.py"))
    assert missing.returncode == 2 and "there is no script" in missing.stderr
    launcher = run(*RUN, "deepspeed", "--num_gpus=2", __file__, PATH=str(tmp_path))
    assert launcher.returncode == 2
    assert "torchrun --nproc-per-node=N -m longshore run-deepspeed SCRIPT" in " ".join(launcher.stderr.split())
    undecided = run(*FORMER[:-1], __file__)
    assert undecided.returncode == 2 and "the command is longshore run-deepspeed SCRIPT" in undecided.stderr


@pytest.mark.slow
def test_the_former_name(tmp_path: Path) -> None:
    path = tmp_path / "says.py"
    path.write_text("import sys, deepspeed\nprint(deepspeed.__name__, sys.argv)\nraise SystemExit(5)\n")
    ours, former = (run(*command, "--local-rank", str(path), "--x") for command in (RUN, FORMER))
    assert (ours.returncode, ours.stdout) == (former.returncode, former.stdout)
    assert ours.returncode == 5 and "'--local_rank=0', '--x'" in ours.stdout


@pytest.mark.slow
def test_the_one_rank_without_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "ranks.py"
    path.write_text(
        "import os, sys, torch, deepspeed\n"
        "deepspeed.init_distributed('nccl')\n"
        "names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR'\n"
        "print(*map(os.environ.get, names), torch.distributed.get_world_size(), sys.argv[1:])\n"
        "total = torch.ones(2); deepspeed.comm.all_reduce(total); deepspeed.comm.barrier()\n"
        "assert deepspeed.comm.get_local_rank() == 0 and total.tolist() == [1.0, 1.0]\n"
        "deepspeed.comm.destroy_process_group()\n"
        "torch.distributed.init_process_group('gloo')  # by these variables\n"
        "deepspeed.init_distributed()\n"
    )
    done = run(*RUN, "--local-rank", str(path), "a")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 0 1 1 127.0.0.1 1 ['--local_rank=0', 'a']\n"


NAMES = ["client_optimizer", "several_engines", "own_backward", "gan", "export"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ranks",
    [
        pytest.param(name, ranks, marks=[] if (name, ranks) in (("own_backward", 1), ("gan", 2)) else pytest.mark.full)
        for name, ranks in itertools.product(NAMES, (1, 2))
    ],
)
def test_scripts_from_the_command_line(name: str, ranks: int, tmp_path: Path) -> None:
    done = run(*(RUN if ranks == 1 else TORCHRUN), str(SCRIPTS / f"{name}.py"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert len(torch.load(tmp_path / f"out.{ranks - 1}")["losses"]) >= 4


@pytest.mark.slow
def test_local_rank_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "says.py"
    path.write_text("import os, sys; print(sys.argv[1] == f'--local_rank={os.environ[\"LOCAL_RANK\"]}')")
    done = run(*TORCHRUN, "--local-rank", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]

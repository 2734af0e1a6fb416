"""Is an installed longshore whole? For an environment with nothing but the wheel and what it asks for.

Usage: python -I scripts/check_installed.py [--native]. With --native only the compiled module is looked at, which needs
no torch. Prints what it found; exits with an error where something is wrong.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

NUMEL = 4096  # of each array; whole vectors, since torch rounds its scalar tail differently
IMPORT_LIMIT_S = 0.3
TORCH_ROUNDS_ALIKE = platform.machine() == "x86_64"  # docs/arithmetic.md
FLOAT32 = 1
FLOAT32_STATES = 0  # longshore.layout.formats.StateFormat.code


def native_module() -> Any:
    """The compiled module, without the package around it, which imports torch."""
    spec = importlib.util.find_spec("longshore")
    assert spec is not None and spec.submodule_search_locations, "longshore is not installed"
    folder = Path(next(iter(spec.submodule_search_locations)), "kernels")
    assert "site-packages" in folder.parts, f"this is not an installed package: {folder}"
    (file,) = folder.glob("_native*.so")
    compiled = importlib.util.spec_from_file_location("_native", file)
    assert compiled is not None and compiled.loader is not None
    module = importlib.util.module_from_spec(compiled)
    compiled.loader.exec_module(module)
    print(f"{file.name} in Python {sys.version.split()[0]}")
    return module


def check_native() -> None:
    """One step of AdamW: the same bits on every instruction set of this CPU, and the right ones for a known element."""
    native = native_module()
    pool = native.ThreadPool(2, [])
    results = {}
    for isa in native.supported_instruction_sets():
        array = ctypes.c_float * NUMEL
        state = (ctypes.c_float * (3 * NUMEL))(*([1.0] * NUMEL))
        gradient, output = array(*(0.5 + i / NUMEL for i in range(NUMEL))), array()
        segment = (0, NUMEL, ctypes.addressof(gradient), ctypes.addressof(output), 0, FLOAT32, FLOAT32, 0, 0)
        # AdamW at step 1: a scale of 1, a learning rate of 0.25, betas of 0.9 and 0.999, no decay, no eps.
        scalars = (1.0, 1.0, 1.0, 0.0, 0.1, 0.999, 0.001, 0.001**0.5, 0.0, -0.25 / 0.1)
        address = ctypes.addressof(state)
        buffer, rules = (address, address, 3, NUMEL, FLOAT32_STATES), ([scalars], [1])
        native.step(pool, native.rules().index("Adam"), buffer, [segment], rules, native.Outputs.WRITTEN, isa)
        # The first step of Adam is the learning rate, whatever the gradient.
        assert all(abs(value - 0.75) < 1e-6 for value in output), f"{isa}: {output[0]}"
        results[isa] = bytes(state)
    assert len(set(results.values())) == 1, "instruction sets differ"
    print(f"one step, the same bits on {', '.join(isa.name for isa in results)}")


def check_training() -> None:
    """The weights of a few steps are the same by the one-line optimizer and by the engine, and on x86-64, where torch's
    own kernel rounds as longshore does on all processors, those of plain torch."""
    import torch

    import longshore

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 16))

    def loss(model: Any, step: int) -> torch.Tensor:
        return model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean()

    plain, ours, engines = model(), model(), model()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    optimizer = longshore.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1)
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    engine = longshore.initialize(model=engines, config=config)[0]
    for step in range(5):
        for each, rule in ((plain, theirs), (ours, optimizer)):
            rule.zero_grad()
            loss(each, step).backward()
            rule.step()
        engine.backward(loss(engine, step))
        engine.step()
    engine.destroy()
    start = model()
    for name, weight in plain.named_parameters():
        assert not torch.equal(weight, start.get_parameter(name)), f"{name} did not move"
        if not TORCH_ROUNDS_ALIKE:
            weight = ours.get_parameter(name)
        assert torch.equal(weight, ours.get_parameter(name)), f"{name} of longshore.AdamW differs from torch's"
        assert torch.equal(weight, engines.get_parameter(name)), f"{name} of the engine differs"
    whose = f"the bits of torch {torch.__version__}" if TORCH_ROUNDS_ALIKE else "the same bits"
    print(f"five steps, {whose}: longshore.AdamW and longshore.initialize")


def check_import_time() -> None:
    """Beyond torch's own, the median of five processes: the package, and with it the optimizer."""
    code = (
        "import time, torch; begun = time.perf_counter(); import longshore; bare = time.perf_counter() - begun; "
        "longshore.AdamW; optimizer = time.perf_counter() - begun; longshore.initialize; "
        "print(bare, optimizer, time.perf_counter() - begun)"
    )
    runs = [subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True) for _ in range(5)]
    rows = [[float(number) for number in run.stdout.split()] for run in runs]
    bare, optimizer, engine = (statistics.median(row[column] for row in rows) for column in range(3))
    print(f"beyond torch: import {bare:.3f} s, with AdamW {optimizer:.3f} s, with initialize {engine:.3f} s")
    assert optimizer < IMPORT_LIMIT_S, f"longshore takes more than {IMPORT_LIMIT_S} s to import"


def check_commands() -> None:
    command = str(Path(sys.executable).with_name("longshore"))
    for arguments in (["--version"], ["launch", "--nproc", "2", "--dry-run", "train.py"], ["report", "--no-measure"]):
        subprocess.run([command, *arguments], check=True, stdout=subprocess.DEVNULL)
    print("longshore --version, launch --dry-run, report")


def main() -> None:
    found = [name for name in ("cc", "c++", "gcc", "g++", "clang", "clang++", "make", "ninja") if shutil.which(name)]
    assert not found, f"there is a compiler, so this shows nothing: {found}"
    check_native()
    if "--native" not in sys.argv[1:]:
        check_training()
        check_commands()
        check_import_time()


if __name__ == "__main__":
    main()

"""Ranks that do not do the same, run on every rank."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import signal
import time
import warnings
from typing import Any

import torch
from support import whole

import longshore
from engine.cases import engine_of
from engine.scenarios import HEADS, Oracle, Scenario, Window, drive, inputs, make_model
from longshore.transfer import CopyStreams

OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.05}


def make_engine(stage: int, transfer: CopyStreams | None = None, **config: Any) -> Any:
    model = make_model(torch.float32)
    settings = longshore.Config(
        **{"stage": stage, "reduce_bucket_numel": 500, "optimizer": {"type": "AdamW", **OPTIONS}, **config}
    )
    offload = longshore.Offload(100, threads=1, transfer=transfer, detect_writes=settings.detect_writes)
    return longshore.initialize(model=model, config=settings, offload=offload).engine


def backward(engine: Any, step: int, rank: int, heads: tuple[str, ...] = HEADS) -> None:
    engine.backward(engine(inputs(step, 0, rank, torch.float32), heads))


def _raise() -> None:
    raise RuntimeError("exploded on purpose")


class Exploding(torch.autograd.Function):
    """Raises in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        _raise()


def explode(engine: Any, step: int, rank: int, *, in_forward: bool = False) -> None:
    def hooked(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return _raise() if in_forward else Exploding.apply(output)

    hook = engine.module.norm.register_forward_hook(hooked)
    try:
        backward(engine, step, rank)
    finally:
        hook.remove()


def check_trains_on(engine: Any, stage: int, rank: int, steps: range, before: Oracle | None = None) -> Oracle:
    """The engine goes on like the plain loop, from what it has come to ``before`` or new weights of the same kind."""
    oracle = before or Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    for step in steps:
        drive(engine, Window(), step, rank, torch.float32)
        oracle.loop.step(oracle.gradients(Window(), step, 1))
    for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)
    return oracle


def raised_by(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing_backward(stage: int, failing: list[int], by_hand: bool = False) -> list[str]:
    """Some ranks raise in the middle of backward; all discard and go on.

    ``by_hand``: then those ranks put a gradient of their own into ``.grad``, which stage 3 refuses.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    said = []
    if rank in failing:
        said.append(raised_by(lambda: explode(engine, 0, rank)))
        if by_hand:
            parameter = next(engine.module.parameters())
            parameter.grad = torch.ones_like(parameter)
    else:
        backward(engine, 0, rank)
    said.append(raised_by(engine.step))
    engine.zero_grad()
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said


def failing_backward_of_several(stage: int) -> list[str]:
    """The first of two backwards of a window raises on rank 1; both ranks call ``step()`` after each backward, and meet
    elsewhere between them, as for a metric."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=2)
    said = [raised_by(lambda: explode(engine, 0, rank) if rank else backward(engine, 0, rank))]
    for _ in range(2):
        said.append(raised_by(engine.step))
        dist.all_reduce(torch.zeros(1))
        said.append(raised_by(lambda: backward(engine, 0, rank)))
    engine.zero_grad()
    for step in range(2):
        for _ in range(2):
            backward(engine, step, rank)
            engine.step()
    engine.optimizer.close()
    return said


def failing_backward_before_one_step(stage: int, goes_on: bool) -> list[str]:
    """As above, with one ``step()`` after all backwards of a window: it is the one that the other rank calls, whether
    rank 1 ``goes_on`` with the second backward, which is an error, or not."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=2)
    for _ in range(2):
        backward(engine, 0, rank)
    engine.step()
    said = [raised_by(lambda: explode(engine, 0, rank) if rank else backward(engine, 0, rank))]
    if goes_on or rank == 0:
        said[0] += raised_by(lambda: backward(engine, 0, rank))
    said.append(raised_by(engine.step))
    dist.all_reduce(torch.zeros(1))
    engine.zero_grad()
    engine.optimizer.close()
    return said


def failing_backward_before_a_declared_boundary(stage: int) -> list[str]:
    """After a window without a ``step()`` between its backwards, boundaries are declared: until then no rank is due."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=2)
    for _ in range(2):
        backward(engine, 0, rank)
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(False)
    said = [raised_by(lambda: explode(engine, 0, rank) if rank else backward(engine, 0, rank)), raised_by(engine.step)]
    dist.all_reduce(torch.zeros(1))
    engine.set_gradient_accumulation_boundary(True)
    said += [raised_by(lambda: backward(engine, 0, rank)), raised_by(engine.step)]
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(None)
    engine.set_gradient_accumulation_steps(1)
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said


def failing_backward_discarded_at_once(stage: int, failing: list[int], slow: bool) -> list[str]:
    """Rank 0 (or both) catches its error and goes on with the next batch; rank 1 learns of it in step().

    ``slow``: rank 0 discards while the failed backward's round has still to take place.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage, reduce_bucket_numel=100_000)  # one bucket: no hook waits for the round
    if slow and rank == 0:
        engine.optimizer._core.members.store.collectives.submit(lambda: time.sleep(0.4))
    said = []
    if rank in failing:
        said.append(raised_by(lambda: explode(engine, 0, rank)))
    else:
        backward(engine, 0, rank)
        said.append(raised_by(engine.step))
    engine.zero_grad()
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said


def window_discarded_between_backwards(stage: int) -> list[str]:
    """Rank 0 catches an error of the first backward and goes on; rank 1 begins a second backward of that window."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    said = []
    if rank == 0:
        said.append(raised_by(lambda: explode(engine, 0, rank)))
    else:
        backward(engine, 0, rank)

        def rest_of_window() -> None:
            backward(engine, 1, rank)
            engine.step()

        said.append(raised_by(rest_of_window))
    engine.zero_grad()
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said


def one_backward_less(stage: int, debug: bool) -> tuple[str, float]:
    """Rank 1 runs one backward less than rank 0."""
    import torch.distributed as dist

    os.environ["LONGSHORE_DEBUG"] = "1" if debug else "0"
    try:
        engine = make_engine(stage)
        rank = dist.get_rank()
        start = time.monotonic()

        def window() -> None:
            backward(engine, 0, rank)
            if rank == 0:
                backward(engine, 1, rank)
            engine.step()

        said = raised_by(window)
        engine.optimizer.close()  # which does not wait for the other rank either
        return said, time.monotonic() - start
    finally:
        os.environ["LONGSHORE_DEBUG"] = "0"


def other_parameters(debug: bool) -> str:
    """Rank 1's weights were changed behind everybody's back."""
    import torch.distributed as dist

    os.environ["LONGSHORE_DEBUG"] = "1" if debug else "0"
    try:
        engine = make_engine(2)
        rank = dist.get_rank()
        with torch.no_grad():
            if rank == 1:
                engine.module.second.bias += 1.0
        backward(engine, 0, rank)
        said = raised_by(engine.step)
        engine.optimizer.close()
        return said
    finally:
        os.environ["LONGSHORE_DEBUG"] = "0"


def bad_group_on_one_rank() -> str:
    """A learning rate that one rank refuses: no rank steps."""
    import torch.distributed as dist

    engine = make_engine(1)
    rank = dist.get_rank()
    if rank == 1:
        engine.optimizer.param_groups[0]["lr"] = -1.0
    before = [whole(parameter.detach()).clone() for parameter in engine.module.parameters()]
    backward(engine, 0, rank)
    said = raised_by(engine.step)
    for parameter, old in zip(engine.module.parameters(), before, strict=True):
        assert torch.equal(whole(parameter), old)
    engine.optimizer.param_groups[0]["lr"] = OPTIONS["lr"]
    engine.zero_grad()
    check_trains_on(engine, 1, rank, range(2))
    engine.optimizer.close()
    return said


def gradient_taken_out(stage: int, ranks: list[int]) -> str:
    """On these ranks a gradient is set to None after the ranks may have added it up."""
    import torch.distributed as dist

    engine = make_engine(stage)
    rank = dist.get_rank()
    before = [whole(parameter.detach()).clone() for parameter in engine.module.parameters()]
    backward(engine, 0, rank)
    if rank in ranks:
        engine.module.second.bias.grad = None
    said = raised_by(engine.step)
    changed = not all(map(torch.equal, map(whole, engine.module.parameters()), before))
    assert changed == (not said)
    if said:
        engine.zero_grad()
        check_trains_on(engine, stage, rank, range(2))
    engine.optimizer.close()
    return said


def commit_that_fails_on_one_rank(stage: int) -> list[str]:
    """Rank 1 steps its tiles, and then fails; what each rank is told, at once and by the next backward."""
    import torch.distributed as dist

    engine = make_engine(stage)
    rank = dist.get_rank()
    inner = engine.optimizer._core.members.store.tiles
    backward(engine, 0, rank)
    if rank == 1:
        commit = inner.commit

        def failing(*args: Any) -> None:
            commit(*args)
            raise MemoryError("no memory on purpose")

        inner.commit = failing
    said = [raised_by(engine.step), raised_by(engine.step)]
    engine.destroy()
    return said


def overflow_on_one_rank(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """An infinite gradient on rank 1 skips the step on all, and leaves every bit as it was."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage, loss_scaling={"initial_scale_power": 4, "hysteresis": 1, "window": 2})
    backward(engine, 0, rank)
    engine.step()
    before = [whole(parameter.detach()).clone() for parameter in engine.module.parameters()]
    state = engine.optimizer.state_dict()["state"]
    scale = engine.loss_scale
    loss = engine(inputs(1, 0, rank, torch.float32), HEADS)
    engine.backward(loss * (torch.inf if rank == 1 else 1.0))
    engine.step()
    for parameter, old in zip(engine.module.parameters(), before, strict=True):
        assert torch.equal(whole(parameter), old)
    after = engine.optimizer.state_dict()["state"]
    for key, entries in state.items():
        for name, value in entries.items():
            assert torch.equal(value, after[key][name]), (key, name)
    found = {
        "applied": engine.was_step_applied(),
        "skipped": engine.skipped_steps,
        "scale": engine.loss_scale / scale,
    }
    backward(engine, 2, rank)
    engine.step()
    found["later"] = engine.was_step_applied()
    engine.optimizer.close()
    return found


def other_setup(what: str) -> str:
    """Rank 1 has another model, configuration, or choice of what is trained."""
    import torch.distributed as dist

    odd = dist.get_rank() == 1
    model = torch.nn.Linear(16, 8 if odd and what == "model" else 4)
    if odd and what == "choice of trainable parameters":
        model.bias.requires_grad_(False)
    clip = 1.0 if odd and what == "configuration" else None
    config = longshore.Config(stage=2, optimizer={"type": "AdamW"}, gradient_clipping=clip)
    return raised_by(lambda: longshore.initialize(model=model, config=config))


def other_learning_rate(stage: int) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    before = [whole(parameter.detach()).clone() for parameter in engine.module.parameters()]
    engine.optimizer.param_groups[0]["lr"] = 1e-3 + rank
    backward(engine, 0, rank)
    said = raised_by(engine.step)
    for parameter, old in zip(engine.module.parameters(), before, strict=True):
        assert torch.equal(whole(parameter), old)
    engine.optimizer.close()
    return said


def peer_that_ends(stage: int, folder: str) -> None:
    """Rank 1 ends without a word; rank 0 writes down what its user sees, each time that it goes on."""
    import traceback
    from pathlib import Path

    import torch.distributed as dist

    engine = make_engine(stage)
    rank = dist.get_rank()
    backward(engine, 0, rank)
    engine.step()
    if rank == 1:
        os._exit(3)

    def go_on() -> None:
        for step in range(1, 4):
            backward(engine, step, rank)
            engine.step()

    for attempt in range(3):
        try:
            go_on()
        except Exception:
            (Path(folder) / f"{attempt}.txt").write_text(traceback.format_exc())


def killed_while_publishing(stage: int, gathering: int | None, told: str) -> None:
    """Rank 1 is killed after its tiles were stepped, before the ranks agree or at a gathering of new parameters.
    Rank 0 writes what it is told, and how soon, to a file."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage, allgather_bucket_numel=100)
    backward(engine, 0, rank)
    engine.step()
    backward(engine, 1, rank)
    if rank == 1:
        _be_killed(engine.optimizer._core.members.store, gathering)
    start = time.monotonic()
    said = [raised_by(engine.step)]
    said += [str(time.monotonic() - start), raised_by(engine.optimizer.state_dict), raised_by(engine.step)]
    pathlib.Path(told).write_text("\n".join(said))
    engine.destroy()


def _be_killed(store: Any, gathering: int | None) -> None:
    inner, send, count = store.tiles.commit, store.collectives.data.gather, 0

    def commit(*args: Any) -> None:
        inner(*args)
        if gathering is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def gather(chunk: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == gathering:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(chunk)

    store.tiles.commit = commit
    store.collectives.data.gather = gather


def killed_in_a_collective_of_the_device(stage: int, gathers: bool, told: str) -> None:
    """Rank 1 is killed after all ranks met to exchange gradients (or for the last gather of a forward), and before it
    does: the collective of rank 0 is under way then. Rank 0 writes what it is told, and how soon, to a file."""
    import torch.distributed as dist

    from longshore.ranks import presence

    presence._SILENT_S = 3.0  # no connection breaks on a device
    rank = dist.get_rank()
    engine = engine_of(Scenario(), stage, "device", "small", torch.float32, "off")
    values = inputs(0, 0, rank, torch.float32).to(engine.device)

    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather  # which older torch has not

    gathered, of_forward, gather = 0, 0, DefaultAllGather.__call__

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        gathered += 1
        if gathered == of_forward:
            be_killed()
        return gather(*args, **kwargs)

    def train() -> None:
        nonlocal gathered, of_forward
        gathered = 0
        loss = engine(values, HEADS)
        if not of_forward and rank == 1 and gathers:
            of_forward = gathered
        loss.item()
        engine.backward(loss)
        engine.step()

    def be_killed(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    DefaultAllGather.__call__ = counting
    train()
    if rank == 1 and not gathers:
        engine.optimizer._core.members.store.collectives.data.exchange = be_killed
    start = time.monotonic()
    said = [raised_by(train), str(time.monotonic() - start), raised_by(engine.optimizer.state_dict)]
    pathlib.Path(told).write_text("\n".join(said))
    engine.destroy()


def last_of_three(stage: int, told: str) -> list[Any]:
    """Rank 2 is killed; what the others are told. The first two do not wait for the same ranks."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    backward(engine, 0, rank)
    engine.step()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(1.0)
    start = time.monotonic()

    def train() -> None:
        backward(engine, 1, rank)
        engine.step()

    said = raised_by(train)
    pathlib.Path(f"{told}{rank}").write_text(f"{said}\n{time.monotonic() - start}")
    while not all(pathlib.Path(f"{told}{other}").exists() for other in range(2)):
        time.sleep(0.05)  # this rank has not ended, too, before the other one knows
    return []


def left_by_engines(stage: int) -> list[tuple[int, int]]:
    """Threads and open files of this process after each of three engines, with garbage left where it is."""
    import torch.distributed as dist

    found = []
    gc.disable()
    try:
        for _ in range(3):
            engine = make_engine(stage)
            drive(engine, Window(), 0, dist.get_rank(), torch.float32)
            engine.destroy()
            dist.barrier()
            found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    finally:
        gc.enable()
    return found


def compiled_blocks(stage: int) -> None:
    """Parts of the model are compiled, with a window of two backwards; the weights are the plain loop's."""
    import torch.distributed as dist

    torch._dynamo.reset()
    engine = make_engine(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        for block in engine.module.children():
            if isinstance(block, torch.nn.Linear):
                block.compile(backend="aot_eager")
        check_trains_on(engine, stage, dist.get_rank(), range(3))
    engine.optimizer.close()


def compiled_autograd(stage: int, compiling: list[int]) -> list[str]:
    """Some ranks run a backward under compiled autograd; all discard and go on."""
    import torch.distributed as dist
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    rank = dist.get_rank()
    engine = make_engine(stage)
    said = []
    loss = engine(inputs(0, 0, rank, torch.float32), HEADS)
    with contextlib.ExitStack() as stack:
        if rank in compiling:
            stack.enter_context(compiled_autograd._enable(torch.compile(backend="eager")))
            said.append(raised_by(lambda: engine(inputs(0, 0, rank, torch.float32), HEADS)))
        said.append(raised_by(lambda: engine.backward(loss)))
    said.append(raised_by(engine.step))
    engine.zero_grad()
    check_trains_on(engine, stage, rank, range(2))
    engine.optimizer.close()
    return said


def different_states(stage: int, one_steps: bool) -> str:
    """Rank 0 reads the state of a parameter; rank 1 reads that of another size, or steps."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    drive(engine, Window(), 0, rank, torch.float32)
    norm = engine.module.norm.weight
    parameters = [norm, next(each for each in engine.module.parameters() if each.numel() > norm.numel())]
    if rank == 1 and one_steps:
        backward(engine, 1, rank)
        said = raised_by(engine.step)
    else:
        said = raised_by(lambda: engine.optimizer.state[parameters[rank]]["exp_avg"])
    engine.optimizer.close()
    return said


def calls_after_hearing(stage: int, backward_first: bool) -> list[str]:
    """Rank 0 discards its window at once; rank 1 hears of it in step(), and does everything but to discard."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    said = []
    if rank == 0:
        said.append(raised_by(lambda: explode(engine, 0, rank)))
    else:
        backward(engine, 0, rank)
        said.append(raised_by(engine.step))
        engine.module.second.bias.grad = torch.ones_like(engine.module.second.bias)
        if backward_first:
            said.append(raised_by(lambda: backward(engine, 1, rank)))
        said.append(raised_by(engine.step))
    engine.zero_grad()
    check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said

"""Run a program on both sides, and compare all that it can see after each statement."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from support import whole
from torch import Tensor

from fuzz.encoded import EncodedTwin
from fuzz.engines import gathered
from fuzz.refusals import refusal_of
from fuzz.worlds import OurWorld, PlainWorld, World

_NOT_COMPARED = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
_RECOVERY = """\
for parameter in m.parameters():
    parameter.grad = None
if "e" in globals():
    e.zero_grad()
elif "o" in globals():
    o.zero_grad()
    for group in o.param_groups:
        group["lr"] = abs(group["lr"])"""


@dataclass(frozen=True)
class Finding:
    """What is wrong, and after which statement.

    Attributes:
        kind: says the same of two programs if they probably found the same.
    """

    kind: str
    place: int
    details: str = ""


@dataclass
class Outcome:
    finding: Finding | None = None
    steps: int = 0
    raised: Counter[str] = field(default_factory=Counter)
    """Errors that both sides raised, by the class of plain PyTorch's."""
    refused: Counter[str] = field(default_factory=Counter)
    """Documented errors of ours where plain PyTorch goes on."""
    uneven: bool = False
    """Whether a statement failed on some ranks alone since the last step: the next meeting may find ranks apart."""
    over: bool = False
    """Whether ranks went apart for good: one alone was refused after an error on one alone, or one alone did not come
    to a backward, in which others wait for it. Here all end each statement together, so it would not come."""
    left_bytes: int = 0
    """Memory of the device that was not given back."""
    hooks_write: bool = False
    """Whether hooks write to weights: a refused forward may have done so first."""
    incomplete: bool = False
    """Whether a name was missing, as after a statement was taken out, or a statement was no Python."""

    def add(self, later: Outcome, place: int) -> None:
        """Add what the part of the program gave that begins at this place."""
        self.finding = None if later.finding is None else replace(later.finding, place=later.finding.place + place)
        self.steps += later.steps
        self.raised += later.raised
        self.refused += later.refused
        self.over = later.over
        self.incomplete |= later.incomplete


def run(program: Sequence[str], compare_states: bool = True, folder: str | None = None) -> Outcome:
    """Run a program, or the part of one that runs on this many ranks.

    Args:
        program: statements.
        compare_states: after each statement; False: at the end only, since reading states may hide what is wrong.
        folder: for checkpoints; None: one of its own.
    """
    with tempfile.TemporaryDirectory(prefix="longshore-fuzz-") as own:
        place = Path(folder or gathered(own)[0])
        outcome = _run(program, compare_states, place)
        if any(gathered(outcome.left_bytes > 0)):  # what is there from the first time on is no leak
            (place / "again").mkdir(exist_ok=True)
            again = _run(program, compare_states, place / "again")
            if again.left_bytes > 0 and again.finding is None:
                outcome.finding = Finding("memory of the device is kept", len(program) - 1, f"{again.left_bytes} bytes")
        return outcome


def _run(program: Sequence[str], compare_states: bool, folder: Path) -> Outcome:
    outcome = Outcome()
    ours, plain = OurWorld(folder), PlainWorld(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for place, statement in enumerate(program):
                found = _statement(place, statement, ours, plain, outcome)
                last = place == len(program) - 1
                alone = len(gathered(None)) == 1  # ranks read states together
                if not outcome.over:
                    found = found or _compared(place, ours, plain, (compare_states and alone) or last)
                outcome.finding = next((each for each in gathered(found) if each is not None), None)
                if outcome.finding is not None or outcome.over:
                    break
        finally:
            ours.end()
        if outcome.finding is None and not outcome.over:
            outcome.left_bytes = ours.left_bytes()
    return outcome


def _statement(place: int, statement: str, ours: World, plain: World, outcome: Outcome) -> Finding | None:
    outcome.hooks_write |= "clamping" in statement
    failure = _raised_by(statement, ours)
    if failure is not None and ours.streams and _in_backward(failure):
        _end_backwards()
    failed = gathered(failure is not None)
    refused = gathered(None if failure is None else refusal_of(failure, ours.kind, outcome.uneven))
    apart = outcome.uneven
    outcome.uneven |= any(failed) and not all(failed)
    waiting = not all(failed) and any(each in statement for each in ("backward(", "raw("))
    outcome.over = waiting and any(gathered(failure is not None and not _in_backward(failure)))
    if any(refused):
        outcome.uneven = False
        # Nothing happened, so the plain side does nothing either. Both discard the window.
        outcome.refused.update([next(filter(None, refused))])
        outcome.over |= not all(refused) and apart
        # Something did happen if the step called a closure first: its backward, and the hooks there that count calls.
        outcome.over |= "closure" in statement or outcome.hooks_write
        if outcome.over:
            return None
        if not all(refused):
            return Finding(f"only some ranks refuse: {next(filter(None, refused))}", place, _words(failure))
        for world in (ours, plain):
            if (again := _raised_by(_RECOVERY, world)) is not None:
                return Finding(f"no recovery: {_words(again)}", place, f"after {_words(failure)}")
        return None
    expected = _raised_by(statement, plain)
    outcome.incomplete |= isinstance(expected, (NameError, SyntaxError))
    if ".step(" in statement and failure is None:
        outcome.steps += 1
        outcome.uneven = False
    if expected is not None:
        outcome.raised[type(expected).__name__] += 1
    if failure is None and expected is not None:
        return Finding(f"only plain PyTorch raises {type(expected).__name__}", place, _words(expected))
    if failure is not None and expected is None:
        return Finding(f"only longshore raises {_head(failure)}", place, _words(failure))
    if failure is not None and not isinstance(failure, type(expected)) and not isinstance(expected, NameError):
        kind = f"longshore raises {type(failure).__name__}, plain PyTorch {type(expected).__name__}"
        return Finding(kind, place, f"{_words(failure)}\nplain: {_words(expected)}")
    if failure is not None and ours.streams and _in_backward(failure):
        # Which gradients a backward that raised has brought to the host by then, and whose hooks, only time says.
        for world in (ours, plain):
            _raised_by(_RECOVERY, world)
            world.count_anew()
    return None


def _end_backwards() -> None:
    """Wait until the device's thread of autograd does nothing: it may still run a backward inside of the one that
    raised on this thread."""
    if (device := torch.accelerator.current_accelerator()) is not None:
        torch.ones((), device=device, requires_grad=True).mul(1.0).backward()


def _in_backward(failure: BaseException) -> bool:
    return any(frame.f_code.co_name == "backward" for frame, _ in traceback.walk_tb(failure.__traceback__))


def _raised_by(statement: str, world: World) -> BaseException | None:
    try:
        exec(compile(statement, "<program>", "exec"), world.names)
    except (KeyboardInterrupt, SystemExit, Exception) as failure:
        if type(failure) is KeyboardInterrupt:
            raise
        return failure
    return None


def _words(failure: BaseException | None) -> str:
    return f"{type(failure).__name__}: {failure}"


def _head(failure: BaseException) -> str:
    """The error without what differs from case to case."""
    return re.sub(r"\S*/longshore-fuzz-\S*|[-+.\d]+|\[.*?\]", "#", _words(failure))[:90]


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, with NaN equal to NaN."""
    a, b = a.cpu(), b.cpu()
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def shard_of(p: Tensor) -> Any:
    """The shard of a parameter at stage 3, which a model does not have between a forward and its backward."""
    fsdp = sys.modules.get("longshore.stage3.fsdp")
    found = None if fsdp is None else fsdp._find(p)
    return p if found is None else found[1].sharded_param


def _compared(place: int, ours: World, plain: World, states: bool) -> Finding | None:
    mine, theirs = ours.names.get("m"), plain.names.get("m")
    if mine is None or theirs is None:
        return None
    if len(ours.seen) != len(plain.seen) or not all(map(same, ours.seen, plain.seen)):
        return Finding("what is seen differs", place, f"{ours.seen[-1:]}, plain {plain.seen[-1:]}")
    ours.seen.clear()
    plain.seen.clear()
    for (name, given), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        p = shard_of(given)
        if not same(mine_now := whole(p).detach(), q.detach()):
            return Finding("weights differ", place, f"{name}: {_difference(mine_now, q)}")
        if ours.holds_gradients:
            continue
        if (p.grad is None) != (q.grad is None):
            found = "None" if p.grad is None else "a tensor"
            return Finding("one .grad is None", place, f"{name}: longshore's is {found}")
        if p.grad is not None and q.grad is not None and not same(p.grad, q.grad):
            return Finding("gradients differ", place, f"{name}: {_difference(p.grad, q.grad)}")
    if (e := ours.names.get("e")) is not None and (f := plain.names.get("e")) is not None:
        for mine_now, now in ((e.skipped_steps, f.skipped_steps), (e.loss_scaling.value, f.loss_scaling.value)):
            if mine_now != now:
                return Finding("loss scales differ", place, f"{mine_now}, plain {now}")
    if (o := ours.names.get("o")) is None or (t := plain.names.get("o")) is None:
        return None
    for number, (group, twin) in enumerate(zip(o.param_groups, t.param_groups, strict=True)):
        for key in sorted((group.keys() & twin.keys()) - _NOT_COMPARED):
            if not _equal_options(group[key], twin[key]):
                return Finding("options differ", place, f"group {number}: {key} is {group[key]}, plain {twin[key]}")
    if not states:
        return None
    names = {q: name for name, q in theirs.named_parameters()}
    members = [
        (p, q)
        for g, h in zip(o.param_groups, t.param_groups, strict=True)
        for p, q in zip(g["params"], h["params"], strict=True)
    ]
    # At stage 3 the model may have whole parameters, which are not those of the groups.
    pairs = members if len(gathered(None)) > 1 else zip(mine.parameters(), theirs.parameters(), strict=True)
    return next((found for p, q in pairs if (found := _states(place, names[q], _read(o, p), _read(t, q), t))), None)


def _equal_options(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)


def _read(optimizer: Any, parameter: Tensor) -> Mapping[str, Any]:
    with contextlib.suppress(KeyError):
        if parameter in optimizer.state:
            return {key: value for key, value in optimizer.state[parameter].items() if value is not None}
    return {}


def _states(place: int, name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], twin: Any) -> Finding | None:
    if not mine and float(theirs.get("step", 0.0)) == 0.0 and not theirs.keys() - {"step", "sum"}:
        return None  # torch's Adagrad has states from the beginning
    if mine.keys() != theirs.keys():
        return Finding("states have other names", place, f"{name}: {sorted(mine)}, plain {sorted(theirs)}")
    for key in sorted(mine):
        a, b = (whole(torch.as_tensor(each[key])).float() for each in (mine, theirs))
        # What was assigned is rounded when a step or a state_dict() takes it, and torch's tensor only by the step.
        if not same(a, b) and not (isinstance(twin, EncodedTwin) and same(a, twin.rounded(key, b))):
            return Finding(f"{key} differs", place, f"{name}: {_difference(a, b)}")
    return None


def _difference(a: Tensor, b: Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)}, plain {b.dtype} {list(b.shape)}"
    a, b = a.detach().cpu().reshape(-1), b.detach().cpu().reshape(-1)
    other = ~((a == b) | (a.isnan() & b.isnan()))
    first = int(other.nonzero()[0])
    return f"{int(other.sum())} of {a.numel()}; [{first}] is {a[first].item()}, plain {b[first].item()}"

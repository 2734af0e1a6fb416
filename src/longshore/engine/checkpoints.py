"""``save_checkpoint`` and ``load_checkpoint``: what an engine saves besides its model and optimizer."""

from __future__ import annotations

import copy
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longshore.checkpoint.deepspeed_files import is_deepspeed
from longshore.checkpoint.folder import WholeCheckpoint, check_tag
from longshore.checkpoint.loading import find, read_values
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.reading import checked
from longshore.checkpoint.saving import Background, Target, memory_for_snapshot, prepare, rank_file, write
from longshore.checkpoint.training_state import CLIENT_STATE, Selection, TrainingState
from longshore.engine.random_states import check_random_states, random_states, restore_random_states
from longshore.engine.wording import is_integer, shown
from longshore.errors import CheckpointError, LongshoreError
from longshore.sharding.collective_thread import twin_of

if TYPE_CHECKING:
    from longshore.engine.engine import Engine

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps")


class _Found(NamedTuple):
    """What of a checkpoint is the engine's own."""

    state: Mapping[str, Any]
    own: Mapping[str, Any]
    """Of this rank."""
    client: dict[str, Any]


class Checkpoints:
    """An engine's checkpoints.

    Args:
        engine: of this rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # From the first time on.
        self._crew: RankGroup | None = None
        self._background = Background()
        self._run = secrets.token_hex(8)
        """Which run it is, also after it was resumed: what ``keep_last`` removes is its own."""

    # -- saving ---------------------------------------------------------------

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any],
        save_latest: bool,
        exclude_frozen: bool,
        keep_last: int | None,
        async_save: bool,
    ) -> Path:
        self.wait()
        engine = self._engine
        if keep_last is not None and (not is_integer(keep_last) or keep_last < 1):
            raise ValueError(f"keep_last is the number of checkpoints that stay, at least 1, not {shown(keep_last)}")
        if not isinstance(client_state, Mapping):
            raise TypeError(f"client_state is a dictionary, not {type(client_state).__name__}")
        tag = check_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
        crew = self._met(loading=False)
        crew.together(lambda: self._check_no_window("a checkpoint has no gradients, and {} would be lost: save"))
        self._check_same(crew, "tag", tag)
        root = Path(save_dir).absolute()
        self._check_same(crew, "save_dir", str(root))
        session = TrainingState(engine.module, engine.optimizer, crew)
        memory_bytes = memory_for_snapshot(crew) if async_save else None
        content = prepare(
            lambda: session.content(
                {"engine": self._state(), CLIENT_STATE: dict(client_state)},
                self._own_state(),
                engine.global_steps,
                self._run,
                exclude_frozen,
                memory_bytes,
            ),
            crew,
        )
        target = Target(root, tag, save_latest, keep_last)
        if not async_save:
            return write(content, target, crew)
        self._background.start(lambda: write(content, target, crew), f"saving {root / tag}", content.close)
        return root / tag

    def wait(self) -> None:
        self._background.wait()

    def _check_no_window(self, why: str) -> None:
        if self._engine.in_window:
            raise CheckpointError(
                f"{why.format('those of the window under way')} right after a step() that was applied, or discard the "
                "window with zero_grad()"
            )

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "run": self._run,
            **{name: getattr(engine, name) for name in _COUNTERS},
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "loss_scale": engine.loss_scaling.state_dict(),
            "lr_scheduler": _state_of(engine.lr_scheduler),
        }

    def _own_state(self) -> dict[str, Any]:
        engine = self._engine
        return {"random": random_states(engine.device), "loader": _state_of(engine.training_dataloader)}

    # -- loading --------------------------------------------------------------

    def load(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None,
        strict: bool,
        optimizer_states: bool,
        scheduler_states: bool,
        module_only: bool,
    ) -> tuple[Path | None, dict[str, Any] | None]:
        self.wait()
        engine = self._engine
        crew = self._met(loading=True)
        root = Path(load_dir).absolute()
        self._check_same(crew, "load_dir", str(root))
        self._check_same(crew, "tag", tag)
        # Where a step failed half way, perhaps on this rank alone, its window went down with it.
        gone = engine.optimizer._core.store.broken is not None and not module_only
        crew.together(lambda: gone or self._check_no_window("{} would be stepped into what is loaded: load"))
        crew.first(lambda: _check_ours(root, None if tag is None else str(tag)))
        whole = find(root, None if tag is None else str(tag), crew)
        if whole is None:
            if crew.rank == 0:
                what = "nothing was loaded (where this is no first start, check the path)"
                warnings.warn(f"{root} has no checkpoint; {what}", stacklevel=3)
            return None, None
        session = TrainingState(engine.module, engine.optimizer, crew)
        looked: list[_Found] = []

        def look(values: Mapping[str, Any]) -> None:
            looked.append(self._look(whole, values, crew, module_only))

        session.load(whole, Selection(strict, optimizer_states and not module_only), look)
        found = looked[0]
        if not module_only:
            crew.together(lambda: self._restore(whole, found, scheduler_states, crew))
        return whole.path, found.client

    def _look(self, whole: WholeCheckpoint, values: Mapping[str, Any], crew: RankGroup, module_only: bool) -> _Found:
        """What is the engine's own, checked before anything changes. Raises CheckpointError."""
        where = str(whole.path)
        client = checked(values.get(CLIENT_STATE), dict, f"{where}: {CLIENT_STATE}")
        if module_only:
            return _Found({}, {}, client)
        state = checked(values.get("engine"), dict, f"{where}: engine")
        for name in (*_COUNTERS, "gradient_accumulation_steps"):
            checked(state.get(name), int, f"{where}: {name}")
        checked(state.get("run"), str, f"{where}: run")
        scaling = checked(state.get("loss_scale"), dict, f"{where}: loss_scale")
        try:
            copy.copy(self._engine.loss_scaling).load_state_dict(scaling)
            self._engine.check_accumulation_steps(state["gradient_accumulation_steps"])
        except (ValueError, TypeError, LongshoreError) as error:
            raise CheckpointError(f"{where}: {error}") from error
        saved = f"{rank_file(crew.rank)}.json" in whole.files
        # A rank that was not there goes on with the data where the others do.
        own = read_values(whole.path, rank_file(crew.rank if saved else 0))
        if not saved:
            own["random"] = None
        if own.get("random") is not None:
            check_random_states(checked(own["random"], dict, f"{where}: random"), self._engine.device)
        return _Found(state, own, client)

    def _restore(self, whole: WholeCheckpoint, found: _Found, scheduler: bool, crew: RankGroup) -> None:
        engine, state = self._engine, found.state
        for name in _COUNTERS:
            setattr(engine, name, state[name])
        self._run = state["run"]
        engine.set_gradient_accumulation_steps(state["gradient_accumulation_steps"])
        engine.loss_scaling.load_state_dict(state["loss_scale"])
        engine.optimizer.set_loss_scale(engine.loss_scale)
        if scheduler:
            _restore(engine.lr_scheduler, state.get("lr_scheduler"), "lr_scheduler", whole)
        _restore(engine.training_dataloader, found.own.get("loader"), "training_dataloader", whole)
        if found.own.get("random") is not None:
            restore_random_states(found.own["random"], engine.device)
        ranks = whole.manifest.get("world_size")
        if ranks != crew.world_size and crew.rank == 0:
            warnings.warn(
                f"{whole.path} was saved by {ranks} ranks, and these are {crew.world_size}: random numbers (dropout) "
                "and the split of batches over ranks are not those of that run; all else is",
                stacklevel=5,
            )

    # -- together -------------------------------------------------------------

    def _met(self, loading: bool) -> RankGroup:
        """All ranks are here; they can talk."""
        ranks = self._engine.ranks
        self._engine.optimizer._core.store.meet(loading)
        if self._crew is None:
            group = twin_of(ranks.group, ranks.device, backend="gloo") if ranks.world_size > 1 else None
            self._crew = RankGroup(group)
        return self._crew

    @staticmethod
    def _check_same(crew: RankGroup, name: str, value: Any) -> None:
        said = crew.gather(value)
        if len(set(said)) > 1:
            raise ValueError(f"{name} is not the same on all ranks: {', '.join(map(repr, said))}")

    def close(self) -> None:
        """Raises what a save on its way raised."""
        try:
            self.wait()
        finally:
            # After Ctrl-C the save may go on, and talks in that group.
            if self._crew is not None and not self._background.busy:
                self._crew.close()
                self._crew = None


class SavesCheckpoints:
    """The part of an engine that saves and loads."""

    _checkpoints: Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep_last: int | None = None,
        async_save: bool = False,
    ) -> Path:
        """Save all that a run needs to go on exactly; all ranks have to call, between two windows.

        Weights, masters, moments and step counts of each parameter, scheduler, loss scale and counters, and of each
        rank its random numbers and the place of ``training_dataloader``. ``docs/checkpoint_format.md`` describes the
        files.

        Args:
            save_dir: a folder that all machines of the run share; made where it is not there.
            tag: the checkpoint's name in it; None: ``global_step`` and the number of steps. One of that name is
                replaced when the new one is whole.
            client_state: values of yours: JSON, and tensors.
            save_latest: ``load_checkpoint`` without a tag finds this one.
            exclude_frozen_parameters: leave those out (of adapters on weights that are elsewhere).
            keep_last: remove older checkpoints of this run beyond so many, but none that was saved with
                ``save_latest=False``; None: none.
            async_save: return at once, and write on another thread while training goes on. Weights are copied; masters
                and moments are not: a step into a page that is not written yet goes into another one, of those for
                steps ahead (``speculation_memory``) or, without them, of at most a quarter of the memory that is free.
                Beyond it a step waits.

        Returns:
            The checkpoint's folder; with ``async_save`` it is there after :meth:`wait_for_checkpoint`.

        Raises:
            CheckpointError: in the middle of a window; a value that cannot be saved, by its key; a disk that refuses.
                What was there before still is. With ``async_save`` the next call that saves, loads, waits or destroys
                raises it, and the log has it at once.
            ValueError: a tag that is no name of a folder, or others on other ranks.
            RankError: another rank does something else, or is gone.
        """
        return self._checkpoints.save(
            save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters, keep_last, async_save
        )

    def wait_for_checkpoint(self) -> None:
        """Until what ``save_checkpoint(async_save=True)`` began is on the disk.

        Raises:
            CheckpointError, RankError: it could not be written, as :meth:`save_checkpoint` says.
        """
        self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        strict: bool | None = None,
    ) -> tuple[Path | None, dict[str, Any] | None]:
        """Go on from a checkpoint, of any stage, offload, tile size and number of ranks; all ranks have to call.

        It is verified and compared with the model and the optimizer as a whole before anything changes.

        Args:
            load_dir: as given to :meth:`save_checkpoint`.
            tag: which one; None: the latest, or, where that is damaged, the newest whole one, with a warning.
            load_module_strict: raise where it does not fit; False: skip what does not, with a warning.
            load_optimizer_states: also masters, moments and step counts.
            load_lr_scheduler_states: also the scheduler's.
            load_module_only: weights alone, and nothing else.
            strict: another name of ``load_module_strict``.

        Returns:
            The checkpoint's folder, and the ``client_state``; None twice, with a warning, where the folder has no
            checkpoint at all.

        Raises:
            CheckpointError: damaged, or of another model or optimizer: lists the differences. Nothing was loaded.
            RankError: another rank does something else, or is gone.
        """
        return self._checkpoints.load(
            load_dir,
            tag,
            load_module_strict if strict is None else strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
        )


def _check_ours(root: Path, tag: str | None) -> None:
    """A run that goes on from DeepSpeed's checkpoint must not begin anew instead."""
    if is_deepspeed(root, tag):
        raise CheckpointError(
            f"the checkpoint in {root} is DeepSpeed's; write it as longshore's once, `longshore import-deepspeed "
            f"{root} --out FOLDER`, and load that folder"
        )


def _state_of(holder: Any) -> dict[str, Any] | None:
    """None where it has none to save."""
    state_dict: Any = getattr(holder, "state_dict", None)
    state: Any = state_dict() if callable(state_dict) else None
    return None if state is None else dict(state)


def _restore(holder: Any, state: Any, name: str, whole: WholeCheckpoint) -> None:
    load = getattr(holder, "load_state_dict", None)
    if callable(load) and state is not None:
        try:
            load(state)
        except Exception as error:
            raise CheckpointError(
                f"the weights and the optimizer of {whole.path} were loaded, and then {name} refused its state: "
                f"{type(error).__name__}: {error}"
            ) from error
    elif callable(load) or state is not None:
        has, has_not = ("the checkpoint", "the engine") if state is not None else ("the engine", "the checkpoint")
        warnings.warn(
            f"{has} has a {name} whose state is saved, and {has_not} has none: {whole.path} is loaded without it",
            stacklevel=6,
        )

"""``save_checkpoint`` and ``load_checkpoint`` of an engine, and its own part of a checkpoint."""

from __future__ import annotations

import copy
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from longshore.checkpoint.deepspeed_files import is_deepspeed
from longshore.checkpoint.folder import WholeCheckpoint, check_tag
from longshore.checkpoint.loading import find, read_values
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.reading import checked
from longshore.checkpoint.saving import Background, Target, memory_for_snapshot, prepare, rank_file, write
from longshore.checkpoint.training_state import CLIENT_STATE, Selection, TrainingState
from longshore.engine.loss_scale import LossScale
from longshore.engine.random_states import check_random_states, random_states, restore_random_states
from longshore.engine.ranks import Ranks
from longshore.engine.window import Window
from longshore.engine.wording import is_integer, shown
from longshore.errors import CheckpointError, LongshoreError
from longshore.optim.host_optimizer import HostOptimizer
from longshore.sharding import sharded_store
from longshore.sharding.collective_thread import twin_of

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps")


class _Found(NamedTuple):
    """The engine's own part of a checkpoint."""

    state: Mapping[str, Any]
    own: Mapping[str, Any]
    """This rank's part."""
    client: dict[str, Any]


class Resumable(Protocol):
    """Attributes of an engine that checkpoints save and restore, besides its accumulation steps."""

    module: nn.Module
    optimizer: HostOptimizer
    ranks: Ranks
    loss_scaling: LossScale
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int
    micro_steps: int
    skipped_steps: int

    @property
    def in_window(self) -> bool: ...


class Checkpoints:
    """Saves and loads the checkpoints of an engine.

    Args:
        engine: of this rank.
        window: the engine's.
    """

    def __init__(self, engine: Resumable, window: Window) -> None:
        self._engine = engine
        self._window = window
        # Set when the first checkpoint is saved or loaded.
        self._crew: RankGroup | None = None
        self._background = Background()
        self._run = secrets.token_hex(8)
        """Identifies the run, also after it was resumed: ``keep_last`` removes only its own checkpoints."""

    # -- saving ---------------------------------------------------------------

    def save(
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
        """Save everything that a run needs to resume exactly; all ranks have to call, between two windows.

        Saved are weights, masters, moments and step counts of each parameter, the schedule, the loss scale, counters,
        and each rank's random states and position in ``training_dataloader``. ``docs/checkpoint_format.md`` describes
        the files.

        Args:
            save_dir: a folder that all machines of the run share; created if it does not exist.
            tag: name of the checkpoint in the folder; None: ``global_step`` and the number of steps. An existing
                checkpoint of that name is replaced when the new one is complete.
            client_state: values of your own: JSON, and tensors.
            save_latest: let ``load_checkpoint`` without a tag find this one.
            exclude_frozen_parameters: leave those out (for adapters on weights that are stored elsewhere).
            keep_last: remove older checkpoints of this run beyond this number, except those saved with
                ``save_latest=False``; None: remove none.
            async_save: return at once and write on another thread while training goes on. Weights are copied; masters
                and moments are not: a step into a state buffer that is not written yet goes into another one, taken
                from those for steps ahead (``speculation_memory``) or, without them, from at most a quarter of the
                free memory. Beyond it a step waits.

        Returns:
            The checkpoint's folder; with ``async_save`` it exists after :meth:`wait`.

        Raises:
            CheckpointError: in the middle of a window; a value that cannot be saved, by its key; the disk failed. The
                former checkpoint is still there. With ``async_save`` the next call that saves, loads, waits or destroys
                raises it, and it is logged at once.
            ValueError: a tag that is not a valid folder name, or that differs between ranks.
            RankError: another rank does something else, or is gone.
        """
        self.wait()
        client_state = client_state or {}
        if keep_last is not None and (not is_integer(keep_last) or keep_last < 1):
            raise ValueError(f"keep_last is the number of checkpoints that stay, at least 1, not {shown(keep_last)}")
        if not isinstance(client_state, Mapping):
            raise TypeError(f"client_state is a dictionary, not {type(client_state).__name__}")
        tag = check_tag(f"global_step{self._engine.global_steps}" if tag is None else str(tag))
        target = Target(Path(save_dir).absolute(), tag, save_latest, keep_last)
        return self._save(target, dict(client_state), exclude_frozen_parameters, async_save)

    def _save(self, target: Target, client_state: dict[str, Any], exclude_frozen: bool, async_save: bool) -> Path:
        engine = self._engine
        crew = self._met(loading=False)
        crew.together(lambda: self._check_no_window("a checkpoint has no gradients, and {} would be lost: save"))
        self._check_same(crew, "tag", target.tag)
        self._check_same(crew, "save_dir", str(target.root))
        session = TrainingState(engine.module, engine.optimizer, crew)
        memory_bytes = memory_for_snapshot(crew) if async_save else None
        content = prepare(
            lambda: session.content(
                {"engine": self._state(), CLIENT_STATE: client_state},
                self._own_state(),
                engine.global_steps,
                self._run,
                exclude_frozen,
                memory_bytes,
            ),
            crew,
        )
        if not async_save:
            return write(content, target, crew)
        path = target.root / target.tag
        self._background.start(lambda: write(content, target, crew), f"saving {path}", content.close)
        return path

    def wait(self) -> None:
        """Wait until what ``async_save=True`` began is on the disk.

        Raises:
            CheckpointError, RankError: it could not be written, as :meth:`save` says.
        """
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
            "gradient_accumulation_steps": self._window.sizes.accumulation_steps,
            "loss_scale": engine.loss_scaling.state_dict(),
            "lr_scheduler": _state_of(engine.lr_scheduler),
        }

    def _own_state(self) -> dict[str, Any]:
        engine = self._engine
        return {"random": random_states(engine.ranks.device), "loader": _state_of(engine.training_dataloader)}

    # -- loading --------------------------------------------------------------

    def load(
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
        """Resume from a checkpoint of any stage, offload, tile size and number of ranks; all ranks have to call.

        The whole checkpoint is verified, and compared with the model and the optimizer, before anything changes.

        Args:
            load_dir: as given to :meth:`save`.
            tag: name of the checkpoint; None: the latest, or, if that one is damaged, the newest intact one, with a
                warning.
            load_module_strict: raise where checkpoint and model differ; False: skip what differs, with a warning.
            load_optimizer_states: also load masters, moments and step counts.
            load_lr_scheduler_states: also load the schedule's state.
            load_module_only: load weights and nothing else.
            strict: another name of ``load_module_strict``.

        Returns:
            The checkpoint's folder, and the ``client_state``; None twice, with a warning, if the folder has no
            checkpoint at all.

        Raises:
            CheckpointError: damaged, or of another model or optimizer; lists the differences. Nothing was loaded.
            RankError: another rank does something else, or is gone.
        """
        self.wait()
        strict = load_module_strict if strict is None else strict
        selection = Selection(strict, load_optimizer_states and not load_module_only)
        root = Path(load_dir).absolute()
        return self._load(root, tag, selection, load_lr_scheduler_states, load_module_only)

    def _load(
        self, root: Path, tag: str | None, selection: Selection, scheduler: bool, module_only: bool
    ) -> tuple[Path | None, dict[str, Any] | None]:
        engine = self._engine
        crew = self._met(loading=True)
        self._check_same(crew, "load_dir", str(root))
        self._check_same(crew, "tag", tag)
        # Where a step failed half way, perhaps on this rank alone, its window is lost with it.
        gone = engine.optimizer._core.store.broken is not None and not module_only
        crew.together(lambda: gone or self._check_no_window("{} would be stepped into what is loaded: load"))
        crew.first(lambda: _check_ours(root, None if tag is None else str(tag)))
        whole = find(root, None if tag is None else str(tag), crew)
        if whole is None:
            if crew.rank == 0:
                what = "nothing was loaded (if this is not a first start, check the path)"
                warnings.warn(f"{root} has no checkpoint; {what}", stacklevel=3)
            return None, None
        session = TrainingState(engine.module, engine.optimizer, crew)
        looked: list[_Found] = []

        def look(values: Mapping[str, Any]) -> None:
            looked.append(self._look(whole, values, crew, module_only))

        session.load(whole, selection, look)
        found = looked[0]
        if not module_only:
            crew.together(lambda: self._restore(whole, found, scheduler, crew))
        return whole.path, found.client

    def _look(self, whole: WholeCheckpoint, values: Mapping[str, Any], crew: RankGroup, module_only: bool) -> _Found:
        """Read and check the engine's own part before anything changes. Raises CheckpointError."""
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
            self._window.sizes.with_accumulation_steps(state["gradient_accumulation_steps"])
        except (ValueError, TypeError, LongshoreError) as error:
            raise CheckpointError(f"{where}: {error}") from error
        saved = f"{rank_file(crew.rank)}.json" in whole.files
        # A rank that the saving run did not have takes rank 0's position in the data.
        own = read_values(whole.path, rank_file(crew.rank if saved else 0))
        if not saved:
            own["random"] = None
        if own.get("random") is not None:
            check_random_states(checked(own["random"], dict, f"{where}: random"), self._engine.ranks.device)
        return _Found(state, own, client)

    def _restore(self, whole: WholeCheckpoint, found: _Found, scheduler: bool, crew: RankGroup) -> None:
        engine, state = self._engine, found.state
        for name in _COUNTERS:
            setattr(engine, name, state[name])
        self._run = state["run"]
        self._window.set_accumulation_steps(state["gradient_accumulation_steps"])
        engine.optimizer.expect_backwards(state["gradient_accumulation_steps"])
        engine.loss_scaling.load_state_dict(state["loss_scale"])
        engine.optimizer.set_loss_scale(engine.loss_scaling.value)
        if scheduler:
            _load_state(engine.lr_scheduler, state.get("lr_scheduler"), "lr_scheduler", whole)
        _load_state(engine.training_dataloader, found.own.get("loader"), "training_dataloader", whole)
        if found.own.get("random") is not None:
            restore_random_states(found.own["random"], engine.ranks.device)
        ranks = whole.manifest.get("world_size")
        if ranks != crew.world_size and crew.rank == 0:
            warnings.warn(
                f"{whole.path} was saved by {ranks} ranks, and these are {crew.world_size}: random numbers (dropout) "
                "and the split of batches over ranks differ from that run; everything else is the same",
                stacklevel=6,
            )

    # -- together -------------------------------------------------------------

    def _met(self, loading: bool) -> RankGroup:
        """Wait for all ranks, and return the group in which they exchange what is not a tensor."""
        ranks = self._engine.ranks
        if (sharded := sharded_store(self._engine.optimizer)) is not None:
            sharded.meet(loading)
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
        """Wait for a save that is under way, and release the group. Raises the error of the save."""
        try:
            self.wait()
        finally:
            # After Ctrl-C the save may go on, and uses the group.
            if self._crew is not None and not self._background.busy:
                self._crew.close()
                self._crew = None


def _check_ours(root: Path, tag: str | None) -> None:
    """Raise for a checkpoint of DeepSpeed, so that a run that was to resume from it does not start afresh."""
    if is_deepspeed(root, tag):
        raise CheckpointError(
            f"the checkpoint in {root} is DeepSpeed's; convert it once with `longshore import-deepspeed {root} --out "
            "FOLDER`, and load that folder"
        )


def _state_of(holder: Any) -> dict[str, Any] | None:
    """Return the state to save; None where there is none."""
    state_dict: Any = getattr(holder, "state_dict", None)
    state: Any = state_dict() if callable(state_dict) else None
    return None if state is None else dict(state)


def _load_state(holder: Any, state: Any, name: str, whole: WholeCheckpoint) -> None:
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
            stacklevel=7,
        )

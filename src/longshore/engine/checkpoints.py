"""``save_checkpoint`` and ``load_checkpoint`` of an engine, and the engine's own part of a checkpoint."""

from __future__ import annotations

import copy
import os
import random
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from longshore.checkpoint.files import checked
from longshore.checkpoint.folder import WholeCheckpoint, check_keep_last, check_not_others, check_tag
from longshore.checkpoint.one_line import RELEASED, compare_modes
from longshore.checkpoint.optimizer_state import OPTIMIZER, checked_about
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.saving import STATE, Background, Target, memory_for_snapshot, prepare, rank_file, write
from longshore.checkpoint.training_state import CLIENT_STATE, Selection, TrainingState, find
from longshore.checkpoint.values import read_values
from longshore.engine.accumulation import Accumulation
from longshore.engine.config.model import Config, decisive
from longshore.engine.precision import DynamicLossScale, FixedLossScale
from longshore.engine.ranks import Ranks
from longshore.errors import CheckpointError, LongshoreError, NoCheckpointError
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.ranks.twin_groups import twin_of
from longshore.store import Store

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps")


class Resumable(Protocol):
    """The attributes of an engine that are saved and restored. A protocol, because the engine imports this module."""

    module: nn.Module
    optimizer: TiledOptimizer
    ranks: Ranks
    loss_scaling: DynamicLossScale | FixedLossScale
    lr_scheduler: Any
    training_dataloader: Any
    config: Config
    global_steps: int
    micro_steps: int
    skipped_steps: int

    @property
    def in_window(self) -> bool: ...

    @property
    def _store(self) -> Store: ...

    def _check_alive(self) -> None: ...


class Saving:
    """State of an engine's checkpoints between two calls; ``accumulation`` counts its backwards."""

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation = accumulation
        self.group: RankGroup | None = None  # set when the first checkpoint is saved or loaded
        self.background = Background()
        self.runs: dict[Path, str] = {}
        """Identifier of the run in each folder, also after it is resumed from there: ``keep_last`` removes only its own
        checkpoints, and not those of another run that began with the same one."""


class Checkpoints:
    """Saves and loads the checkpoints of an engine, which makes one for each call: it refers to the engine."""

    def __init__(self, engine: Resumable, saving: Saving) -> None:
        self._engine = engine
        self._saving = saving
        self._accumulation = saving.accumulation
        self._background = saving.background
        self._runs = saving.runs

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

        It saves weights, masters, moments and step counts of each parameter, the schedule, the loss scale, counters,
        and each rank's random states and position in ``training_dataloader``. ``docs/checkpoint_format.md`` describes
        the files.

        Args:
            save_dir: a folder that all machines of the run share; created if it does not exist.
            tag: name of the checkpoint in the folder; None: ``global_step`` and the number of steps. An existing
                checkpoint of that name is replaced when the new one is complete.
            client_state: values of your own: JSON, and tensors.
            save_latest: let ``load_checkpoint`` without a tag find this one.
            exclude_frozen_parameters: leave out frozen parameters (for adapters on weights that are stored elsewhere).
            keep_last: remove older checkpoints of this run beyond this number, except those saved with
                ``save_latest=False``; None: remove none.
            async_save: return at once and write on another thread while training goes on. Weights are copied; masters
                and moments are not: a step of a tile whose state buffer is not written yet goes into another one,
                taken from the spares (``speculation_memory``) or, without them, from at most a quarter of the free
                memory. When these are used up, a step waits.

        Returns:
            The checkpoint's folder; with ``async_save`` it exists after :meth:`wait`.

        Raises:
            CheckpointError: a window is under way, a value (named by its key) cannot be saved, or the disk failed. The
                former checkpoint is still there. With ``async_save`` the next call that saves, loads, waits or destroys
                raises it, and it is logged at once.
            ValueError: there is no ``save_dir``, or the tag is not a valid folder name or differs between ranks.
            RankError: another rank makes a different call, or is gone.
        """
        self.wait()
        if not save_dir:
            raise ValueError(f'save_checkpoint() takes a folder, not {save_dir!r}; name one, such as "checkpoints"')
        client_state = client_state or {}
        check_keep_last(keep_last)
        if not isinstance(client_state, Mapping):
            raise TypeError(f"client_state is a dictionary, not {type(client_state).__name__}")
        tag = check_tag(f"global_step{self._engine.global_steps}" if tag is None else str(tag))
        target = Target(Path(save_dir).absolute(), tag, save_latest, keep_last)
        return self._save(target, dict(client_state), exclude_frozen_parameters, async_save)

    def _save(self, target: Target, client_state: dict[str, Any], exclude_frozen: bool, async_save: bool) -> Path:
        engine, group = self._engine, self._met(loading=False)
        group.together(lambda: self._check_no_window("a checkpoint has no gradients, and {} would be lost: save"))
        self._check_same(group, "tag", target.tag)
        self._check_same(group, "save_dir", str(target.root))
        state = TrainingState(engine.module, engine.optimizer, group)
        memory_bytes = memory_for_snapshot(group) if async_save else None
        run = self._runs.setdefault(target.root, secrets.token_hex(8))
        content = prepare(
            lambda: state.content(
                {"engine": self._state(run), CLIENT_STATE: client_state},
                {"random": random_states(engine.ranks.device), "loader": _state_of(engine.training_dataloader)},
                engine.global_steps,
                run,
                exclude_frozen,
                memory_bytes,
            ),
            group,
        )
        if not async_save:
            return write(content, target, group)
        path = target.root / target.tag
        self._background.start(lambda: write(content, target, group), f"saving {path}", content.close)
        return path

    def wait(self) -> None:
        """Wait until a save that ``async_save=True`` began is on the disk.

        Raises:
            CheckpointError, RankError: the save failed, for the reasons that :meth:`save` lists.
        """
        self._background.wait()

    def _check_no_window(self, why: str) -> None:
        if not self._engine.in_window:
            return
        if core_of(self._engine.optimizer).members.source.superseded:
            raise CheckpointError(
                f"{why.format('those of the window under way')} with the engine that a later initialize() made for "
                "this model, which steps it now; to go on with this one, call destroy() of that engine and zero_grad() "
                "of this one"
            )
        raise CheckpointError(
            f"{why.format('those of the window under way')} right after a step() that was applied, or discard the "
            "window with zero_grad()"
        )

    def _state(self, run: str) -> dict[str, Any]:
        engine = self._engine
        return {
            "run": run,
            **{name: getattr(engine, name) for name in _COUNTERS},
            "several": int(engine._store.several),
            "gradient_accumulation_steps": self._accumulation.sizes.accumulation_steps,
            "loss_scale": engine.loss_scaling.state_dict(),
            "lr_scheduler": _state_of(engine.lr_scheduler),
            "decisive": decisive(engine.config, engine.ranks.world_size),
        }

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
    ) -> tuple[Path, dict[str, Any]]:
        """Resume from a checkpoint of any stage, offload, tile size and number of ranks; all ranks have to call.

        From one of :func:`longshore.save` it takes weights, masters, moments and the number of steps: it has no more.

        The whole checkpoint is verified, and compared with the model and the optimizer, before anything changes.
        Settings stay this engine's, ``gradient_accumulation_steps`` too; a warning names those that change bits and
        were others in the saved run.

        Args:
            load_dir: as given to :meth:`save`.
            tag: name of the checkpoint; None: the latest, or, if that one is damaged, the newest intact one, with a
                warning.
            load_module_strict: raise where checkpoint and model differ; False: skip differing entries, with a warning.
            load_optimizer_states: also load masters, moments and step counts.
            load_lr_scheduler_states: also load the schedule's state.
            load_module_only: load weights and nothing else.
            strict: another name of ``load_module_strict``.

        Returns:
            The checkpoint's folder, and the ``client_state``.

        Raises:
            NoCheckpointError: the folder has no checkpoint at all, as at a first start.
            CheckpointError: the checkpoint is damaged, or of another model or optimizer; the message lists the
                differences. Nothing was loaded.
            RankError: another rank makes a different call, or is gone.
        """
        self.wait()
        strict = load_module_strict if strict is None else strict
        selection = Selection(strict, load_optimizer_states and not load_module_only)
        root, tag = Path(load_dir).absolute(), None if tag is None else str(tag)
        return self._load(root, tag, selection, load_lr_scheduler_states, load_module_only)

    def _load(
        self, root: Path, tag: str | None, selection: Selection, scheduler: bool, module_only: bool
    ) -> tuple[Path, dict[str, Any]]:
        engine = self._engine
        if selection.optimizer:
            engine._check_alive()
        group = self._met(loading=True)
        self._check_same(group, "load_dir", str(root))
        self._check_same(group, "tag", tag)
        # If a step failed half way, perhaps on this rank alone, its window is lost in any case.
        gone = engine._store.tiles.broken is not None and not module_only
        group.together(lambda: gone or self._check_no_window("{} would be stepped into what is loaded: load"))
        group.first(lambda: check_not_others(root, tag))
        whole = find(root, tag, group)
        if whole is None:
            raise NoCheckpointError(root)
        own: dict[str, Any] = {}

        def look(values: Mapping[str, Any]) -> None:
            """Check the engine's own part before anything changes."""
            checked(values.get(CLIENT_STATE), dict, f"{whole.path}: {CLIENT_STATE}")
            if not module_only and "engine" in values:
                own.update(self._looked(whole, values["engine"], group))

        values = TrainingState(engine.module, engine.optimizer, group).load(whole, selection, look)
        if not module_only and "engine" in values:
            group.together(lambda: self._restore(whole, values["engine"], own, scheduler, group))
        elif not module_only:
            group.together(lambda: self._go_on_from_loop(whole, values, group))
        return whole.path, values[CLIENT_STATE]

    def _looked(self, whole: WholeCheckpoint, state: Any, group: RankGroup) -> dict[str, Any]:
        """Check the engine's state, and read and check this rank's own part. Raises CheckpointError."""
        where = str(whole.path)
        state = checked(state, dict, f"{where}: engine")
        for name in (*_COUNTERS, "gradient_accumulation_steps"):
            checked(state.get(name), int, f"{where}: {name}")
        checked(state.get("run"), str, f"{where}: run")
        checked(state.get("several", 0), int, f"{where}: several")
        for name, value in checked(state.get("decisive", {}), dict, f"{where}: decisive").items():
            checked(value, str, f"{where}: decisive: {name}")
        scaling = checked(state.get("loss_scale"), dict, f"{where}: loss_scale")
        try:
            copy.copy(self._engine.loss_scaling).load_state_dict(scaling)
            self._accumulation.sizes.with_accumulation_steps(state["gradient_accumulation_steps"])
        except (ValueError, TypeError, LongshoreError) as error:
            raise CheckpointError(f"{where}: {error}") from error
        saved = f"{rank_file(group.rank)}.json" in whole.files
        # A rank that the saving run did not have takes rank 0's position in the data.
        own = read_values(whole.path, rank_file(group.rank if saved else 0))
        if not saved:
            own["random"] = None
        if own.get("random") is not None:
            check_random_states(checked(own["random"], dict, f"{where}: random"), self._engine.ranks.device)
        return own

    def _restore(
        self,
        whole: WholeCheckpoint,
        state: Mapping[str, Any],
        own: Mapping[str, Any],
        scheduler: bool,
        group: RankGroup,
    ) -> None:
        engine = self._engine
        for name in _COUNTERS:
            setattr(engine, name, state[name])
        engine._store.several = state.get("several", 0) > 0
        self._runs[whole.path.parent] = state["run"]
        engine.loss_scaling.load_state_dict(state["loss_scale"])
        engine.loss_scaling.hand_to(engine.optimizer)
        if scheduler:
            _load_state(engine.lr_scheduler, state.get("lr_scheduler"), "lr_scheduler", whole)
        _load_state(engine.training_dataloader, own.get("loader"), "training_dataloader", whole)
        if own.get("random") is not None:
            restore_random_states(own["random"], engine.ranks.device)
        if group.rank == 0:
            self._warn_of_differences(whole, state, scheduler)

    def _go_on_from_loop(self, whole: WholeCheckpoint, values: Mapping[str, Any], group: RankGroup) -> None:
        """Take the steps that ``longshore.save`` counted in a loop without an engine."""
        self._engine.global_steps = max(0, whole.step)
        if whole.run is not None:
            self._runs[whole.path.parent] = whole.run
        if group.rank == 0:
            warnings.warn(
                f"{whole.path} was saved by longshore.save, and has no counters but that of steps, no schedule, loss "
                "scale, random states or place in the data: the engine's stay as they are. What the loop saved in "
                "state= is the client_state, the second result",
                stacklevel=7,
            )
            compare_modes(self._engine.optimizer, values.get(RELEASED), whole.path, stacklevel=7)

    def _warn_of_differences(self, whole: WholeCheckpoint, state: Mapping[str, Any], scheduler: bool) -> None:
        """Warn of settings that change bits and differ from those saved; imported and older checkpoints have none."""
        there, sizes = state.get("decisive", {}), self._accumulation.sizes
        steps = (state["gradient_accumulation_steps"], sizes.accumulation_steps)
        ranks = (checked(whole.manifest.get("world_size"), int, f"{whole.path}: world_size"), sizes.world_size)
        differing = self._differing(state, there, scheduler)
        # Whoever declares boundaries decides anew how many backwards a step has (Lightning's Trainer).
        if there and self._accumulation.boundary is None and ranks[0] * steps[0] != ranks[1] * steps[1]:
            differing.append(
                f"gradient_accumulation_steps {steps[0]} there, {steps[1]} here"
                if ranks[0] == ranks[1]
                else f"backwards a step (ranks times gradient_accumulation_steps) {ranks[0]} * {steps[0]} there, "
                f"{ranks[1]} * {steps[1]} here"
            )
        if ranks[0] != ranks[1]:
            warnings.warn(
                f"{whole.path} was saved by {ranks[0]} ranks, and these are {ranks[1]}: random numbers (dropout), the "
                "split of batches over ranks and the order in which their gradients are added differ from that run; "
                f"everything else is {'as another warning says' if differing else 'the same'}",
                stacklevel=7,
            )
        if differing:
            warnings.warn(
                f"{whole.path} was saved with other settings, and the weights will be those of neither run: "
                f"{'; '.join(differing)}. Give initialize() the configuration of that run, if this is to continue it",
                stacklevel=7,
            )

    def _differing(self, state: Mapping[str, Any], there: Mapping[str, str], scheduler: bool) -> list[str]:
        """Return the settings that change bits and that the saved run, whose settings are ``there``, had otherwise."""
        here = decisive(self._engine.config, self._engine.ranks.world_size)
        irrelevant = set() if scheduler else {"scheduler"}
        counted = state["gradient_accumulation_steps"] > 1 or state["micro_steps"] > state["global_steps"]
        if not counted and not state.get("several", 0):  # the latter says it of a plain loss.backward(), too
            irrelevant.add("stage")  # with one backward a step there is one order
        names = [name for name in here if name in there and name not in irrelevant]
        return [f"{name} {there[name]} there, {here[name]} here" for name in names if there[name] != here[name]]

    def saved_groups(self, folder: Path) -> list[dict[str, Any]]:
        """Return the parameter groups in a checkpoint's folder, each with the names of its ``parameters`` and its
        ``options``; all ranks have to call it. There are none if the checkpoint is damaged, which :meth:`load` says."""

        def read() -> list[dict[str, Any]]:
            try:
                about = read_values(folder, STATE).get(OPTIMIZER)
                return [] if about is None else checked_about(about, str(folder))["groups"]
            except CheckpointError:
                return []

        return self._met(loading=True).first(read)

    # -- together -------------------------------------------------------------

    def _met(self, loading: bool) -> RankGroup:
        """Wait for all ranks, and return the group in which they exchange Python objects."""
        ranks = self._engine.ranks
        self._engine._store.meet(loading)
        if self._saving.group is None:
            several = ranks.world_size > 1
            self._saving.group = RankGroup(twin_of(ranks.group, ranks.device, backend="gloo") if several else None)
        return self._saving.group

    @staticmethod
    def _check_same(group: RankGroup, name: str, value: Any) -> None:
        said = group.gather(value)
        if len(set(said)) > 1:
            raise ValueError(f"{name} is not the same on all ranks: {', '.join(map(repr, said))}")

    def close(self) -> None:
        """Wait for a save that is under way, and release the group. Raises the error of the save."""
        try:
            self.wait()
        finally:
            # After Ctrl-C the save may still run and use the group.
            if self._saving.group is not None and not self._background.busy:
                self._saving.group.close()
                self._saving.group = None


def _state_of(holder: Any) -> dict[str, Any] | None:
    """Return ``holder.state_dict()``, or None if it has none."""
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


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python, NumPy, torch on the CPU, and torch on ``device`` if that is a CUDA device."""
    version, numbers, gauss = random.getstate()
    # NumPy's default generator is always MT19937, whose name comes first.
    _, key, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(np.asarray(key, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore states that :func:`random_states` returned.

    Raises:
        CheckpointError: the states are not valid; some generators may be set already.
    """
    try:
        python, numpy = states["python"], states["numpy"]
        random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
        key = numpy["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"]))
        torch.set_rng_state(states["torch"])
        if device.type != "cpu" and device.type in states:
            torch.get_device_module(device).set_rng_state(states[device.type], device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the states of random number generators are damaged: {error}") from error


def check_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Raise the error that :func:`restore_random_states` would raise, and leave all generators as they are."""
    present = random_states(device)
    try:
        restore_random_states(states, device)
    finally:
        restore_random_states(present, device)

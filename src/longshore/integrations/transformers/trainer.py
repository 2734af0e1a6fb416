"""``Trainer``: transformers' own, whose model is sharded and stepped by the engine."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from longshore import CheckpointError, Config, Engine, Offload, initialize
from longshore.integrations.transformers.accelerator import EngineAccelerator, EngineOptimizer
from longshore.integrations.transformers.settings import TrainerSettings
from longshore.seam import WholeCheckpoint, check_not_deepspeeds, is_checkpoint, make_schedule, read_latest

_TAG = "longshore"
"""Tag of the engine's checkpoint within the Trainer's ``checkpoint-N``."""
_STATE, _SCHEDULER, _OPTIMIZER = "trainer_state.json", "scheduler.pt", "optimizer.pt"
_log = logging.getLogger(__name__)


class TrainerMixin:
    """Puts the engine into a subclass of ``transformers.Trainer``, as the first base class.

    ``class Sft(TrainerMixin, trl.SFTTrainer): pass``

    Args:
        config: a DeepSpeed JSON file, the same as a dictionary, or a :class:`longshore.Config`. Values that are
            ``"auto"`` or left out come from ``TrainingArguments``. None: ZeRO-2 with the optimizer on the host.
        weights: a safetensors file or a folder of them, for a model made under ``longshore.Init(empty=True)``.
        offload: settings of the host side in addition to the configuration, as for :func:`longshore.initialize`.
        args, kwargs: the trainer's own arguments.

    Attributes:
        engine: the engine; None before training begins.

    Raises:
        ConfigError: the configuration is wrong, or contradicts ``TrainingArguments``; shows both values.
        ValueError: an argument that cannot be honoured, by name.
    """

    engine: Engine | None = None

    def __init__(
        self,
        *args: Any,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        weights: str | os.PathLike[str] | None = None,
        offload: Offload | None = None,
        **kwargs: Any,
    ) -> None:
        self._longshore_config = config
        self._longshore_weights = weights
        self._longshore_offload = offload
        self._longshore_schedule: Any = None
        super().__init__(*args, **kwargs)

    if TYPE_CHECKING:
        # Attributes of transformers.Trainer.
        label_smoother: Any

        def __getattr__(self, name: str) -> Any: ...

    def _base(self) -> Any:
        """Return the methods of the trainer that this class is mixed into."""
        return super()

    # -- before training ------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        for name, instead in _INSTEAD.items():
            if value := getattr(self.args, name, None):
                raise ValueError(
                    f"TrainingArguments({name}={value!r}) is not supported by longshore's Trainer: {instead}"
                )
        # Report everything that is wrong before the model is moved.
        settings = self._settings()
        if self._in_shards() and self.args.load_best_model_at_end and self.args.save_only_model:
            raise ValueError(
                "at stage 3 on several ranks load_best_model_at_end=True loads what the engine saved, and "
                "save_only_model=True does not save that; leave out one of the two"
            )
        if self.args.process_index == 0:
            for note in settings.notes:
                warnings.warn(note, stacklevel=4)
        if self.args.n_gpu > 1:
            _log.warning(
                "one process drives one GPU, so %d are idle; start it with torchrun --nproc-per-node=%d",
                self.args.n_gpu - 1,
                self.args.n_gpu,
            )
            self.args._n_gpu = 1
        self._base().create_accelerator_and_postprocess()
        for plugin in ("deepspeed_plugin", "fsdp_plugin"):
            if getattr(self.accelerator.state, plugin, None) is not None:
                raise ValueError(
                    f"accelerate was started with a {plugin}, which would shard the model too; start with torchrun, or "
                    "with an accelerate configuration that has neither DeepSpeed nor FSDP"
                )

    def _settings(self) -> TrainerSettings:
        return TrainerSettings(self._longshore_config, self.args, self.args.world_size)

    def _in_shards(self) -> bool:
        """Return whether several ranks share the parameters, so that no rank has the whole model."""
        config = self._settings().config if self.engine is None else self.engine.config
        return self.args.world_size > 1 and config.stage == 3

    def _fits_nowhere(self) -> bool:
        """Return whether no device need have room for the whole model, which then is the engine's to move."""
        config = self._settings().config if self.engine is None else self.engine.config
        return self._in_shards() or config.param_device == "cpu"

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # The engine also moves a model whose weights are read from files.
        if not self._fits_nowhere() and not any(parameter.is_meta for parameter in model.parameters()):
            self._base()._move_model_to_device(model, device)

    # -- the engine -----------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the engine's optimizer; the engine is made at the first call for a model."""
        engine = self.engine
        if engine is None or engine.module is not self.model or not isinstance(self.optimizer, EngineOptimizer):
            self._start_engine()
        return self.optimizer

    def _start_engine(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
            self.optimizer = None if isinstance(self.optimizer, EngineOptimizer) else self.optimizer
        settings = self._settings()
        if settings.config.optimizer is None:
            client, parameters = self._base().create_optimizer(), None
        elif self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ValueError(
                "an optimizer is given twice: to the Trainer (optimizers= or optimizer_cls_and_kwargs=), and in the "
                "configuration; keep one"
            )
        else:
            client, parameters = None, self._groups()
        if self.label_smoother is not None and self.model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            # The Trainer decides by the name of the model's class whether labels are shifted, and fully_shard changes
            # the name.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        if self.args.torch_compile:
            self.model.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        engine = initialize(
            model=self.model,
            optimizer=client,
            model_parameters=parameters,
            lr_scheduler=self.lr_scheduler,
            config=settings.config,
            offload=self._longshore_offload,
            weights=self._longshore_weights,
        ).engine
        # The Trainer steps the schedule, once for each applied step.
        self.lr_scheduler, engine.lr_scheduler = engine.lr_scheduler, None
        self.engine = engine
        self.accelerator = EngineAccelerator.take_over(self.accelerator, engine)
        self.optimizer = EngineOptimizer(engine, self.accelerator)

    def _groups(self) -> list[dict[str, Any]]:
        """Return parameter groups with and without weight decay, as the Trainer makes them."""
        decayed = set(self._base().get_decay_parameter_names(self.model))
        trainable = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [each for name, each in trainable if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [each for name, each in trainable if name not in decayed], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the configuration's schedule, or the arguments' schedule."""
        named = self._settings().scheduler(num_training_steps) if self.lr_scheduler is None else None
        if named is None:
            return self._base().create_scheduler(num_training_steps, optimizer)
        assert self.engine is not None
        self.lr_scheduler = make_schedule(named, self.engine.optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        # A device may not have memory for the whole model, so evaluation shards or streams it too.
        if training or (self.engine is None and self._fits_nowhere()):
            self.create_optimizer()
        if self.engine is not None and self.engine.module is self.model:
            return self.engine
        return self._base()._wrap_model(model, training, dataloader)

    # -- checkpoints ----------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer.train`` does; ``True`` resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_complete(Path(self.args.output_dir))
        elif resume_from_checkpoint and not (Path(resume_from_checkpoint) / _STATE).is_file():
            raise ValueError(
                f"{resume_from_checkpoint} is not a complete checkpoint of a Trainer: it has no {_STATE}; give a "
                "folder checkpoint-N, or True for the newest complete one"
            )
        return self._base().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        engine = self._running()
        if self.control.should_training_stop:
            engine.zero_grad()  # gradients after the last step, which will not be stepped
        elif engine.in_window:
            raise CheckpointError(
                f"a checkpoint was to be saved after step {self.state.global_step} in the middle of accumulation: the "
                "data ended there, or a callback asked for it; a checkpoint has no gradients, so that a resumed run "
                'would lose them. Use save_strategy="steps", and have callbacks ask in on_step_end'
            )
        self._base()._save_checkpoint(model, trial)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._running().zero_grad()  # gradients after the last step
        return self._base()._finalize_training(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # PEFT saves an adapter's frozen weights elsewhere.
        is_adapter = hasattr(self.model, "peft_config") and hasattr(self.model, "base_model")
        self._running().save_checkpoint(output_dir, _TAG, exclude_frozen_parameters=is_adapter)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # The engine's checkpoint includes the weights. A plain Trainer's checkpoint has none of the engine's.
        if _engine_part(resume_from_checkpoint) is None:
            check_not_deepspeeds(Path(resume_from_checkpoint).absolute(), None)
            self._base()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        engine, folder = self._running(), Path(checkpoint)
        if (tag := _engine_part(checkpoint)) is not None:
            engine.load_checkpoint(folder, tag)
        elif (folder / _OPTIMIZER).is_file():
            engine.optimizer.load_state_dict(torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True))
        else:
            raise CheckpointError(
                f"{folder} has neither a checkpoint of longshore nor {_OPTIMIZER}, so training would start again from "
                "its weights; load those into the model, and leave resume_from_checkpoint out"
            )
        if (folder / _SCHEDULER).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the engine's checkpoint includes the loss scale."""

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and (tag := _engine_part(best)) is not None:
            self._running().load_checkpoint(best, tag, load_module_only=True)
        else:
            self._base()._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as ``transformers.Trainer.save_model`` does; all ranks have to call it."""
        if self.engine is None or not self._in_shards():
            self._base().save_model(output_dir, _internal_call)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self.model, options=options)
        if self.args.should_save:
            self._base()._save(output_dir if output_dir is not None else self.args.output_dir, state_dict=whole)
        if self.args.push_to_hub and not _internal_call:
            self._base().push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _running(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("there is no engine before training begins; call train() first")
        return self.engine


class Trainer(TrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` on ZeRO-1, 2 or 3 with the optimizer on the host.

    Takes the arguments of ``transformers.Trainer`` and those of :class:`TrainerMixin`.
    """


_INSTEAD = {
    "deepspeed": "give the file as Trainer(config=...)",
    "fsdp": "use Trainer(config={'zero_optimization': {'stage': 3}, ...})",
    "parallelism_config": "longshore shards over data-parallel ranks only",
    "auto_find_batch_size": "set per_device_train_batch_size",
    "fp16_full_eval": "the model cannot be cast while it is trained; evaluate a copy",
    "bf16_full_eval": "the model cannot be cast while it is trained; evaluate a copy",
}
"""Arguments that would have another library shard or cast the model, and what to do instead."""


def _engine_part(checkpoint: str) -> str | None:
    """Return the tag of the engine's checkpoint inside a Trainer's: this Trainer's own, or one imported from DeepSpeed;
    None: there is none."""
    folder = Path(checkpoint)
    if (folder / _TAG).is_dir():
        return _TAG
    latest = read_latest(folder)
    return latest if latest is not None and is_checkpoint(folder / latest) else None


def _newest_complete(output_dir: Path) -> str:
    """Return the newest complete ``checkpoint-N``; a killed run may leave incomplete ones.

    Raises:
        ValueError: there is none.
    """
    found = [(path.name.rpartition("-")[2], path) for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    numbered = sorted((int(number), path) for number, path in found if number.isdecimal() and path.is_dir())
    for _, path in reversed(numbered):
        try:
            json.loads((path / _STATE).read_text())
            if (tag := _engine_part(str(path))) is not None:
                WholeCheckpoint(path / tag)
            return str(path)
        except (OSError, ValueError, CheckpointError) as error:
            _log.warning("%s is skipped: it is incomplete (%s)", path, error)
    raise ValueError(f"{output_dir} has no complete checkpoint to resume from; leave resume_from_checkpoint out")

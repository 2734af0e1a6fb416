"""The names that a program uses, and what they are bound to in plain PyTorch and in longshore."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longshore
from fuzz.engines import PlainEngine, gathered, made_twin, our_engine
from fuzz.files import Refused, Said
from fuzz.streams import NAMES, Blocks, Streams
from longshore.optim.family import ELEMENTWISE

OURS = ("AdamW", "Adam", "Adagrad", "SGD", "Lion", "Muon")
CLIENTS = tuple(ELEMENTWISE)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "mixed": torch.bfloat16}


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, told from one of a person's."""


class Net(nn.Module):
    """A trunk, two heads that take turns, and a gain that both use.

    Args:
        dtype: one of :data:`DTYPES`; in ``"mixed"`` the gain is float32.
        odd: sizes that are no multiples of anything, and a parameter without elements.
        tied: both heads have one weight.
        strided: the trunk's weight is transposed in memory.
        wide: the trunk's weight may have states of 8 bits.
    """

    place, inside = "cpu", ""

    def __init__(
        self, dtype: str = "fp32", odd: bool = False, tied: bool = False, strided: bool = False, wide: bool = False
    ) -> None:
        super().__init__()
        read, width, out = (5, 33, 7) if odd else (64, 72, 16) if wide else (8, 64, 16)
        self.read, self.dtype = read, DTYPES[dtype]
        self.trunk = nn.Linear(read, width)
        self.heads = nn.ModuleList([nn.Linear(width, out), nn.Linear(width, out)])
        self.gain = nn.Parameter(torch.ones(() if odd else (16,)))
        self.empty = nn.Parameter(torch.ones(0, 3)) if odd else None
        if strided:
            self.trunk.weight = nn.Parameter(torch.ones(read, width).t())
        self.tied = tied
        self.tie()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(x(seed, parameter) * 0.3)
        self.to(self.dtype)
        if dtype == "mixed":
            self.gain.data = self.gain.data.float()

    def tie(self) -> None:
        if self.tied:
            self.heads[1].weight = self.heads[0].weight  # pyright: ignore

    def forward(self, seed: int, head: int = 0) -> Tensor:
        """The loss of a batch, by one head."""
        batch = torch.randn(6, self.read, generator=torch.Generator().manual_seed(seed)).to(self.place, self.dtype)
        loss = ((self.heads[head](torch.tanh(self.trunk(batch))) * self.gain).float() ** 2).mean()
        return loss if self.empty is None else loss + self.empty.float().sum()


def x(seed: int, like: Tensor) -> Tensor:
    """Normal numbers of the seed, like a tensor."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


def in_thread(work: Callable[[], Any]) -> None:
    """Run in another thread; what it raises is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def through_file(value: Any) -> Any:
    """Through ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def copied(value: Any) -> Any:
    """The model and the optimizer as a deep copy."""
    return copy.deepcopy(value)


def pickled(value: Any) -> Any:
    """The model and the optimizer through ``pickle``."""
    return pickle.loads(pickle.dumps(value))


def nothing() -> Tensor:
    """A loss of no parameter."""
    return torch.ones(1, requires_grad=True).sum()


@contextlib.contextmanager
def _as_saved(optimizer: Any, model: nn.Module, names: list[list[str]] | None) -> Iterator[None]:
    """Put parameters that were taken out of their groups since these were saved back for a while: longshore loads by
    name, and refuses only if a state would be lost."""
    groups, named = optimizer.param_groups, dict(model.named_parameters())
    now = [group["params"] for group in groups]
    then = [[named[name] for name in group if name in named] for group in names or ()]
    fewer = len(now) == len(then) and all({*map(id, a)} <= {*map(id, b)} for a, b in zip(now, then, strict=True))
    try:
        for group, params in zip(groups, then if fewer else now, strict=True):
            group["params"] = params
        yield
    finally:
        for group, params in zip(optimizer.param_groups, now, strict=True):
            group["params"] = params


def gradients_of(loss: Tensor, parameters: list[Tensor]) -> None:
    """Assign gradients from ``torch.autograd.grad``."""
    trained = [p for p in parameters if p.requires_grad]
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
        parameter.grad = gradient


class World:
    """One side: the names of a program, and what they are bound to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        """For checkpoints; one and the same on all ranks."""
        self.settings: dict[str, Any] = {}
        self.kind = ""
        """The name of the last optimizer that was made."""
        self.streams = False
        """Whether a model is streamed here."""
        self.names: dict[str, Any] = {
            **{name: globals()[name] for name in ("torch", "nn", "copy", "Net", "Interrupt")},
            **{each.__name__: each for each in (x, in_thread, through_file, gradients_of)},
            **{each.__name__: each for each in (self.ours, self.client, self.clip, self.saved, self.loaded)},
            "raising": self.raising,
            "rebuilt": self.rebuilt,
            **{each.__name__: each for each in (self.engine, self.raw, self.engine_saved, self.engine_loaded)},
            **{each.__name__: each for each in (copied, pickled)},
            "nothing": nothing,
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "through_torch": self.through_torch,
            **NAMES,
            **{each.__name__: each for each in (self.streamed, self.placed, self.again, self.delays, self.theirs)},
            **{each.__name__: each for each in (self.see, self.silently, self.keep, self.take)},
            "initialized": self.initialized,
        }
        self.seen: list[Tensor] = []
        self._calls: list[int] = []
        """How often each hook that raises was called."""

    def raising(self, error: type[BaseException], at: int = 1) -> Callable[..., None]:
        """A hook that raises when it is called for the ``at``-th time."""
        place = len(self._calls)
        self._calls.append(0)

        def hook(*_: Any) -> None:
            self._calls[place] += 1
            if self._calls[place] == at:
                raise error

        return hook

    def count_anew(self) -> None:
        """Let hooks that raise count their calls from here on."""
        self._calls = [0] * len(self._calls)

    def ours(self, **settings: Any) -> None:
        """Settings of longshore's optimizers from here on."""
        self.settings = settings

    def see(self, value: Tensor) -> None:
        """Let a tensor be compared."""
        self.seen.append(value.detach().cpu().clone())

    def silently(self, write: Callable[[], Any]) -> None:
        """Write where torch cannot see it, while no graph is held that needs what was there."""
        self.names.pop("loss", None)
        write()

    def theirs(self, name: str, params: Any, **options: Any) -> Any:
        """One of torch's own optimizers."""
        self.kind = name
        return getattr(torch.optim, name)(params, foreach=False, **options)

    def streamed(self, model: Blocks, **options: Any) -> Blocks:
        """``longshore.stream``."""
        raise NotImplementedError

    def placed(self, model: Net) -> Net:
        """The model on the device."""
        raise NotImplementedError

    def again(self, model: Blocks, **options: Any) -> None:
        """Close its stream, and stream it again."""
        raise NotImplementedError

    def delays(self, seed: int, kernel_us: int, copy_us: int) -> None:
        raise NotImplementedError

    @property
    def released(self) -> bool:
        """Whether ``.grad`` will be longshore's."""
        return bool(self.settings.get("release_gradients")) or "stage" in self.settings

    def engine(self, model: nn.Module, kind: str, params: Any, **options: Any) -> Any:
        """The engine, its optimizer, and the parameters that the model has from now on."""
        raise NotImplementedError

    def initialized(self, model: Net, text: str, valid: bool = False) -> Any:
        """What :meth:`engine` returns, by a configuration file with this text.

        Raises:
            Refused: it has a mistake; not if it is ``valid``.
        """
        raise NotImplementedError

    def raw(self, engine: Any, loss: Tensor, scaled: bool = True) -> None:
        """``loss.backward()``, which the engine does not see."""
        raise NotImplementedError

    def engine_saved(self, engine: Any) -> Any:
        raise NotImplementedError

    def engine_loaded(self, save: Any, engine: Any) -> None:
        raise NotImplementedError

    def client(self, name: str, params: Any, **options: Any) -> Any:
        raise NotImplementedError

    def clip(self, optimizer: Any, max_norm: float) -> Tensor:
        raise NotImplementedError

    def rebuilt(self, optimizer: Any, build: Callable[[], Any]) -> Any:
        """Another optimizer in the place of this one, between two windows."""
        raise NotImplementedError

    def through_torch(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state after a torch optimizer has loaded it."""
        low = any(p.dtype != torch.float32 for group in optimizer.param_groups for p in group["params"])
        if self.kind == "Lion" or (self.kind == "Adagrad" and low):  # torch rounds Adagrad's first states
            return copy.deepcopy(optimizer.state_dict())
        groups = [
            {**group, "params": [p.detach().clone().requires_grad_() for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        theirs = getattr(torch.optim, self.kind)(groups)
        theirs.load_state_dict(optimizer.state_dict())
        return copy.deepcopy(theirs.state_dict())

    def saved(self, model: nn.Module, optimizer: Any) -> Any:
        raise NotImplementedError

    def keep(self, tag: str, model: nn.Module, trained_by: Any) -> None:
        """Write a checkpoint of a model with its optimizer or engine, for any later part of the program."""
        raise NotImplementedError

    def take(self, tag: str, model: nn.Module, trained_by: Any) -> None:
        """Go on from a checkpoint of :meth:`keep`."""
        raise NotImplementedError

    def loaded(self, save: Any, model: nn.Module, optimizer: Any) -> None:
        raise NotImplementedError


class PlainWorld(World):
    """Plain PyTorch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in OURS:
            self.names[name] = lambda *args, name=name, **options: self._make(name, *args, **options)

    def _make(self, name: str, *args: Any, **options: Any) -> Any:
        made = made_twin(self.settings, name, *args, released=self.released, **options)
        self.kind = name
        return made

    def engine(self, model: nn.Module, kind: str, params: Any, **options: Any) -> Any:
        engine = PlainEngine(self.settings, model, kind, params, options)
        return engine, engine.optimizer, list(model.parameters())

    def initialized(self, model: Net, text: str, valid: bool = False) -> Any:
        said = Said(text, len(gathered(None)))
        said.cast(model)
        model.dtype = next(model.parameters()).dtype
        self.settings = said.settings
        return self.engine(model, said.kind, list(model.parameters()), **said.options)

    def raw(self, engine: Any, loss: Tensor, scaled: bool = True) -> None:
        engine.raw(engine.scale(loss) if scaled else loss)

    def engine_saved(self, engine: Any) -> Any:
        return engine.saved()

    def engine_loaded(self, save: Any, engine: Any) -> None:
        engine.loaded(save)

    def client(self, name: str, params: Any, **options: Any) -> Any:
        return self._make(name, params, **options)

    def rebuilt(self, optimizer: Any, build: Callable[[], Any]) -> Any:
        optimizer.zero_grad()
        optimizer.remove_hooks()
        return build()

    def clip(self, optimizer: Any, max_norm: float) -> Tensor:
        return optimizer.clip(max_norm)

    def streamed(self, model: Blocks, **options: Any) -> Blocks:
        return model

    def placed(self, model: Net) -> Net:
        return model

    def again(self, model: Blocks, **options: Any) -> None:
        pass

    def delays(self, seed: int, kernel_us: int, copy_us: int) -> None:
        pass

    def saved(self, model: nn.Module, optimizer: Any) -> Any:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), groups))

    def loaded(self, save: Any, model: nn.Module, optimizer: Any) -> None:
        model.load_state_dict(save[0])
        stateless = len(save) == 3 and not save[1]["state"]
        with _as_saved(optimizer, model, save[2] if stateless else None):
            optimizer.load_state_dict(copy.deepcopy(save[1]))

    def keep(self, tag: str, model: nn.Module, trained_by: Any) -> None:
        engine = isinstance(trained_by, PlainEngine)
        save = trained_by.saved() if engine else (*self.saved(model, trained_by)[:2], None, None, None)
        if self.names["rank"] == 0:
            torch.save(save, self._plain(tag))
        gathered(None)

    def take(self, tag: str, model: nn.Module, trained_by: Any) -> None:
        if not self._plain(tag).exists():
            raise NameError(f"the program has no {tag}")
        save = torch.load(self._plain(tag), weights_only=False)
        if isinstance(trained_by, PlainEngine):
            trained_by.loaded(save)
        else:
            self.loaded(save, model, trained_by)

    def _plain(self, tag: str) -> Path:
        return self._folder / f"{tag}.plain"


class OurWorld(World):
    """longshore; optimizers are closed by :meth:`end`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._saves = 0
        self.made: list[Any] = []
        self.holds_gradients = False
        """Whether ``.grad`` is longshore's, by the settings with which the last optimizer or engine was made."""
        self._streams = Streams()
        for name in OURS:
            self.names[name] = lambda *args, name=name, **options: self._keep(
                name, getattr(longshore, name)(*args, **options, **self._how())
            )

    def _how(self) -> dict[str, Any]:
        settings = dict(self.settings)
        release = settings.pop("release_gradients", False)
        if "simulated" in settings:
            settings["transfer"] = longshore.SimulatedTransfer(settings.pop("simulated"), max_delay_s=1e-4)
        return {"release_gradients": release, "offload": longshore.Offload(**{"threads": 1, **settings})}

    def _keep(self, name: str, optimizer: Any) -> Any:
        self.kind = name
        self.made.append(optimizer)
        self.holds_gradients = self.released
        return optimizer

    def placed(self, model: Net) -> Net:
        self._streams.place(model)
        model.to(model.place)
        model.tie()  # where that makes new parameters, it makes one for each name
        return model

    def streamed(self, model: Blocks, **options: Any) -> Blocks:
        self._streams.begin(model, **options)
        self.streams = True
        return model

    def again(self, model: Blocks, **options: Any) -> None:
        self._streams.again(model, **options)

    def delays(self, seed: int, kernel_us: int, copy_us: int) -> None:
        self._streams.delays(seed, kernel_us, copy_us)

    def engine(self, model: nn.Module, kind: str, params: Any, **options: Any) -> Any:
        if "param_device" in self.settings:  # the engine moves it
            self._streams.place(model)  # pyright: ignore[reportArgumentType]
            self.streams = True
        engine = our_engine(self.settings, model, kind, params, options)
        self.made.append(engine)
        self.holds_gradients = True
        return engine, engine.optimizer, list(model.parameters())

    def initialized(self, model: Net, text: str, valid: bool = False) -> Any:
        file = self._folder / f"config-{self.names['rank']}.json"
        file.write_text(text)
        self.settings = {"stage": None}
        self.holds_gradients = True
        try:
            engine = longshore.initialize(model=model, config=file).engine
        except longshore.ConfigError as error:
            if valid:
                raise
            raise Refused(f"the file is refused: {error}") from error
        self.made.append(engine)
        model.dtype = next(model.parameters()).dtype
        return engine, engine.optimizer, list(model.parameters())

    def raw(self, engine: Any, loss: Tensor, scaled: bool = True) -> None:
        (engine.scale(loss) if scaled else loss).backward()

    def engine_saved(self, engine: Any) -> Any:
        self._saves += 1
        engine.save_checkpoint(self._folder, f"save{self._saves}")
        return self._folder, f"save{self._saves}"

    def engine_loaded(self, save: Any, engine: Any) -> None:
        engine.load_checkpoint(*save)

    def client(self, name: str, params: Any, **options: Any) -> Any:
        theirs = getattr(torch.optim, name)(params, **options)
        return self._keep(name, longshore.from_client(theirs, **self._how()))

    def clip(self, optimizer: Any, max_norm: float) -> Tensor:
        return optimizer.clip_grad_norm_(max_norm)

    def rebuilt(self, optimizer: Any, build: Callable[[], Any]) -> Any:
        optimizer.zero_grad()
        optimizer.close()
        return build()

    def saved(self, model: nn.Module, optimizer: Any) -> Any:
        self._saves += 1
        tag = f"save{self._saves}"
        longshore.save(self._folder, model, optimizer, tag)
        return tag

    def loaded(self, save: Any, model: nn.Module, optimizer: Any) -> None:
        longshore.load(self._folder, model, optimizer, save)

    def keep(self, tag: str, model: nn.Module, trained_by: Any) -> None:
        if hasattr(trained_by, "save_checkpoint"):
            trained_by.save_checkpoint(self._folder, tag)
        else:
            longshore.save(self._folder, model, trained_by, tag)

    def take(self, tag: str, model: nn.Module, trained_by: Any) -> None:
        if hasattr(trained_by, "load_checkpoint"):
            trained_by.load_checkpoint(self._folder, tag)
        else:
            longshore.load(self._folder, model, trained_by, tag)

    def end(self) -> None:
        for made in self.made:
            made.destroy() if hasattr(made, "destroy") else made.close()
        self._streams.end()

    def left_bytes(self) -> int:
        """Memory of the device that is not given back at the end."""
        self.names.clear()
        self.made.clear()
        self.seen.clear()
        return self._streams.left_bytes()

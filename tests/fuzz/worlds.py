"""The names that a program uses, and what they are bound to in plain PyTorch and in longshore."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longshore
from fuzz.engines import PlainEngine, gathered, our_engine
from fuzz.plain import twin
from longshore.optim.family import ELEMENTWISE

OURS = ("AdamW", "Adam", "Adagrad", "SGD", "Lion")
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
    """

    def __init__(self, dtype: str = "fp32", odd: bool = False, tied: bool = False, strided: bool = False) -> None:
        super().__init__()
        read, width, out = (5, 33, 7) if odd else (8, 64, 16)
        self.read, self.dtype = read, DTYPES[dtype]
        self.trunk = nn.Linear(read, width)
        self.heads = nn.ModuleList([nn.Linear(width, out), nn.Linear(width, out)])
        self.gain = nn.Parameter(torch.ones(() if odd else (16,)))
        self.empty = nn.Parameter(torch.ones(0, 3)) if odd else None
        if strided:
            self.trunk.weight = nn.Parameter(torch.ones(read, width).t())
        if tied:
            self.heads[1].weight = self.heads[0].weight  # pyright: ignore
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(x(seed, parameter) * 0.3)
        self.to(self.dtype)
        if dtype == "mixed":
            self.gain.data = self.gain.data.float()

    def forward(self, seed: int, head: int = 0) -> Tensor:
        """The loss of a batch, by one head."""
        batch = torch.randn(6, self.read, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        loss = ((self.heads[head](torch.tanh(self.trunk(batch))) * self.gain).float() ** 2).mean()
        return loss if self.empty is None else loss + self.empty.float().sum()


def x(seed: int, like: Tensor) -> Tensor:
    """Normal numbers of the seed, like a tensor."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def raising(error: type[BaseException], at: int = 1) -> Callable[..., None]:
    """A hook that raises when it is called for the ``at``-th time."""
    left = [at]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    return hook


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


def gradients_of(loss: Tensor, parameters: list[Tensor]) -> None:
    """Assign gradients from ``torch.autograd.grad``."""
    trained = [p for p in parameters if p.requires_grad]
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
        parameter.grad = gradient


class World:
    """One side: the names of a program, and what they are bound to."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.kind = ""
        """The name of the last optimizer that was made."""
        self.names: dict[str, Any] = {
            **{name: globals()[name] for name in ("torch", "nn", "copy", "Net", "Interrupt")},
            **{each.__name__: each for each in (x, raising, in_thread, through_file, gradients_of)},
            **{each.__name__: each for each in (self.ours, self.client, self.clip, self.saved, self.loaded)},
            "rebuilt": self.rebuilt,
            **{each.__name__: each for each in (self.engine, self.raw, self.engine_saved, self.engine_loaded)},
            **{each.__name__: each for each in (copied, pickled)},
            "nothing": nothing,
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "through_torch": self.through_torch,
        }

    def ours(self, **settings: Any) -> None:
        """Settings of longshore's optimizers from here on."""
        self.settings = settings

    @property
    def released(self) -> bool:
        """Whether ``.grad`` is longshore's."""
        return bool(self.settings.get("release_gradients")) or "stage" in self.settings

    def engine(self, model: nn.Module, kind: str, params: Any, **options: Any) -> Any:
        """The engine, its optimizer, and the parameters that the model has from now on."""
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

    def loaded(self, save: Any, model: nn.Module, optimizer: Any) -> None:
        raise NotImplementedError


class PlainWorld(World):
    """Plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        for name in OURS:
            self.names[name] = lambda *args, name=name, **options: self._make(name, *args, **options)

    def _make(self, name: str, *args: Any, **options: Any) -> Any:
        made = twin(name)(*args, released=self.released, **options)
        self.kind = name
        return made

    def engine(self, model: nn.Module, kind: str, params: Any, **options: Any) -> Any:
        engine = PlainEngine(self.settings["stage"], model, kind, params, options)
        return engine, engine.optimizer, list(model.parameters())

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

    def saved(self, model: nn.Module, optimizer: Any) -> Any:
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def loaded(self, save: Any, model: nn.Module, optimizer: Any) -> None:
        model.load_state_dict(save[0])
        optimizer.load_state_dict(copy.deepcopy(save[1]))


class OurWorld(World):
    """longshore; optimizers are closed by :meth:`end`."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="longshore-fuzz-")
        self._saves = 0
        self.made: list[Any] = []
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
        return optimizer

    def engine(self, model: nn.Module, kind: str, params: Any, **options: Any) -> Any:
        engine = our_engine(self.settings, model, kind, params, options)
        self.made.append(engine)
        return engine, engine.optimizer, list(model.parameters())

    def raw(self, engine: Any, loss: Tensor, scaled: bool = True) -> None:
        (engine.scale(loss) if scaled else loss).backward()

    def engine_saved(self, engine: Any) -> Any:
        self._saves += 1
        folder = gathered(self._folder.name)[0]
        engine.save_checkpoint(folder, f"save{self._saves}")
        return folder, f"save{self._saves}"

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
        longshore.save(self._folder.name, model, optimizer, tag)
        return tag

    def loaded(self, save: Any, model: nn.Module, optimizer: Any) -> None:
        longshore.load(self._folder.name, model, optimizer, save)

    def end(self) -> None:
        for made in self.made:
            made.destroy() if hasattr(made, "destroy") else made.close()
        self._folder.cleanup()

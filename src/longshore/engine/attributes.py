"""Attributes of the engine: where they are looked up, and which of them may be assigned."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

_FIXED = {
    "module": "the optimizer steps the parameters of the model that initialize() was given: wrap or replace the model "
    "before, and compile it with engine.compile()",
    "optimizer": "pass the optimizer to initialize()",
    "config": "settings do not change after initialize()",
    "ranks": "it belongs to the engine",
    "binding": "it belongs to the engine",
    "loss_scaling": "set fp16 in the configuration",
}
"""Parts of the engine that others of its parts have too: a new one would not be seen there."""

_INSTEAD_OF_ASSIGNING = {
    "train_batch_size": "call engine.set_train_batch_size()",
    "gradient_accumulation_steps": "call engine.set_gradient_accumulation_steps()",
    "is_gradient_accumulation_boundary": "call engine.set_gradient_accumulation_boundary()",
}


class Answer:
    """An attribute that is worked out when it is read. Unlike a property, it lets an object have another value in its
    place: scripts and tests wrap the engine's answers, and tensors of DeepSpeed's files have their own."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.__doc__ = read.__doc__

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        # Of the class it is None: torch asks each attribute of a class that has __get__ for a __set__.
        return None if owner is None else self.read(owner)


class EngineAttributes(nn.Module):
    """Looks up names of the model, and sees every assignment or refuses it.

    Attributes:
        _where_else: the end of the error about a name that neither the engine nor the model has.
        built: whether the engine has all of its own attributes; later assignments are the user's.
    """

    _where_else: ClassVar[str] = "settings are in engine.config"
    built = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}; {self._where_else}"
                ) from None
        return getattr(module, name)  # generate(), save_pretrained(): scripts call the engine as if it were the model

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one that only the model has is set there, where its forward reads it.

        Raises:
            AttributeError: the attribute is a part of the engine that stays, or a value is assigned to a method.
        """
        if not self.built:
            super().__setattr__(name, value)
            return
        if name in _FIXED and value is not getattr(self, name):
            instead = _FIXED[name]
            raise AttributeError(f"engine.{name} cannot be assigned; {instead}")
        of_class = inspect.getattr_static(type(self), name, None)
        is_method = callable(of_class) or isinstance(of_class, Answer)
        if is_method and not callable(value):  # a function may wrap the method: those who call it call the function
            instead = _INSTEAD_OF_ASSIGNING.get(name, "set it in the configuration, before initialize()")
            raise AttributeError(f"engine.{name} cannot be assigned, and what it says would stay; {instead}")
        own = name in self.__dict__ or name in self._modules or hasattr(type(self), name)
        on_model = not own and hasattr(self._modules["module"], name)
        place: Any = self._modules["module"] if on_model else super()
        place.__setattr__(name, value)

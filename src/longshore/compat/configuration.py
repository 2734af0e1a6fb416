"""``engine.config`` for scripts of DeepSpeed: typed settings that are also the mapping that the engine was given."""

from __future__ import annotations

import warnings
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch.distributed as dist
from pydantic import PrivateAttr

from longshore import Config


class FileConfig(Config):
    """A :class:`longshore.Config` that also reads as DeepSpeed's ``engine.config``, a mapping with a file's keys.

    ``config.get("zero_optimization", {}).get("stage")`` is the file's, and ``config.stage`` is the one that the engine
    does. The mapping is read only: settings do not change after ``initialize()``.
    """

    _content: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, config: Config, content: Mapping[str, Any]) -> FileConfig:
        """Return the same settings with the file's content."""
        made = cls.model_construct(**{name: getattr(config, name) for name in Config.model_fields})
        made._content = content
        return made

    def get(self, key: str, default: Any = None) -> Any:
        """Return the file's value for a key at its top level; ``default`` if the file does not have it."""
        return self._content.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __contains__(self, key: object) -> bool:
        return key in self._content

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def keys(self) -> KeysView[str]:
        return self._content.keys()

    def values(self) -> ValuesView[Any]:
        return self._content.values()

    def items(self) -> ItemsView[str, Any]:
        return self._content.items()


def for_evaluation(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's content for an engine that never steps: without keys that matter to steps alone.

    Dotted keys at the top level are left out too. TRL writes some, and DeepSpeed does not read them.
    """
    steps = ("optimizer", "scheduler", "gradient_clipping")
    kept = {key: value for key, value in content.items() if key not in steps and "." not in str(key)}
    zero = kept.get("zero_optimization")
    if isinstance(zero, Mapping):
        kept["zero_optimization"] = _without_states(zero)
    return {**kept, "gradient_clipping": 0}


def _without_states(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``zero_optimization`` for an engine that never steps: its parameters may rest on the host at stage 3."""
    kept = {key: value for key, value in zero.items() if key not in ("offload_optimizer", "cpu_offload")}
    of_parameters = zero.get("offload_param")
    rests = isinstance(of_parameters, Mapping) and of_parameters.get("device") == "cpu"
    if not rests and zero.get("cpu_offload_param") is not True:
        return kept
    if zero.get("stage", 0) == 3:
        return {**kept, "offload_optimizer": {"device": "cpu"}}  # where the parameters are
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            f"zero_optimization.offload_param is for stage 3, and this engine without an optimizer has stage "
            f"{zero.get('stage', 0)}: its parameters stay on the device, as in DeepSpeed; set the stage to 3 to keep "
            "them in host memory",
            stacklevel=4,
        )
    return {key: value for key, value in kept.items() if key not in ("offload_param", "cpu_offload_param")}

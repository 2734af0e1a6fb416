"""Lightning on longshore: ``LongshoreStrategy`` for the Trainer, ``FabricLongshoreStrategy`` for Fabric.

Importing this package also registers the names ``"longshore"``, ``"longshore_stage_1"`` and so on for ``strategy=``.
"""

from longshore.integrations.lightning.fabric import FabricLongshoreStrategy
from longshore.integrations.lightning.names import FabricRegistry, TrainerRegistry
from longshore.integrations.lightning.trainer import LongshoreStrategy

__all__ = ["FabricLongshoreStrategy", "LongshoreStrategy"]

for _registry, _kind in ((TrainerRegistry, LongshoreStrategy), (FabricRegistry, FabricLongshoreStrategy)):
    if "longshore" not in _registry:
        _registry.register("longshore", _kind, "ZeRO-2, optimizer state in host memory")
        for _stage in (1, 2, 3):
            _name, _what = f"longshore_stage_{_stage}", f"ZeRO-{_stage}"
            _registry.register(_name, _kind, _what, stage=_stage, offload_device="none")
            _registry.register(f"{_name}_offload", _kind, f"{_what}, optimizer state in host memory", stage=_stage)

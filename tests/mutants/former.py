"""Breaking what scripts do to parameters that they hold from before ``initialize()``."""

from __future__ import annotations

from mutants.mutant import GATHER, Mutant

_GRADIENTS = GATHER + "::test_gradients_where_a_parameter_is_held_from_before"
_GROUPS = GATHER + "::test_groups_of_parameters_from_before"
_LOADED = GATHER + "::test_whole_tensors_are_loaded_into_shards"

MUTANTS = [
    Mutant(
        "a gradient on the host is not seen at the parameter from before",
        "optim/released.py",
        "        former.grad = record.left\n",
        "        former.grad = record.left = None\n",
        (_GRADIENTS,),
    ),
    Mutant(
        "a gradient that was discarded at the parameter from before counts",
        "optim/released.py",
        "        put_gradient(record, None)\n",
        "        pass\n",
        (_GRADIENTS,),
    ),
    Mutant(
        "a module's zero_grad() misses parameters from before",
        "sharding/fsdp.py",
        "            replaced.grad = None\n",
        "            pass\n",
        (_GRADIENTS,),
    ),
    Mutant(
        "initialize() takes over gradients of parameters from before",
        "optim/parameters.py",
        " or (former is not None and former.grad is not None)",
        "",
        (_GRADIENTS,),
    ),
    Mutant(
        "a group takes what is not in the sharded model",
        "sharding/offload.py",
        "if self.sharded is not None and id(parameter)",
        "if False and id(parameter)",
        (_GROUPS,),
    ),
    Mutant(
        "a group does not know parameters from before",
        "optim/tiled_optimizer.py",
        'group["params"] = list(map(present, group["params"]))',
        'group["params"] = list(group["params"])',
        (_GROUPS,),
    ),
    Mutant(
        "every rank loads the first rank's shard",
        "sharding/fsdp.py",
        "[offset : offset + numel]",
        "[:numel]",
        (_LOADED,),
    ),
    Mutant(
        "loading puts other tensors in the place of shards",
        "sharding/fsdp.py",
        'if metadata.get("assign_to_params_buffers"):',
        "if False:",
        (_LOADED,),
    ),
]

"""Breaking what scripts do to parameters that they hold from before ``initialize()``."""

from __future__ import annotations

from mutants.mutant import GATHER, Mutant

_GRADIENTS = GATHER + "::test_gradients_where_a_parameter_is_held_from_before"
_GROUPS = GATHER + "::test_groups_of_parameters_from_before"
_LOADED = GATHER + "::test_whole_tensors_are_loaded_into_shards"

MUTANTS = [
    Mutant(
        "a gradient on the host is not seen at the parameter from before",
        "put_gradient",
        "former.grad = record.left",
        "former.grad = record.left = None",
        (_GRADIENTS,),
    ),
    Mutant(
        "a gradient that was discarded at the parameter from before counts",
        "gradient_of",
        "put_gradient(record, None)",
        "pass",
        (_GRADIENTS,),
    ),
    Mutant(
        "a module's zero_grad() misses parameters from before",
        "_zero_grad",
        "replaced.grad = None",
        "pass",
        (_GRADIENTS,),
    ),
    Mutant(
        "initialize() takes over gradients of parameters from before",
        "ParameterRecord.has_gradient",
        "return self.parameter.grad is not None or (former is not None and former.grad is not None)",
        "return self.parameter.grad is not None",
        (_GRADIENTS,),
    ),
    Mutant(
        "a group takes what is not in the sharded model",
        "ShardedOffload.check_member",
        "if self.sharded is not None and id(parameter) not in self.sharded.members:",
        "if False and id(parameter) not in self.sharded.members:",
        (_GROUPS,),
    ),
    Mutant(
        "a group does not know parameters from before",
        "TiledOptimizer.add_param_group",
        "group['params'] = list(map(present, group['params']))",
        "group['params'] = list(group['params'])",
        (_GROUPS,),
    ),
    Mutant(
        "every rank loads the first rank's shard",
        "FullyShardedModel._before_loading",
        "mine = layout.part_of(flat(given), self.tp_rank)[offset:offset + numel]",
        "mine = layout.part_of(flat(given), self.tp_rank)[:numel]",
        (_LOADED,),
    ),
    Mutant(
        "loading puts other tensors in the place of shards",
        "FullyShardedModel._before_loading",
        "if metadata.get('assign_to_params_buffers'):",
        "if False:",
        (_LOADED,),
    ),
]

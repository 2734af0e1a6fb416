"""Rows: ``zero_optimization`` and the sections in it."""

from __future__ import annotations

from longshore.engine.config.keys import Key, accepted, each_accepted, honoured, refused
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BOOLEAN,
    DEVICE,
    FRACTION,
    STAGE,
    TEXT,
    Block,
    Integer,
    Items,
    OneOf,
)

_Z = "zero_optimization"
_O = f"{_Z}.offload_optimizer"
_P = f"{_Z}.offload_param"

_GATHERED = (
    "It chooses what stage 3 gathers and when, and no weight depends on it. See wrap_policy in the section longshore."
)
_SAVED = "It is about saving and loading at stage 3, not about training."
_NVME = "DeepSpeed reads it with NVMe only, which longshore refuses."
_COLLECTIVE = "It chooses the collective, not the numbers; longshore uses reduce-scatter and all-gather."
_LAYOUT = "It chooses where gradients lie in memory, not their values."
_SPEED = "It changes how fast bytes are copied, not their values."
_STAGE_3_SIZES = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)

_BUCKET = 'Any size gives the same bits. Default: 500000000, which is also what "auto" means.'

# fmt: off
# One row is one key; the formatter would make ten lines of it.

ZERO: tuple[Key, ...] = (
    honoured(_Z, "stage", STAGE,
             "0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too. Default: 0.",
             "stage"),
    honoured(_Z, "reduce_bucket_size", AT_LEAST_1,
             f"Elements whose gradients are reduced together; at stages 2 and 3 with overlap_comm half of them, so "
             f"that one half fills while the other is on its way. {_BUCKET}", "reduce_bucket_numel",
             absent_when_auto=True),
    honoured(_Z, "allgather_bucket_size", AT_LEAST_1, f"Elements that are gathered together. {_BUCKET}",
             "allgather_bucket_numel", absent_when_auto=True),
    honoured(_Z, "overlap_comm", BOOLEAN,
             "Reduce while backward runs. The weights are the same bits either way. Default: true.",
             "overlap_comm", absent_when_auto=True),
    accepted(_Z, "contiguous_gradients", BOOLEAN, _LAYOUT),
    *each_accepted(_Z, "reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions", BOOLEAN, _COLLECTIVE),
    accepted(_Z, "compute_grad_norm", BOOLEAN, "longshore computes the norm when clipping or your script needs it."),
    refused(_Z, "load_from_fp32_weights", BOOLEAN, (True,), "longshore loads masters as they were saved; leave it out"),
    refused(_Z, "elastic_checkpoint", BOOLEAN, (False,), "it is a checkpoint format of DeepSpeed's; leave it out"),
    refused(_Z, "zenflow", Block({}), (),
            "it steps with stale gradients; leave it out: offload_optimizer with super_offload overlaps without them"),
    accepted(_Z, "sub_group_size", AT_LEAST_0,
             "It sets how much stage 3 steps at a time. See tile_numel in the section longshore."),
    refused(_Z, "ignore_unused_parameters", BOOLEAN, (True,),
            "longshore does not step a parameter without a gradient, and engine.explain() names it; leave this out"),
    accepted(_Z, "legacy_stage1", BOOLEAN, "It chooses between two implementations of stage 1; longshore has one."),
    accepted(_Z, "round_robin_gradients", BOOLEAN, "It sets the order in which ranks copy gradients, not the sum."),
    accepted(_Z, "parameter_alignment", BOOLEAN, _LAYOUT),
    accepted(_Z, "override_module_apply", BOOLEAN, _GATHERED),
    accepted(_Z, "log_trace_cache_warnings", BOOLEAN, "It switches a warning of DeepSpeed's prefetching."),
    accepted(_Z, "enable_sanity_checks", BOOLEAN,
             "Checks change no weight. longshore's are always on, and LONGSHORE_DEBUG=1 adds those across ranks."),
    accepted(_Z, "memory_efficient_linear", BOOLEAN, "It replaces torch's Linear, which needs no replacement here."),
    accepted(_Z, "pipeline_loading_checkpoint", BOOLEAN, _SAVED),
    accepted(_Z, "save_muon_momentum_buffer_in_memory", BOOLEAN, "DeepSpeed reads it for Muon at stage 3 only."),
    *(
        row
        for prefix in ("stage3_", "")
        for row in (
            *each_accepted(_Z, " ".join(f"{prefix}{name}" for name in _STAGE_3_SIZES), AT_LEAST_0, _GATHERED),
            accepted(_Z, f"{prefix}module_granularity_threshold", Integer(), _GATHERED),
            accepted(_Z, f"{prefix}use_all_reduce_for_fetch_params", BOOLEAN, _GATHERED),
            accepted(_Z, f"{prefix}allgather_sequential", BOOLEAN, _GATHERED),
            accepted(_Z, f"{prefix}gather_16bit_weights_on_model_save", BOOLEAN, _SAVED),
        )
    ),
    accepted(_Z, "stage3_gather_fp16_weights_on_model_save", BOOLEAN, _SAVED),
    *each_accepted(f"{_Z}.leaf_module", "classes names name_suffixes", Items(TEXT), _GATHERED),
    refused(_Z, "zero_hpz_partition_size", AT_LEAST_0, (0, 1),
            "longshore shards parameters over all ranks; leave it out"),
    *(
        refused(_Z, name, BOOLEAN, (False,), "quantized communication cannot give the weights of plain torch")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    refused(_Z, "zeropp_loco_param", Block({}), (), "quantized communication cannot give the weights of plain torch"),
    refused(_Z, "mics_shard_size", Integer(-1), (-1,), "longshore shards over all ranks; leave it out"),
    refused(_Z, "mics_hierarchical_params_gather", BOOLEAN, (False,), "longshore shards over all ranks; leave it out"),
    honoured(_Z, "cpu_offload", BOOLEAN, "Old name: true means offload_optimizer with device cpu.",
             renamed=f"{_O}.device", values=((True, "cpu"), (False, None))),
    refused(_Z, "cpu_offload_param", BOOLEAN, (False,),
            "parameters stay on the device (at stage 3, one shard on each rank); leave it out"),
    accepted(_Z, "cpu_offload_use_pin_memory", BOOLEAN, _SPEED),
    honoured("", "allgather_size", AT_LEAST_1, "Old name of zero_optimization.allgather_bucket_size.",
             renamed=f"{_Z}.allgather_bucket_size"),
    accepted("", "disable_allgather", BOOLEAN, "DeepSpeed reads it and does nothing with it."),
)

OFFLOAD: tuple[Key, ...] = (
    honoured(_O, "device", DEVICE, "Where optimizer state is kept and stepped. The weights are the same bits. "
             "Default: none.", "offload_device"),
    accepted(_O, "pin_memory", BOOLEAN, _SPEED),
    accepted(_O, "nvme_path", TEXT, _NVME),
    accepted(_O, "buffer_count", AT_LEAST_0, _NVME),
    *each_accepted(_O, "pipeline_read pipeline_write fast_init", BOOLEAN, _NVME),
    honoured(_O, "ratio", FRACTION, "The share of the optimizer's state that is on the host (DeepSpeed's "
             "Twin-Flow). The rest belongs to the parameters whose gradients come last, and stays on the device and is "
             "stepped there. The weights are the same bits.", "offload_ratio"),
    honoured(_O, "super_offload", BOOLEAN, "Steps on the host while backward runs. true means speculation_memory auto, "
             "unless the section longshore sets it. Clipping and rollback are exact."),
    honoured(_O, "cpuadam_cores_perc", FRACTION, "The share of the CPUs on which host threads run. It is read "
             "with super_offload only, as in DeepSpeed. Default: all of them."),
    refused(_P, "device", OneOf(("none", "cpu", "nvme")), ("none",),
            "parameters stay on the device (at stage 3, one shard on each rank); remove it, or set its device to none"),
    accepted(_P, "nvme_path", TEXT, _NVME),
    *each_accepted(_P, "buffer_count buffer_size max_in_cpu", AT_LEAST_0, _NVME),
    accepted(_P, "pin_memory", BOOLEAN, "It has no effect while the device of offload_param is none."),
)

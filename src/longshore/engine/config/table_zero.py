"""Rows: ``zero_optimization`` and the sections in it."""

from __future__ import annotations

from longshore.engine.config.keys import Key, accepted, honoured, refused
from longshore.engine.config.values import (
    AT_LEAST_0,
    AT_LEAST_1,
    BOOLEAN,
    DEVICE,
    FRACTION,
    STAGE,
    TEXT,
    Block,
    Choice,
    Integer,
    Items,
)

_Z = "zero_optimization"
_O = f"{_Z}.offload_optimizer"
_P = f"{_Z}.offload_param"
_REDUCTION = "tests/engine/test_reduction.py::"
_OLD_NAMES = "tests/engine/config/test_translate.py::test_old_names"

_GATHERED = "What of stage 3 is gathered when; no weight depends on it. See wrap_policy in the section longshore."
_SAVED = "Of saving and loading at stage 3, not of training."
_NVME = "Read with NVMe only, which is refused."
_COLLECTIVE = "Which collective carries the same numbers; longshore reduce-scatters and all-gathers."
_LAYOUT = "Where gradients lie in memory, not what they are."

_BUCKET = 'The weights are the same bits for any. Left out it is 500000000, which is also what "auto" means.'

# fmt: off
# One row is one key; the formatter would make ten lines of it.

ZERO: tuple[Key, ...] = (
    honoured(_Z, "stage", STAGE,
             "0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too. Left out it is 0.",
             f"{_REDUCTION}test_stages", "stage"),
    honoured(_Z, "reduce_bucket_size", AT_LEAST_1,
             f"Elements whose gradients are reduced together; at stages 2 and 3 with overlap_comm half of them, so "
             f"that one half fills while the other is on its way. {_BUCKET}",
             f"{_REDUCTION}test_bucket_sizes", "reduce_bucket_numel", absent_when_auto=True),
    honoured(_Z, "allgather_bucket_size", AT_LEAST_1, f"Elements that are gathered together. {_BUCKET}",
             f"{_REDUCTION}test_bucket_sizes", "allgather_bucket_numel", absent_when_auto=True),
    honoured(_Z, "overlap_comm", BOOLEAN,
             "Reduce while backward runs. The weights are the same bits either way. Left out it is true.",
             f"{_REDUCTION}test_overlap_comm", "overlap_comm", absent_when_auto=True),
    accepted(_Z, "contiguous_gradients", BOOLEAN, _LAYOUT),
    accepted(_Z, "reduce_scatter", BOOLEAN, _COLLECTIVE),
    accepted(_Z, "use_multi_rank_bucket_allreduce", BOOLEAN, _COLLECTIVE),
    accepted(_Z, "allgather_partitions", BOOLEAN, _COLLECTIVE),
    accepted(_Z, "compute_grad_norm", BOOLEAN, "The norm is computed where clipping or you need it."),
    refused(_Z, "load_from_fp32_weights", BOOLEAN, (True,), "masters are read as they were saved; leave it out"),
    refused(_Z, "elastic_checkpoint", BOOLEAN, (False,), "it is a checkpoint format of DeepSpeed's; leave it out"),
    refused(_Z, "zenflow", Block({}), (),
            "it steps with stale gradients; leave it out, offload_optimizer overlaps without that"),
    accepted(_Z, "sub_group_size", AT_LEAST_0,
             "How much is stepped at a time at stage 3. See tile_numel in the section longshore."),
    refused(_Z, "ignore_unused_parameters", BOOLEAN, (True,),
            "a parameter without a gradient is left as it is; engine.explain() names it. Leave this out"),
    accepted(_Z, "legacy_stage1", BOOLEAN, "Which of two programs does stage 1; longshore has one."),
    accepted(_Z, "round_robin_gradients", BOOLEAN, "In which order ranks copy the same gradients."),
    accepted(_Z, "parameter_alignment", BOOLEAN, _LAYOUT),
    accepted(_Z, "override_module_apply", BOOLEAN, _GATHERED),
    accepted(_Z, "log_trace_cache_warnings", BOOLEAN, "A warning of DeepSpeed's prefetching."),
    accepted(_Z, "enable_sanity_checks", BOOLEAN,
             "Checks change no weight; longshore's are always on, LONGSHORE_DEBUG=1 adds those across ranks."),
    accepted(_Z, "memory_efficient_linear", BOOLEAN, "Replaces a Linear at stage 3; torch's own is as good now."),
    accepted(_Z, "pipeline_loading_checkpoint", BOOLEAN, _SAVED),
    accepted(_Z, "save_muon_momentum_buffer_in_memory", BOOLEAN, "Read for Muon at stage 3 only."),
    *(
        accepted(_Z, f"{prefix}{name}", kind, _SAVED if name.startswith("gather_") else _GATHERED)
        for name, kind in (
            ("prefetch_bucket_size", AT_LEAST_0),
            ("param_persistence_threshold", AT_LEAST_0),
            ("model_persistence_threshold", AT_LEAST_0),
            ("max_live_parameters", AT_LEAST_0),
            ("max_reuse_distance", AT_LEAST_0),
            ("gather_16bit_weights_on_model_save", BOOLEAN),
            ("module_granularity_threshold", Integer()),
            ("use_all_reduce_for_fetch_params", BOOLEAN),
            ("allgather_sequential", BOOLEAN),
        )
        for prefix in ("stage3_", "")
    ),
    accepted(_Z, "stage3_gather_fp16_weights_on_model_save", BOOLEAN, _SAVED),
    *(accepted(f"{_Z}.leaf_module", name, Items(TEXT), _GATHERED) for name in ("classes", "names", "name_suffixes")),
    refused(_Z, "zero_hpz_partition_size", AT_LEAST_0, (0, 1),
            "parameters have one partition, over all ranks; leave it out"),
    *(
        refused(_Z, name, BOOLEAN, (False,), "quantized communication cannot give the weights of plain torch")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    refused(_Z, "zeropp_loco_param", Block({}), (), "quantized communication cannot give the weights of plain torch"),
    refused(_Z, "mics_shard_size", Integer(-1), (-1,), "shards span all ranks; leave it out"),
    refused(_Z, "mics_hierarchical_params_gather", BOOLEAN, (False,), "shards span all ranks; leave it out"),
    honoured(_Z, "cpu_offload", BOOLEAN, "An old name: true is offload_optimizer with device cpu.", _OLD_NAMES,
             renamed=f"{_O}.device", values=((True, "cpu"), (False, None))),
    refused(_Z, "cpu_offload_param", BOOLEAN, (False,),
            "parameters stay on the device, at stage 3 a shard on each rank; leave it out"),
    accepted(_Z, "cpu_offload_use_pin_memory", BOOLEAN, "How fast bytes move, not what they are."),
    honoured("", "allgather_size", AT_LEAST_1, "An old name of zero_optimization.allgather_bucket_size.", _OLD_NAMES,
             renamed=f"{_Z}.allgather_bucket_size"),
    accepted("", "disable_allgather", BOOLEAN, "DeepSpeed reads it and does nothing with it."),
)

OFFLOAD: tuple[Key, ...] = (
    honoured(_O, "device", DEVICE, "Where optimizer state lives and is stepped. The weights are the same bits. "
             "Left out it is none.", f"{_REDUCTION}test_offload", "offload_device"),
    accepted(_O, "pin_memory", BOOLEAN, "How fast bytes move, not what they are."),
    accepted(_O, "nvme_path", TEXT, _NVME),
    accepted(_O, "buffer_count", AT_LEAST_0, _NVME),
    accepted(_O, "pipeline_read", BOOLEAN, _NVME),
    accepted(_O, "pipeline_write", BOOLEAN, _NVME),
    accepted(_O, "fast_init", BOOLEAN, _NVME),
    honoured(_O, "ratio", FRACTION, "The share of the optimizer's state that is on the host. The rest, of which "
             "gradients come last, stays on the device and is stepped there; DeepSpeed calls it Twin-Flow. The weights "
             "are the same bits.",
             "tests/engine/test_split.py::test_ratio", "offload_ratio"),
    honoured(_O, "super_offload", BOOLEAN, "Steps on the host while backward runs: true is speculation_memory auto of "
             "the section longshore, where that is not given. Clipping and rollback are exact.",
             "tests/engine/test_speculation.py::test_super_offload"),
    honoured(_O, "cpuadam_cores_perc", FRACTION, "With super_offload (DeepSpeed reads it there only): the share of the "
             "CPUs on which host threads run. Left out it is all of them.",
             "tests/engine/test_speculation.py::test_the_share_of_the_cpus"),
    refused(_P, "device", Choice(("none", "cpu", "nvme")), ("none",),
            "parameters stay on the device, at stage 3 a shard on each rank; remove it, or set its device to none"),
    accepted(_P, "nvme_path", TEXT, _NVME),
    accepted(_P, "buffer_count", AT_LEAST_0, _NVME),
    accepted(_P, "buffer_size", AT_LEAST_0, _NVME),
    accepted(_P, "max_in_cpu", AT_LEAST_0, _NVME),
    accepted(_P, "pin_memory", BOOLEAN, "Of offload_param, whose device is none."),
)

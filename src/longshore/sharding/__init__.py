"""Training of one model by several ranks: buckets, rounds of reductions, and the ZeRO stages."""

from longshore.sharding.offload import ShardedOffload
from longshore.sharding.reduction import ReductionSettings
from longshore.sharding.store import ShardedStore, sharded_store

__all__ = ["ReductionSettings", "ShardedOffload", "ShardedStore", "sharded_store"]

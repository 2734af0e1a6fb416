"""Buckets, rounds and strategies: how several ranks train one model."""

from longshore.sharding.gathered import gather
from longshore.sharding.placement import STRATEGIES, ShardedPlacement
from longshore.sharding.store import ShardedStore
from longshore.sharding.window import ReductionSettings

__all__ = ["STRATEGIES", "ReductionSettings", "ShardedPlacement", "ShardedStore", "gather"]

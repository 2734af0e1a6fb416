"""Names that the core offers its doors and tools beside those that are public; they import nothing else of it.

Doors (``compat``, ``integrations``) have others' words for our calls; tools (``plan``, ``report``, ``tracing``,
``cli``) read and never step. A name here binds the core to its present form: scripts/shape.json holds their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longshore.lazily import lazily

if TYPE_CHECKING:
    from longshore import engine as engine
    from longshore import machine as machine
    from longshore.accelerator import DeviceClock as DeviceClock
    from longshore.accelerator import Mark as Mark
    from longshore.accelerator import accelerator_type as accelerator_type
    from longshore.byte_sizes import format_byte_size as format_byte_size
    from longshore.byte_sizes import parse_byte_size as parse_byte_size
    from longshore.byte_sizes import parse_memory_budget as parse_memory_budget
    from longshore.byte_sizes import parse_scaled as parse_scaled
    from longshore.checkpoint.boxes import SavedBoxes as SavedBoxes
    from longshore.checkpoint.export import export as export
    from longshore.checkpoint.export import whole_state_dict as whole_state_dict
    from longshore.checkpoint.files import SAVED_DTYPES as SAVED_DTYPES
    from longshore.checkpoint.files import checked as checked
    from longshore.checkpoint.files import checked_entry as checked_entry
    from longshore.checkpoint.files import replace_file as replace_file
    from longshore.checkpoint.folder import LATEST as LATEST
    from longshore.checkpoint.folder import WholeCheckpoint as WholeCheckpoint
    from longshore.checkpoint.folder import check_not_deepspeeds as check_not_deepspeeds
    from longshore.checkpoint.folder import check_tag as check_tag
    from longshore.checkpoint.folder import is_checkpoint as is_checkpoint
    from longshore.checkpoint.folder import is_deepspeed as is_deepspeed
    from longshore.checkpoint.folder import read_latest as read_latest
    from longshore.checkpoint.folder import remove_all as remove_all
    from longshore.checkpoint.inspection import CheckpointSummary as CheckpointSummary
    from longshore.checkpoint.inspection import Inspection as Inspection
    from longshore.checkpoint.inspection import inspect as inspect
    from longshore.checkpoint.model_state import MODEL as MODEL
    from longshore.checkpoint.optimizer_state import OPTIMIZER as OPTIMIZER
    from longshore.checkpoint.optimizer_state import array_name as array_name
    from longshore.checkpoint.rank_group import RankGroup as RankGroup
    from longshore.checkpoint.saving import Content as Content
    from longshore.checkpoint.saving import Target as Target
    from longshore.checkpoint.saving import write as write
    from longshore.checkpoint.training_state import CLIENT_STATE as CLIENT_STATE
    from longshore.checkpoint.values import Values as Values
    from longshore.checkpoint.values import encode as encode
    from longshore.engine import precision as precision
    from longshore.engine import schedules as schedules
    from longshore.engine.access import comes_in_shards as comes_in_shards
    from longshore.engine.activation_checkpointing import checkpoint as checkpoint
    from longshore.engine.activation_checkpointing import install as install
    from longshore.engine.activation_checkpointing import is_configured as is_configured
    from longshore.engine.activation_checkpointing import reset as reset
    from longshore.engine.binding import Binding as Binding
    from longshore.engine.checkpoints import random_states as random_states
    from longshore.engine.checkpoints import restore_random_states as restore_random_states
    from longshore.engine.config.base import NOTHING as NOTHING
    from longshore.engine.config.base import FrozenModel as FrozenModel
    from longshore.engine.config.base import NamedModel as NamedModel
    from longshore.engine.config.base import alias_of as alias_of
    from longshore.engine.config.base import candidates as candidates
    from longshore.engine.config.base import edits as edits
    from longshore.engine.config.base import json_text as json_text
    from longshore.engine.config.base import quoted as quoted
    from longshore.engine.config.base import suggestion as suggestion
    from longshore.engine.config.model import BETWEEN_RANKS as BETWEEN_RANKS
    from longshore.engine.config.model import MONITORS as MONITORS
    from longshore.engine.config.model import NO_OPTIMIZER as NO_OPTIMIZER
    from longshore.engine.config.model import OF_EACH_RANK as OF_EACH_RANK
    from longshore.engine.config.model import OURS as OURS
    from longshore.engine.config.model import BatchNumbers as BatchNumbers
    from longshore.engine.config.model import Names as Names
    from longshore.engine.config.model import check_world_size as check_world_size
    from longshore.engine.config.model import checked_config as checked_config
    from longshore.engine.config.model import order_of_sums as order_of_sums
    from longshore.engine.config.model import resolve as resolve
    from longshore.engine.config.optimizers import ENCODABLE as ENCODABLE
    from longshore.engine.config.optimizers import OPTIMIZER_CONFIGS as OPTIMIZER_CONFIGS
    from longshore.engine.config.optimizers import OPTIMIZER_TYPE as OPTIMIZER_TYPE
    from longshore.engine.config.optimizers import MuonConfig as MuonConfig
    from longshore.engine.config.optimizers import check_encodable as check_encodable
    from longshore.engine.config.optimizers import check_states_seed as check_states_seed
    from longshore.engine.config.optimizers import optimizers_with as optimizers_with
    from longshore.engine.config.schedulers import SCHEDULER_CONFIGS as SCHEDULER_CONFIGS
    from longshore.engine.config.schedulers import SCHEDULER_TYPE as SCHEDULER_TYPE
    from longshore.engine.config.values import AT_LEAST_0 as AT_LEAST_0
    from longshore.engine.config.values import AT_LEAST_1 as AT_LEAST_1
    from longshore.engine.config.values import BOOLEAN as BOOLEAN
    from longshore.engine.config.values import DTYPE as DTYPE
    from longshore.engine.config.values import FRACTION as FRACTION
    from longshore.engine.config.values import LARGEST_SCALE as LARGEST_SCALE
    from longshore.engine.config.values import LOW_DTYPE as LOW_DTYPE
    from longshore.engine.config.values import NOT_NEGATIVE as NOT_NEGATIVE
    from longshore.engine.config.values import TEXT as TEXT
    from longshore.engine.config.values import Either as Either
    from longshore.engine.config.values import Exactly as Exactly
    from longshore.engine.config.values import Infinite as Infinite
    from longshore.engine.config.values import Items as Items
    from longshore.engine.config.values import Kind as Kind
    from longshore.engine.config.values import Number as Number
    from longshore.engine.config.values import OneOf as OneOf
    from longshore.engine.config.values import WrongValueError as WrongValueError
    from longshore.engine.config.values import kind_in as kind_in
    from longshore.engine.creation import Unplaced as Unplaced
    from longshore.engine.creation import unplaced as unplaced
    from longshore.engine.data import TrainingLoader as TrainingLoader
    from longshore.engine.data import make_loader as make_loader
    from longshore.engine.engine import Answer as Answer
    from longshore.engine.engine import Engine as Engine
    from longshore.engine.model_sharding import is_fully_sharded as is_fully_sharded
    from longshore.engine.model_sharding import named_leaves as named_leaves
    from longshore.engine.model_sharding import rest_device as rest_device
    from longshore.engine.model_sharding import shard_model as shard_model
    from longshore.engine.model_sharding import stream_model as stream_model
    from longshore.engine.optimizers import muon_groups_of as muon_groups_of
    from longshore.engine.precision import DTYPES as DTYPES
    from longshore.engine.ranks import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
    from longshore.engine.ranks import Ranks as Ranks
    from longshore.engine.ranks import detect as detect
    from longshore.engine.ranks import expected_world_size as expected_world_size
    from longshore.engine.ranks import join as join
    from longshore.engine.ranks import with_port as with_port
    from longshore.engine.schedules import change_over as change_over
    from longshore.engine.schedules import make_schedule as make_schedule
    from longshore.engine.setup import check_model as check_model
    from longshore.engine.setup import data_ranks as data_ranks
    from longshore.engine.setup import make as make
    from longshore.engine.weights import first_weights as first_weights
    from longshore.engine.wording import did_you_mean as did_you_mean
    from longshore.engine.wording import shown as shown
    from longshore.kernels import SUPPORTED_DTYPES as SUPPORTED_DTYPES
    from longshore.kernels import Buffer as Buffer
    from longshore.kernels import HostKernels as HostKernels
    from longshore.kernels import TileSegment as TileSegment
    from longshore.kernels import element_bytes as element_bytes
    from longshore.kernels import newton_schulz as newton_schulz
    from longshore.layout.boxes import Box as Box
    from longshore.layout.formats import StateFormat as StateFormat
    from longshore.layout.formats import parse_state_format as parse_state_format
    from longshore.layout.layout import Bucket as Bucket
    from longshore.layout.layout import Layout as Layout
    from longshore.layout.layout import division_of as division_of
    from longshore.layout.memory import HomeLayout as HomeLayout
    from longshore.layout.memory import Spares as Spares
    from longshore.layout.tiles import Home as Home
    from longshore.layout.tiles import MatrixLayout as MatrixLayout
    from longshore.layout.tiles import Spec as Spec
    from longshore.layout.tiles import TileRun as TileRun
    from longshore.layout.tiles import default_tile_numel as default_tile_numel
    from longshore.layout.tiles import runs_by_home as runs_by_home
    from longshore.machine import available_bytes as available_bytes
    from longshore.machine import start as start
    from longshore.machine import text_of as text_of
    from longshore.machine import usable_cpus as usable_cpus
    from longshore.machine.binding import RankBinding as RankBinding
    from longshore.machine.binding import RankDevice as RankDevice
    from longshore.machine.binding import binding_wanted as binding_wanted
    from longshore.machine.binding import plan_ranks as plan_ranks
    from longshore.machine.binding import unbound as unbound
    from longshore.optim.dtensor import counterparts as counterparts
    from longshore.optim.dtensor import held_part as held_part
    from longshore.optim.dtensor import is_sharded as is_sharded
    from longshore.optim.dtensor import present as present
    from longshore.optim.other_optimizers import IN_PLACE_OF as IN_PLACE_OF
    from longshore.optim.other_optimizers import check_no_own_step as check_no_own_step
    from longshore.optim.other_optimizers import is_accelerates_mapping as is_accelerates_mapping
    from longshore.optim.other_optimizers import stands_for as stands_for
    from longshore.optim.other_optimizers import steps_as as steps_as
    from longshore.optim.parameters import is_lazy as is_lazy
    from longshore.optim.rules.adam import AdamRule as AdamRule
    from longshore.optim.rules.muon import MuonFamily as MuonFamily
    from longshore.optim.rules.muon import MuonRule as MuonRule
    from longshore.optim.tiled_optimizer import OPTIMIZERS as OPTIMIZERS
    from longshore.optim.tiled_optimizer import TiledOptimizer as TiledOptimizer
    from longshore.optim.tiled_optimizer import core_of as core_of
    from longshore.ranks.presence import presence as presence
    from longshore.ranks.presence import words as words
    from longshore.ranks.twin_groups import twin_of as twin_of
    from longshore.ranks.waiting import finish as finish
    from longshore.ranks.waiting import gather_objects as gather_objects
    from longshore.stage3.fsdp import FullyShardedModel as FullyShardedModel
    from longshore.stage3.fsdp import sharded_of as sharded_of
    from longshore.store.exchange import batched as batched
    from longshore.store.exchange import owners_of as owners_of
    from longshore.store.ownership import DEVICE_GATHER_NUMEL as DEVICE_GATHER_NUMEL
    from longshore.store.ownership import GATHER_NUMEL as GATHER_NUMEL
    from longshore.store.ownership import slices as slices
    from longshore.store.rounds import DEVICE_SLICE_NUMEL as DEVICE_SLICE_NUMEL
    from longshore.store.rounds import SLICE_NUMEL as SLICE_NUMEL
    from longshore.store.rounds import ReductionSettings as ReductionSettings
    from longshore.store.rounds import add_up as add_up
    from longshore.streaming import streams_of as streams_of
    from longshore.tiles import MASTER as MASTER
    from longshore.tiles import Ranges as Ranges
    from longshore.tiles import Recorder as Recorder
    from longshore.tiles import events as events
    from longshore.tiles.events import ADD as ADD
    from longshore.tiles.events import ARRIVE as ARRIVE
    from longshore.tiles.events import COPY_TO_HOST as COPY_TO_HOST
    from longshore.tiles.events import DISCARD as DISCARD
    from longshore.tiles.events import DROPPED as DROPPED
    from longshore.tiles.events import FETCH as FETCH
    from longshore.tiles.events import KEPT as KEPT
    from longshore.tiles.events import MEASURE as MEASURE
    from longshore.tiles.events import NORM as NORM
    from longshore.tiles.events import PUBLISH as PUBLISH
    from longshore.tiles.events import REDONE as REDONE
    from longshore.tiles.events import SCHEDULE as SCHEDULE
    from longshore.tiles.events import STEP_AHEAD as STEP_AHEAD
    from longshore.tiles.events import STEP_IN_PLACE as STEP_IN_PLACE
    from longshore.tiles.events import TRANSFORM as TRANSFORM
    from longshore.tiles.events import WAIT as WAIT
    from longshore.tiles.events import Move as Move
    from longshore.tiles.events import Row as Row
    from longshore.tiles.events import Track as Track
    from longshore.tiles.events import Which as Which
    from longshore.tiles.events import commit_moves as commit_moves
    from longshore.tiles.matrix_exchange import MATRICES_UNDER_WAY as MATRICES_UNDER_WAY
    from longshore.tiles.matrix_exchange import Matrix as Matrix
    from longshore.tiles.matrix_exchange import reserved_bytes as reserved_bytes
    from longshore.tiles.memory import allocate_zeros as allocate_zeros
    from longshore.tiles.speculation import speculation_budget as speculation_budget
    from longshore.torch_versions import require as require
    from longshore.transfer import Copy as Copy
    from longshore.transfer import FinishedCopy as FinishedCopy
    from longshore.units import WrapPolicy as WrapPolicy
    from longshore.units import module_that_cannot as module_that_cannot
    from longshore.units import units_of as units_of
    from longshore.units import units_with_leaves as units_with_leaves

HOMES = {
    "longshore": "engine machine",
    "longshore.accelerator": "DeviceClock Mark accelerator_type",
    "longshore.byte_sizes": "format_byte_size parse_byte_size parse_memory_budget parse_scaled",
    "longshore.checkpoint.boxes": "SavedBoxes",
    "longshore.checkpoint.export": "export whole_state_dict",
    "longshore.checkpoint.files": "SAVED_DTYPES checked checked_entry replace_file",
    "longshore.checkpoint.folder": "LATEST WholeCheckpoint check_not_deepspeeds check_tag is_checkpoint is_deepspeed "
    "read_latest remove_all",
    "longshore.checkpoint.inspection": "CheckpointSummary Inspection inspect",
    "longshore.checkpoint.model_state": "MODEL",
    "longshore.checkpoint.optimizer_state": "OPTIMIZER array_name",
    "longshore.checkpoint.rank_group": "RankGroup",
    "longshore.checkpoint.saving": "Content Target write",
    "longshore.checkpoint.training_state": "CLIENT_STATE",
    "longshore.checkpoint.values": "Values encode",
    "longshore.engine": "precision schedules",
    "longshore.engine.access": "comes_in_shards",
    "longshore.engine.activation_checkpointing": "checkpoint install is_configured reset",
    "longshore.engine.binding": "Binding",
    "longshore.engine.checkpoints": "random_states restore_random_states",
    "longshore.engine.config.base": "FrozenModel NOTHING NamedModel alias_of candidates edits json_text quoted "
    "suggestion",
    "longshore.engine.config.model": "BETWEEN_RANKS BatchNumbers MONITORS NO_OPTIMIZER Names OF_EACH_RANK OURS "
    "check_world_size checked_config order_of_sums resolve",
    "longshore.engine.config.optimizers": "ENCODABLE MuonConfig OPTIMIZER_CONFIGS OPTIMIZER_TYPE check_encodable "
    "check_states_seed optimizers_with",
    "longshore.engine.config.schedulers": "SCHEDULER_CONFIGS SCHEDULER_TYPE",
    "longshore.engine.config.values": "AT_LEAST_0 AT_LEAST_1 BOOLEAN DTYPE Either Exactly FRACTION Infinite Items "
    "Kind LARGEST_SCALE LOW_DTYPE NOT_NEGATIVE Number OneOf TEXT WrongValueError kind_in",
    "longshore.engine.creation": "Unplaced unplaced",
    "longshore.engine.data": "TrainingLoader make_loader",
    "longshore.engine.engine": "Answer Engine",
    "longshore.engine.model_sharding": "is_fully_sharded named_leaves rest_device shard_model stream_model",
    "longshore.engine.optimizers": "muon_groups_of",
    "longshore.engine.precision": "DTYPES",
    "longshore.engine.ranks": "DEFAULT_TIMEOUT Ranks detect expected_world_size join with_port",
    "longshore.engine.schedules": "change_over make_schedule",
    "longshore.engine.setup": "check_model data_ranks make",
    "longshore.engine.weights": "first_weights",
    "longshore.engine.wording": "did_you_mean shown",
    "longshore.kernels": "Buffer HostKernels SUPPORTED_DTYPES TileSegment element_bytes newton_schulz",
    "longshore.layout.boxes": "Box",
    "longshore.layout.formats": "StateFormat parse_state_format",
    "longshore.layout.layout": "Bucket Layout division_of",
    "longshore.layout.memory": "HomeLayout Spares",
    "longshore.layout.tiles": "Home MatrixLayout Spec TileRun default_tile_numel runs_by_home",
    "longshore.machine": "available_bytes start text_of usable_cpus",
    "longshore.machine.binding": "RankBinding RankDevice binding_wanted plan_ranks unbound",
    "longshore.optim.other_optimizers": "IN_PLACE_OF check_no_own_step is_accelerates_mapping stands_for steps_as",
    "longshore.optim.parameters": "is_lazy",
    "longshore.optim.rules.adam": "AdamRule",
    "longshore.optim.rules.muon": "MuonFamily MuonRule",
    "longshore.optim.dtensor": "counterparts held_part is_sharded present",
    "longshore.optim.tiled_optimizer": "OPTIMIZERS TiledOptimizer core_of",
    "longshore.ranks.presence": "presence words",
    "longshore.ranks.twin_groups": "twin_of",
    "longshore.ranks.waiting": "finish gather_objects",
    "longshore.stage3.fsdp": "FullyShardedModel sharded_of",
    "longshore.store.exchange": "batched owners_of",
    "longshore.store.ownership": "DEVICE_GATHER_NUMEL GATHER_NUMEL slices",
    "longshore.store.rounds": "DEVICE_SLICE_NUMEL ReductionSettings SLICE_NUMEL add_up",
    "longshore.streaming": "streams_of",
    "longshore.tiles": "MASTER Ranges Recorder events",
    "longshore.tiles.events": "ADD ARRIVE COPY_TO_HOST DISCARD DROPPED FETCH KEPT MEASURE Move NORM PUBLISH REDONE "
    "Row SCHEDULE STEP_AHEAD STEP_IN_PLACE TRANSFORM Track WAIT Which commit_moves",
    "longshore.tiles.matrix_exchange": "MATRICES_UNDER_WAY Matrix reserved_bytes",
    "longshore.tiles.memory": "allocate_zeros",
    "longshore.tiles.speculation": "speculation_budget",
    "longshore.torch_versions": "require",
    "longshore.transfer": "Copy FinishedCopy",
    "longshore.units": "WrapPolicy module_that_cannot units_of units_with_leaves",
}

if not TYPE_CHECKING:
    __getattr__ = lazily(globals(), HOMES)

"""Muon in a plan: which parameters are matrices, and in which batches they are made orthogonal.

The engine's own functions divide the parameters, fill the batches and choose the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from longshore.plan.job import Job, PlannedModel, Use
from longshore.plan.machine import PeakCompute, PlanMachine
from longshore.seam import (
    MATRICES_UNDER_WAY,
    Matrix,
    MuonConfig,
    MuonFamily,
    MuonRule,
    batched,
    muon_groups_of,
    owners_of,
    reserved_bytes,
)

MATRIX_ARRAYS = 2
"""Float32 arrays of a matrix: the master weights and the momentum."""
_SENT_BYTES = 2
"""Bytes of an element on its way to where its matrix is transformed, and back: bfloat16."""


class MatrixBatch(NamedTuple):
    """Matrices that are transformed together.

    Attributes:
        matrices: parameters by their index among the trainable ones.
        numel: elements of them on this rank.
        owners: the rank that transforms each of them; empty: this rank has all of them, and transforms them.
        part_numel: most elements that one rank sends to another.
    """

    matrices: tuple[Matrix, ...]
    numel: int
    owners: tuple[int, ...] = ()
    part_numel: int = 0

    @property
    def operations(self) -> int:
        """Operations of the rank that has the most to transform."""
        sums: dict[int, int] = {}
        for place, matrix in enumerate(self.matrices):
            owner = self.owners[place] if self.owners else 0
            sums[owner] = sums.get(owner, 0) + operations_of(matrix)
        return max(sums.values(), default=0)


def operations_of(matrix: Matrix) -> int:
    """Return the operations to transform the matrices of a parameter."""
    assert isinstance(matrix.rule, MuonRule)
    steps, layout = matrix.rule.ns_steps, matrix.layout
    return sum(newton_schulz_operations(*layout.shape_of(block), steps) for block in layout.blocks)


def newton_schulz_operations(rows: int, columns: int, steps: int) -> int:
    """Return the operations of :func:`longshore.kernels.newton_schulz` in its products, two for each multiplication."""
    short, long = sorted((rows, columns))
    # The Gram matrix, its square, and the product of their polynomial with the matrix.
    return steps * (4 * short * short * long + 2 * short**3)


# -- which parameters are matrices --------------------------------------------


def divided(model: PlannedModel, job: Job) -> PlannedModel:
    """Return the model with the matrices that the job's optimizer makes orthogonal, and the groups of that optimizer.

    Raises:
        ValueError: a parameter looks as if it held several matrices, and the optimizer's options do not say how it
            is divided.
    """
    config = job.optimizer_config
    if not isinstance(config, MuonConfig) or any(each.matrices for each in model.parameters):
        return model
    module = _Named(model) if model.module is None else model.module
    own = dict(module.named_parameters())
    groups = muon_groups_of(module, [{"params": [(each.name, own[each.name]) for each in model.trainable]}], config)
    family = MuonFamily()
    found = {
        name: (number, family.of(group).matrix_layout(group, tuple(parameter.shape)))
        for number, group in enumerate(groups)
        for name, parameter in group["params"]
    }
    parameters = []
    for each in model.parameters:
        group, matrices = found.get(each.name, (0, None))
        parameters.append(replace(each, group=group, matrices=matrices))
    return replace(model, parameters=tuple(parameters))


class _Named(nn.Module):
    """A model on the meta device, of whose modules only the names of parameters tell."""

    def __init__(self, model: PlannedModel) -> None:
        super().__init__()
        self._outer: list[nn.Parameter] = []
        for each in model.parameters:
            *path, last = each.name.split(".")
            module: nn.Module = self
            for name in path:
                if name not in dict(module.named_children()):
                    module.add_module(name, nn.Module())
                module = module.get_submodule(name)
            parameter = nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="meta"), requires_grad=False)
            module.register_parameter(last, parameter)
            if each.use in (Use.LOOKED_UP, Use.HEAD):
                self._outer.append(parameter)

    def get_output_embeddings(self) -> nn.Module:
        """Return a module of the embeddings and the head, for which Muon asks models of transformers."""
        return nn.ParameterList(self._outer)


def notes_of(model: PlannedModel, job: Job, machine: PlanMachine, streams: bool) -> Iterator[str]:
    """Yield the notes on the plan of a divided model; ``streams``: whether some choices do."""
    if not isinstance(job.optimizer_config, MuonConfig):
        return
    muon = [each.numel for each in model.trainable if each.matrices is not None]
    adamw = sum(each.numel for each in model.trainable if each.matrices is None)
    yield f"Muon steps {sum(muon):,} parameters in {len(muon)} tensors, and AdamW the other {adamw:,}"
    if machine.transform_flops is None:
        yield "times leave out Newton-Schulz, whose speed on this machine is not known"
        return
    if isinstance(machine.compute, PeakCompute):
        yield "Newton-Schulz reaches the speed of other matrix products"
    if streams and machine.ranks == 1:
        yield "streamed on one rank, Newton-Schulz runs on the host, and times leave it out: its speed is not known"


# -- where and when they are transformed --------------------------------------


def matrices_of(model: PlannedModel, job: Job) -> dict[int, Matrix]:
    """Return the matrices of a divided model, by their index among the trainable parameters, in the optimizer's
    order."""
    config = job.optimizer_config
    if not isinstance(config, MuonConfig):
        return {}
    rule = MuonRule(**config.options())
    trainable = model.trainable
    return {
        index: Matrix(index, matrices, rule)
        for index in laid_out_order(model)
        if (matrices := trainable[index].matrices) is not None
    }


def laid_out_order(model: PlannedModel) -> list[int]:
    """Return the indices of the trainable parameters in the order of the optimizer's groups."""
    return sorted(range(len(model.trainable)), key=lambda index: model.trainable[index].group)


def batches_of(
    matrices: Mapping[int, Matrix], here: Mapping[int, int], largest: Mapping[int, int], ranks: int
) -> Iterator[MatrixBatch]:
    """Yield the batches of one rank, in their order.

    Args:
        matrices: as :func:`matrices_of` returns them.
        here: elements of each matrix on this rank.
        largest: elements of the largest part of each matrix that one rank has.
        ranks: the number of ranks.
    """
    shared = [matrix for index, matrix in matrices.items() if largest[index] < matrix.numel]
    for batch in batched(shared, ranks):
        # A rank beyond their number gets none of them.
        owners = owners_of(batch, min(ranks, len(batch)))
        sent = [0] * ranks
        for matrix, owner in zip(batch, owners, strict=True):
            sent[owner] += largest[matrix.parameter]
        numel = sum(here.get(matrix.parameter, 0) for matrix in batch)
        yield MatrixBatch(tuple(batch), numel, tuple(owners), max(sent))
    for index, matrix in matrices.items():
        if largest[index] == matrix.numel and here.get(index, 0):
            yield MatrixBatch((matrix,), matrix.numel)


def staging_bytes(batches: Sequence[MatrixBatch]) -> int:
    """Return the bytes of a store's memory for the batches under way."""
    return MATRICES_UNDER_WAY * _SENT_BYTES * max((batch.numel for batch in batches), default=0)


def transforming_bytes(batches: Sequence[MatrixBatch], ranks: int, rank: int) -> int:
    """Estimate the bytes that transformations take where the parameters compute: workspace, matrices and parts under
    way."""
    matrices = [matrix for batch in batches for matrix in batch.matrices]
    if not matrices:
        return 0
    owned, parts = 0, 0
    for batch in batches:
        own = (matrix for matrix, owner in zip(batch.matrices, batch.owners, strict=False) if owner == rank)
        owned = max(owned, _SENT_BYTES * sum(matrix.numel for matrix in own))
        parts = max(parts, _SENT_BYTES * ranks * batch.part_numel)
    workspace = max(matrix.workspace_bytes for matrix in matrices)
    # What is sent and what is received have memory of their own.
    return max(reserved_bytes(matrices), MATRICES_UNDER_WAY * owned + 2 * parts + workspace)

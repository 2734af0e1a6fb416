"""``deepspeed.utils.zero_to_fp32``: whole float32 weights of a checkpoint, longshore's or DeepSpeed's."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from longshore.byte_sizes import parse_byte_size


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """A state dict of whole float32 weights (masters) on the CPU; tied ones are one tensor under all their names.

    Args:
        checkpoint_dir: the folder that was given to ``save_checkpoint``.
        tag: None: the latest.
        exclude_frozen_parameters: leave frozen parameters out.
        lazy_mode: refused; ``convert_zero_checkpoint_to_fp32_state_dict`` needs memory for one tensor at a time.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or does not have the whole model.
        ValueError: ``lazy_mode``, or no tag.
    """
    from longshore.checkpoint.export import whole_state_dict

    if lazy_mode:
        raise ValueError(
            "lazy_mode is not supported; use convert_zero_checkpoint_to_fp32_state_dict(..., safe_serialization=True), "
            "which needs memory for one tensor at a time"
        )
    return whole_state_dict(checkpoint_dir, tag, exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the whole float32 weights into a model, moved to the CPU as in DeepSpeed; returns the model."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole float32 weights into a folder that is new or empty.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as in :func:`get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: gets ``pytorch_model.bin``, or ``model.safetensors`` (several with an index, one tensor in memory
            at a time).
        max_shard_size: of a safetensors file: bytes, or ``"5GB"``; None: one file. ``pytorch_model.bin`` is one file.
        safe_serialization: write safetensors.

    Raises:
        ValueError: ``max_shard_size`` is not a valid size.
    """
    from longshore.checkpoint.export import export
    from longshore.engine.weight_files import save_weights

    try:
        max_bytes = 1 << 62 if max_shard_size is None else parse_byte_size(max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size: {error}") from error
    if safe_serialization and not exclude_frozen_parameters:
        export(checkpoint_dir, output_dir, max_bytes, torch.float32, tag=tag)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    save_weights(state, output_dir, "model.safetensors" if safe_serialization else "pytorch_model.bin")

"""A Trainer that resumes from FOLDER: transformers' own with ``deepspeed=FILE``, or longshore's with ``config=FILE``.

It begins with other weights than the folder's, and rank 0 saves the float32 masters and the weights at the end.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from masters import masters_of
from torch.utils.data import Dataset, SequentialSampler

sys.path.insert(0, str(Path(__file__).parents[2]))
from compat.write_checkpoint_data import Model, config_of, groups_of

from longshore.integrations.transformers import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["transformers", "longshore"])
parser.add_argument("folder")
parser.add_argument("file")
parser.add_argument("out")
parser.add_argument("--bf16", action="store_true")


class TrainedModel(Model):
    def forward(self, words: torch.Tensor) -> Any:
        return {"loss": super().forward(words)}


class Words(Dataset):
    """Six steps of two samples on each of two ranks."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"words": torch.randint(7, (4,), generator=torch.Generator().manual_seed(index))}


def as_saved(base: Any) -> Any:
    """A Trainer with what the saved run had: samples in their order, and its own groups."""

    class AsSaved(base):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(Words())

        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW(
                    groups_of(self.model), **config_of({"stage": 0})["optimizer"]["params"]
                )
            return super().create_optimizer()

    return AsSaved


def main() -> None:
    chosen = parser.parse_args()
    theirs = chosen.kind == "transformers"
    args = transformers.TrainingArguments(
        chosen.out,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        bf16=chosen.bf16,
        deepspeed=chosen.file if theirs else None,
    )
    transformers.set_seed(5)
    given = {} if theirs else {"config": chosen.file}
    kind = as_saved(transformers.Trainer if theirs else Trainer)
    trainer = kind(TrainedModel(), args, train_dataset=Words(), **given)
    trainer.train(resume_from_checkpoint=chosen.folder)
    assert trainer.state.global_step == 6
    masters = masters_of(trainer.model)
    if args.process_index == 0:
        torch.save(masters, Path(chosen.out) / "masters.pt")


if __name__ == "__main__":
    main()

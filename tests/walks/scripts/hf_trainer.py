"""A training script on transformers' Trainer and a DeepSpeed file, as people write them; nothing of longshore is in it.

python hf_trainer.py --deepspeed ds.json --output_dir runs/trained ...
"""

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(Dataset):
    def __init__(self, count: int) -> None:
        self.rows = torch.randint(3, 64, (count, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    (args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=Tokens(32))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()

"""Training with transformers' Trainer, whose own argument is ``--deepspeed FILE``; without it the Trainer is plain.

At the end each rank prints the losses of all its forwards. Float32 masters are saved as ``masters.pt``.
"""

from dataclasses import dataclass, field

import torch
from differences import compute_as_torch, pass_through
from masters import MasterArguments, save_masters, train_by_hand
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    model: str = field(default="", metadata={"help": "a folder for from_pretrained; without it, random weights"})
    lora: bool = field(default=False, metadata={"help": "train adapters"})
    pass_through: bool = field(default=False, metadata={"help": "modules as in DeepSpeed's stage 3"})
    compute_as_torch: bool = field(default=False, metadata={"help": "have DeepSpeed clip and step as torch does"})


class Tokens(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(3, 64, (count, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments, MasterArguments))
    chosen, args, by_hand = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    if chosen.model:
        model = AutoModelForCausalLM.from_pretrained(chosen.model)
    else:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
        )
        model = AutoModelForCausalLM.from_config(config)
    if chosen.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if chosen.pass_through:
        pass_through(model)
    if chosen.compute_as_torch:
        compute_as_torch()
    losses: list[float] = []
    model.register_forward_hook(lambda *called: losses.append(called[-1].loss.item()))
    trainer = Trainer(model, args, train_dataset=Tokens(32, 0), eval_dataset=Tokens(8, 1))
    if by_hand.by_hand:
        train_by_hand(trainer, by_hand)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    save_masters(trainer, by_hand)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    print(f"\nlosses of rank {args.process_index}: {losses}\n", end="", flush=True)


if __name__ == "__main__":
    main()

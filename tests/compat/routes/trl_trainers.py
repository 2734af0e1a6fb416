"""TRL's trainers: ``sft``, ``dpo`` or ``grpo`` and the trainer's own arguments; without ``--deepspeed FILE`` plain.

``make FOLDER`` makes the tiny model and its tokenizer.
"""

import sys
from typing import Any

import torch
from datasets import Dataset
from masters import MasterArguments, save_masters, train_by_hand
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = [
    "the",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "under",
    "over",
    "a",
    "mat",
    "tree",
    "house",
    "quickly",
    "slowly",
]


def make(folder: str) -> None:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def sentences(seed: int) -> list[str]:
    rows = torch.randint(0, len(WORDS), (16, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(WORDS[index] for index in row) for row in rows]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [completion.count("a") + 0.1 * len(set(completion.split())) for completion in completions]


def main() -> None:
    kind, model = sys.argv[1:3]
    if kind == "make":
        make(model)
        return
    configuration, trainer_of = {
        "sft": (SFTConfig, SFTTrainer),
        "dpo": (DPOConfig, DPOTrainer),
        "grpo": (GRPOConfig, GRPOTrainer),
    }[kind]
    parser = HfArgumentParser((configuration, MasterArguments))
    args, by_hand, rest = parser.parse_args_into_dataclasses(sys.argv[3:], return_remaining_strings=True)
    rows = {
        "sft": {"text": sentences(0)},
        "dpo": {"prompt": sentences(1), "chosen": sentences(2), "rejected": sentences(3)},
        "grpo": {"prompt": sentences(4)},
    }[kind]
    more: dict[str, Any] = {"reward_funcs": reward} if kind == "grpo" else {}
    assert rest in ([], ["--lora"])
    if rest:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = trainer_of(model=model, args=args, train_dataset=Dataset.from_dict(rows), **more)
    if by_hand.by_hand:
        train_by_hand(trainer, by_hand)
    trainer.train()
    save_masters(trainer, by_hand)
    trainer.save_model()


if __name__ == "__main__":
    main()

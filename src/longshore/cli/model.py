"""Models and tokenizers of transformers, which is imported nowhere else in the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from longshore import Init
from longshore.cli.data import END_OF_DOCUMENT, Corpus, byte_corpus
from longshore.cli.settings import BYTE_VOCABULARY, NUMEL_MULTIPLE, ModelSettings, Shape
from longshore.cli.terminal import CommandError, import_extra, one_line
from longshore.seam import DTYPES, is_sharded

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_transformers() -> Any:
    """Return the package, configured to print nothing."""
    transformers, logging = import_extra("transformers"), import_extra("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def load_tokenizer(path: Path | None, model: Path | None) -> Any | None:
    """Return the tokenizer at ``path``, or the one in the folder ``model``, or None: each byte is a token."""
    if path is None:
        if model is None or not any((model / name).is_file() for name in _TOKENIZER_FILES):
            return None
        path = model
    transformers = load_transformers()
    try:
        if path.is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its parsers raise errors of any type
        raise CommandError(f"cannot load a tokenizer from {path}: {one_line(error)}") from error


def make_corpus(documents: list[bytes], tokenizer: Any | None) -> Corpus:
    """Return the tokens of all documents, each followed by the end-of-text token if the tokenizer has one."""
    if tokenizer is None:
        return byte_corpus(documents, BYTE_VOCABULARY)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[torch.Tensor] = []
    for document in documents:
        ids = tokenizer(document.decode(), add_special_tokens=False, verbose=False)["input_ids"]
        tokens.append(torch.tensor(ids + end, dtype=torch.int32))
    vocabulary = -(-len(tokenizer) // NUMEL_MULTIPLE) * NUMEL_MULTIPLE
    return Corpus(torch.cat(tokens), vocabulary)


def build_model(
    settings: ModelSettings, seq_len: int, seed: int, corpus: Corpus, tokenizer: Any | None, shared: bool = False
) -> nn.Module:
    """Return a Llama with weights that depend only on ``seed``, or the model in ``settings.path``; on the CPU.

    Weights are made in fp32 and rounded to the dtype, so that every dtype starts from the same ones. Buffers
    (the rotary frequencies) stay in fp32, as they do when the exported model is loaded.

    Args:
        shared: whether only rank 0 has weights, since a machine may have no room for a copy for each of its ranks.
    """
    torch.manual_seed(seed)
    with Init(enabled=shared):
        if settings.path is None:
            model = new_llama(settings.shape, seq_len, corpus.vocabulary, tokenizer)
        else:
            model = _load_model(settings.path)
    if settings.path is not None:
        _check_fits(model, settings.path, seq_len, corpus)
    dtype = DTYPES[settings.dtype]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.train()


def new_llama(shape: Shape, seq_len: int, vocabulary: int, tokenizer: Any | None) -> nn.Module:
    """Return a Llama with random weights."""
    transformers = load_transformers()
    tokens = {"bos_token_id": None, "eos_token_id": END_OF_DOCUMENT, "pad_token_id": None}
    if tokenizer is not None:
        tokens = {name: getattr(tokenizer, name) for name in tokens}
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=seq_len,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **tokens,
    )
    return transformers.LlamaForCausalLM(config)


def checkpoint_activations(model: nn.Module) -> None:
    """Let backward compute each block again. Raise CommandError if the model cannot."""
    # The name in transformers changes; each has its options under its own.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    try:
        enable: Any = getattr(model, f"{kind}_checkpointing_enable")
        enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
    except (AttributeError, ValueError) as error:
        raise CommandError(
            f"{type(model).__name__} cannot compute its blocks again ({one_line(error)}): leave out "
            "--activation-checkpointing"
        ) from error


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Return the weights by name; those of a sharded model on the CPU of rank 0 only. All ranks have to call."""
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return dict(model.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:  # tied weights were gathered once for each name; as one tensor they are written once
            weights[name] = weights[first.setdefault(id(parameter), name)]
    return weights


def save_model(model: nn.Module, weights: dict[str, Any], tokenizer: Any | None, folder: Path) -> None:
    """Write safetensors, the configuration and the tokenizer, as ``from_pretrained`` reads them."""
    save: Any = model.save_pretrained
    save(folder, state_dict=weights, max_shard_size="1000TB")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _load_model(path: Path) -> nn.Module:
    auto = load_transformers().AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(path, local_files_only=True, output_loading_info=True)
    except Exception as error:  # its parsers raise errors of any type
        raise CommandError(f"cannot load a causal language model from --model {path}: {one_line(error)}") from error
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise CommandError(
            f"--model {path} has no usable weights for {wrong[0]} ({len(wrong)} such): give a whole model"
        )
    return model


def _check_fits(model: nn.Module, path: Path, seq_len: int, corpus: Corpus) -> None:
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise CommandError(f"--seq-len {seq_len} is longer than the {positions} positions of --model {path}")
    largest = int(corpus.tokens.max())
    if largest >= config.vocab_size:
        raise CommandError(
            f"the text has token {largest}, but --model {path} knows only {config.vocab_size} tokens: "
            f"give its --tokenizer"
        )

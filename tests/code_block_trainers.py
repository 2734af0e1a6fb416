"""Setups of code blocks (see ``code_block_setups.py``) about other people's trainers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from code_block_setups import Names, setup
from integrations.transformers.cases import fresh_accelerate, make_data, make_model, make_texts
from torch.utils.data import DataLoader


def _close(names: Names) -> None:
    """A Trainer made an engine, and it trained."""
    engine = getattr(names.get("trainer"), "engine", None)
    if engine is not None:
        assert engine.global_steps >= 2
        engine.destroy()


@setup
def trainer(_: Path) -> Iterator[Names]:
    """A small Llama, and tokens."""
    data = make_data()
    model = make_model()
    before = model.lm_head.weight.detach().clone()
    names: Names = {"model": model, "data": data, "loader": DataLoader(data, batch_size=2)}  # pyright: ignore
    with fresh_accelerate():
        yield names
    assert not names["model"].lm_head.weight.equal(before)
    _close(names)


@setup
def trainer_files(folder: Path) -> Iterator[Names]:
    """Its weights, as a folder."""
    make_model().save_pretrained(folder / "model")
    names: Names = {"data": make_data()}
    with fresh_accelerate():
        yield names
    _close(names)


@setup
def trl(_: Path) -> Iterator[Names]:
    """Texts and a tokenizer."""
    texts, tokenizer = make_texts()
    names: Names = {"model": make_model(), "data": texts, "tokenizer": tokenizer}
    with fresh_accelerate():
        yield names
    _close(names)


@setup
def lightning(folder: Path) -> Iterator[Names]:
    """Nothing: the page makes its own model. On one device, with the warnings of Lightning's own imports."""
    import longshore.integrations.lightning  # noqa: F401

    names: Names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield names
    if "state" in names:
        assert isinstance(names["state"], dict) and names["state"]["step"] == 4
        assert (folder / "all.ckpt").is_dir() and (folder / "weights.ckpt").is_file()

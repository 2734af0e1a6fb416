"""Sequences: nothing is lost, nothing is in both parts, and the order depends only on the seed."""

from __future__ import annotations

import pytest
import torch

from longshore.cli.data import END_OF_DOCUMENT, Corpus, Sequences, byte_corpus
from longshore.cli.terminal import CommandError


def counting(tokens: int) -> Corpus:
    return Corpus(torch.arange(tokens, dtype=torch.int32), tokens)


def test_bytes_are_tokens_and_documents_end():
    corpus = byte_corpus([b"ab", b"\xc3\xa4"], 256)
    assert corpus.tokens.tolist() == [97, 98, END_OF_DOCUMENT, 0xC3, 0xA4, END_OF_DOCUMENT]


def test_digest_tells_tokens_apart():
    assert (
        byte_corpus([b"ab"], 256).digest() == byte_corpus([b"ab"], 256).digest() != byte_corpus([b"ac"], 256).digest()
    )


def test_targets_are_the_next_tokens():
    batch = Sequences(counting(100), 8, 0).training_batch(0, 3)
    assert batch.inputs.shape == batch.targets.shape == (3, 8)
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)


@pytest.mark.parametrize("count", [2, 7, 20, 21, 95])
def test_an_epoch_is_every_training_sequence_once(count):
    sequences = Sequences(counting(count * 4 + 1), 4, 0)
    training, validation = sequences.training.numel(), sequences.validation.numel()
    assert training + validation == count
    assert validation == max(1, count // 20)
    epochs = [
        [int(sequences.training_batch(epoch * training + index, 1).inputs[0, 0]) for index in range(training)]
        for epoch in range(2)
    ]
    kept = {int(batch.inputs[0, 0]) for batch in sequences.validation_batches(count, 1)}
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(set(range(0, count * 4, 4)) - kept)
    if training > 4:
        assert epochs[0] != epochs[1]


def test_batches_do_not_depend_on_what_was_asked_before():
    one, other = Sequences(counting(200), 4, 3), Sequences(counting(200), 4, 3)
    wanted = one.training_batch(20, 5)
    for index in (30, 2, 20):
        found = other.training_batch(index, 5)
    assert torch.equal(wanted.inputs, found.inputs)


def test_the_seed_changes_the_order():
    batches = [Sequences(counting(2000), 4, seed).training_batch(0, 8).inputs for seed in (0, 1)]
    assert not torch.equal(*batches)


def test_validation_batches_are_as_many_as_there_are():
    sequences = Sequences(counting(401), 4, 0)  # 100 sequences, 5 to validate on
    assert [len(batch.inputs) for batch in sequences.validation_batches(8, 2)] == [2, 2, 1]
    assert [len(batch.inputs) for batch in sequences.validation_batches(1, 2)] == [2]


@pytest.mark.parametrize("tokens, enough", [(8, False), (9, True)])
def test_shorter_than_two_sequences(tokens, enough):
    if enough:
        Sequences(counting(tokens), 4, 0)
        return
    with pytest.raises(CommandError, match="the text has 8 tokens, but one sequence to train on and one to validate"):
        Sequences(counting(tokens), 4, 0)


def test_text_shorter_than_a_sequence(cli, tmp_path):
    path = tmp_path / "text"
    path.write_text("short")
    out = tmp_path / "run"
    assert "give more --data or a smaller --seq-len" in cli("train", "--data", path, "--out", out).refused()
    assert not out.exists()

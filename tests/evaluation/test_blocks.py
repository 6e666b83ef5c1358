"""Blocks of a text for a checkpoint of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gnmr.errors import UserError
from gnmr.lab.evaluation.blocks import blocks_of
from gnmr.lab.evaluation.subjects import Text, load_subject
from gnmr.measure.kl import IGNORED


@pytest.mark.parametrize("python", [False, True])
def test_blocks_begin_as_the_tokenizer_begins_a_text(python: bool, checkpoint: Path, tmp_path: Path) -> None:
    text = "".join(f"{number} and " for number in range(60))
    (tmp_path / "text.txt").write_text(text)
    subject = load_subject(str(checkpoint), device="cpu")
    ids = AutoTokenizer.from_pretrained(checkpoint).encode(text)
    if python:
        subject.text = Text(InPython(ids), subject.text.eos)
    begin, ids = ids[0], ids[1:]
    blocks = blocks_of(subject, tmp_path / "text.txt", batches=2, held_out=1, length=16, size=4)
    places = []
    for batch in (*blocks.batches, *blocks.held_out):
        assert (batch.tokens[:, 0] == begin).all() and torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        for target in batch.targets.tolist():
            places.append(next(i for i in range(len(ids)) if ids[i : i + 16] == target))
    assert len(set(places)) == 12 and all(place % 16 == 1 for place in places), "every target is one only once"


def test_blocks_begin_with_both_of_two_tokens_and_neither_is_a_target(checkpoint: Path, tmp_path: Path) -> None:
    """As the tokenizers of GLM begin a text."""
    text, subject = "".join(f"{number} and " for number in range(60)), load_subject(str(checkpoint), device="cpu")
    (tmp_path / "text.txt").write_text(text)
    specials = [("<unk>", 0), ("<s>", 1)]
    own = subject.text.tokenizer.backend_tokenizer
    own.post_processor = processors.TemplateProcessing(single="<unk> <s> $A", special_tokens=specials)
    ids = subject.text.plain(text, "")
    found = blocks_of(subject, tmp_path / "text.txt", batches=2, held_out=1, length=16, size=4)
    for batch in (*found.batches, *found.held_out):
        assert batch.tokens[:, :2].tolist() == [[0, 1]] * 4 and batch.targets[:, 0].tolist() == [IGNORED] * 4
        assert torch.equal(batch.tokens[:, 2:], batch.targets[:, 1:-1]) and batch.num_targets == 4 * 15
        for target in batch.targets[:, 1:].tolist():
            assert any(ids[i : i + 15] == target for i in range(1, len(ids), 15))
    with pytest.raises(UserError, match=r"^block=1: .* puts 2 tokens before a text; use longer blocks$"):
        blocks_of(subject, tmp_path / "text.txt", batches=2, held_out=1, length=1)


def test_the_length_that_a_text_too_short_is_told_fits(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{number} and " for number in range(200)))
    subject = load_subject(str(checkpoint), device="cpu")
    with pytest.raises(UserError, match=r"of 1 each; use more text, or block=\d+$") as refused:
        blocks_of(subject, tmp_path / "text.txt", batches=5, held_out=3, length=256)
    length = int(str(refused.value).rpartition("=")[2])
    assert blocks_of(subject, tmp_path / "text.txt", batches=5, held_out=3, length=length).length == length


@pytest.mark.parametrize("template", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("letters", ["ab", "b"])
def test_neither_padding_nor_an_end_begins_a_text(template: str | None, letters: str) -> None:
    """As tokenizer.json may hold them, whatever its vocabulary has."""
    specials = [("<s>", 0), ("</s>", 1)]
    for model in (models.BPE, lambda vocabulary, _: models.WordLevel(vocabulary, "<unk>")):
        own = Tokenizer(model(dict(specials) | {letter: 2 + i for i, letter in enumerate(letters)}, []))
        if template is not None:
            own.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
        own.enable_padding(direction="left", pad_id=1, pad_token="</s>", length=8)
        text = Text(PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>"), 1)
        assert text.begin() == ([0] if "<s>" in (template or "") else [])


def test_blocks_for_a_run_from_scratch_begin_anywhere(train, checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    """No text began with a token of its own in training, whatever the tokenizer would put there."""
    subject = load_subject(str(train(tmp_path / "run", f"data.tokenizer={checkpoint}", "training.steps=1")), "cpu")
    blocks = blocks_of(subject, text_file, batches=2, held_out=1, length=16, size=4)
    assert not any((batch.tokens <= 2).any() for batch in (*blocks.batches, *blocks.held_out))


class InPython:
    """A tokenizer without a backend, which puts the first of `ids` before a text."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.all_special_ids = ids, ids[:1]

    def encode(self, text: str, add_special_tokens: bool = True, **_: bool) -> list[int]:
        return self.ids if add_special_tokens else self.ids[1:]

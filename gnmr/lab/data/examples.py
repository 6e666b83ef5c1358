"""Examples: a prompt, and the answer that is learned.

gsm8k has the form of lm-evaluation-harness' task, so that a model is scored as it was trained; the answer is the whole
solution. instructions are the user's rows. Documents of a plain corpus (stdlib, text, c4, wikitext2) are answers
without a prompt, split as in gnmr/lab/data/corpora.py.

Rows are split like documents: by the files' names, else every 20th is for validation; of fewer than 20 the last one.
Rows with a blank answer are skipped and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from gnmr.lab.config import DataConfig
from gnmr.lab.data import corpora, files
from gnmr.lab.data.corpora import Corpus, Skipped
from gnmr.lab.data.files import ONE_IN, TRAIN, VALIDATION
from gnmr.lab.data.rows import Row, read_rows


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, as text."""

    prompt: str
    """Read, not learned; empty for plain text."""
    answer: str
    """Learned; appended to the prompt without white space of ours."""


def open_examples(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> Corpus[Example]:
    """Return the examples that `config` names; raises UserError if there are none. `tell` hears of the progress."""
    if config.name not in ("gsm8k", "instructions"):
        return open_documents(config, tell)
    make = _gsm8k if config.name == "gsm8k" else _instruction
    rows: Callable[[str], Iterator[Row]]
    if config.path is None:
        hub, by_name = files.HUBS[config.name], False
        where, summary, source = f"data.name={config.name}", f"{hub.name} {hub.config}", f"{hub.name}/{hub.config}"
        rows = lambda _: corpora.hub_rows(config.name, TRAIN)  # its only other split is the test split
    else:
        local = files.local_files(config, tell)
        where, summary, source, by_name = local.where, local.summary, local.identity, local.by_name
        rows = lambda split: chain.from_iterable(map(read_rows, local.of(split)))

    columns = [config.prompt_column, config.input_column, config.response_column]
    identity = hashlib.sha256(json.dumps([config.name, columns, source]).encode()).hexdigest()
    skipped = Skipped()

    def answered(split: str) -> Iterator[Example]:
        examples: Iterator[Example] = (make(row, config) for row in rows(split))
        examples = examples if by_name else _of_split(examples, split)
        return skipped.kept(examples, lambda each: each.answer.strip(), "row{s} without an answer", split)

    return Corpus(where, summary, identity, answered, skipped=skipped)


def open_documents(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> Corpus[Example]:
    """Return the documents of a plain corpus as answers without a prompt; otherwise as `open_examples`."""
    texts = corpora.open_corpus(config, tell)
    read = lambda split: (Example("", text) for text in texts.read(split))
    return Corpus(texts.where, texts.summary, texts.identity, read, texts.streamed, texts.skipped)


def _of_split(examples: Iterator[Example], split: str) -> Iterator[Example]:
    """Every 20th for validation; of fewer than 20 the last."""
    head = list(islice(examples, ONE_IN))
    for number, example in enumerate(chain(head, examples), start=1):
        if (VALIDATION if number % ONE_IN == 0 or number == len(head) else TRAIN) == split:
            yield example


# ---- rows to examples ----


def _gsm8k(row: Row, config: DataConfig) -> Example:
    return Example(f"Question: {row.text('question')}\nAnswer:", f" {row.text('answer')}")


def _instruction(row: Row, config: DataConfig) -> Example:
    prompt = row.text(config.prompt_column, "data.prompt_column")
    if config.input_column is not None:
        prompt += _spaced(prompt, row.text(config.input_column, "data.input_column", optional=True))
    return Example(prompt, _spaced(prompt, row.text(config.response_column, "data.response_column")))


def _spaced(before: str, text: str) -> str:
    """`text` with a blank line in front, unless it is blank or there is white space between the two already."""
    if not before or not text.strip() or before[-1].isspace() or text[0].isspace():
        return text
    return f"\n\n{text}"

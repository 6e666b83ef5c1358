"""Tiny corpora in every format, and what is needed to look at a prepared one."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gnmr.lab.config import DataConfig
from gnmr.lab.data.cache import TokenCorpus
from gnmr.lab.data.tokens import prepare

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [f"document {i}:\n  the {i * 7}th fox – über {'brown dog ' * (i % 5)}\r\n\tend" for i in range(40)]
TRAIN = [text for i, text in enumerate(DOCUMENTS) if i not in (19, 39)]
VALIDATION = [DOCUMENTS[19], DOCUMENTS[39]]


def write_rows(file: Path, documents: list[Any], column: str = "text") -> Path:
    """The documents as rows with a number beside the text, in the format that the name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"number": i, column: text} for i, text in enumerate(documents)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines))
    else:
        file.write_bytes(lines)
    return file


def build(config: DataConfig) -> tuple[TokenCorpus, list[str]]:
    """The corpus and what was said."""
    said: list[str] = []
    return prepare(config, 1000, said.append), said


def texts(corpus: TokenCorpus, split: str) -> list[str]:
    """The documents of a split, decoded."""
    from tokenizers import Tokenizer

    tokens = getattr(corpus, split)[:]
    assert tokens[-1] == corpus.end_token
    ends = np.flatnonzero(tokens == corpus.end_token)
    documents = np.split(tokens, ends + 1)[:-1]
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    return [tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False) for document in documents]


def shared_data(name: str) -> Path:
    """A folder of the real data beside the project; skips the test where it is absent."""
    root = Path(os.environ.get("GNMR_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (root / name).is_dir():
        pytest.skip(f"needs {name} in ../shared/data or GNMR_SHARED_DATA")
    return root / name


def word_checkpoint(folder: Path, begin: bool = True) -> Path:
    """A checkpoint's tokenizer: <s> is 0, </s> 1, anything unknown 2, the letters a to j are 10 to 19."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<s>": 0, "</s>": 1, "?": 2} | {letter: 10 + place for place, letter in enumerate("abcdefghij")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_examples(file: Path, pairs: list[tuple[str, str]]) -> Path:
    """Rows of data.name=instructions."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": prompt, "response": answer}) + "\n" for prompt, answer in pairs))
    return file

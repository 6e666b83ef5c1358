"""The tokenizer: a byte-level BPE trained on training documents, a user's tokenizer.json, or a checkpoint's.

A checkpoint's tokenizer is its tokenizer.json, which contains everything but the name of the end token. That name is in
tokenizer_config.json or special_tokens_map.json. transformers is not needed to read these files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnmr.errors import UserError
from gnmr.records.untrusted import first_line

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

END = "<|endoftext|>"
ACCEPTED_ENDS = (END, "<|end_of_text|>", "</s>")
FILE = "tokenizer.json"
_PROBE = "A naïve café:\n 1 + 2 = 3 – 東京."
"""A text by which `token_bytes` checks a vocabulary."""
LONGEST_WORD = 1000  # bytes; longer words (or runs of blanks) are split while the tokenizer is trained


def train(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries, deterministically. The end token has id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training time grows with the square of a word's length, so long words are split here. Encoding does not split
    # them.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # include every byte, so that no text is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.pre_tokenizer = words
    tokenizer.encode_special_tokens = True
    return tokenizer


def read(path: Path, where: str) -> tuple[bytes, str | None]:
    """Return the content of a tokenizer.json, and the name of the end token if the checkpoint's folder contains it.

    `path` is a tokenizer.json, or the folder of a checkpoint of transformers. Raises UserError, which begins with
    `where`.
    """
    try:
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            needs = ""
            if (path / "tokenizer.model").exists():
                needs = " from its tokenizer.model, with the packages sentencepiece and protobuf installed"
            raise UserError(
                f"{where}: there is no {FILE}; AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of "
                f"transformers writes one{needs}"
            )
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error
    # A single file has no settings beside it; those of a checkpoint's folder may name the end token.
    settings = [path / name for name in ("tokenizer_config.json", "special_tokens_map.json")] if file != path else []
    ends = (_named_end(setting) for setting in settings if setting.is_file())
    return content, next((end for end in ends if end is not None), None)


def _named_end(file: Path) -> str | None:
    try:
        end = json.loads(file.read_text()).get("eos_token")
        end = end["content"] if isinstance(end, dict) else end
        if end is not None and not isinstance(end, str):
            raise TypeError(f"eos_token must be text, and is {type(end).__name__}")
        return end
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as a tokenizer's settings ({error})") from error


def load(content: bytes, where: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, without truncation and padding. Errors refer to it as `where`.

    Control tokens in a text count as text, see `encode`.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8-sig"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{where}: not a tokenizer.json of the tokenizers library ({first_line(error)})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_token(tokenizer: Tokenizer, where: str, end: str | None = None) -> int:
    """Return the id of the token that follows each document.

    Args:
        tokenizer: Any tokenizer.
        where: The beginning of the message.
        end: The name of the end token. If None, it is one of `ACCEPTED_ENDS`.

    Raises:
        UserError: If the tokenizer has no such token.
    """
    ends = ACCEPTED_ENDS if end is None else (end,)
    ids = [number for name in ends if (number := tokenizer.token_to_id(name)) is not None]
    if not ids:
        raise UserError(f"{where}: has no end-of-text token; one of {', '.join(ends)} must be in it")
    return ids[0]


def tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens that the tokenizer puts before and after a text, as BERT's [CLS] and [SEP].

    A "bos_token" that a checkpoint names does not count, because GPT-2 and others name one that training never used.
    `tokenizer` has no truncation and no padding.
    """
    encoding = tokenizer.encode("", add_special_tokens=False)
    text = 2**32 - 1  # in place of a text, since a vocabulary may have no token for a given one
    encoding.pad(len(encoding.ids) + 1, direction="left", pad_id=text)
    ids = tokenizer.post_process(encoding).ids
    place = ids.index(text)
    return list(ids[:place]), list(ids[place + 1 :])


@dataclass(frozen=True)
class Controls:
    """The control tokens of a tokenizer, which do not represent text: its special tokens and its end token."""

    written: re.Pattern[str]
    """Matches any of them in a text."""
    ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, end: int) -> Controls:
        """Return the control tokens of `tokenizer` whose names have at least two characters."""
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        named = {number: tokenizer.id_to_token(number) or "" for number in (*special, end)}
        long = {number: name for number, name in named.items() if len(name) > 1}
        # Longer names first, because a regular expression takes the first alternative that matches.
        names = sorted(long.values(), key=len, reverse=True)
        return cls(re.compile("|".join(map(re.escape, names)) or "(?!)"), frozenset(long))


def encode(
    tokenizer: Tokenizer, texts: list[str], where: str, controls: Controls, offsets: bool = True
) -> list[Encoding]:
    """Return the encodings of `texts` without special tokens. Raises UserError if the tokenizer cannot encode a text.

    A control token in a text is encoded as text. Some vocabularies contain it as a word or a piece (WordLevel,
    Unigram). The text is then split after the token's first character.
    """
    from tokenizers import Encoding

    tokenizer.encode_special_tokens = True
    try:
        encode_batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        encodings = encode_batch(texts, add_special_tokens=False)
        for place, text in enumerate(texts):
            if controls.written.search(text) and not controls.ids.isdisjoint(encodings[place].ids):
                cuts = [0, *(match.start() + 1 for match in controls.written.finditer(text)), len(text)]
                pieces = [text[start:stop] for start, stop in pairwise(cuts)]
                encodings[place] = Encoding.merge(tokenizer.encode_batch(pieces, add_special_tokens=False), True)
        return encodings
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{where}: cannot encode the text ({first_line(error)})") from error


def token_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of text that each token stands for.

    Args:
        tokenizer: any tokenizer that `load` returned.

    Returns:
        (V,) int64, the bytes of UTF-8 by token id; 0 for special tokens and unused ids. None if the tokens of a text
        do not spell it, because the tokenizer drops or changes characters (WordPiece, WordLevel).
    """
    names = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    encoding = tokenizer.encode(_PROBE, add_special_tokens=False)
    # A character of a byte-level name is one byte. Other names are text, with ▁ for a blank and <0x0A> for a byte.
    for length in (len, _length_as_text):
        table = np.zeros(vocab_size(tokenizer), dtype=np.int64)
        for name, number in names.items():
            table[number] = len(name.encode()) if number in added else length(name)
        table[[number for number, token in added.items() if token.special]] = 0
        # A tokenizer of pieces may put one blank before the text.
        if int(table[encoding.ids].sum()) - len(_PROBE.encode()) in (0, 1):
            return table
    return None


def _length_as_text(name: str) -> int:
    """Return the bytes of a token that is named by its text."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", name) else len(name.replace("▁", " ").encode())


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return the largest id + 1, because a user's tokenizer may skip ids."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

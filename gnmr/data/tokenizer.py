"""The byte-level BPE tokenizer: trained on training documents, or a tokenizer.json of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gnmr.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
ACCEPTED_ENDS = (END, "<|end_of_text|>", "</s>")


def train(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """At most `vocab_size` entries (a tiny corpus gives fewer); the end token has id 0. Equal text, equal tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so that no text is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def load(content: bytes, where: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without its truncation and padding; `where` names it in errors."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{where}: not a tokenizer.json of the tokenizers library ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not any(tokenizer.token_to_id(end) is not None for end in ACCEPTED_ENDS):
        raise UserError(f"{where}: has no end-of-text token; one of {', '.join(ACCEPTED_ENDS)} must be in it")
    return tokenizer


def end_token(tokenizer: Tokenizer) -> int:
    """Id of the token that stands after each document."""
    return next(number for end in ACCEPTED_ENDS if (number := tokenizer.token_to_id(end)) is not None)


def vocab_size(tokenizer: Tokenizer) -> int:
    """Largest id + 1: a user's tokenizer may leave ids out."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

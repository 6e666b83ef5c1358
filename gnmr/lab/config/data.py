"""data.*: the corpus and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from gnmr.errors import as_user_error
from gnmr.options import one_of, require


@dataclass(frozen=True)
class DataConfig:
    """Corpus and tokenizer. Prepared tokens are kept in GNMR_CACHE (~/.cache/gnmr)."""

    name: str = "stdlib"
    """The corpus: stdlib (this Python's library sources), c4, gsm8k (from the hub, or a local copy in its layout), text
    (local files) or instructions (local files of prompts and answers)."""
    path: str | None = None
    """File or folder for text and instructions. For other corpora, a local copy, or null to read from the hub."""
    text_column: str = "text"
    """Column that holds the text in .jsonl, .json.gz and .parquet files."""
    prompt_column: str = "prompt"
    """Column that holds the prompt (instructions)."""
    response_column: str = "response"
    """Column that holds the answer (instructions)."""
    input_column: str | None = None
    """Column of a text that follows the prompt if it is not blank, as Alpaca's "input" (instructions)."""
    answers_only: bool = True
    """Compute the loss on answers only; false includes prompts. Plain text has no prompts."""
    vocab_size: int = 4096
    """Largest vocabulary of the byte-level BPE. A tiny corpus may give a smaller one."""
    tokenizer: str | None = None
    """A tokenizer.json, or its folder, to use instead of training one. Fine-tuning uses the checkpoint's own."""

    @as_user_error("data.")
    def __post_init__(self) -> None:
        one_of(("stdlib", "c4", "text", "gsm8k", "instructions"), name=self.name)
        local = self.name in ("text", "instructions")
        require(
            self.path != "" and not (local and self.path is None),
            "path",
            self.path,
            f"data.name={self.name} needs a file or folder{'' if local else ', or null'}",
        )
        fits = 257 <= self.vocab_size <= 2**24  # the trainer reserves memory for each entry and aborts if it fails
        require(fits, "vocab_size", self.vocab_size, "byte-level BPE needs 257 or more, 16,777,216 at most")

"""data.*: the corpus and its tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gnmr.errors import as_user_error, one_of, require, whole


@dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and their cache."""

    name: str = "stdlib"
    """stdlib (this Python's own library sources), c4, gsm8k (hub, or local in its layout), text (local files) or
    instructions (local files of prompts and answers)."""
    path: str | None = None
    """File or folder for text and instructions; for the others a local copy, or null to read from the hub."""
    text_column: str = "text"
    """Column that holds the text in .jsonl, .json.gz and .parquet files."""
    prompt_column: str = "prompt"
    """Column that holds the prompt; of instructions."""
    response_column: str = "response"
    """Column that holds the answer; of instructions."""
    input_column: str | None = None
    """Column of a text that follows the prompt where it is not blank (Alpaca's "input"); of instructions."""
    answers_only: bool = True
    """Loss on the answers alone; false: on prompts too. Plain text has no prompts."""
    vocab_size: int = 4096
    """Largest vocabulary of the byte-level BPE; a tiny corpus may give a smaller one."""
    tokenizer: str | None = None
    """A tokenizer.json to use instead of training one; for fine-tuning, instead of the checkpoint's: a folder too."""
    tokenizer_bytes: int = 50_000_000
    """Text that the tokenizer is trained on at the most, bytes of UTF-8."""
    max_tokens: int | None = None
    """Training tokens to prepare at the most; null: the whole corpus, for the hub what the run needs."""
    cache_dir: str = "~/.cache/gnmr"
    """Where tokenizers and token files are kept."""

    @as_user_error("data.")
    def __post_init__(self) -> None:
        if self.cache_dir == os.environ.get("GNMR_CACHE") == "":  # an empty variable counts as none
            object.__setattr__(self, "cache_dir", DataConfig.cache_dir)
        one_of(("stdlib", "c4", "text", "gsm8k", "instructions"), name=self.name)
        local = self.name in ("text", "instructions")
        require(
            self.path != "" and not (local and self.path is None),
            "path",
            self.path,
            f"data.name={self.name} needs a file or folder{'' if local else ', or null'}",
        )
        fits = 257 <= self.vocab_size <= 2**24  # its trainer reserves room for each entry, and aborts without it
        require(fits, "vocab_size", self.vocab_size, "byte-level BPE needs 257 or more, 16,777,216 at most")
        whole(tokenizer_bytes=self.tokenizer_bytes)
        whole(or_null=True, max_tokens=self.max_tokens)

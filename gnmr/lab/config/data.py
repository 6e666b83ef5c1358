"""data.*: the corpus and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    columns: list[str] = field(default_factory=list)
    """Names of the columns in .jsonl, .json.gz and .parquet files: [text], or for instructions [prompt, response] or
    [prompt, input, response]. The input follows the prompt if it is not blank, as in Alpaca. If empty, the columns are
    called text, or prompt and response."""
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
        numbers = (0, 2, 3) if self.name == "instructions" else (0, 1)
        right = "names [text], or for instructions [prompt, response] or [prompt, input, response]"
        require(len(self.columns) in numbers, "columns", self.columns, right)
        fits = 257 <= self.vocab_size <= 2**24  # the trainer reserves memory for each entry and aborts if it fails
        require(fits, "vocab_size", self.vocab_size, "byte-level BPE needs 257 or more, 16,777,216 at most")

    @property
    def text_column(self) -> str:
        """Column of the documents, unless the corpus is instructions."""
        return self.columns[0] if self.columns and self.name != "instructions" else "text"

    @property
    def prompt_column(self) -> str:
        """Column of the prompts of instructions."""
        return self.columns[0] if self.columns and self.name == "instructions" else "prompt"

    @property
    def input_column(self) -> str | None:
        """Column of the text that follows the prompt of instructions, or None."""
        return self.columns[1] if len(self.columns) == 3 else None

    @property
    def response_column(self) -> str:
        """Column of the answers of instructions."""
        return self.columns[-1] if self.columns and self.name == "instructions" else "response"

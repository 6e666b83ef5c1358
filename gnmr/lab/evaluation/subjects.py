"""The models that `gnmr diagnose` and `gnmr audit` load: a run, or a Hugging Face checkpoint of one of `KINDS`."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnmr.conversion import ConvertedModel
from gnmr.errors import UserError, as_user_error, warn
from gnmr.formats.recipes import described
from gnmr.lab import models
from gnmr.lab.config import Config, config_hash, read
from gnmr.lab.data import cache
from gnmr.lab.data import tokenizer as bpe
from gnmr.lab.models import pretrained
from gnmr.lab.models.kinds import CAUSAL, IMAGE_TEXT, MASKED, ModelKind, kind_of
from gnmr.lab.models.stored import NotReadByBlocks, StoredWeights, open_stored
from gnmr.lab.train.build import pretrained_model
from gnmr.lab.train.checkpoint import load_model
from gnmr.lab.train.memory import refuse_checkpoint, refuse_run
from gnmr.measure.blocks import named_blocks
from gnmr.options import one_of
from gnmr.records.disk import check_tree
from gnmr.records.reader import read_json
from gnmr.records.untrusted import exists, reading


@dataclass(frozen=True)
class Text:
    """A tokenizer of the library tokenizers or of transformers."""

    tokenizer: Any
    eos: int
    """The token that ends a text, or the one that separates two."""
    from_scratch: bool = False
    """True for the tokenizer of a run that began from scratch: its end token, and none else, separates documents."""

    def plain(self, text: str, where: str) -> list[int]:
        """Return the token ids of a text in which control tokens count as text, as in training.

        Errors name the tokenizer as `where`.
        """
        tokenizer = self._backend()
        if tokenizer is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        return list(bpe.encode(tokenizer, [text], where, bpe.Controls.of(tokenizer, self.eos))[0].ids)

    def begin(self) -> list[int]:
        """Return the tokens that the tokenizer puts before a text; none also if training put none there."""
        return [] if self.from_scratch else self.around()[0]

    def around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer puts before and after a text."""
        tokenizer = self._backend()
        if tokenizer is not None:
            return bpe.tokens_around(tokenizer)
        plain, with_special = (
            list(self.tokenizer.encode("a", add_special_tokens=special)) for special in (False, True)
        )
        if not plain:
            return [], []
        place = with_special.index(plain[0])
        return with_special[:place], with_special[place + len(plain) :]

    def _backend(self) -> Any:
        """Return a copy of the tokenizer as one of the library tokenizers; None for one of transformers in Python.

        The copy has no truncation and no padding.
        """
        tokenizer = self.tokenizer if self.from_scratch else getattr(self.tokenizer, "backend_tokenizer", None)
        if tokenizer is None:
            return None
        tokenizer = type(tokenizer).from_str(tokenizer.to_str())  # transformers modifies its tokenizer at each call
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


@dataclass
class Subject:
    """A model that can be diagnosed."""

    name: str
    model: nn.Module
    text: Text
    max_length: int
    """Largest number of tokens in one pass."""
    vocab_size: int
    device: torch.device
    converted: ConvertedModel | None = None
    """The converted operators of the model, if it has any."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts for records: kind, model, dtype, ..."""
    weights: StoredWeights | None = None
    """Reads the weights of the blocks, if the model has them on the meta device."""
    kind: ModelKind = CAUSAL
    """Which inputs the model takes (`gnmr.lab.evaluation.inputs`)."""

    @property
    def targets(self) -> list[str] | None:
        """Patterns of the linears that a diagnosis is about by default: of an image-text model those of its text part.

        None: those that every diagnosis takes.
        """
        if self.kind is not IMAGE_TEXT:
            return None
        model: Any = self.model
        decoder = model.get_decoder()
        prefix = next((name for name, module in model.named_modules() if module is decoder), "")
        return [".".join(filter(None, (prefix, named_blocks(decoder)[0], "*")))]


def load_subject(
    path: str,
    device: str = "auto",
    *,
    gradients: bool = True,
    floats: bool = False,
    tokens: int = 0,
    by_blocks: bool = False,
) -> Subject:
    """Return the model at `path`: a run folder, a checkpoint folder, or a hub name of Hugging Face.

    `device` is auto, cpu or cuda. With `by_blocks`, the blocks of a checkpoint stay on disk if they can be read one by
    one. The other arguments say what a checkpoint is loaded for, as `memory.refuse_checkpoint`. Raises UserError if the
    model cannot be loaded. Folders are not trusted (`gnmr.records.untrusted`): no links below them are followed, and
    only safetensors and data of checkpoints are read.
    """
    with as_user_error():
        one_of(("auto", "cpu", "cuda"), device=device)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: PyTorch sees no CUDA device here; use auto or cpu")
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    folder = Path(path).expanduser()
    if exists(folder / "config.yaml"):
        check_tree(folder, skip=("wandb",))
        with reading(folder):
            return _run(folder, where)
    # No run: a folder has to be a checkpoint, and another word a name on the hub.
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "model_index.json")):
            raise UserError(f"{path}: neither a run (config.yaml) nor a Hugging Face checkpoint (config.json)")
    elif folder.exists() or folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UserError(f"{path}: there is no such run, checkpoint folder or hub name")
    with_blocks = by_blocks and kind_of(pretrained.open_config(path, path, causal=False)) is CAUSAL
    if with_blocks:
        try:
            return _stored_checkpoint(path, where, floats)
        except NotReadByBlocks as error:
            warn(f"{error}; the whole model is loaded")
    return _checkpoint(path, where, gradients=gradients, floats=floats, tokens=tokens)


# ---- runs ----


def _run(folder: Path, device: torch.device) -> Subject:
    config = read(folder / "config.yaml")
    if config.model.checkpoint is not None:
        return _fine_tuned(folder, config, device)
    corpus = _corpus(folder, config)
    refuse_run(config, device, corpus.vocab_size)
    # Nothing is initialized, because load_model overwrites every weight.
    model = models.build_empty(config.model, corpus.vocab_size, config.training.seq_len)
    model.to(getattr(torch, config.training.dtype)).to_empty(device=device)
    facts = _facts(config, model, None) | {"step": load_model(folder / "checkpoints", model, None)}
    where = str(corpus.tokenizer_path)
    try:
        tokenizer = bpe.load(corpus.tokenizer_path.read_bytes(), where)
    except OSError as error:
        raise UserError(f"{where}: the tokenizer cannot be read ({error.strerror})") from error
    text = Text(tokenizer, bpe.end_token(tokenizer, where), from_scratch=True)
    return Subject(str(folder), model, text, config.training.seq_len, corpus.vocab_size, device, None, facts)


def _fine_tuned(folder: Path, config: Config, device: torch.device) -> Subject:
    """Load the checkpoint that a run began from, with the weights that the run trained."""
    checkpoint = config.model.checkpoint
    assert checkpoint is not None
    base, now = _header(folder).get("checkpoint"), pretrained.fingerprint(checkpoint)
    if base != now:
        raise UserError(f"{folder}: began from other weights than model.checkpoint={checkpoint} holds now")
    model, converted = pretrained_model(config, device)
    facts = _facts(config, model, converted) | {"step": load_model(folder / "checkpoints", model, converted)}
    return _hugging_face_subject(str(folder), model, checkpoint, device, converted, facts)


def _facts(config: Config, model: nn.Module, converted: ConvertedModel | None) -> dict[str, Any]:
    return {
        "kind": "run",
        "model": config.model.name,
        "checkpoint": config.model.checkpoint,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": config.training.dtype,
        "arm": config.arm_name,
        "config": config_hash(config),
        "seed": config.training.seed,
        "low_path": None if converted is None else described(converted.low),
    }


def _header(folder: Path) -> dict[str, Any]:
    if (header := read_json(folder / "header.json")) is None:
        raise UserError(f"{folder / 'header.json'}: cannot be read (it is missing or no JSON object)")
    return header


def run_corpus(folder: Path) -> cache.TokenCorpus:
    """Return the token folder that a run was trained on. Raises UserError if it is missing or damaged."""
    with reading(folder):
        return _corpus(folder, read(folder / "config.yaml"))


def _corpus(folder: Path, config: Config) -> cache.TokenCorpus:
    """Find the token folder that the run was trained on by the fingerprint in its header."""
    try:
        fingerprint = _header(folder)["data"]["fingerprint"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder}: header.json does not say which data the run was trained on ({error})") from error
    folder_of_tokens = cache.cache_folder()
    unreadable = None
    # A folder that may not be read may be the one, so the message names it if no other is found.
    for token_folder in folder_of_tokens.glob(f"{config.data.name}-*"):
        if not os.access(token_folder, os.R_OK | os.X_OK):
            unreadable = token_folder
            continue
        try:
            meta = json.loads((token_folder / cache.META).read_text())
            if meta["fingerprint"] == fingerprint:
                return cache.open_folder(token_folder)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        except cache.Corrupt as error:
            raise UserError(f"{token_folder}: the run's tokenizer and tokens are damaged ({error})") from error
    if unreadable is not None:
        raise UserError(f"{folder}: its tokenizer may be in {unreadable}, which this user may not read")
    raise UserError(
        f"{folder}: its tokenizer is missing: no token folder in {folder_of_tokens} is of data {fingerprint[:12]}; "
        "set GNMR_CACHE, or repeat the run's command, which prepares the data again"
    )


# ---- Hugging Face's checkpoints ----


def _checkpoint(name: str, device: torch.device, **purpose: Any) -> Subject:
    kind = kind_of(pretrained.open_config(name, name, causal=False))
    assert kind is not None
    tokenizer_of_kind(name, kind)  # check first: it is missing more often than the weights, which load for minutes
    folder = pretrained.local(name, name, causal=False)
    refuse_checkpoint(pretrained.tensors_of(folder), device, where=name, **purpose)
    model = pretrained.load(name, "auto", device, where=name, causal=False)
    facts = {"kind": "checkpoint", "model": model.config.model_type}  # type: ignore[union-attr]
    facts |= {"parameters": sum(p.numel() for p in model.parameters())}
    facts |= {"dtype": str(next(model.parameters()).dtype).removeprefix("torch."), "loaded_by": kind.auto_class}
    return _hugging_face_subject(name, model, name, device, None, facts, kind)


def _stored_checkpoint(name: str, device: torch.device, floats: bool) -> Subject:
    """Return a checkpoint whose blocks stay on disk. Raises NotReadByBlocks if they cannot be read one by one."""
    tokenizer_of_kind(name)
    model, weights = open_stored(name, torch.float32 if floats else None, device)
    config: Any = model.config
    facts = {"kind": "checkpoint", "model": config.model_type}
    facts |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(config.dtype).removeprefix("torch."),
    }
    subject = _hugging_face_subject(name, model, name, device, None, facts)
    subject.weights = weights
    return subject


def _hugging_face_subject(
    name: str,
    model: Any,
    checkpoint: str,
    device: torch.device,
    converted: ConvertedModel | None,
    facts: dict[str, Any],
    kind: ModelKind = CAUSAL,
) -> Subject:
    """Return a Hugging Face model with the tokenizer of `checkpoint`. Raises UserError like `tokenizer_of_kind`."""
    tokenizer = tokenizer_of_kind(checkpoint, kind)
    end, longest = tokenizer.eos_token_id, pretrained.max_length(model)
    if kind is MASKED:
        # RoBERTa's table of positions begins with two rows that no token reads, which only its tokenizer says.
        end, longest = tokenizer.sep_token_id if end is None else end, min(longest, tokenizer.model_max_length)
    vocabulary = len(model.get_input_embeddings().weight)
    return Subject(name, model, Text(tokenizer, end), longest, vocabulary, device, converted, facts, kind=kind)


def tokenizer_of_kind(checkpoint: str, kind: ModelKind = CAUSAL) -> Any:
    """Return the tokenizer of a checkpoint.

    Raises UserError if it is missing, or has no token that ends a text, or that masks others for a masked-LM head.
    """
    tokenizer = pretrained.open_tokenizer(checkpoint)
    if kind is MASKED and tokenizer.mask_token_id is None:
        raise UserError(f"{checkpoint}: its tokenizer has no mask token: mask_token in tokenizer_config.json")
    if tokenizer.eos_token_id is None and (kind is not MASKED or tokenizer.sep_token_id is None):
        raise UserError(f"{checkpoint}: its tokenizer has no end-of-text token: eos_token in tokenizer_config.json")
    return tokenizer

"""Subjects, what can be scored: a run of ours, or a Hugging Face checkpoint of a LLaMA-like model.

Each kind is a branch of `load_subject`. A subject has a path in force: `16bit` (plain linears), or `low`, a run's low
path, for every operator.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.errors import UserError, one_of, told_as
from gnmr.lab import models
from gnmr.lab.config import Config, config_hash, read
from gnmr.lab.data import cache
from gnmr.lab.data import tokenizer as bpe
from gnmr.lab.models import pretrained
from gnmr.lab.train.build import build_converted, pretrained_model
from gnmr.lab.train.checkpoint import load_model
from gnmr.lab.train.memory_bound import refuse_run
from gnmr.precision import ConvertedModel, Recipe
from gnmr.precision.converted import described
from gnmr.records.reader import read_json
from gnmr.records.untrusted import check_folder, exists, first_line, reading

PATHS = ("16bit", "low")
Generate = Callable[[list[list[int]], int, Callable[[list[int]], bool]], list[list[int]]]


@dataclass(frozen=True)
class Text:
    """A tokenizer, of the library tokenizers or of transformers."""

    tokenizer: Any
    eos: int
    """The token that ends a text."""
    bos: int | None = None
    """The token that begins every text, if one does."""
    adds_special: bool = True
    """False: one of gnmr.lab.data, whose end token separates documents."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids; `special`: with the special tokens that the tokenizer adds itself."""
        found = self.tokenizer.encode(text, add_special_tokens=special and self.adds_special)
        return list(getattr(found, "ids", found))

    def plain(self, text: str, where: str) -> list[int]:
        """Token ids of a text in which control tokens count as text, as in training; `where` names the tokenizer."""
        own = getattr(self.tokenizer, "backend_tokenizer", None if self.adds_special else self.tokenizer)
        if own is None:  # one of transformers in Python
            return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        own = type(own).from_str(own.to_str())  # transformers changes its own at each call
        own.no_truncation()
        own.no_padding()
        return list(bpe.encode(own, [text], where, bpe.Controls.of(own, self.eos))[0].ids)

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """Text, without special tokens unless `special`."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special))


@dataclass
class Subject:
    """A model that can be scored; use it inside `serving`."""

    name: str
    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    """tokens_BT (int64, on `device`) -> logits_BTV."""
    text: Text
    max_length: int
    """The most tokens of one pass."""
    vocab_size: int
    device: torch.device
    path: str = "16bit"
    """The path in force: one of `PATHS`."""
    plan: ConvertedModel | None = None
    """The converted operators of the model, where there are any."""
    generate: Generate | None = None
    """(prompts, most new tokens, whether an answer is ended) -> greedy answers; None: by `logits` for each token."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For scores.json: kind, model, dtype, ..."""

    @property
    def named_path(self) -> str:
        """`path` as records name it: 16bit is w8a16 where precision.weights=instead left only INT8 codes."""
        coded = self.plan is not None and any(not o.weight.is_floating_point() for o in self.plan.operators)
        return "w8a16" if coded and self.path == "16bit" else self.path

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The model in evaluation mode, on the subject's path, without gradients; everything is restored afterwards.

        That includes each operator's path, the generator of stochastic rounding and delayed scales.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), _in_force(self.plan, self.path):
                yield
        finally:
            self.model.train(was_training)


@contextmanager
def _in_force(plan: ConvertedModel | None, path: str) -> Iterator[None]:
    if plan is None:
        yield
        return
    if path == "16bit":
        with plan.high_precision():
            yield
        return
    with plan.on_low_path():
        yield


def load_subject(path: str, in_force: str = "16bit", adapter: str | None = None, device: str = "auto") -> Subject:
    """The model at `path`: a run folder of ours, or a checkpoint folder or hub name of Hugging Face's.

    Args:
        in_force: `16bit`, or `low`: the run's own low path.
        adapter: a folder of peft's, for a Hugging Face checkpoint.
        device: auto, cpu or cuda.

    UserError for whatever cannot be scored. Folders are not trusted (`gnmr.records.untrusted`): no link below one is followed,
    and of Hugging Face's checkpoints only safetensors and data are read.
    """
    with told_as():
        one_of(PATHS, path=in_force)
        one_of(("auto", "cpu", "cuda"), device=device)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: PyTorch sees no CUDA device here; use auto or cpu")
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    folder = Path(path).expanduser()
    if exists(folder / "config.yaml"):
        if adapter is not None:
            raise UserError(f"adapter={adapter}: belongs to a Hugging Face checkpoint, and {path} is a run")
        check_folder(folder / "checkpoints")
        with reading(folder):
            return _run(folder, in_force, where)
    if in_force == "low":
        raise UserError(f"path=low: {path} is no run and has no low path; use path=16bit")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise UserError(f"{path}: is an adapter: give its base checkpoint, and adapter={path}")
            raise UserError(f"{path}: neither a run (config.yaml) nor a Hugging Face checkpoint (config.json)")
    elif folder.exists() or folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UserError(f"{path}: there is no such run, checkpoint folder or hub name")
    return _checkpoint(path, adapter, where)


# ---- runs of ours ----


def _run(folder: Path, in_force: str, device: torch.device) -> Subject:
    config = read(folder / "config.yaml")
    if config.model.checkpoint is not None:
        return _fine_tuned(folder, config, in_force, device)
    corpus = _corpus(folder, config)
    refuse_run(config, device, corpus.vocab_size)
    with torch.device("meta"):
        model = models.build(config.model, corpus.vocab_size, config.training.seq_len)
    model.to(getattr(torch, config.training.dtype)).to_empty(device=device)
    plan = None
    if in_force == "low":
        plan = build_converted(model, config.precision, config.training.seed)
        check_low(plan, config)
    facts = _facts(config, model, plan) | {"step": load_model(folder / "checkpoints", model, plan)}
    name, tokenizer, longest = str(folder), corpus.tokenizer_path, config.training.seq_len
    return of_run(name, model, tokenizer, max_length=longest, device=device, path=in_force, plan=plan, facts=facts)


def _fine_tuned(folder: Path, config: Config, in_force: str, device: torch.device) -> Subject:
    """A run that began from a checkpoint: the checkpoint with the weights that were trained."""
    checkpoint = config.model.checkpoint
    assert checkpoint is not None
    base, now = _header(folder).get("checkpoint"), pretrained.fingerprint(checkpoint)
    if base != now:
        raise UserError(f"{folder}: began from other weights than model.checkpoint={checkpoint} holds now")
    model, plan = pretrained_model(config, device)
    if in_force == "low":
        check_low(plan, config)
    facts = _facts(config, model, plan) | {"step": load_model(folder / "checkpoints", model, plan)}
    return of_checkpoint(str(folder), model, checkpoint, device=device, path=in_force, plan=plan, facts=facts)


def _facts(config: Config, model: nn.Module, plan: ConvertedModel | None) -> dict[str, Any]:
    return {
        "kind": "run",
        "model": config.model.name,
        "checkpoint": config.model.checkpoint,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": config.training.dtype,
        "arm": config.arm_name,
        "config": config_hash(config),
        "seed": config.training.seed,
        "low_path": None if plan is None else described(plan.low),
    }


def _header(folder: Path) -> dict[str, Any]:
    if (header := read_json(folder / "header.json")) is None:
        raise UserError(f"{folder / 'header.json'}: cannot be read (it is missing or no JSON object)")
    return header


def of_run(
    name: str,
    model: nn.Module,
    tokenizer: Path,
    *,
    max_length: int,
    device: torch.device,
    path: str = "16bit",
    plan: ConvertedModel | None = None,
    facts: dict[str, Any] | None = None,
) -> Subject:
    """A model of ours, loaded or in training, with the tokenizer.json of its data (`TokenCorpus.tokenizer_path`)."""
    try:
        own = bpe.load(tokenizer.read_bytes(), str(tokenizer))
    except OSError as error:
        raise UserError(f"{tokenizer}: the tokenizer cannot be read ({error.strerror})") from error
    text = Text(own, bpe.end_token(own), adds_special=False)
    vocab_size: int = model.embed_tokens.num_embeddings  # type: ignore[union-attr,assignment]
    return Subject(name, model, model, text, max_length, vocab_size, device, path, plan, None, facts or {})


def run_corpus(folder: Path) -> cache.TokenCorpus:
    """The token folder that a run was trained on. UserError where it is missing or damaged."""
    with reading(folder):
        return _corpus(folder, read(folder / "config.yaml"))


def _corpus(folder: Path, config: Config) -> cache.TokenCorpus:
    """The token folder that the run was trained on, by the fingerprint in its header."""
    try:
        fingerprint = _header(folder)["data"]["fingerprint"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder}: header.json does not say which data the run was trained on ({error})") from error
    places = dict.fromkeys([config.data.cache_dir, os.environ.get("GNMR_CACHE") or "~/.cache/gnmr"])
    for seen in (seen for place in places for seen in _seen_from(folder, place)):
        for meta in seen.glob(f"{config.data.name}-*/{cache.META}"):
            try:
                if json.loads(meta.read_text())["fingerprint"] == fingerprint:
                    return cache.open_folder(meta.parent)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            except cache.Corrupt as error:
                raise UserError(f"{meta.parent}: the run's tokenizer and tokens are damaged ({error})") from error
    raise UserError(
        f"{folder}: its tokenizer is missing: no token folder in {' or '.join(places)} is of data {fingerprint[:12]}; "
        "set GNMR_CACHE, or repeat the run's command, which prepares the data again"
    )


def _seen_from(folder: Path, place: str) -> list[Path]:
    """Where a token cache may be that config.yaml names: as seen from the run's folder, or from the working folder."""
    try:
        path = Path(place).expanduser()
    except RuntimeError:  # no home folder
        return []
    return [path] if path.is_absolute() else [folder / path, path]


def check_low(plan: ConvertedModel, config: Config) -> None:
    """UserError where the low path's forward pass is that of the 16-bit path."""
    if plan.casts_forward:
        return
    low = plan.low
    if isinstance(low, Recipe):
        why = f"the recipe {low.name} casts nothing in fprop"
    else:
        why = f"precision.low={low.name} with precision.site={config.precision.site} touches nothing but what backward keeps"
    raise UserError(f"path=low: {why}: its forward pass is the 16-bit one; use path=16bit")


# ---- Hugging Face's checkpoints ----


def _checkpoint(name: str, adapter: str | None, device: torch.device) -> Subject:
    pretrained.open_tokenizer(name)  # missing more often than the weights, which take minutes to load
    model = pretrained.load(name, "auto", device, where=name)
    facts = {"kind": "checkpoint", "model": model.config.model_type, "adapter": adapter}  # type: ignore[union-attr]
    facts |= {"parameters": sum(p.numel() for p in model.parameters())}
    facts |= {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    if adapter is not None:
        with pretrained.quiet():
            model = _adapted(model, Path(adapter).expanduser())
    return of_checkpoint(name, model, name, device=device, facts=facts)


def of_checkpoint(
    name: str,
    model: Any,
    checkpoint: str,
    *,
    device: torch.device,
    path: str = "16bit",
    plan: ConvertedModel | None = None,
    facts: dict[str, Any] | None = None,
) -> Subject:
    """A model of Hugging Face's, loaded or in training, with the tokenizer of `checkpoint`. UserError without one."""
    tokenizer = pretrained.open_tokenizer(checkpoint)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{checkpoint}: its tokenizer has no end-of-text token: eos_token in tokenizer_config.json")

    def logits(tokens_BT: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
        return found

    text = Text(tokenizer, tokenizer.eos_token_id, tokenizer.bos_token_id)
    longest, vocab_size = int(model.config.max_position_embeddings), model.get_input_embeddings().num_embeddings
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id)
    # The mask hides it, but it is looked up: a [PAD] that was added to the tokenizer alone has no embedding.
    pad = next((token for token in known if token is not None and token < vocab_size), 0)
    generate = _generator(model, pad, device)
    return Subject(name, model, logits, text, longest, vocab_size, device, path, plan, generate, facts or {})


def _adapted(model: Any, folder: Path) -> nn.Module:
    """`model` under the adapter in `folder`."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"adapter={folder}: holds no adapter of peft's (adapter_config.json)")
    pretrained.read_object(folder / "adapter_config.json")
    pretrained.check_safetensors(folder / "adapter_model.safetensors")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted: nn.Module = PeftModel.from_pretrained(model, str(folder))
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            surplus = sorted(set(file.keys()) - set(get_peft_model_state_dict(adapted)))
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, UserWarning) as error:
        raise UserError(f"adapter={folder}: does not fit this checkpoint ({first_line(error)})") from error
    if surplus:
        raise UserError(
            f"adapter={folder}: {len(surplus)} of its weights have no place in the model that adapter_config.json "
            f"describes (the first is {surplus[0]}); give the adapter_config.json that belongs to them"
        )
    return adapted


def _generator(model: Any, pad: int, device: torch.device) -> Generate:
    """Greedy answers by the model's own `generate`, with its cache of keys and values; prompts padded on the left."""
    from transformers import StoppingCriteria

    def generate(prompts: list[list[int]], most: int, ended: Callable[[list[int]], bool]) -> list[list[int]]:
        width = max(map(len, prompts))
        tokens_BT = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)

        class Ended(StoppingCriteria):
            def __call__(self, tokens: Tensor, scores: Tensor, **_: Any) -> Tensor:
                return torch.tensor([ended(row) for row in tokens[:, width:].tolist()], device=tokens.device)

        answers = model.generate(
            input_ids=tokens_BT,
            attention_mask=mask_BT,
            max_new_tokens=most,
            do_sample=False,
            use_cache=True,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=pad,
            stopping_criteria=[Ended()],
        )
        return [row[width:] for row in answers.tolist()]

    return generate

"""Batches for models that are no causal language models, from a text or from files with a text each.

| kind            | the model reads                                    | targets                              |
|-----------------|----------------------------------------------------|--------------------------------------|
| masked          | a piece of the text, 15% of its tokens masked      | the masked tokens                    |
| encoder-decoder | encoder: half of a piece; decoder: the other half  | the other half, one token further    |
| speech          | encoder: sound; decoder: the text                  | the text, one token further          |
| image-text      | pictures with their texts, by its processor        | the text, one token further          |

Sound and pictures are the files of a folder, each beside a file of the same name with .txt in which its text is. Where
there is a text alone, a speech model hears noise, and an image-text model is a causal language model.
"""

from __future__ import annotations

import inspect
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.errors import UserError, warn
from gnmr.lab.data.batch import IGNORED, Batch
from gnmr.lab.data.corpora import utf8
from gnmr.lab.evaluation.subjects import Subject
from gnmr.lab.models.kinds import ENCODER_DECODER, IMAGE_TEXT, MASKED, SPEECH
from gnmr.lab.models.pretrained import one_line, open_processor
from gnmr.records.untrusted import first_line

MASKED_SHARE = 0.15
"""Share of the tokens of a text that are masked, as BERT was trained (1810.04805)."""
_NOISE_SECONDS = 10
"""Length of noise in place of sound, if the feature extractor has no length of its own."""
_SUFFIXES = {SPEECH: (".wav",), IMAGE_TEXT: (".png", ".jpg", ".jpeg", ".webp")}


@dataclass(frozen=True)
class Examples:
    """N sequences of which batches are made."""

    number: int
    batch: Callable[[Tensor], Batch]
    """Returns the batch of the sequences of these numbers, (B,) int64."""


def examples_of_text(subject: Subject, ids: np.ndarray, length: int) -> Examples:
    """Return the sequences of `length` tokens that a text of these token ids makes. Raises UserError if it cannot."""
    if subject.kind is MASKED:
        return _masked(subject, ids, length)
    if subject.kind is ENCODER_DECODER:
        return _encoder_decoder(subject, ids, length)
    assert subject.kind is SPEECH
    return _noise(subject, ids, length)


def examples_in_folder(subject: Subject, data: Path, length: int) -> Examples:
    """Return the files of a folder with their texts: of sound, at most `length` tokens of each; of pictures, all.

    Raises UserError if the model reads neither sound nor pictures, or if a file cannot be read.
    """
    suffixes = _SUFFIXES.get(subject.kind)
    if suffixes is None:
        raise UserError(f"data={data}: is a folder, and a {subject.kind.name} model reads a text: give data=FILE.txt")
    files = sorted(file for file in data.iterdir() if file.suffix.lower() in suffixes and file.is_file())
    texts = [_text_of(file) for file in files]
    if subject.kind is SPEECH:
        extractor = _extractor(subject)
        return Examples(len(files), lambda places: _sounds(subject, extractor, *_at(places, files, texts), length))
    processor = open_processor(subject.name, "AutoProcessor")
    return Examples(len(files), lambda places: _pictures(subject, processor, *_at(places, files, texts)))


# ---- a text ----


def _masked(subject: Subject, ids: np.ndarray, length: int) -> Examples:
    begin, end = subject.text.around()
    pieces = _pieces(subject, ids, length, len(begin) + len(end))
    mask_token = subject.text.tokenizer.mask_token_id
    number = max(1, round(MASKED_SHARE * pieces.shape[1]))

    def batch(places: Tensor) -> Batch:
        tokens = _between(begin, pieces[places], end)
        targets = torch.full_like(tokens, IGNORED)
        for row, place in enumerate(places.tolist()):
            # The seed is the sequence's number, so that its masks are the same in every batch.
            order = torch.randperm(pieces.shape[1], generator=torch.Generator().manual_seed(place))
            chosen = len(begin) + order[:number]
            targets[row, chosen] = tokens[row, chosen]
            tokens[row, chosen] = mask_token
        return Batch(tokens, targets, inputs={"input_ids": tokens})

    return Examples(len(pieces), batch)


def _encoder_decoder(subject: Subject, ids: np.ndarray, length: int) -> Examples:
    begin, end = subject.text.around()
    prefix = _prefix(subject, begin)
    # The decoder's first token stands before the first target, so its prefix takes one place less than it has tokens.
    pieces = _pieces(subject, ids, length, len(begin) + len(end) + len(prefix) - 1)
    half = pieces.shape[1] // 2

    def batch(places: Tensor) -> Batch:
        source = _between(begin, pieces[places, :half], end)
        tokens, targets = _decoder_tokens(prefix, pieces[places, half:])
        return _for_decoder(tokens, targets, {"input_ids": source})

    return Examples(len(pieces), batch)


def _noise(subject: Subject, ids: np.ndarray, length: int) -> Examples:
    extractor = _extractor(subject)
    prefix = _prefix(subject, subject.text.around()[0])
    pieces = _pieces(subject, ids, length, len(prefix) - 1)
    samples = getattr(extractor, "n_samples", None) or _NOISE_SECONDS * extractor.sampling_rate
    warn(
        f"{subject.name}: a text has no sound, so the encoder hears noise; data=FOLDER with NAME.wav and NAME.txt "
        "gives it speech"
    )

    def batch(places: Tensor) -> Batch:
        # The seed is the block's number, so that it sounds the same in every batch.
        sounds = [0.1 * np.random.default_rng(place).standard_normal(samples) for place in places.tolist()]
        tokens, targets = _decoder_tokens(prefix, pieces[places])
        return _for_decoder(tokens, targets, _heard(subject, extractor, sounds))

    return Examples(len(pieces), batch)


def _pieces(subject: Subject, ids: np.ndarray, length: int, taken: int) -> Tensor:
    """Cut a text into pieces of `length` tokens less those `taken` by the tokenizer or decoder, (N, n) int64."""
    width = length - taken
    if width < 2:
        raise UserError(f"block={length}: {subject.name} puts {taken} tokens around a text; use longer blocks")
    return torch.from_numpy(ids[: len(ids) // width * width]).view(-1, width)


def _between(begin: Sequence[int], pieces: Tensor, end: Sequence[int]) -> Tensor:
    """Return the pieces (B, n) with the tokens before and after a text around each."""
    columns = [torch.tensor(tokens, dtype=torch.int64).expand(len(pieces), -1) for tokens in (begin, end)]
    return torch.cat([columns[0], pieces, columns[1]], dim=1)


# ---- decoders ----


def _prefix(subject: Subject, begin: Sequence[int]) -> list[int]:
    """Return the tokens with which a decoder begins: its start, and those before a text."""
    model: Any = subject.model
    settings = (model.config, getattr(model, "generation_config", None))
    starts = (getattr(config, "decoder_start_token_id", None) for config in settings)
    start = next((start for start in starts if start is not None), None)
    if start is None:
        raise UserError(f"{subject.name}: config.json has no decoder_start_token_id, with which its decoder begins")
    return [*begin] if begin and begin[0] == start else [start, *begin]


def _decoder_tokens(prefix: Sequence[int], texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return (what the decoder reads, its targets) of texts (B, n); the prefix is no target."""
    sequences = _between(prefix, texts, ())
    targets = sequences[:, 1:].clone()
    targets[:, : len(prefix) - 1] = IGNORED
    return sequences[:, :-1], targets


def _for_decoder(tokens: Tensor, targets: Tensor, encoder_inputs: dict[str, Tensor]) -> Batch:
    return Batch(tokens, targets, inputs=encoder_inputs | {"decoder_input_ids": tokens, "use_cache": False})


# ---- sound ----


def _sounds(subject: Subject, extractor: Any, files: Sequence[Path], texts: Sequence[str], length: int) -> Batch:
    prefix = _prefix(subject, subject.text.around()[0])
    heard = _heard(subject, extractor, [_sound(file, extractor.sampling_rate) for file in files])
    ids = [subject.text.plain(text, subject.name)[: length - len(prefix) + 1] for text in texts]
    longest = max(map(len, ids))
    # A shorter text is padded with targets that do not count; what the decoder reads there changes nothing before.
    padded = torch.tensor([[*row, *[IGNORED] * (longest - len(row))] for row in ids], dtype=torch.int64)
    tokens, targets = _decoder_tokens(prefix, padded)
    return _for_decoder(tokens.clamp(min=0), targets, heard)


def _sound(file: Path, rate: int) -> np.ndarray:
    """Return the samples of a WAV file of 16 bits, the mean of its channels, (n,) float32 between -1 and 1."""
    try:
        with wave.open(str(file)) as opened:
            channels, width, rate_of_file = opened.getnchannels(), opened.getsampwidth(), opened.getframerate()
            values = np.frombuffer(opened.readframes(opened.getnframes()), dtype="<i2" if width == 2 else np.uint8)
    except (OSError, EOFError, wave.Error) as error:
        raise UserError(f"{file}: cannot be read as WAV ({first_line(error)})") from error
    if (width, rate_of_file) != (2, rate):
        right = f"{rate:,} Hz in 16 bits (ffmpeg -i {file.name} -ar {rate} -c:a pcm_s16le OTHER.wav)"
        raise UserError(f"{file}: has {rate_of_file:,} Hz in {8 * width} bits, and the model hears {right}")
    return (values.reshape(-1, channels).mean(axis=1) / 2**15).astype(np.float32)


def _extractor(subject: Subject) -> Any:
    """Return the feature extractor of a speech model."""
    return open_processor(subject.name, "AutoFeatureExtractor")


def _heard(subject: Subject, extractor: Any, sounds: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return what the encoder reads of some sounds."""
    # Whisper's extractor pads to its 30 seconds by itself, and its encoder reads no other length.
    padding = {} if hasattr(extractor, "n_samples") else {"padding": True}
    features = extractor([*sounds], sampling_rate=extractor.sampling_rate, return_tensors="pt", **padding)
    return _accepted(subject, features)


# ---- pictures ----


def _pictures(subject: Subject, processor: Any, files: Sequence[Path], texts: Sequence[str]) -> Batch:
    pictures = [_picture(file) for file in files]
    prompts = [_prompt(subject, processor, text) for text in texts]
    with one_line(subject.name, problem="has a processor that cannot read the pictures"):
        features = processor(images=pictures, text=prompts, return_tensors="pt", padding=True)
    tokens, present = features["input_ids"], features["attention_mask"].bool()
    # The next token, if it is there and is a token of the text: pictures stand for themselves.
    tokenizer: Any = subject.text.tokenizer
    # Some tokenizers say of their image token only that it is special, and give it no role.
    added = {token for token, word in tokenizer.added_tokens_decoder.items() if word.special}
    special = torch.tensor(sorted({*tokenizer.all_special_ids, *added}))
    targets = torch.full_like(tokens, IGNORED)
    counts = present[:, 1:] & present[:, :-1] & ~torch.isin(tokens[:, 1:], special)
    targets[:, :-1] = torch.where(counts, tokens[:, 1:], IGNORED)
    return Batch(tokens, targets, inputs=_accepted(subject, features) | {"use_cache": False})


def _prompt(subject: Subject, processor: Any, text: str) -> str:
    """Return the text with the place of one picture before it, as the model was trained to read it."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": text}]
        return str(processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    place: Any = getattr(processor, "image_token", None)
    if place is None:
        raise UserError(f"{subject.name}: its processor has neither a chat template nor an image_token")
    return f"{place}{text}"


def _picture(file: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f"{file}: pictures need Pillow: pip install pillow torchvision") from error
    try:
        return Image.open(file).convert("RGB")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as a picture ({first_line(error)})") from error


# ---- files ----


def _accepted(subject: Subject, features: Any) -> dict[str, Any]:
    """Return the features that the model's forward pass takes."""
    taken = inspect.signature(subject.model.forward).parameters
    return {name: value for name, value in features.items() if name in taken}


def _text_of(file: Path) -> str:
    beside = file.with_suffix(".txt")
    try:
        return utf8(beside.read_bytes(), f"{beside}:", plain=True).strip()
    except OSError as error:
        raise UserError(f"{beside}: cannot be read ({error.strerror}); it holds the text of {file.name}") from error


def _at(places: Tensor, files: Sequence[Path], texts: Sequence[str]) -> tuple[list[Path], list[str]]:
    return [files[place] for place in places.tolist()], [texts[place] for place in places.tolist()]

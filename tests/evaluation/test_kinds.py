"""Models that are no causal language models, in the command: masked, encoder-decoder, speech and image-text."""

from __future__ import annotations

import json
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from architectures import ARCHITECTURES, DECODER, IMAGE, SEQ2SEQ, causal, language_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

import gnmr as package
from gnmr.errors import UserError
from gnmr.lab.evaluation import inputs
from gnmr.lab.evaluation.blocks import blocks_of
from gnmr.lab.evaluation.subjects import load_subject
from gnmr.lab.models.kinds import CAUSAL, ENCODER_DECODER, IMAGE_TEXT, MASKED, SPEECH, kind_of
from gnmr.lab.train.loss import logits_of
from gnmr.measure.kl import IGNORED

SPECIAL = ["<pad>", "<s>", "</s>", "<mask>", "<image>"]
TEMPLATES = {"bert": "<s> $A </s>", "modernbert": "<s> $A </s>", "t5": "$A </s>", "bart": "<s> $A </s>"}
TEMPLATES |= {"whisper": "<pad> <s> $A </s>", "llava": "<s> $A"}
KINDS = {"bert": MASKED, "modernbert": MASKED, "t5": ENCODER_DECODER, "bart": ENCODER_DECODER}
KINDS |= {"whisper": SPEECH, "llava": IMAGE_TEXT}
FEW = ("recipe=sim_e2m1", "batches=2", "held_out=0", "confirm=2", "batch_size=2", "block=16", "device=cpu")


def llava() -> Any:
    vision = tf.CLIPVisionConfig(**IMAGE, image_size=32, patch_size=8)
    config = {"vision_config": vision, "text_config": tf.LlamaConfig(**DECODER), "image_token_index": 4}
    return language_model(causal("Llava", **config), tf.AutoModelForImageTextToText).model


def whisper() -> Any:
    """It hears a second: 100 frames, of which the encoder makes 50 positions."""
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 64))}
    layers |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_target_positions": 32}
    config = causal("Whisper", **SEQ2SEQ, **layers, num_mel_bins=16, max_source_positions=50)
    return language_model(config, tf.AutoModelForSpeechSeq2Seq).model


def save(folder: Path, family: str) -> Path:
    """Write a small model with random weights and a byte-level tokenizer in Hugging Face's layout."""
    model = {"llava": llava, "whisper": whisper}.get(family, lambda: ARCHITECTURES[family]().model)()
    for weight in model.parameters():  # far from uniform predictions
        if weight.dim() == 2:
            weight.data.mul_(3)
    model.save_pretrained(folder)
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=TEMPLATES[family], special_tokens=[(token, number) for number, token in enumerate(SPECIAL)]
    )
    names: dict[str, Any] = dict(zip(("pad_token", "bos_token", "eos_token", "mask_token"), SPECIAL, strict=False))
    if family == "bert":  # as BERT's own, which has no end of a text
        names["sep_token"] = names.pop("eos_token")
    if family == "llava":
        names["extra_special_tokens"] = {"image_token": "<image>"}
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    if family == "whisper":
        tf.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in folders:
            folders[family] = save(tmp_path_factory.mktemp(family), family)
        return folders[family]

    return of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{number} and " for number in range(200)))


def batches(folder: Path, data: str = "text.txt", **more: Any) -> tuple[Any, list[Any]]:
    subject = load_subject(str(folder), device="cpu")
    options = {"batches": 2, "held_out": 1, "length": 16, "size": 2} | more
    blocks = blocks_of(subject, Path(data), **options)
    subject.model.eval()
    return subject, [*blocks.batches, *blocks.held_out]


# ---- which kind ----


@pytest.mark.parametrize("family", KINDS)
def test_the_kind_follows_from_the_class_that_was_saved(family: str, saved: Any) -> None:
    assert kind_of(tf.AutoConfig.from_pretrained(saved(family))) is KINDS[family]


@pytest.mark.parametrize(
    ("config", "saved_as", "kind"),
    [
        (tf.BertConfig, "BertLMHeadModel", CAUSAL),
        (tf.BertConfig, "BertModel", None),
        (tf.BertConfig, "BertForSequenceClassification", None),
        (tf.BartConfig, "BartModel", ENCODER_DECODER),
        (tf.LlamaConfig, "LlamaModel", CAUSAL),
        (tf.LlamaConfig, None, CAUSAL),
        (tf.CLIPConfig, "CLIPModel", None),
        (tf.Gemma3Config, "Gemma3ForConditionalGeneration", IMAGE_TEXT),
        (tf.Gemma3TextConfig, "Gemma3ForCausalLM", CAUSAL),
        (tf.GraniteSpeechConfig, "GraniteSpeechForConditionalGeneration", None),
    ],
)
def test_families_with_several_kinds(config: Any, saved_as: str | None, kind: Any) -> None:
    assert kind_of(config(architectures=None if saved_as is None else [saved_as])) is kind


def test_what_has_no_logits_is_one_line_that_points_to_python(gnmr: Any) -> None:
    says = r"has no logits that the commands can ask for: use gnmr.diagnose(model, forward, batches)"
    tf.BertConfig(architectures=["BertModel"]).save_pretrained("features")
    line = gnmr("diagnose", "features", "data=text.txt").mistake
    assert line.startswith(f"features: BertModel {says}")
    for folder, file, content in (
        ("pipeline", "model_index.json", {"_class_name": "StableDiffusionPipeline"}),
        ("unet", "config.json", {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30"}),
    ):
        Path(folder).mkdir()
        Path(folder, file).write_text(json.dumps(content))
        for command in ("diagnose", "audit"):
            assert gnmr(command, folder, "data=text.txt").mistake.startswith(f"{folder}: a diffusion model {says}")


# ---- batches ----


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_masked_model_predicts_the_masked_tokens_of_the_text(family: str, saved: Any) -> None:
    subject, made = batches(saved(family))
    ids = torch.tensor(subject.text.plain(Path("text.txt").read_text(), ""))
    for batch in made:
        masked = batch.targets != IGNORED
        assert masked.sum(1).tolist() == [2, 2], "15% of 14"
        assert torch.equal(masked, batch.tokens == 3) and torch.equal(batch.inputs["input_ids"], batch.tokens)
        assert (batch.tokens[:, 0] == 1).all() and (batch.tokens[:, -1] == 2).all()
        for row in torch.where(masked, batch.targets, batch.tokens)[:, 1:-1]:
            assert any(torch.equal(row, piece) for piece in ids.unfold(0, 14, 14))
    larger = batches(saved(family), batches=1, size=4, held_out=0)[1][0]
    assert torch.equal(larger.tokens, torch.cat([batch.tokens for batch in made[:2]])), "the masks are the same"


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_decoder_goes_on_with_the_text(family: str, saved: Any) -> None:
    """Its decoder reads what transformers makes of the targets."""
    subject, made = batches(saved(family))
    prefix = len(subject.text.around()[0])
    for batch in made:
        source, labels = batch.inputs["input_ids"], batch.targets.clone()
        if prefix:
            labels[:, 0] = 1  # <s> is read, and is no target
        with torch.no_grad():
            expected = subject.model(input_ids=source, labels=labels).logits
            torch.testing.assert_close(logits_of(subject.model, batch), expected, rtol=0, atol=1e-6)
        whole = torch.cat([source[:, prefix:-1], batch.targets[:, prefix:]], dim=1)
        text = Path("text.txt").read_text()
        assert all(subject.text.tokenizer.decode(row) in text for row in whole)


def test_without_sound_a_speech_model_hears_noise_and_says_so(saved: Any) -> None:
    with pytest.warns(UserWarning, match=r"a text has no sound, so the encoder hears noise; data=FOLDER with NAME.wav"):
        subject, made = batches(saved("whisper"))
    assert made[0].inputs["input_features"].shape == (2, 16, 100)
    assert made[0].tokens[:, :2].tolist() == [[0, 1]] * 2 and (made[0].targets[:, 0] == IGNORED).all()
    with torch.no_grad():
        assert logits_of(subject.model, made[0]).shape == (2, 16, 320)


def record(file: Path, samples: np.ndarray, rate: int = 16000) -> None:
    with wave.open(str(file), "wb") as opened:
        opened.setparams((1, 2, rate, len(samples), "NONE", ""))
        opened.writeframes((samples * 2**15).astype("<i2").tobytes())


def test_a_speech_model_hears_the_files_of_a_folder(saved: Any) -> None:
    Path("speech").mkdir()
    for number in range(6):
        record(Path("speech", f"{number}.wav"), np.sin(np.arange(16000) * 0.05 * (number + 1)) / 2)
        Path("speech", f"{number}.txt").write_text("one two " * (1 + number % 2))
    subject, made = batches(saved("whisper"), "speech")
    extractor = tf.AutoFeatureExtractor.from_pretrained(saved("whisper"))
    expected = [
        extractor(np.sin(np.arange(16000) * 0.05 * (number + 1)) / 2, sampling_rate=16000, return_tensors="pt")
        for number in range(6)
    ]
    heard = torch.cat([batch.inputs["input_features"] for batch in made])
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()
    for row, number in zip(heard, order, strict=True):
        # 16 bits of the file, in a logarithm
        torch.testing.assert_close(row, expected[number].input_features[0], rtol=0, atol=0.1)
    for batch, numbers in zip(made, torch.tensor(order).split(2), strict=True):
        said = [subject.text.tokenizer.decode(row[row != IGNORED]) for row in batch.targets]
        assert said == [("one two " * (1 + number % 2))[:15].strip(" ") for number in numbers.tolist()]


@pytest.mark.parametrize("template", [None, "{{ messages[0].content[1].text }}<image>!"])
def test_an_image_text_model_sees_the_pictures_of_a_folder(template: str | None, saved: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = saved("llava")
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    places = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    pictures = tf.CLIPImageProcessor(**sizes)
    tf.LlavaProcessor(pictures, tokenizer, chat_template=template, **places).save_pretrained(folder)
    Path("seen").mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 50, 3), dtype=np.uint8)
        image.fromarray(pixels).save(f"seen/{number}.png")
        Path(f"seen/{number}.txt").write_text("noise " * (1 + number % 2))
    subject, made = batches(folder, "seen")
    for batch in made:
        assert batch.inputs["pixel_values"].shape == (2, 3, 32, 32)
        assert (batch.tokens == 4).sum(1).tolist() == [16, 16], "a place for each patch"
        said = [subject.text.tokenizer.decode(row[row != IGNORED]) for row in batch.targets]
        if template is None:
            assert all(text in ("noise", "noise noise") for text in said)
        else:  # its first letter is predicted from <s>, and ! after the picture
            assert all(text in ("noise!", "noise noise!") for text in said)
        with torch.no_grad():
            logits = logits_of(subject.model, batch)
            blank = {**batch.inputs, "pixel_values": torch.zeros_like(batch.inputs["pixel_values"])}
            assert not torch.equal(logits, subject.model(**blank).logits)


def test_no_picture_is_a_target(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokenizer says of <image> only that it is special, and gives it no role."""
    subject = load_subject(str(saved("llava")), device="cpu")
    letters = Tokenizer.from_str(subject.text.tokenizer.backend_tokenizer.to_str())
    letters.add_special_tokens(["<image>"])
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")
    assert 4 not in tokenizer.all_special_ids
    tokens = torch.tensor([[4, 4, 7, 8, 2]])

    class Processor:
        image_token = "<image>"

        def __call__(self, **_asked: Any) -> dict[str, Tensor]:
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    monkeypatch.setattr(inputs, "open_processor", lambda *_: Processor())
    monkeypatch.setattr(inputs, "_picture", lambda _file: None)
    Path("seen").mkdir()
    for ending in ("png", "txt"):
        Path(f"seen/0.{ending}").write_text("ab")
    with_text = replace(subject, text=replace(subject.text, tokenizer=tokenizer))
    (batch,) = blocks_of(with_text, Path("seen"), batches=1, held_out=0, length=16, size=1).batches
    assert batch.targets.tolist() == [[IGNORED, 7, 8, IGNORED, IGNORED]]


def test_mistakes_in_a_folder(saved: Any) -> None:
    Path("speech").mkdir()
    record(Path("speech/a.wav"), np.zeros(800), rate=8000)
    with pytest.raises(UserError, match=r"^speech/a.txt: cannot be read \(.*\); it holds the text of a.wav$"):
        batches(saved("whisper"), "speech")
    Path("speech/a.txt").write_text("one")
    with pytest.raises(UserError, match=r"^data=speech: has 1 blocks of 16 tokens and needs 6"):
        batches(saved("whisper"), "speech")
    with pytest.raises(UserError, match=r"^speech/a.wav: has 8,000 Hz in 16 bits, and the model hears 16,000 Hz in 16"):
        batches(saved("whisper"), "speech", batches=1, held_out=0, size=1)
    with pytest.raises(UserError, match=r"^data=speech: is a folder, and a masked model reads a text: give data=FILE"):
        batches(saved("bert"), "speech")


# ---- the commands ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "operators"),
    [
        ("bert", {"bert.encoder.layer.0.attention.self.query"}),
        ("t5", {"encoder.block.0.layer.0.SelfAttention.q", "decoder.block.1.layer.1.EncDecAttention.v"}),
        ("whisper", {"model.encoder.layers.0.fc1", "model.decoder.layers.0.encoder_attn.q_proj"}),
        ("llava", {"model.language_model.layers.0.self_attn.q_proj"}),
    ],
)
def test_diagnose_and_audit(family: str, operators: set[str], saved: Any, gnmr: Any) -> None:
    """The numbers are those of Python, with the inputs that the command makes."""
    folder = saved(family)
    kinds = "include=head" if family == "bert" else "include=kv,head"
    ended = gnmr("diagnose", str(folder), "data=text.txt", *FEW, "out=plan", kinds)
    assert ended.code == 0, ended.err
    assert "gnmr.attach(model, plan='plan')" in ended.out and "gnmr train" not in ended.out
    tree = json.loads(Path("plan/diagnosis.json").read_text())
    assert operators <= tree["operators"].keys() and tree["subject"]["loaded_by"] == KINDS[family].auto_class
    assert not any("vision" in name or "lm_head" in name for name in tree["operators"])
    caches = [row["operator"] for row in tree["beside"] if "_cache" in row["operator"]]
    assert all("decoder" in name or "language_model" in name for name in caches) and bool(caches) == (family != "bert")
    subject, made = batches(folder, held_out=0)
    found = package.diagnose(
        subject.model.float(),
        lambda batch: (logits_of(subject.model, batch), batch.targets),
        made,
        recipe="sim_e2m1",
        targets=subject.targets,
        confirm=2,
    )
    assert found.measured.kl and found.measured.kl > 1e-4
    assert found.measured.kl == pytest.approx(tree["measured"]["kl"], rel=1e-4)
    ended = gnmr("audit", str(folder), "data=text.txt", "recipe=fp8_hybrid", "batch_size=2", "block=16", "device=cpu")
    assert ended.code in (0, 1), ended.err


def test_an_encoder_keeps_no_keys_and_values(saved: Any, gnmr: Any) -> None:
    line = gnmr("diagnose", str(saved("bert")), "data=text.txt", "include=kv", *FEW).mistake
    assert line.endswith("is an encoder, which keeps no keys and values for a next token")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "followed"), [("bert", True), ("llava", True), ("t5", False)])
def test_measured_alone(family: str, followed: bool, saved: Any, gnmr: Any) -> None:
    """Block by block where the blocks can be followed, else operator by operator, which one line says."""
    words = ("data=text.txt", "recipe=sim_int4", "batches=1", "held_out=0", "batch_size=2", "block=16", "device=cpu")
    ended = gnmr("diagnose", str(saved(family)), *words, "measure=all", "out=plan")
    assert ended.code == 0, ended.err
    assert ("every operator is measured by passes of the whole model" in ended.err) != followed
    rows = json.loads(Path("plan/diagnosis.json").read_text())["rows"]
    assert rows and all(row["measured"] is not None for row in rows)

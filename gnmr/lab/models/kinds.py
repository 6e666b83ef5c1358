"""Kinds of language models that `gnmr diagnose` and `gnmr audit` read, each loaded by an Auto class of transformers.

Training takes causal language models alone (`gnmr.lab.models.pretrained`). A diagnosis needs only logits over a
vocabulary, which all of these kinds have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelKind:
    """A kind of models that one Auto class of transformers loads."""

    name: str
    auto_class: str
    mapping: str
    """Name of the mapping of transformers from configs to the classes of this kind."""

    def class_of(self, config: Any) -> str | None:
        """Return the name of the class that the Auto class makes of a config; None if it makes none."""
        import transformers

        classes: Any = getattr(transformers, self.mapping)
        if type(config) not in classes:
            return None
        chosen = classes[type(config)]
        return str((chosen[0] if isinstance(chosen, tuple) else chosen).__name__)


CAUSAL = ModelKind("causal", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING")
IMAGE_TEXT = ModelKind("image-text", "AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING")
SPEECH = ModelKind("speech", "AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
ENCODER_DECODER = ModelKind("encoder-decoder", "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING")
MASKED = ModelKind("masked", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING")
KINDS = (IMAGE_TEXT, SPEECH, ENCODER_DECODER, MASKED, CAUSAL)
"""The order decides where one class serves two Auto classes: Gemma 3 with its images is an image-text model."""

IN_PYTHON = (
    "use gnmr.diagnose(model, forward, batches) or gnmr.audit(model, loss, batch) in Python, with a forward pass of "
    "your own"
)
"""What to do with a model of no kind."""


def kind_of(config: Any) -> ModelKind | None:
    """Return the kind of a checkpoint by its `PretrainedConfig`; None if it has no logits over tokens that we can ask.

    config.json names the class that was saved (`architectures`), which decides where a family has several: BERT is an
    encoder with a masked-LM head, a decoder, or a feature extractor.
    """
    saved = set(getattr(config, "architectures", None) or ())
    classes = {kind: kind.class_of(config) for kind in KINDS}
    by_class = next((kind for kind, name in classes.items() if name in saved), None)
    if by_class is SPEECH and not getattr(config, "is_encoder_decoder", False):
        return None  # it reads sound among the tokens of a prompt
    if by_class is not None:
        return by_class
    # The class says nothing (a base model whose head is tied, or none is named): take the family's only kind.
    if getattr(config, "is_encoder_decoder", False):
        return ENCODER_DECODER if classes[ENCODER_DECODER] else None
    kinds = [kind for kind, name in classes.items() if name is not None]
    return CAUSAL if CAUSAL in kinds and (len(kinds) == 1 or not saved) else None

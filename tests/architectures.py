"""Tiny models of transformers with random weights, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as tf
from torch import Tensor

WIDE = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
ENCODER = WIDE | {"intermediate_size": 128}
DECODER = ENCODER | ENDS | {"num_key_value_heads": 2}
SMALL_HEADS = DECODER | {"head_dim": 16}
GPT2_NAMES = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SEQ2SEQ = {"vocab_size": 320, "d_model": 64, "decoder_start_token_id": 0} | ENDS
LAYERS = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 128))}
LAYERS |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
IMAGE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}


def causal(name: str, **config: Any) -> Callable[[], tf.PretrainedConfig]:
    return lambda: getattr(tf, f"{name}Config")(**config)


CAUSAL: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "llama": causal("Llama", **DECODER),
    "mistral": causal("Mistral", **DECODER),
    "qwen2": causal("Qwen2", **DECODER),
    "qwen3": causal("Qwen3", **SMALL_HEADS),
    "gemma": causal("Gemma", **SMALL_HEADS),
    "gemma2": causal("Gemma2", **SMALL_HEADS),
    "gemma3_text": causal("Gemma3Text", **SMALL_HEADS),
    "phi": causal("Phi", **DECODER),
    "phi3": causal("Phi3", **DECODER),
    "stablelm": causal("StableLm", **DECODER),
    "starcoder2": causal("Starcoder2", **DECODER),
    "cohere": causal("Cohere", **DECODER),
    "olmo2": causal("Olmo2", **DECODER),
    "granite": causal("Granite", **DECODER),
    "mixtral": causal("Mixtral", **DECODER, num_local_experts=4),
    "olmoe": causal("Olmoe", **DECODER, num_experts=4, num_experts_per_tok=2),
    "qwen2_moe": causal("Qwen2Moe", **DECODER, **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": causal("Qwen3Moe", **SMALL_HEADS, **EXPERTS),
    "gpt_oss": causal("GptOss", **SMALL_HEADS, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": causal("DeepseekV2", **DECODER | LATENT, first_k_dense_replace=1, head_dim=16),
    "deepseek_v3": causal("DeepseekV3", **DECODER | LATENT, first_k_dense_replace=1, n_group=2, topk_group=1),
    "qwen3_next": causal(
        "Qwen3Next",
        **SMALL_HEADS,
        **EXPERTS,
        shared_expert_intermediate_size=64,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "jamba": causal(
        "Jamba",
        **DECODER,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=16,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "mamba": causal("Mamba", vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=8, time_step_rank=16),
    "mamba2": causal(
        "Mamba2",
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=16,
        **ENDS,
    ),
    "llama4": causal(
        "Llama4Text", **SMALL_HEADS, num_local_experts=4, intermediate_size_mlp=128, interleave_moe_layer_step=2
    ),
    "jetmoe": causal(
        "JetMoe",
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=16,
        intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        **ENDS,
    ),
    "dbrx": causal(
        "Dbrx",
        vocab_size=320,
        d_model=64,
        n_heads=4,
        n_layers=2,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        **ENDS,
    ),
    "gpt2": causal("GPT2", **GPT2_NAMES),
    "gpt_neo": causal(
        "GPTNeo",
        vocab_size=320,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt_neox": causal("GPTNeoX", **ENCODER),
    "gptj": causal("GPTJ", **GPT2_NAMES, rotary_dim=8),
    "codegen": causal("CodeGen", **GPT2_NAMES, rotary_dim=8),
    "gpt_bigcode": causal("GPTBigCode", **GPT2_NAMES),
    "opt": causal("OPT", **WIDE, **ENDS, ffn_dim=128, word_embed_proj_dim=64),
    "bloom": causal("Bloom", vocab_size=320, hidden_size=64, n_layer=2, n_head=4, **ENDS),
    "mpt": causal("Mpt", d_model=64, n_heads=4, n_layers=2, vocab_size=320, expansion_ratio=2, max_seq_len=128),
    "falcon": causal("Falcon", **WIDE, **ENDS),
    "recurrent_gemma": causal("RecurrentGemma", **DECODER, lru_width=64, attention_window_size=16),
}
"""Configs of causal language models."""


class Architecture(NamedTuple):
    """A model without dropout, a batch, and the loss of the model on it."""

    model: Any
    batch: Any
    loss: Callable[[Any], Tensor]


def tokens(length: int = 32, rows: int = 2) -> Tensor:
    return torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(1))


def language_model(config: Callable[[], tf.PretrainedConfig], auto: Any = tf.AutoModelForCausalLM) -> Architecture:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config()).eval()
    return Architecture(model, tokens(), lambda x: model(input_ids=x, labels=x, use_cache=False).loss)


def masked(name: str, **more: Any) -> Architecture:
    model = language_model(causal(name, **ENCODER | {"tie_word_embeddings": False} | more), tf.AutoModelForMaskedLM)
    return model._replace(loss=lambda x: model.model(input_ids=x, labels=x).loss)


def translator(name: str, **config: Any) -> Architecture:
    """400 tokens in, 8 out: rows count."""
    found = language_model(causal(name, **config), tf.AutoModelForSeq2SeqLM)
    model = found.model
    return Architecture(model, tokens(400), lambda x: model(input_ids=x, labels=x[:, :8].clone()).loss)


def whisper() -> Architecture:
    config = SEQ2SEQ | LAYERS | {"num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 32}
    model = language_model(causal("Whisper", **config), tf.AutoModelForSpeechSeq2Seq).model
    sound = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(1))
    return Architecture(model, sound, lambda x: model(input_features=x, labels=tokens(8)).loss)


def image_model(name: str, **config: Any) -> Architecture:
    kind = causal(name, **config, image_size=32, patch_size=8, num_labels=10)
    model = language_model(kind, tf.AutoModelForImageClassification).model
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return Architecture(model, pixels, lambda x: model(pixel_values=x, labels=torch.tensor([3, 5])).loss)


def clip() -> Architecture:
    text = ENCODER | {"max_position_embeddings": 32, "projection_dim": 64, "eos_token_id": 2}
    vision = IMAGE | {"image_size": 32, "patch_size": 8, "projection_dim": 64}
    whole = {"text_config": text, "vision_config": vision, "projection_dim": 64}
    model = language_model(causal("CLIP", **whole), tf.AutoModel)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    own = model.model
    return Architecture(own, pixels, lambda x: own(input_ids=tokens(16), pixel_values=x, return_loss=True).loss)


def wav2vec2() -> Architecture:
    shape = ENCODER | {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    shape |= {"mask_time_prob": 0.0, "layerdrop": 0.0, "num_conv_pos_embeddings": 16, "pad_token_id": 0}
    model = language_model(causal("Wav2Vec2", **shape), tf.AutoModelForCTC).model
    sound = torch.randn(2, 2000, generator=torch.Generator().manual_seed(1))
    return Architecture(model, sound, lambda x: model(input_values=x, labels=tokens(8)).loss)


OTHERS: dict[str, Callable[[], Architecture]] = {
    "bert": lambda: masked("Bert"),
    "roberta": lambda: masked("Roberta", max_position_embeddings=64),
    "modernbert": lambda: masked("ModernBert", **ENDS, cls_token_id=0, sep_token_id=0, reference_compile=False),
    "distilbert": lambda: masked("DistilBert", dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    "electra": lambda: masked("Electra", embedding_size=64),
    "t5": lambda: translator("T5", **SEQ2SEQ, d_ff=128, d_kv=16, num_layers=2, num_heads=4),
    "bart": lambda: translator("Bart", **SEQ2SEQ, **LAYERS, max_position_embeddings=512),
    "whisper": whisper,
    "vit": lambda: image_model("ViT", **IMAGE),
    "swin": lambda: image_model("Swin", embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=2),
    "clip": clip,
    "wav2vec2": wav2vec2,
}
"""Encoders and encoder-decoders."""

ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    **{name: lambda config=config: language_model(config) for name, config in CAUSAL.items()},
    **OTHERS,
}

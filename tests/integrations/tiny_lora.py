"""A Hugging Face LLaMA with random weights and LoRA on its seven projections, and tokens to train it on."""

from __future__ import annotations

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64
BASE = ["*_proj.base_layer"]
"""The frozen linears, as peft names them."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(layers: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=layers, **shape))


def lora_llama(layers: int = 3, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """The base frozen, rank 8 and scaling 16 as in the paper's 5.3."""
    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules=PROJECTIONS)
    return peft.get_peft_model(llama(layers, seed), config)


def token_blocks(number: int, length: int = 12, seed: int = 1) -> Tensor:
    """(number, length) int64. Every fifth block is one token over and over, so that steps differ."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(VOCAB, (number, length), generator=generator)
    blocks[::5] = blocks[::5, :1]
    return blocks

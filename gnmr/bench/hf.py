"""Our plain 16-bit model against Hugging Face's of the same shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.steps import batch
from gnmr.bench.timing import alternate, clock_of
from gnmr.errors import UserError
from gnmr.training.run import Parts, assemble


def check_hf(setting: Setting) -> None:
    """UserError unless the comparison can be made."""
    config = setting.config
    if find_spec("transformers") is None:
        raise UserError("bench hf: needs Hugging Face's transformers (pip install transformers), which is missing here")
    if config.model.name != "llama":
        raise UserError(f"bench hf: model.name={config.model.name}: the comparison is made for llama")


def hf(setting: Setting) -> list[Figure]:
    """Forward, loss and backward of one batch, no optimizer, taking turns; the weights are the same."""
    plain, converted = (assemble(setting.static("bf16"), Path(), setting.say) for _ in range(2))
    plain.plan.restore()
    theirs = _hugging_face(plain)
    block = batch(plain)[0]
    losses: dict[str, float] = {}

    def arm(name: str, model: nn.Module, logits: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            loss = F.cross_entropy(logits(block[:, :-1]).float().flatten(0, 1), block[:, 1:].flatten())
            loss.backward()
            losses[name] = loss.item()
            for parameter in model.parameters():
                parameter.grad = None

        return step

    arms = {
        "theirs": arm("theirs", theirs, lambda tokens: theirs(input_ids=tokens, use_cache=False).logits),
        "ours": arm("ours", plain.model, plain.model),
        "converted": arm("converted", converted.model, converted.model),
    }
    rounds = setting.rounds("hf: forward and backward of both models", 20, warm_up=3)
    seconds = alternate(arms, rounds, clock_of(plain.device, setting.clock))
    note = f"same weights and batch; loss {losses['ours']:.5f} here, {losses['theirs']:.5f} there"
    return [
        median("our plain step over Hugging Face's", seconds["ours"] / seconds["theirs"], "x", 1.0, note, True),
        median("  with linears converted, paths=bf16", seconds["converted"] / seconds["theirs"], "x", interval=True),
        median("Hugging Face's step", seconds["theirs"], "s"),
    ]


def _hugging_face(parts: Parts) -> nn.Module:
    """`LlamaForCausalLM` with sdpa and the weights, dtype and device of our model."""
    logging.disable(logging.WARNING)  # of what else is installed beside it
    from transformers import LlamaConfig, LlamaForCausalLM

    logging.disable(logging.NOTSET)
    model, config = parts.config.model, parts.config
    shape = LlamaConfig(
        vocab_size=parts.corpus.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads or model.num_heads,
        max_position_embeddings=config.training.seq_len,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tied_head,
    )
    theirs: nn.Module = LlamaForCausalLM._from_config(shape, attn_implementation="sdpa")
    weights = {
        f"{'' if name.startswith('lm_head') else 'model.'}{name}": p for name, p in parts.model.named_parameters()
    }
    with torch.no_grad():
        theirs.to(device=parts.device, dtype=getattr(torch, config.training.dtype))
        theirs.load_state_dict(weights, strict=not model.tied_head)  # a tied head is no weight of its own here
    return theirs.train()

"""Estimates block by block from disk against those of the whole model in memory, and what a backward pass asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import CAUSAL
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gnmr
from gnmr.lab.models.stored import NotReadByBlocks, open_stored
from gnmr.measure.blocks import NotFollowed
from gnmr.measure.kl import IGNORED, divergence, losses

QUICK = ("llama", "qwen3_moe")


def token_ids(seed: int) -> Tensor:
    return torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(seed))


def diagnosed(model: Any, **options: Any) -> Any:
    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return model(tokens, use_cache=False).logits, tokens.roll(-1, dims=1)

    batches = [token_ids(1), token_ids(2), token_ids(3)]
    options = {"confirm": 2, "held_out": [token_ids(4)], "rescue": ["mxfp8", "bf16"]} | options
    return gnmr.diagnose(model, run, batches, **options)


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """The numbers and words of a tree by their path."""
    if isinstance(tree, dict):
        return {key: leaf for name, value in tree.items() for key, leaf in leaves(value, f"{path}.{name}").items()}
    if isinstance(tree, list):
        return {key: leaf for at, value in enumerate(tree) for key, leaf in leaves(value, f"{path}.{at}").items()}
    return {path: tree}


def stored(family: str, folder: Path) -> Any:
    """A checkpoint in BF16 whose operators differ, and the same model in memory."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CAUSAL[family](), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    model.save_pretrained(folder)
    # Tables of positions are made in BF16, as in any pass of the model that was saved.
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CAUSAL if name not in QUICK)]
)
def test_an_estimate_by_blocks_is_that_of_the_whole_model(family: str, tmp_path: Path) -> None:
    in_memory = stored(family, tmp_path)
    options: dict[str, Any] = {"include": ["head", "kv"]} if family == "llama" else {}
    if family in ("jamba", "mamba"):  # widths that mxfp8 cannot have
        options["rescue"] = ["bf16"]
    try:
        model, weights = open_stored(str(tmp_path), torch.float32, torch.device("cpu"))
        by_blocks = diagnosed(model, weights=weights.read, **options).tree()
    except (NotFollowed, NotReadByBlocks) as error:
        assert family not in QUICK
        pytest.skip(f"{error}")
    whole = leaves(json.loads(json.dumps(diagnosed(in_memory, **options).tree())))
    apart = leaves(json.loads(json.dumps(by_blocks)))
    assert whole.keys() == apart.keys()
    for path, value in whole.items():
        if isinstance(value, float) and path != ".limit":  # drawn signs, in the order of calls
            # Other operands are added up in the same order, but masks may choose another kernel of attention.
            assert apart[path] == pytest.approx(value, rel=1e-4, abs=1e-10, nan_ok=True), path
        elif path != ".limit":
            assert apart[path] == value, path
    assert all(p.is_meta for name, p in model.named_parameters() if ".layers.0." in name)


def test_no_weight_requires_a_gradient() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CAUSAL["llama"]()).eval()
    frozen: list[bool] = []

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        frozen.append(not any(parameter.requires_grad for parameter in model.parameters()))
        return model(tokens, use_cache=False).logits, tokens.roll(-1, dims=1)

    diagnosis = gnmr.diagnose(model, run, [token_ids(1), token_ids(2)], confirm=0)
    assert all(frozen) and all(parameter.requires_grad for parameter in model.parameters())
    # The guess by gradient norms is that of a plain backward pass on the data's labels.
    norms: dict[str, float] = {}
    for seed in (1, 2):
        model.zero_grad()
        logits, targets = run(token_ids(seed))
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module.weight.grad is not None:
                norms[name] = norms.get(name, 0.0) + float(module.weight.grad.norm()) / 2
    scores = diagnosis.scores["gradient norm"]
    assert len(scores) == 14
    assert scores == pytest.approx({name: norms[name] for name in scores}, rel=1e-5)


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.first, self.head = nn.Embedding(300, 32), nn.Linear(32, 32), nn.Linear(32, 300)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embed(tokens)
            added = self.first(hidden)
            hidden += added
            return self.head(hidden)

    torch.manual_seed(0)
    model = InPlace()
    with pytest.raises(ValueError, match="first: its input is changed in place before the backward pass"):
        gnmr.diagnose(model, model, [token_ids(1), token_ids(2)], targets=["first"], recipe="mxfp8")


# ---- logits in slices ----

POSITIONS, VOCABULARY = 400, 50


class Large(TorchDispatchMode):
    """Counts results that are as large as the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = ("aten.view", "aten.split", "aten.slice", "aten.detach", "aten.alias", "aten.expand")
        if isinstance(result, Tensor) and not str(func).startswith(views):
            self.number += result.numel() >= POSITIONS * VOCABULARY
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_those_of_pytorch_and_keep_no_copy_of_the_logits(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(POSITIONS, VOCABULARY, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (POSITIONS,), generator=draw)
    targets[::7] = IGNORED
    weights = torch.rand(POSITIONS, generator=draw)
    expected = F.cross_entropy(logits.float(), targets, reduction="none")
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    with Large() as large:
        by_slices = losses(logits, targets)
        assert large.number == 0
        (by_hand,) = torch.autograd.grad((by_slices * weights).sum(), logits)
    assert large.number == 1, "the gradient itself"
    assert torch.equal(by_slices, expected)
    # Both round to `dtype` once; the terms of a softmax may be added up in another order.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(by_hand, gradient, rtol=tolerance, atol=1e-8)


def test_the_divergence_keeps_no_copy_of_the_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    high, low = torch.randn(2, 4, POSITIONS // 4, VOCABULARY, generator=draw)
    with Large() as large:
        divergence(high, low)
    assert large.number == 0


# ---- the command ----


@pytest.fixture
def text_command(tmp_path: Path, gnmr: Callable[..., Any]) -> Callable[..., Any]:
    """`gnmr diagnose` of a small checkpoint, with a tokenizer of bytes and a text."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path / "llama"
    stored("llama", folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["plain text of some words " * 20], vocab_size=300, special_tokens=["<end>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("plain text of some words, and of other words that are read twice " * 60)
    words = (f"data={text}", "batches=2", "held_out=1", "block=16", "batch_size=2", "confirm=1", "device=cpu")
    return lambda *more: gnmr("diagnose", str(folder), *words, *more)


def test_the_command_falls_back_to_the_whole_model(
    text_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnmr.measure import blocks

    ended = text_command(f"out={tmp_path / 'blocks'}")
    assert ended.code == 0, ended.err
    assert "2 blocks one after the other" in ended.out

    def refused(*_: Any) -> Any:
        raise NotFollowed("a reason")

    monkeypatch.setattr(blocks, "_split", refused)
    ended = text_command(f"out={tmp_path / 'whole'}")
    assert ended.code == 0, ended.err
    assert "LlamaForCausalLM cannot be run block by block: a reason" in ended.err
    whole, by_blocks = (json.loads((tmp_path / name / "diagnosis.json").read_text()) for name in ("whole", "blocks"))
    values = [[row["value"] for row in tree["rows"]] for tree in (whole, by_blocks)]
    assert values[1] == pytest.approx(values[0], rel=1e-5)


def test_too_little_memory_for_an_estimate_is_told_before_work_begins(
    text_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnmr.lab.train import memory

    monkeypatch.setattr(memory, "machine_memory", lambda: 10_000_000)
    ended = text_command()
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "cannot fit into memory" in ended.err and "use a smaller batch_size=" in ended.err

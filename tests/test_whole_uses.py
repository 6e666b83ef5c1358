"""Diagnose, plan, train under the plan, audit: four families from the command line, encoder-decoders in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
from architectures import ARCHITECTURES  # noqa: E402

import gnmr as package  # noqa: E402
from gnmr.lab.models import pretrained  # noqa: E402
from gnmr.plan.pin_plan import read_plan  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL = ["batches=2", "held_out=0", "batch_size=2", "block=16", "confirm=2", "device=cpu"]
RUN = ["model=pretrained", "model.adapter.rank=0", "optim.lr=1e-3", "training.steps=3", "training.seq_len=16"]
RUN += ["training.batch_size=2", "training.eval_every=3", "training.eval_sequences=2", "training.export_hf=true"]
RUN += ["training.threads=1", "records.live=off", "records.wandb=off", "data.name=text"]


def write(family: str, folder: Path) -> torch.nn.Module:
    """The family's tiny model with a tokenizer of bytes, in Hugging Face's layout."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(["</s>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = ARCHITECTURES[family]().model
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "opt", "gpt2"])
def test_from_the_command_line(
    family: str, gnmr: Callable, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = write(family, tmp_path / "base").state_dict()
    ended = gnmr("diagnose", "base", f"data={text_file}", "recipe=sim_e2m1", "budget=10%", "out=plan", *SMALL)
    assert ended.code == 0, ended.err
    plan = read_plan("plan/plan.json")
    assert plan.pins and plan.low == "sim_e2m1"

    words = [f"data.path={text_file}", "model.checkpoint=base", "plan=plan/plan.json", "run_dir=run"]
    ended = gnmr("train", *RUN, *words, "controller.signal=always_low")
    assert ended.code == 0, ended.err
    assert ("of an example each" in ended.out + ended.err) == (family == "opt")  # the others look at positions
    trained = pretrained.load("run/hf", torch.float32, torch.device("cpu")).state_dict()
    assert trained.keys() == before.keys() and any(not torch.equal(trained[name], before[name]) for name in before)
    losses = [json.loads(line)["loss"] for line in Path("run/steps.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and all(4 < loss < 8 for loss in losses)  # log 320 is 5.8

    for place in (["run"], ["run/hf", "plan=plan/plan.json", f"data={text_file}"]):
        ended = gnmr("audit", *place, "batch_size=2", "block=16", "device=cpu")
        assert ended.code == 0, ended.out + ended.err
    ended = gnmr("diagnose", "run", *SMALL, "plan=plan/plan.json")
    assert ended.code == 0, ended.err


def multiplications(model: torch.nn.Module, loss: Callable, batch: torch.Tensor) -> dict[str, int]:
    """Rows times inputs times outputs of every linear and convolution that `loss` calls, by hooks."""
    found: dict[str, int] = {}

    def hook(name: str) -> Callable:
        return lambda module, _, output: found.update({name: output.numel() * module.weight[0].numel()})

    kinds = torch.nn.Linear, torch.nn.Conv1d
    handles = [one.register_forward_hook(hook(name)) for name, one in model.named_modules() if isinstance(one, kinds)]
    loss(batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_an_encoder_decoder_in_python(family: str) -> None:
    """The encoder reads more rows than the decoder, so its GEMMs take more of the plan's time."""
    model, _, loss = ARCHITECTURES[family]()
    generator = torch.Generator().manual_seed(2)
    sounds = [torch.randn(2, 16, 128, generator=generator) for _ in range(2)]
    texts = [torch.randint(3, 320, (2, 48), generator=generator) for _ in range(2)]
    batches = texts if family == "t5" else sounds
    counted = multiplications(model, loss, batches[0])
    found = package.diagnose(model, loss, batches, recipe="nvfp4", confirm=2)
    plan = found.plan(0.1)
    assert plan.pins and plan.operators.keys() < counted.keys()
    rows = {name: counted[name] // (inputs * outputs) for name, (inputs, outputs) in plan.operators.items()}
    assert set(rows.values()) == ({96, 16} if family == "t5" else {128, 16})
    time = {"nvfp4": 1, "mxfp8": 2, "bf16": 4}
    rest = sum(number for name, number in counted.items() if name not in plan.operators)
    low = 3 * sum(counted[name] for name in plan.operators) + 3 * time["bf16"] * rest
    more = sum(counted[name] * (time[recipe] - 1) for name, own in plan.pins.items() for recipe in own.values())
    assert plan.extra_of_all == pytest.approx(more / low, rel=1e-6)
    fprop = sum(counted[name] for name in plan.operators)
    assert plan.extra == pytest.approx(more / fprop, rel=1e-6) and 0 < more / fprop <= 0.1

    controller = package.attach(model.train(), plan=plan, signal="always_low")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(8):
        own = loss(batches[step % 2])
        own.backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(own.detach()))
    assert losses[-1] < losses[0]
    audit = package.audit(model, loss, batches[0])
    assert [one.kind for one in audit.findings] == ([] if family == "t5" else ["not covered"]), "its convolutions"
    assert f"low precision covers {100 * (1 - rest / sum(counted.values())):.1f}%" in audit.verdict()
    controller.detach()

"""What a training step costs: the controller's share, signals' evidence, a mixture's dispatch, our model itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.attachment.record import event_rows, ratio_rows
from gnmr.control import Controller
from gnmr.control.norms import UnitNorms
from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.steps import compare
from gnmr.lab.bench.timing import Stopwatch, alternate, clock_of
from gnmr.lab.config import Config, to_dict
from gnmr.lab.config.model import ExpertsConfig
from gnmr.lab.models import Llama
from gnmr.lab.models.layers import GELUMLP
from gnmr.lab.models.moe import MoEMLP
from gnmr.lab.models.pretrained import as_hugging_face
from gnmr.lab.train import rows, step
from gnmr.lab.train.build import assemble, device_of, first_batch, train_step
from gnmr.precision import ConvertedModel
from gnmr.records.recorder import Recorder

# (owner, attribute, part) of what a step has because of the controller and the records.
_PARTS = (
    (UnitNorms, "__call__", "norms"),
    (Controller, "observe", "signal and policy"),
    (Controller, "apply", "switching"),
    (ConvertedModel, "saved_bytes", "records"),
    (ConvertedModel, "predicted_bytes", "records"),
    (ConvertedModel, "spent", "records"),
)
GNMR = "gnmr_delta"
# Arm: (signal, its options, precision.probe_tokens). Those between measurements never measure again after their first step:
# with every=k the mean is that plus a k-th of the difference.
SIGNALS: dict[str, tuple[str, dict[str, Any], int]] = {
    GNMR: (GNMR, {}, 1),
    "gap": ("gap", {}, 1),
    "gap, every 8th token": ("gap", {}, 8),
    "gap, every 64th token": ("gap", {}, 64),
    "gap, steps between measurements": ("gap", {"every": 1_000_000}, 1),
    "price, measured in each step": ("price", {"every": 1}, 1),
    "price, steps between measurements": ("price", {"early": 1, "every": 1_000_000}, 1),
    "gap_exact": ("gap_exact", {}, 1),
    "mse": ("mse", {}, 1),
    "grad_to_noise": ("grad_to_noise", {}, 1),
    "update_norm": ("update_norm", {}, 1),
    "oracle": ("oracle", {}, 1),
}
DISPATCH = 1.3
"""The most that it should cost against its dense arithmetic."""


def controller(setting: Setting) -> list[Figure]:
    """Two arms on one model: a bare step (forward, loss, backward, AdamW) and the step of `gnmr train` with records.

    The parts are timed where they run, inside the second arm; their sum over the median of the bare steps is the
    figure, because a step's noise is larger than what it has to show. The ratio of the arms is the check. W&B is off,
    the live view too.
    """
    settings = replace(setting.config.records, wandb="off", live="off")
    config = replace(setting.config, records=settings)
    with tempfile.TemporaryDirectory(prefix="gnmr-bench-") as folder:
        parts = assemble(config, Path(folder), setting.say)
        clock = clock_of(parts.device, setting.clock)
        watch = Stopwatch(clock)
        counters = rows.Counters()
        take_step, micro_batches = train_step(parts), first_batch(parts)

        def bare() -> None:
            losses = []
            for block in micro_batches:
                loss = step.loss_of(parts.model, block)
                (step.objective_of(parts.model, loss) / len(micro_batches)).backward()
                losses.append(loss.detach())
            parts.optimizer.found_inf = None  # type: ignore[attr-defined]
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=True)
            float(torch.stack(losses).mean())

        def controlled() -> None:
            watch.lap()
            result = take_step(micro_batches, config.optim.lr)
            counters.step += 1
            with watch.part("records"):
                recorder.step(rows.step_row(result, counters, 0.0), ratio_rows(result.decision))
                recorder.events(event_rows(result.decision))

        with Recorder(rows.run_info(parts, "bench"), settings, None) as recorder, watch.inside(*_PARTS):
            tree = to_dict(config)
            header = rows.header(parts, "gnmr bench step only=controller")
            recorder.start(OmegaConf.to_yaml(OmegaConf.create(tree)), tree, header, "bench")
            rounds = setting.rounds("controller: steps with and without", 40, warm_up=2)
            seconds = alternate({"bare": bare, "controlled": controlled}, rounds, clock)

    bare_s = seconds["bare"]
    names = list(dict.fromkeys(part for _, _, part in _PARTS))
    shares = {name: watch.seconds(name, len(bare_s)) / np.median(bare_s) for name in names}
    total: np.ndarray = np.sum(list(shares.values()), axis=0)
    return [
        median("controller and records, share of a step", total, "%", target=0.02, note="sum of the parts below"),
        *(median(f"  {name}", share, "%") for name, share in shares.items()),
        median("step with over step without", seconds["controlled"] / bare_s, "x", interval=True, note="check"),
        median("step without", bare_s, "s"),
    ]


def signals(setting: Setting) -> list[Figure]:
    """Whole steps of runs that differ in the signal alone."""
    arms = {name: _under(setting.config, *arm) for name, arm in SIGNALS.items()}
    found = compare(setting, "signals: steps under", arms)
    return [
        *(median(f"step under {name}", ratio, "x", interval=True) for name, ratio in found.ratios.items()),
        median(f"step under {GNMR}", found.seconds, "s"),
    ]


def _under(config: Config, name: str, options: dict[str, Any], probe_tokens: int) -> Config:
    controller = replace(config.controller, signal=name, options=options)
    return replace(config, controller=controller, precision=replace(config.precision, probe_tokens=probe_tokens))


def mixture(setting: Setting) -> list[Figure]:
    """Forward and backward of one mixture against a dense MLP with as many multiplications (k experts wide), and
    against its own experts on rows that lie sorted already: what is left then is the dispatch."""
    config = setting.config.model
    if config.name != "moe":
        config = replace(
            config, name="moe", num_kv_heads=None, tied_head=False, experts=ExpertsConfig(number=8, top_k=2)
        )
    config = replace(config, experts=replace(config.experts, routing_seed=None))  # which would need tokens
    dense = replace(config, intermediate_size=config.intermediate_size * config.experts.top_k)
    training, device = setting.config.training, device_of(setting.config.training.device)
    torch.manual_seed(training.seed)
    dtype = getattr(torch, training.dtype)
    moe, mlp = MoEMLP(config, 0).to(device, dtype), GELUMLP(dense).to(device, dtype)
    x_BTD = torch.randn(training.batch_size, training.seq_len, config.hidden_size).to(device, dtype).requires_grad_()
    x_ND = x_BTD.detach().flatten(0, 1)
    with torch.no_grad():
        lengths = moe.route(x_ND, None)[2].tolist()
    rows_RD = x_ND.repeat(config.experts.top_k, 1).requires_grad_()

    def experts() -> Tensor:
        pairs = zip(moe.experts, rows_RD.split(lengths), strict=True)
        return torch.cat([expert(rows) for expert, rows in pairs])

    def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def once() -> None:
            forward().sum().backward()
            for module in (moe, mlp):
                module.zero_grad(set_to_none=True)
            x_BTD.grad = rows_RD.grad = None

        return once

    arms = {"mixture": step(lambda: moe(x_BTD)[0]), "dense": step(lambda: mlp(x_BTD)), "experts": step(experts)}
    experts_are = f"{config.experts.number} experts, top-{config.experts.top_k}"
    rounds = setting.rounds(f"mixture: {experts_are}, its experts alone, and a dense MLP", 30, warm_up=3)
    seconds = alternate(arms, rounds, clock_of(device, setting.clock))
    note = f"{experts_are} of width {config.intermediate_size}, {training.batch_size * training.seq_len} tokens"
    return [
        median(
            "mixture over its dense arithmetic",
            seconds["mixture"] / seconds["dense"],
            "x",
            target=DISPATCH,
            note=note,
            interval=True,
        ),
        median(
            "mixture over its experts alone", seconds["mixture"] / seconds["experts"], "x", note=note, interval=True
        ),
        median("dense MLP, forward and backward", seconds["dense"], "s"),
    ]


def check_hf(setting: Setting) -> None:
    """UserError unless the comparison can be made."""
    config = setting.config
    if find_spec("transformers") is None:
        raise UserError("bench step: hf needs transformers (pip install transformers), which is missing here")
    if config.model.name != "llama":
        raise UserError(f"bench step: hf: model.name={config.model.name}: the comparison is made for llama")


def hf(setting: Setting) -> list[Figure]:
    """Forward, loss and backward of one batch, no optimizer, taking turns; the weights are the same."""
    plain, converted = (assemble(setting.static("bf16"), Path(), setting.say) for _ in range(2))
    plain.converted.restore()
    assert isinstance(plain.model, Llama), "check_hf refuses the others"
    theirs = as_hugging_face(plain.model)
    block = first_batch(plain)[0]
    assert isinstance(block, Tensor), "models of ours are trained on plain blocks"
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
        median(
            "our plain step over Hugging Face's",
            seconds["ours"] / seconds["theirs"],
            "x",
            target=1.0,
            note=note,
            interval=True,
        ),
        median("  with linears converted, low=bf16", seconds["converted"] / seconds["theirs"], "x", interval=True),
        median("Hugging Face's step", seconds["theirs"], "s"),
    ]


PARTS = {"controller": controller, "signals": signals, "mixture": mixture, "hf": hf}
CHECKS = {"hf": check_hf}

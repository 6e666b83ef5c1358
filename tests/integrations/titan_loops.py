"""One training in torchtitan's Trainer, as two processes, and by hand over the same torchtitan model.

python titan_loops.py FOLDER     # one process of those that RANK and WORLD_SIZE tell of: FOLDER/RANK.pt
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import torchtitan_loop as example
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import gnmr
from gnmr.attachment.torchtitan import GnmrConverter, GnmrTrainer, RoutedLinear, _attached, _routing_of
from gnmr.attachment.torchtitan_rules import ControlSection
from gnmr.control import Decision
from gnmr.errors import UserError

STEPS, SAVED, SIZE, ACCUMULATION, SEQ_LEN, LR, CLIP = 8, 4, 2, 2, 16, 5e-3, 0.5
PATHS = {"low": "int4", "recovery": "int8"}
CONTROL = {"max_o": 3, "alpha": 1.1, "beta": 1.05}
GAPS = {"signal": "recovery_gap", "max_o": 3}


class Noted(GnmrTrainer):
    """Keeps what its controller decided."""

    def __init__(self, config: GnmrTrainer.Config) -> None:
        self.seen: list[Decision] = []
        super().__init__(config)

    def forward_backward_step(self, **passes: Any) -> Tensor:
        loss = super().forward_backward_step(**passes)
        if self._passes == self.gradient_accumulation_steps:
            assert self.decision is not None
            self.seen.append(self.decision)
        return loss


def configured(folder: Path, steps: int = STEPS, paths: dict[str, Any] = PATHS, **control: Any) -> GnmrTrainer.Config:
    config = example.bytes_llama()
    config.dump_folder = str(folder)
    config.model_spec = example.small_llama(GnmrConverter.Config(paths=paths))
    config.optimizer = example.default_adamw(lr=LR)
    config.lr_scheduler = example.LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0)
    training = config.training
    training.steps, training.seq_len, training.local_batch_size, training.max_norm = steps, SEQ_LEN, SIZE, CLIP
    training.global_batch_size = SIZE * ACCUMULATION * int(os.environ["WORLD_SIZE"])
    training.mixed_precision_param = "float32"
    config.checkpoint.interval = SAVED
    config.debug.enable_structured_logging = False
    config.gnmr = ControlSection(**(control or CONTROL))
    return config


def trained(config: GnmrTrainer.Config) -> tuple[Noted, dict[str, Tensor]]:
    """The trainer when it is done, and the weights that it began with."""
    trainer = Noted(config)
    weights = {name: whole(one).clone() for name, one in trainer.model_parts[0].state_dict().items()}
    trainer.train()
    trainer.close()
    return trainer, weights


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def by_hand(config: GnmrTrainer.Config, weights: dict[str, Tensor]) -> list[Decision]:
    """One process with the micro-batches of all; `config`: of torchtitan's run."""
    parts, batches = ACCUMULATION * int(os.environ["WORLD_SIZE"]), micro_batches()
    spec = model_registry("debugmodel").model
    spec.layers = spec.layers[:2]
    for layer in spec.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.update_from_config(config=config)
    model = spec.build()
    model.init_weights()
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    targets = ["attention.*", "feed_forward.*"]
    controller = gnmr.attach(model, targets=targets, steps=config.training.steps, **PATHS, **config.gnmr.named())
    decisions = []
    for _ in range(config.training.steps):
        for _ in range(parts):
            rows = next(batches)
            logits = model(rows[:, :-1]).float().flatten(0, 1)
            (F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum") / (parts * SIZE * SEQ_LEN)).backward()
            controller.micro_step()
        decisions.append(controller.step())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    controller.detach()
    return decisions


def micro_batches() -> Iterator[Tensor]:
    """(SIZE, SEQ_LEN + 1) each: those of all ranks, in order."""
    library = example.Library(
        example.Library.Config(), dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=SIZE
    )
    return iter(library.batches)


def parallelized(config: GnmrTrainer.Config) -> tuple[bool, bool]:
    """Under torchtitan's usual spmd_backend, without FSDP2: whether every linear's forward was wrapped, and whether
    every path ran."""
    config.parallelism.spmd_backend = "spmd_types"
    dims = ParallelDims.from_config(config.parallelism, torch.distributed.get_world_size())
    utils.set_spmd_backend("spmd_types")
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    model = spec.model.build()
    model.parallelize(dims)
    model.init_weights()
    linears = [one for one in model.modules() if isinstance(one, RoutedLinear)]
    converted = _attached(model, _routing_of(spec.model), config).converted
    with utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
        model(next(micro_batches())[:, :-1])
    return all("forward" in vars(one) for one in linears), all(one.read is not None for one in converted.operators)


def refusal(config: GnmrTrainer.Config) -> str:
    try:
        trained(config)
    except UserError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(450, exit=True)  # where one of two waits for the other
    config, records = configured(out / "run"), out / "records" / "titan-s0"
    config.gnmr.record = str(records)
    run, weights = trained(config)
    config.gnmr.record = ""
    rank = torch.distributed.get_rank()
    if rank == 0:
        shutil.copytree(records, out / "records" / "first-s0")
        (records / "DONE").unlink()  # as of a run that was killed behind its last checkpoint
    seen: dict[str, Any] = {"whole": run.seen, "t": run.step}
    seen["routed"] = [name for name, one in run.model_parts[0].named_modules() if isinstance(one, RoutedLinear)]

    validated: list[bool] = []
    run._validate(lambda *_: validated.append(run.controller.converted.shared.high_precision))
    seen["in 16 bits"] = [*validated, run.controller.converted.shared.high_precision]

    again = configured(out / "run")
    again.gnmr.record = str(records)
    again.checkpoint.load_step = SAVED
    seen["rest"] = trained(again)[0].seen
    foreign = configured(out / "run", signal="grad_norm", options={"threshold": 1.0}, max_o=1)
    foreign.checkpoint.load_step = SAVED
    seen["of other settings"] = refusal(foreign)

    for name in ("eager", "compiled"):
        blocks = configured(
            out / name, 3, {"low": "sim_int8", "recovery": "bf16", "unit": "block"}, max_o=1, alpha=1.05
        )
        blocks.compile.enable, blocks.compile.components = name == "compiled", ["model"]
        blocks.compile.backend = "aot_eager"
        seen[name] = trained(blocks)[0].seen
    seen["graphs"] = counters["stats"]["unique_graphs"]
    config.compile.enable = True
    seen["compiled units"] = refusal(config)
    config.compile.enable = False

    short = configured(out / "gap", 2, **GAPS)
    gap, at_first = trained(short)
    seen["gap"] = gap.seen

    bare = configured(out / "bare", 1)
    plain = {one.name: getattr(bare, one.name) for one in fields(Trainer.Config)}
    plain["model_spec"].model = model_registry("debugmodel").model
    plain["model_spec"].model.layers = plain["model_spec"].model.layers[:2]
    for layer in plain["model_spec"].model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = Trainer(Trainer.Config(**plain))
    trainer.train()
    trainer.close()
    seen["without state"] = refusal(configured(out / "bare", 2))

    seen["spmd_types"] = parallelized(configured(out / "spmd", 2))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # by hand it is one process
    if rank == 0:
        seen["by hand"] = by_hand(config, weights)
        seen["gap by hand"] = by_hand(short, at_first)
    torch.save(seen, out / f"{rank}.pt")
    os._exit(0)  # gloo's threads may take their time


if __name__ == "__main__":
    main(Path(sys.argv[1]))

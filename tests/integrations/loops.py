"""One training in four loops: by hand, under Accelerate, in Hugging Face's Trainer and in Lightning's.

    python loops.py FOLDER by_hand ...     # one process of those that RANK and WORLD_SIZE tell of: FOLDER/RANK.pt

A loop takes `Start` and a folder for checkpoints, and returns what its controller decided. Micro-batch i of a step is
that of rank i, where there are several.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import gnmr
from gnmr.control import Decision
from gnmr.lab.config import ModelConfig
from gnmr.lab.models import build


@dataclass
class Start:
    """What a training begins from."""

    model: ModelConfig
    vocab_size: int
    weights: dict[str, Tensor]
    blocks: Tensor
    """(steps x micro-batches x their size, seq_len + 1)."""
    options: dict[str, Any]
    """Of `gnmr.attach`."""
    size: int
    """Blocks of a micro-batch."""
    accumulation: int
    lr: float
    clip_norm: float
    save_at: int = 0
    """The step after which a checkpoint is written; 0: none."""
    resume: bool = False
    """Whether to begin from it."""

    @property
    def steps(self) -> int:
        return len(self.blocks) // (self.size * self.accumulation)

    def net(self) -> nn.Module:
        model = build(self.model, self.vocab_size, self.blocks.shape[1] - 1)
        model.load_state_dict(self.weights)
        return model

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.0, fused=True)

    def micro_batches(self, rank: int = 0, world: int = 1) -> Iterator[Tensor]:
        """Those of one rank, in order."""
        return iter(self.blocks.split(self.size)[rank::world])


class Blocks(Dataset):
    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"blocks": self.blocks[index]}


class Later(DataLoader):
    """Lightning skips nothing when it resumes: this loader begins at batch `first`, as long as it was."""

    first = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        return islice(super().__iter__(), self.first, None)


class WithLoss(nn.Module):
    """As Hugging Face's models: the loss comes out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, blocks: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, blocks)}


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    return F.cross_entropy(model(blocks[:, :-1]).float().flatten(0, 1), blocks[:, 1:].flatten())


def place() -> tuple[int, int]:
    """(rank, how many)."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def by_hand(start: Start, folder: Path) -> list[Decision]:
    rank, world = place()
    model = start.net()
    optimizer = start.adamw(model)
    controller = gnmr.attach(model, **start.options)
    run = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    blocks, decisions = start.micro_batches(rank, world), []
    parts = start.accumulation // world
    for step in range(1, start.steps + 1):
        if start.resume and step <= start.save_at:
            _ = [next(blocks) for _ in range(parts)]
            if step == start.save_at:
                saved = torch.load(folder / "state.pt")
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                controller.load_state_dict(saved["controller"])
            continue
        for i in range(parts):
            with run.no_sync() if world > 1 and i < parts - 1 else nullcontext():
                (loss_of(run, next(blocks)) / parts).backward()
            controller.micro_step()
        decisions.append(controller.step())
        nn.utils.clip_grad_norm_(model.parameters(), start.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step == start.save_at and rank == 0:
            parts_of = {"model": model, "optimizer": optimizer, "controller": controller}
            torch.save({name: part.state_dict() for name, part in parts_of.items()}, folder / "state.pt")
    controller.detach()
    return decisions


def accelerate(start: Start, folder: Path) -> list[Decision]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=start.accumulation // place()[1], cpu=True)
    model = start.net()
    optimizer = start.adamw(model)
    controller = gnmr.attach(model.to(accelerator.device), **start.options)
    accelerator.register_for_checkpointing(controller)
    loader = DataLoader(Blocks(start.blocks), batch_size=start.size)
    run, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    decisions = []
    if start.resume:
        accelerator.load_state(str(folder / "accelerate"))
        loader = accelerator.skip_first_batches(loader, start.save_at * accelerator.gradient_accumulation_steps)
    for batch in loader:
        with accelerator.accumulate(run):
            accelerator.backward(loss_of(run, batch["blocks"]))
            controller.micro_step()
            if accelerator.sync_gradients:
                decisions.append(controller.step())
                accelerator.clip_grad_norm_(run.parameters(), start.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and controller.t == start.save_at and not start.resume:
            accelerator.save_state(str(folder / "accelerate"))
    controller.detach()
    return decisions


def hf_trainer(start: Start, folder: Path) -> list[Decision]:
    from transformers import Trainer, TrainingArguments

    from gnmr.attachment.trainer import GnmrTrainerCallback

    decisions: list[Decision] = []

    class Noted(GnmrTrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert self.decision is not None
            decisions.append(self.decision)

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=start.size,
        gradient_accumulation_steps=start.accumulation // place()[1],
        max_steps=start.steps,
        max_grad_norm=start.clip_norm,
        save_strategy="steps" if start.save_at else "no",
        save_steps=start.save_at or 500,
        save_total_limit=None,
        train_sampling_strategy="sequential",
        logging_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if place()[1] > 1 else None,
    )
    model = WithLoss(start.net())
    optimizer = start.adamw(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(model, arguments, train_dataset=Blocks(start.blocks), optimizers=(optimizer, constant))
    trainer.add_callback(Noted(trainer, **start.options))
    trainer.train(str(folder / "trainer" / f"checkpoint-{start.save_at}") if start.resume else None)
    return decisions


def lightning(start: Start, folder: Path) -> list[Decision]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from gnmr.attachment.lightning import GnmrLightningCallback

    rank, world = place()
    decisions: list[Decision] = []

    class Noted(GnmrLightningCallback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            super().on_before_optimizer_step(*args)
            assert self.decision is not None
            decisions.append(self.decision)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = start.net()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return loss_of(self.net, batch["blocks"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return start.adamw(self)

    kept = ModelCheckpoint(
        folder / "lightning", "{step}", every_n_train_steps=start.save_at or 10**6, save_top_k=-1, save_last=False
    )
    several = {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": world}
    trainer = pl.Trainer(
        accelerator="cpu",
        **(several if world > 1 else {"devices": 1}),
        use_distributed_sampler=False,
        max_steps=start.steps,
        accumulate_grad_batches=start.accumulation // world,
        gradient_clip_val=start.clip_norm,
        callbacks=[Noted(**start.options), kept],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    mine = torch.cat([*start.micro_batches(rank, world)])
    state = folder / "lightning" / f"step={start.save_at}.ckpt" if start.resume else None
    loader = Later(Blocks(mine), batch_size=start.size)
    loader.first = start.save_at * trainer.accumulate_grad_batches if start.resume else 0
    trainer.fit(Module(), loader, ckpt_path=state, weights_only=False)
    return decisions


LOOPS: dict[str, Callable[[Start, Path], list[Decision]]] = {
    "by_hand": by_hand,
    "accelerate": accelerate,
    "hf_trainer": hf_trainer,
    "lightning": lightning,
}


def main(argv: list[str]) -> None:
    out, *names = Path(argv[0]), *argv[1:]
    start = torch.load(out / "start.pt", weights_only=False)
    rank, world = place()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(300, exit=True)  # where one of two waits for the other
    store = f"file://{out / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    seen = {}
    for name in names:
        seen[name] = []
        for resume in (False, True):
            seen[name].append(LOOPS[name](replace(start, resume=resume), out))
            torch.distributed.barrier()
    torch.save(seen, out / f"{rank}.pt")
    os._exit(0)  # gloo's threads may take their time


if __name__ == "__main__":
    main(sys.argv[1:])

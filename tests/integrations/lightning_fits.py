"""A small module, its fits in Lightning's Trainer, and a callback that keeps what was decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gnmr.attachment.lightning import GnmrLightningCallback

OPTIONS: dict[str, Any] = {"targets": ["net.*"], "max_o": 1, "alpha": 1.02, "beta": 1.01}
X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))


class Module(pl.LightningModule):
    def __init__(self, skip: int = -1, optimizer: str = "AdamW", **words: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
        self.skip, self.optimizer, self.words, self.told = skip, optimizer, words, []

    def training_step(self, x: Tensor, i: int) -> Tensor | None:
        return None if i == self.skip else (self.net(x) - 2 * x).square().mean()

    def validation_step(self, x: Tensor, i: int) -> None:
        self.told.append((self.net(x) - 2 * x).square().mean().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-2, **self.words)


class Noted(GnmrLightningCallback):
    """Keeps what its controller decided."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**OPTIONS | options)
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, *args: Any) -> None:
        super().on_before_optimizer_step(*args)
        self.seen.append(self.decision)


def fit(folder: Path, module: Any = None, callback: Any = None, ckpt: str | None = None, **words: Any) -> Any:
    callback = Noted() if callback is None else callback
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "num_sanity_val_steps": 0}
    own = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": [callback], "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **(quiet | own | words))
    trainer.fit(Module() if module is None else module, DataLoader(X, 4), DataLoader(X[:4], 4), ckpt_path=ckpt)
    return callback

"""GNMR in Lightning's Trainer: a small LLaMA learns the bytes of Python's library, kept in 4 bits for backward.

    python examples/lightning_loop.py [--steps 20] [--folder FOLDER]
    torchrun --nproc-per-node 2 examples/lightning_loop.py --folder FOLDER      # two processes

The example needs the extra lightning but no network. GNMR adds one callback.
"""

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path

import lightning.pytorch as L
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from gnmr.attachment.lightning import GnmrLightningCallback

SEQ_LEN, BATCH, ACCUMULATION = 64, 8, 2


def library_blocks(number: int) -> torch.Tensor:
    """Return the source of this Python's standard library, one token per byte, as (number, SEQ_LEN + 1)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: number * (SEQ_LEN + 1)]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(number, SEQ_LEN + 1)


class Bytes(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, blocks: torch.Tensor, _: int) -> torch.Tensor:
        logits = self.model(input_ids=blocks[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Printed(L.Callback):
    """Prints the Trainer's log, which includes GNMR's metrics."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, _: object, __: object, i: int) -> None:
        if (i + 1) % ACCUMULATION == 0 and trainer.is_global_zero:
            told = "  ".join(f"{name} {float(value):.3f}" for name, value in sorted(trainer.logged_metrics.items()))
            print(f"step {trainer.global_step:3d}  {told}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--folder", help="where Lightning keeps its checkpoints; default: a temporary folder")
    words = parser.parse_args(argv)

    torch.manual_seed(0)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as temporary:
        trainer = L.Trainer(
            max_steps=words.steps,
            accumulate_grad_batches=ACCUMULATION,
            gradient_clip_val=1.0,
            callbacks=[GnmrLightningCallback(low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3), Printed()],
            log_every_n_steps=1,
            accelerator="cpu",
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            default_root_dir=words.folder or temporary,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        blocks = library_blocks(words.steps * BATCH * ACCUMULATION * processes)
        trainer.fit(Bytes(), torch.utils.data.DataLoader(blocks, batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()

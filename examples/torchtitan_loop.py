"""GNMR in torchtitan's Trainer: a small LLaMA learns the bytes of Python's library, kept in 4 bits for backward.

    torchrun --nproc-per-node 2 examples/torchtitan_loop.py --training.steps 12 --dump_folder FOLDER

The example needs torchtitan 0.3, in a separate environment (extra torchtitan), but no network. The options are
torchtitan's, except `--gnmr.max_o` and other `--gnmr` options. The same command continues from the newest checkpoint in
FOLDER.

GNMR adds a converter and `routed`. torchtitan expects an accelerator, so three things differ without CUDA. `on_cpu`
declares the CPU as the accelerator. FSDP2 sums without multiplying on the way, because gloo cannot. Attention is
torchtitan's own over `scaled_dot_product_attention`, because FlexAttention has no backward pass on CPUs. With torch
2.13 `partial_dtensor` is needed: FSDP2 does not accept the result of torchtitan's usual spmd_backend.
"""

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils

BATCH, ACCUMULATION, SEQ_LEN = 4, 2, 64


def on_cpu() -> None:
    """Declare the CPU as the accelerator, before torchtitan is imported."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lacking = {
        "current_device": lambda: 0,
        "get_device_name": lambda _: "CPU",
        "get_device_properties": lambda _: SimpleNamespace(total_memory=memory),
        "memory_stats": lambda _: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    module = SimpleNamespace(**vars(torch.cpu) | lacking)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: module
    if not hasattr(torch.distributed, "set_timeout"):  # it came after torch 2.13
        torch.distributed.set_timeout = lambda *_: None


if not torch.cuda.is_available():
    on_cpu()

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.train import main
from torchtitan.trainer import Trainer

from gnmr.attachment.torchtitan import GnmrConverter, GnmrTrainer, routed


class Bytes(BaseTokenizer):
    """A tokenizer with one token per byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Library(BaseDataLoader):
    """The source of this Python's standard library; rank i of W takes every W-th batch. Its position is saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        text = text[: len(text) // (seq_len + 1) * (seq_len + 1)]
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, seq_len + 1)
        self.batches, self.at = rows.split(local_batch_size)[dp_rank::dp_world_size], 0

    def __iter__(self):
        for rows in self.batches[self.at :]:
            self.at += 1
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def small_llama(converter: GnmrConverter.Config) -> ModelSpec:
    """Return two blocks of torchtitan's debug model, with our converter."""
    spec = model_registry("debugmodel", converters=[converter])
    spec.model.layers = spec.model.layers[:2]
    if torch.cuda.is_available():
        return spec
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelize = spec.parallelize_fn

    def with_gloo(model: torch.nn.Module, **options: object) -> torch.nn.Module:
        model = parallelize(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
        return model

    spec.parallelize_fn = with_gloo
    return spec


def bytes_llama() -> GnmrTrainer.Config:
    """Return the configuration of `--module torchtitan_loop --config bytes_llama`."""
    config = Trainer.Config(
        model_spec=small_llama(GnmrConverter.Config(paths={"low": "int4", "recovery": "int8"})),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        tokenizer=Bytes.Config(),
        dataloader=Library.Config(),
        optimizer=default_adamw(lr=2e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH,
            global_batch_size=BATCH * ACCUMULATION * int(os.environ.get("WORLD_SIZE", 1)),
            seq_len=SEQ_LEN,
            steps=12,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False),
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        debug=DebugConfig(seed=0),
    )
    return routed(config, max_o=4, alpha=1.3, beta=1.2)


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", "torchtitan_loop", "--config", "bytes_llama"]
    main()

"""GNMR in a Hugging Face Trainer: LoRA on a frozen base in INT8, risky layers in BF16.

    python examples/hf_trainer.py [--steps 20] [--folder FOLDER]
    torchrun --nproc-per-node 2 examples/hf_trainer.py --folder FOLDER      # two processes

A tiny LLaMA with random weights replaces a real checkpoint. The example needs the extra finetune but no network.
"""

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gnmr.attachment.trainer import GnmrTrainerCallback

SEQ_LEN, BATCH, ACCUMULATION = 48, 4, 2


class Blocks(torch.utils.data.Dataset):
    """The source of this Python's standard library in blocks of bytes."""

    def __init__(self, number: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: number * SEQ_LEN]
        self.blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(number, SEQ_LEN)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--folder", help="where the Trainer keeps its checkpoints; default: a temporary folder")
    words = parser.parse_args(argv)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)

    with tempfile.TemporaryDirectory() as temporary:
        args = TrainingArguments(
            output_dir=words.folder or temporary,
            max_steps=words.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            max_grad_norm=1.0,
            learning_rate=3e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=10,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        )
        trainer = Trainer(model, args, train_dataset=Blocks(words.steps * BATCH * ACCUMULATION))
        routing = {"unit": "block", "observe": "adapter"}
        callback = GnmrTrainerCallback(
            trainer, low="llm_int8", recovery="bf16", max_o=1, alpha=1.1, beta=1.2, **routing
        )
        trainer.add_callback(callback)
        trainer.train()


if __name__ == "__main__":
    main()

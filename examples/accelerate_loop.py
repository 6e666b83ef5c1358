"""GNMR in a loop under Hugging Face's Accelerate: LoRA on a frozen base in INT8, risky layers in BF16.

    python examples/accelerate_loop.py [--steps 20]
    torchrun --nproc-per-node 2 examples/accelerate_loop.py      # two processes, on CPUs too

A tiny LLaMA with random weights replaces a real checkpoint. The example needs the extra finetune but no network. The
three lines of GNMR are numbered.
"""

import argparse
import sysconfig
from pathlib import Path

import peft
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr

SEQ_LEN, BATCH, ACCUMULATION = 48, 4, 2


def library_blocks(number: int) -> torch.Tensor:
    """Return the source of this Python's standard library, one token per byte, as (number, SEQ_LEN)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: number * SEQ_LEN]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(number, SEQ_LEN)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    steps = parser.parse_args(argv).steps

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=not torch.cuda.is_available())
    number = steps * BATCH * ACCUMULATION * accelerator.num_processes
    blocks = torch.utils.data.DataLoader(library_blocks(number), batch_size=BATCH, shuffle=True)
    model, optimizer, blocks = accelerator.prepare(model, optimizer, blocks)
    controller = gnmr.attach(  # 1: after the adapters are added and the model is on its device
        model, low="llm_int8", recovery="bf16", unit="block", observe="adapter",
        max_o=1, alpha=1.1, beta=1.2,
    )  # fmt: skip

    model.train()
    for block in blocks:
        with accelerator.accumulate(model):
            loss = model(input_ids=block, labels=block).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                # 2: after the step's last micro-batch, before clipping. Under mixed_precision="fp16" the gradients
                # still carry the loss scale here: controller.step(grad_scale=accelerator.scaler.get_scale())
                decision = controller.step()
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.print(f"step {decision.step:3d}  loss {loss.item():.3f}  in recovery {controller.active}")
            optimizer.step()
            optimizer.zero_grad()

    controller.detach()  # 3: plain linears again


if __name__ == "__main__":
    main()

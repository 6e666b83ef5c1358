"""GNMR in your own loop and on your own model: a small Hugging Face LLaMA learns the bytes of Python's library.

    python examples/own_loop.py [--steps 40]

The three lines of GNMR are numbered; the rest is an ordinary training loop.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr

SEQ_LEN, BATCH, ACCUMULATION = 64, 8, 2


def library_bytes() -> torch.Tensor:
    """Return text that every machine has: the source of this Python's standard library, one token per byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    steps = parser.parse_args(argv).steps

    torch.manual_seed(0)
    text = library_bytes()
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)  # 1: before training
    print(controller.converted)

    for step in range(1, steps + 1):
        loss = 0.0
        for _ in range(ACCUMULATION):
            starts = torch.randint(len(text) - SEQ_LEN, (BATCH, 1))
            blocks = text[starts + torch.arange(SEQ_LEN + 1)]
            logits = model(input_ids=blocks[:, :-1]).logits
            part = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()) / ACCUMULATION
            part.backward()
            loss += part.item()

        decision = controller.step()  # 2: the step's gradients are complete and not yet clipped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        print(f"step {step:3d}  loss {loss:.3f}  in recovery next: {len(controller.active)} of {len(controller.units)}")
        for event in decision.events:
            if event.event == "promote":
                risk = "none" if event.risk is None else f"{event.risk:.2f}"  # None: unobserved, or before step 1
                print(f"          {event.unit} promoted: {event.cause}, risk {risk}")

    controller.detach()  # 3: plain linears again


if __name__ == "__main__":
    main()

"""Memory and time of `gnmr diagnose` by the size of the model, each command in a process of its own.

    python benchmarks/any_size.py make llama-8b FOLDER --tokenizer .cache/smollm2    random weights in this shape
    python benchmarks/any_size.py run OUT.jsonl FOLDER recipe=nvfp4 measure=all ...  appends one row of the command

`make` writes a checkpoint in Hugging Face's layout, bfloat16, one file a block, whose values depend on the names of
tensors alone. Random weights take the time and memory of trained ones; their KLs mean nothing. `run` records the peak
of the resident memory (getrusage) and the wall-clock time. Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1.3b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""Shapes of the LLaMA of 1.3 B that papers train, of Llama-3.2-1B and of Llama-3.1-8B."""
STANDARD_DEVIATION = 0.02


def make(shape: str, folder: Path, tokenizer: Path | None = None) -> None:
    """Write a checkpoint with random weights, file by file."""
    import torch
    from accelerate import init_empty_weights
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[shape], dtype="bfloat16")
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*") if tokenizer else ():
        shutil.copy(file, folder / file.name)
    files: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        block = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{block}.safetensors", {})[name] = parameter
    for file_name, parameters in files.items():
        tensors = {}
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.ones(parameter.shape, dtype=torch.bfloat16)
            tensors[name] = values if values.dim() == 1 else values.normal_(0, STANDARD_DEVIATION, generator=generator)
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        print(f"{folder / file_name}", flush=True)
    weight_map = {name: file_name for file_name, parameters in files.items() for name in parameters}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def run(out: Path, words: list[str]) -> None:
    """Run `gnmr diagnose` and append its peak memory and time to `out`."""
    from gnmr.lab.train.provenance import commit, machine

    began = time.perf_counter()
    process = os.posix_spawn(
        sys.executable, [sys.executable, "-m", "gnmr", "diagnose", *words], os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    _, status, usage = os.wait4(process, 0)
    import torch

    row = {
        "command": " ".join(["gnmr diagnose", *(re.sub(r"(^|=)/\S*/", r"\1", word) for word in words)]),  # no folders
        "exit_code": os.waitstatus_to_exitcode(status),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
        "commit": commit(),
        "machine": machine(torch.device("cpu")),
    }
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    maker = modes.add_parser("make")
    maker.add_argument("shape", choices=SHAPES)
    maker.add_argument("folder", type=Path)
    maker.add_argument("--tokenizer", type=Path, required=True)
    runner = modes.add_parser("run")
    runner.add_argument("out", type=Path)
    runner.add_argument("words", nargs="+")
    asked = parser.parse_args()
    if asked.mode == "make":
        make(asked.shape, asked.folder, asked.tokenizer)
    else:
        run(asked.out, asked.words)


if __name__ == "__main__":
    main()

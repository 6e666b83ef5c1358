"""Golden records: short runs of every experiment, recipe, signal, fault and transform, diagnoses, exports, a report.

    python benchmarks/golden.py OUT.json             records them
    python benchmarks/golden.py NEW.json OLD.json    records them and says which runs changed: exit code 1 if any did
    python benchmarks/golden.py NEW.json OLD.json --only REGEX    only the runs whose names match

Run it before and after a refactoring, on one machine: rounding differs between processors. The record of a run is a
digest of its losses, gradient norms, sets, validation losses, events and per-unit rows. Times and memory are omitted.
That of a diagnosis has its plan, its numbers and the files of every export; that of the report is of a run in the
repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parent.parent

QUIET = "training.threads=1 records.live=off records.wandb=off"
STEPS = "training.steps=6 training.seq_len=32 training.batch_size=2 training.accumulation=2 training.eval_every=3"
STEPS += " training.eval_sequences=2"
TEXT = "data.name=text data.vocab_size=300 data.path=babble.txt"
DENSE = "model.hidden_size=64 model.intermediate_size=128 model.num_heads=2"
STRESSES = {"saturation": "scale_down", "scale_inf": "inf", "scale_nan": "nan", "underflow": "scale_up"}
STRESSES |= {name: name for name in ("bit_flip", "noise", "stale_scale")}
"""Part of a run's name: its kind of fault."""
TRANSFORMS = ("agc", "gradient_stabilizer", "skip_step", "stable_spam")
DIAGNOSES = {
    "diagnose_base": f"{ROOT}/gnmr/lab/bases/shipped recipe=nvfp4 batches=4 held_out=2 confirm=4 fused=[qkv]",
    "diagnose_llama": "tiny data=babble.txt recipe=fp8_hybrid batches=3 held_out=2 confirm=3 block=32",
    "diagnose_moe": "moe recipe=mxfp4 rescue=mxfp8,bf16 batches=3 held_out=2 confirm=3",
}
"""Words of `gnmr diagnose` by name; `moe` is the golden run of that name."""
VOLATILE = {"seconds", "command", "commit", "machine", "gnmr", "torch", "date", "python", "subject"}
STEP_KEYS = [
    "loss",
    "grad_norm_pre_clip",
    "num_candidates",
    "num_active",
    "over",
    "saved_bytes",
    "saved_bytes_predicted",
]


def runs() -> dict[str, list[str]]:
    """Return the arguments of `gnmr train` for each golden run, by name."""
    from gnmr.control.signals import SIGNALS
    from gnmr.names import RECIPES

    act = f"experiment=act_quant_stress controller.max_o=4 {DENSE}"
    recipe = f"experiment=deepseek_recipe controller.max_o=1 {DENSE}"
    eight = f"{recipe} precision=fp8_bf16 controller.beta=null"
    wide = "model.hidden_size=128 model.intermediate_size=256 model.num_heads=2"
    found = {"act": act, "act_forward": f"{act} precision.site=forward", "gpt": f"{act} model=gpt"}
    found |= {f"signal_{name}": f"{act} controller.signal={name}" for name in SIGNALS}
    found |= {f"stress_{name}": f"{act} faults.kind={kind} faults.windows=[[3,2]]" for name, kind in STRESSES.items()}
    found |= {f"transform_{name}": f"{act} optim.transform.name={name}" for name in TRANSFORMS}
    found |= {"scale": f"{act} optim.name=scale", "stochastic": f"{act} precision.rounding=stochastic"}
    found |= {"hierarchy_6_8": recipe, "hierarchy_8_16": eight, "scaled_mm": f"{eight} precision.backend=scaled_mm"}
    found |= {f"recipe_{name}": f"experiment=pretrain precision.low={name} {wide}" for name in RECIPES}
    found["moe"] = "experiment=moe_stress controller.max_o=2 model.hidden_size=64 model.num_heads=2"
    found["pangu"] = "experiment=pangu_4bit controller.max_o=4"
    found["fork_base"] = f"experiment=fork_base {DENSE}"
    found = {name: f"{words} model.num_layers=2 {STEPS} {QUIET} {TEXT}" for name, words in found.items()}
    lora = "experiment=finetune model.checkpoint=tiny model.adapter.rank=2 controller.max_o=1 optim.lr=0.01"
    lora = f"{lora} {STEPS} {QUIET}"  # the checkpoint defines the layers
    found["finetune"] = f"{lora} data.name=instructions data.path=rows.jsonl"
    found["finetune_text"] = f"{lora} data.name=text data.path=babble.txt"
    found["fork"] = (  # from the base that is shipped
        "experiment=fork controller.signal=recovery_gap controller.routing=ranked training.steps=3 fork.heal=2 "
        f"training.seed=1 training.eval_sequences=2 {QUIET}"
    )
    return {name: words.split() for name, words in found.items()}


def make_inputs(folder: Path) -> None:
    """Write a text, prompts with answers, and a tiny LLaMA in Hugging Face's layout that reads words of the text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(120)]
    (folder / "babble.txt").write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(600)))
    rows = [{key: " ".join(draw.choices(words, k=draw.randint(1, 9))) for key in ("prompt", "response")} for _ in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = {word: number for number, word in enumerate(["</s>", "?", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **shape)).save_pretrained(folder / "tiny")


def digest(folder: Path) -> dict[str, str]:
    """Return the last loss with all digits and a hash of each kind of record."""
    from gnmr.records.reader import read_jsonl, read_units

    steps = [[row["step"], *(row[key] for key in STEP_KEYS)] for row in read_jsonl(folder / "steps.jsonl")]
    evals, events = read_jsonl(folder / "eval.jsonl"), read_jsonl(folder / "events.jsonl")
    units = read_units(folder).to_pylist()
    parts = {"steps": steps, "evals": [row["val_loss"] for row in evals], "events": events, "ratios": units}
    hashes = {name: hashlib.sha256(repr(rows).encode()).hexdigest()[:16] for name, rows in parts.items()}
    return {"loss": repr(steps[-1][1]), "folder": folder.name, **hashes}


def without_origin(tree: Any) -> Any:
    """Return the tree of a JSON file without the values of `VOLATILE` keys."""
    if isinstance(tree, dict):
        return {key: without_origin(value) for key, value in tree.items() if key not in VOLATILE}
    return [without_origin(value) for value in tree] if isinstance(tree, list) else tree


def digest_of_files(folder: Path) -> dict[str, str]:
    """Return a hash of each file by its name. Values of `VOLATILE` keys in JSON objects do not count."""
    hashes = {}
    for file in sorted(folder.iterdir()):
        text = file.read_text()
        if file.suffix == ".json":
            text = json.dumps(without_origin(json.loads(text)))
        hashes[file.name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return hashes


def kept_digits(found: dict[str, dict[str, str]], name: str) -> dict[str, str] | None:
    """Return the compared part of a run: all but the config hash in the folder's name, which a renamed key changes."""
    run = found.get(name)
    return run and run | {"folder": re.sub(r"-[0-9a-f]{8}-s(\d+)$", r"-s\1", run.get("folder", ""))}


def main() -> int:
    """Record, compare, print; return the exit code."""
    from gnmr.lab.cli import main as gnmr
    from gnmr.lab.config.compose import compose
    from gnmr.lab.train.run import run as train

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="NEW.json", type=lambda word: Path(word).resolve())
    parser.add_argument("against", metavar="OLD.json", nargs="?", type=Path)
    parser.add_argument("--only", metavar="REGEX", default="", help="only the runs whose names match (re.search)")
    asked = parser.parse_args()
    before = {} if asked.against is None else json.loads(asked.against.read_text())
    scratch = Path(tempfile.mkdtemp(prefix="gnmr-golden-"))
    make_inputs(scratch)
    os.chdir(scratch)  # the config hash holds data.path
    os.environ["GNMR_CACHE"] = "cache"
    found = {}
    for name, words in runs().items():
        if not re.search(asked.only, name):
            continue
        print(f"{name}: {' '.join(words)}", file=sys.stderr, flush=True)
        code = 0
        if name == "scaled_mm":  # the command refuses it on CPUs, where its products take long
            train(compose([*words, f"runs_dir={name}"]), lambda _line: None)
        else:
            code = gnmr(["train", *words, f"runs_dir={name}"])
        folders = list(Path(name).glob("*/*"))
        found[name] = digest(folders[0]) if code == 0 and folders else {"exit": str(code)}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, command_line in {**DIAGNOSES, "report": f"{ROOT}/runs/reference/example"}.items():
        if not re.search(asked.only, name):
            continue
        place, *options = command_line.split()
        place = str(next(Path(place).glob("*/*/config.yaml")).parent) if place == "moe" else place
        print(f"{name}: {command_line}", file=sys.stderr, flush=True)
        command = "report" if name == "report" else "diagnose"
        code = gnmr([command, place, *options, f"out=out_{name}"])
        if code == 0 and command == "diagnose":
            code = gnmr(["export", f"out_{name}"])
        found[name] = digest_of_files(Path(f"out_{name}")) if code == 0 else {"exit": str(code)}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    shutil.rmtree(scratch)
    if asked.against is None:
        return 0
    before = {name: kept for name, kept in before.items() if re.search(asked.only, name)}
    if new := [name for name in found if name not in before]:
        print(f"new: {', '.join(new)}")
    changed = [name for name in before if kept_digits(before, name) != kept_digits(found, name)]
    for name in changed:
        print(f"{name}: {before.get(name)} -> {found.get(name)}")
    print(f"{len(before) - len(changed)} of {len(before)} runs equal")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

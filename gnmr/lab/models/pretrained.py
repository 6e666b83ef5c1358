"""Checkpoints in Hugging Face's layout: loaded, given LoRA adapters, and written.

A checkpoint is a folder with config.json, safetensors weights and a tokenizer, or the name of one on the hub. What can
be fine-tuned is the LLaMA family: a causal decoder whose blocks (`model.layers`) have the seven projections as linears
of their own (llama, mistral, qwen2, ...). Models keep their own classes and names, so that a unit is called as in the
checkpoint: `model.layers.3`.

Checkpoints are not trusted: nothing that they bring is run. Python code (auto_map) is refused, weights are read from
safetensors only, never from a pickle, and the tokenizer is data.

Needs transformers, and peft for adapters (the extra finetune), imported when first used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.errors import UserError, install
from gnmr.lab.config.model import AdapterConfig
from gnmr.lab.models.llama import Llama
from gnmr.names import select
from gnmr.precision import cpu_products
from gnmr.records.untrusted import MAX_OBJECT, bounded, first_line

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOST_LAYERS = 1000  # that a config.json may ask for; the deepest known models have some 130
_CHUNK = 2**20  # bytes of a file that are hashed together
_DTYPES = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the dtypes that weights without a quantization_config may have."""
_BUFFERS = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias", ".position_ids", ".cos_cached", ".sin_cached")
"""Ends of the names of buffers that a model makes itself and that older versions wrote into checkpoints."""


def need(package: str, what: str) -> None:
    """UserError if `package`, which `what` needs, is not installed."""
    if find_spec(package) is None:
        raise UserError(f"{what}: needs {package}, which is missing here; {install('finetune')}")


def open_config(checkpoint: str, where: str | None = None) -> Any:
    """The `PretrainedConfig` of a checkpoint. UserError where there is none that transformers knows.

    `where` names it in messages; None: as model.checkpoint.
    """
    where = where or f"model.checkpoint={checkpoint}"
    need("transformers", where)
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{where}: the folder has no config.json; give one in Hugging Face's layout")
        for path in sorted(folder.iterdir()):
            if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
                raise UserError(f"{where}: {path.name} is no regular file")
    elif folder.exists() or folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint):
        raise UserError(f"{where}: there is no such folder or hub name")
    with quiet(), _one_line(where, folder.is_dir()):
        from transformers import AutoConfig

        found = AutoConfig.from_pretrained(folder if folder.is_dir() else checkpoint, trust_remote_code=False)
    if isinstance(layers := getattr(found, "num_hidden_layers", 0), int) and layers > MOST_LAYERS:
        raise UserError(f"{where}: config.json says {layers:,} layers, {MOST_LAYERS:,} are the most")
    return found


def check_files(folder: Path) -> list[Path]:
    """Return the files of weights. UserError for weights that are missing or cut off, naming the file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{index}: has no weight_map")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: holds no *.safetensors")
    for file in files:
        check_safetensors(file)
    return files


def check_safetensors(file: Path) -> None:
    """UserError unless the file is there and whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: is missing, truncated or no safetensors file ({first_line(error)})") from error


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError for anything else."""
    try:
        with file.open("rb") as stream:  # a link of the hub's cache too
            text = stream.read(MAX_OBJECT + 1)
        if len(text) > MAX_OBJECT:
            raise ValueError(f"more than {MAX_OBJECT:,} bytes")
        tree = bounded(json.loads(text))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{file}: is no JSON object")
    return tree


def local(checkpoint: str, where: str | None = None) -> Path:
    """The folder of a checkpoint; one on the hub is fetched (config, safetensors, tokenizer) into the hub's own cache.

    Raises UserError if it cannot be reached. `where`: see `open_config`.
    """
    where = where or f"model.checkpoint={checkpoint}"
    open_config(checkpoint, where)
    if (folder := Path(checkpoint).expanduser()).is_dir():
        return folder
    with quiet(), _one_line(where, local=False):
        return _fetched(checkpoint)


@cache
def _fetched(name: str) -> Path:
    """Fetched once a process, so that the fingerprint is that of the weights that are loaded."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "tokenizer*"]))


def load(checkpoint: str, dtype: torch.dtype | str, device: torch.device, where: str | None = None) -> nn.Module:
    """The model of a checkpoint on `device`, in training mode, every weight trainable.

    `dtype`: that of the weights, or "auto": their own. UserError for a checkpoint that is missing, damaged, or none of
    a LLaMA-like causal model, and unless its weights are exactly those of the model that config.json describes; nothing
    but safetensors is read. `where`: see `open_config`.
    """
    where = where or f"model.checkpoint={checkpoint}"
    shapes: Any = empty(checkpoint, torch.float32, where)  # refuses other families before their weights are read
    folder = local(checkpoint, where)
    files = check_files(folder)
    if getattr(shapes.config, "quantization_config", None) is None:
        whole = folder / "model.safetensors"  # is read in the place of all others
        _check_dtypes([whole] if whole in files else files, where)
    cpu_products.provide()
    with quiet(), _one_line(where):
        from transformers import AutoModelForCausalLM

        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            trust_remote_code=False,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, by name
            device_map={"": str(device)},
        )
    model, report = found
    _check_weights(report, where)
    model.config.use_cache = False
    return cast(nn.Module, model.train())


def _check_dtypes(files: list[Path], where: str) -> None:
    """UserError for integers and formats below 16 bits: without their scales they are other numbers than was meant."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                dtype = opened.get_slice(name).get_dtype()
                if dtype not in _DTYPES and not name.endswith(_BUFFERS):
                    raise UserError(
                        f"{where}: {name} is {dtype} in {file.name}, and config.json has no quantization_config that "
                        f"says what its values stand for; give weights in {', '.join(_DTYPES)}"
                    )


def _check_weights(report: Mapping[str, Any], where: str) -> None:
    """UserError unless the files and the model have the same weights, by what transformers reports of the loading.

    Buffers that older versions wrote into checkpoints (inv_freq) and weights that a class leaves out on purpose are no
    part of the report.
    """
    if lacking := sorted(report["missing_keys"]):
        raise UserError(f"{where}: {_these(lacking)} missing in its files")
    if unlike := sorted(report["mismatched_keys"]):
        name, there, here = unlike[0]
        raise UserError(
            f"{where}: {_these([name for name, _, _ in unlike])} of another shape than config.json says ({name} is "
            f"{list(there)} in the file and {list(here)} by config.json)"
        )
    surplus = sorted(name for name in report["unexpected_keys"] if not name.endswith(_BUFFERS))
    if surplus:
        raise UserError(
            f"{where}: {_these(surplus)} in its files, and the model of config.json has no such weights: it would not "
            "compute what was trained; give the config.json that belongs to these files (attention_bias, "
            "num_hidden_layers, quantization_config, ...)"
        )


def _these(names: list[str]) -> str:
    """How many weights a message is about, and the first three."""
    first = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
    return f"1 weight ({first}) is" if len(names) == 1 else f"{len(names)} weights ({first}) are"


def empty(checkpoint: str, dtype: torch.dtype, where: str | None = None) -> nn.Module:
    """The same model on the meta device: shapes without weights."""
    where = where or f"model.checkpoint={checkpoint}"
    model: Any = on_meta(checkpoint, dtype, where)
    layers = getattr(getattr(model, "model", None), "layers", None)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not isinstance(layers, nn.ModuleList) or (lacking := [name for name in PROJECTIONS if name not in names]):
        lacks = "no model.layers" if not isinstance(layers, nn.ModuleList) else f"no linears {', '.join(lacking)}"
        kind = model.config.model_type
        raise UserError(f"{where}: a {kind} model, which is not LLaMA-like (it has {lacks}); use one of that family")
    model.config.use_cache = False
    return cast(nn.Module, model.train())


def on_meta(checkpoint: str, dtype: torch.dtype, where: str) -> nn.Module:
    """Return a model of any family on the meta device, as its config.json says."""
    config = open_config(checkpoint, where)
    with quiet(), _one_line(where), torch.device("meta"):
        from transformers import AutoModelForCausalLM

        return cast(
            nn.Module,
            AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False),
        )


def add_adapter(model: nn.Module, adapter: AdapterConfig, seed: int) -> None:
    """Freezes the model and puts LoRA adapters around the matching linears, in place (peft).

    A is drawn Kaiming-uniform from `seed`, B is 0, so the function is at first the model's own. Both are kept in FP32
    and compute in the dtype of their input. UserError for a pattern that matches no linear, and without peft.
    """
    need("peft", f"model.adapter.rank={adapter.rank}")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen, nothing = select(linears, adapter.targets)
    if nothing:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise UserError(f"model.adapter.targets={nothing}: no linear has such a name; there are {', '.join(kinds)}")
    with quiet():
        from peft import LoraConfig

        lora = LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.scaling,
            lora_dropout=adapter.dropout,
            target_modules=chosen,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.add_adapter(lora)  # type: ignore[operator]
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.cast_input_dtype_enabled = False  # type: ignore[assignment]
            for linear in (*layer.lora_A.values(), *layer.lora_B.values()):  # type: ignore[operator]
                linear.__class__ = _AdapterLinear
                linear.float()


class _AdapterLinear(nn.Linear):
    """A linear with FP32 weights that computes in its input's dtype.

    At the paper's rate (2e-5) most updates are smaller than a BF16 weight can show; and in FP32, as peft would compute,
    backward would keep a copy of every input in 32 bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def fingerprint(checkpoint: str) -> str:
    """sha256 over config and weight files, of a hub name over what `local` fetched; takes one to two seconds per GB."""
    seen = hashlib.sha256()
    mine = ("config.json", "model.safetensors.index.json")
    for file in sorted(p for p in local(checkpoint).iterdir() if p.name in mine or p.suffix == ".safetensors"):
        seen.update(f"{file.name} {file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                seen.update(chunk)
    return seen.hexdigest()


def save(
    model: nn.Module,
    folder: Path,
    tokenizer: Path | str | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes `model` in Hugging Face's layout to `folder`, beside first and then renamed.

    A model of ours (`Llama`) is written as `LlamaForCausalLM`; one with adapters as peft has them (adapter_config.json,
    adapter_model.safetensors) without its base. `tokenizer`: our tokenizer.json, or the checkpoint it came from.
    `weights`: in the place of the model's own, of which this process may have parts; of adapters theirs.
    """
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    with quiet():
        if isinstance(model, Llama):
            as_hugging_face(model, weights).save_pretrained(beside)
        else:
            model.save_pretrained(beside, state_dict=None if weights is None else dict(weights))  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer_of(tokenizer).save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def as_hugging_face(model: Llama, weights: Mapping[str, Tensor] | None = None) -> Any:
    """`LlamaForCausalLM` on the very weights of `model`, or on these (sdpa attention); equal logits up to the order of
    sums."""
    need("transformers", "Hugging Face's layout")
    with quiet():
        from transformers import LlamaConfig, LlamaForCausalLM

        own = model.config
        own_weights = dict(model.named_parameters()) if weights is None else weights
        weight = own_weights["embed_tokens.weight"]
        shape = LlamaConfig(
            vocab_size=weight.shape[0],
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_hidden_layers=own.num_layers,
            num_attention_heads=own.num_heads,
            num_key_value_heads=own.num_kv_heads or own.num_heads,
            max_position_embeddings=model.max_seq_len,
            rms_norm_eps=own.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": own.rope_theta},
            tie_word_embeddings=own.tied_head,
            initializer_range=own.init_std,
            dtype=weight.dtype,
        )
        with torch.random.fork_rng(devices=[]):  # its initialisation draws
            theirs = LlamaForCausalLM._from_config(shape, attn_implementation="sdpa")
        renamed = {f"{'' if name.startswith('lm_head') else 'model.'}{name}": p for name, p in own_weights.items()}
        theirs.to(device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            theirs.load_state_dict(renamed, strict=not own.tied_head)  # a tied head is no weight of its own here
    return theirs.train(model.training)


def open_tokenizer(checkpoint: str) -> Any:
    """The tokenizer of a checkpoint, as transformers has it. UserError where there is none."""
    folder = Path(checkpoint).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise UserError(f"{folder}: holds no tokenizer (tokenizer.json or tokenizer.model)")
    pieces = folder / "tokenizer.model"
    if not (folder / "tokenizer.json").is_file() and pieces.is_file() and find_spec("sentencepiece") is None:
        with pieces.open("rb") as file:
            if file.read(1) == b"\n":  # a protocol buffer; a file of tiktoken's begins with text
                raise UserError(
                    f"{pieces}: is read by sentencepiece, which is missing here; pip install sentencepiece protobuf"
                )
    with quiet(), _one_line(checkpoint, folder.is_dir()):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder if folder.is_dir() else checkpoint, trust_remote_code=False)


def tokenizer_of(tokenizer: Path | str) -> Any:
    """The tokenizer of a checkpoint, or of our own tokenizer.json."""
    if isinstance(tokenizer, str):
        return open_tokenizer(tokenizer)
    from transformers import PreTrainedTokenizerFast

    from gnmr.lab.data import tokenizer as bpe

    own = bpe.load(tokenizer.read_bytes(), str(tokenizer))
    end = own.id_to_token(bpe.end_token(own))
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token=end, pad_token=end)


@contextmanager
def _one_line(where: str, local: bool = True) -> Iterator[None]:
    """UserError in one line for whatever the libraries raise over an unusable checkpoint."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # they have no common type: OSError, ValueError, SafetensorError, ...
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{where}: brings Python code of its own (auto_map), which is never run; use a checkpoint of a model "
                "that transformers has"
            ) from error
        what = "cannot be loaded" if local else "cannot be read from the hub"
        remedy = "" if local else "; give a local folder, or check the network, HF_ENDPOINT and the token"
        raise UserError(f"{where}: {what} ({first_line(error)}){remedy}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hides notes and progress bars of the libraries."""
    before, bars = logging.root.manager.disable, os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        from transformers.utils import logging as theirs

        theirs.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars is None:
            os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
        else:
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = bars

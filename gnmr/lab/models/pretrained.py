"""Checkpoints in the layout of Hugging Face: load them, add LoRA adapters, and write them.

A checkpoint is a folder with config.json, safetensors weights and a tokenizer, or the name of one on the hub. Every
causal language model of transformers is accepted; a test on the logits verifies that it is causal. Models keep their
classes, names and attention, so a unit has its name in the checkpoint: `model.layers.3`.

**Documents of a sequence** must not attend to each other. Positions that restart mark the documents for a model of
transformers, but not every family uses them: GPT-NeoX does, OPT and BLOOM do not, and recurrent layers cannot. This is
tested too. If documents would be mixed, a sequence holds one document (`Documents.alone`).

Checkpoints are not trusted, and no code of theirs is run. Python code (auto_map) is refused. Weights are read only from
safetensors, never from a pickle, and the tokenizer is data.

transformers, and peft for adapters, are needed (the extra finetune) and imported at the first use.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.errors import UserError, first_few, install
from gnmr.lab.config.model import AdapterConfig
from gnmr.lab.data.batch import Batch, model_inputs
from gnmr.lab.models import cpu_products
from gnmr.lab.models.decoders import Llama
from gnmr.lab.models.kinds import CAUSAL, IN_PYTHON, MASKED, kind_of
from gnmr.measure.stored_weights import check_files
from gnmr.patterns import select
from gnmr.records.disk import sha256
from gnmr.records.untrusted import first_line

MAX_LAYERS = 1000  # upper limit for config.json; the deepest known models have about 130
MAX_TOKENS = 2**30  # for a model without a length limit (recurrent, ALiBi)
_LORA_ALPHA = 16
"""The output of an adapter is multiplied by this number over the adapter's rank (E.3)."""
_LORA_TARGETS = ("*_proj",)
_DTYPES = ("F64", "F32", "F16", "BF16")
"""The dtypes, as named by safetensors, of weights without a quantization_config."""
_DEQUANTIZED = ("fp8", "mxfp4")
"""Methods whose weights transformers dequantizes when asked; a GPU that multiplies them would keep them otherwise."""
_BESIDE_MASKED = (".pooler.", "cls.seq_relationship.")
"""Parts of names of weights that encoders were trained with, besides the head that predicts masked tokens."""
_BUFFERS = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias", ".position_ids", ".cos_cached", ".sin_cached")
"""Name endings of buffers that a model computes and that older versions wrote into checkpoints."""


def need(package: str, what: str) -> None:
    """Raise UserError if `package`, which `what` needs, is not installed."""
    if find_spec(package) is None:
        raise UserError(f"{what}: needs {package}, which is missing here; {install('finetune')}")


def open_config(checkpoint: str, where: str | None = None, *, causal: bool = True) -> Any:
    """Return the `PretrainedConfig` of a checkpoint.

    Messages name the checkpoint as `where`, by default as model.checkpoint. Raises UserError unless it is a causal
    language model, or without `causal` a model of one of `KINDS`.
    """
    where = where or f"model.checkpoint={checkpoint}"
    need("transformers", where)
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        _refuse_diffusion(folder, where)
        if not (folder / "config.json").is_file():
            raise UserError(f"{where}: the folder has no config.json; give one in Hugging Face's layout")
    elif folder.exists() or folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint):
        raise UserError(f"{where}: there is no such folder or hub name")
    with quiet(), one_line(where, folder.is_dir()):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder if folder.is_dir() else checkpoint, trust_remote_code=False)
        if causal and (getattr(config, "is_encoder_decoder", False) or CAUSAL.class_of(config) is None):
            raise _not_causal(config, where)
        if not causal and kind_of(config) is None:
            saved_as = ", ".join(getattr(config, "architectures", None) or ()) or f"a {config.model_type} model"
            raise UserError(f"{where}: {saved_as} has no logits that the commands can ask for: {IN_PYTHON}")
    if isinstance(layers := getattr(config, "num_hidden_layers", 0), int) and layers > MAX_LAYERS:
        raise UserError(f"{where}: config.json says {layers:,} layers, {MAX_LAYERS:,} are the most")
    return config


def _not_causal(config: Any, where: str) -> UserError:
    return UserError(
        f"{where}: a {config.model_type} model is not a causal language model, the only kind that training reads; "
        "gnmr.diagnose, gnmr.audit and gnmr.attach take any model in Python, with a loss of your own"
    )


def _refuse_diffusion(folder: Path, where: str) -> None:
    """Raise UserError if the folder is a pipeline of diffusers, or a part of one."""
    of_diffusers = (folder / "model_index.json").is_file()
    with suppress(OSError, ValueError, RecursionError):  # a damaged config.json has a message of its own
        of_diffusers |= "_diffusers_version" in json.loads((folder / "config.json").read_bytes())
    if of_diffusers:
        raise UserError(f"{where}: a diffusion model has no logits that the commands can ask for: {IN_PYTHON}")


def tensors_of(folder: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return (shape, bytes of a number) of each tensor of a checkpoint, by its name, from the headers of its files."""
    from safetensors import safe_open

    tensors = {}
    for file in check_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                header = opened.get_slice(name)
                bits = "".join(filter(str.isdigit, header.get_dtype().partition("_")[0]))  # F8_E4M3: 8; BOOL: none
                tensors[name] = tuple(header.get_shape()), int(bits or 8) // 8
    return tensors


def local(checkpoint: str, where: str | None = None, *, causal: bool = True) -> Path:
    """Return the folder of a checkpoint. Files of a hub checkpoint are fetched into the hub's cache.

    These are config, safetensors and tokenizer. Raises UserError if the hub cannot be reached. See `open_config` for
    `where` and `causal`.
    """
    where = where or f"model.checkpoint={checkpoint}"
    open_config(checkpoint, where, causal=causal)
    if (folder := Path(checkpoint).expanduser()).is_dir():
        return folder
    with quiet(), one_line(where, local=False):
        return _fetched(checkpoint)


@cache
def _fetched(name: str) -> Path:
    """Fetch once per process, so that the fingerprint is the fingerprint of the loaded weights."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "tokenizer*"]))


def load(
    checkpoint: str, dtype: torch.dtype | str, device: torch.device, where: str | None = None, *, causal: bool = True
) -> nn.Module:
    """Return the model of a checkpoint on `device`, in training mode, with every weight trainable.

    `dtype` is the dtype of the weights, or "auto" to keep the checkpoint's. Only safetensors are read. See
    `open_config` for `where` and `causal`. `model.separates_documents` is True if documents of a sequence do not attend
    to each other under `model_inputs`.

    Raises UserError if the checkpoint is missing, damaged, or of another kind, or if transformers keeps it quantized.
    Its weights must be exactly the weights of the model that config.json describes.
    """
    where = where or f"model.checkpoint={checkpoint}"
    config = open_config(checkpoint, where, causal=causal)
    kind = CAUSAL if causal else kind_of(config)
    assert kind is not None
    folder = local(checkpoint, where, causal=causal)
    files = check_files(folder)
    quantization = getattr(config, "quantization_config", None)
    with quiet(), one_line(where):
        from transformers.quantizers import AutoHfQuantizer

        supported = quantization is not None and AutoHfQuantizer.supports_quant_method(quantization)
    if not supported:  # transformers passes over a method of others (ModelOpt)
        single_file = folder / "model.safetensors"  # transformers reads it instead of all other files
        _check_dtypes([single_file] if single_file.is_file() else files, where)
    dequantized = isinstance(quantization, dict) and quantization.get("quant_method") in _DEQUANTIZED
    if dequantized:
        config.quantization_config["dequantize"] = True
    cpu_products.provide()
    with quiet(), one_line(where), torch.random.fork_rng(devices=[]):  # some families draw before they read
        import transformers

        loaded: Any = getattr(transformers, kind.auto_class).from_pretrained(
            str(folder),
            config=config,
            trust_remote_code=False,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report lists them by name
            device_map={"": str(device)},
        )
    model, report = loaded
    if getattr(model, "is_quantized", False):
        raise UserError(
            f"{where}: transformers keeps it quantized ({model.quantization_method.value}), so no other casts "
            "can be in force; give the checkpoint in 16 or 32 bits"
        )
    beside = _BESIDE_MASKED if kind is MASKED else ()
    _check_weights(report, where, beside)
    if dtype == torch.float32:  # of an FP8 checkpoint transformers leaves the rest in bfloat16, whatever is asked for
        model.float()
    if dequantized:
        # Otherwise `save_pretrained` reverses the dequantization: it saves experts under their names with scales, or
        # not at all. transformers has no public option for a plain save of a model that it dequantized.
        model._weight_conversions = None
    model.config.use_cache = False
    if kind is not CAUSAL:
        return cast(nn.Module, model.train())
    with quiet(), one_line(where, problem="cannot be run"):
        reads = _reads(model.eval())
    if reads & {6, 7}:
        raise _not_causal(model.config, where)
    model.separates_documents = _takes_positions(model) and not reads & {0, 1, 2, 3}
    return cast(nn.Module, model.train())


def _reads(model: Any) -> set[int]:
    """Return which of 8 tokens, two documents of 4, the logits at position 5 depend on.

    The test uses the derivative, which is exactly 0 for a masked token, independent of rounding.
    """
    leaf = torch.empty(0)

    def cut(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        nonlocal leaf
        leaf = output.detach().requires_grad_()
        return leaf

    embeddings = model.get_input_embeddings()
    tokens = torch.arange(8, device=embeddings.weight.device)[None]
    positions = tokens % 4 if _takes_positions(model) else None
    handle = embeddings.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            logits = model(**model_inputs(Batch(tokens % len(embeddings.weight), tokens, positions))).logits
            (gradient,) = torch.autograd.grad(logits[0, 5].float().sum(), leaf)
    finally:
        handle.remove()
    return {*(gradient[0].abs().amax(-1) > 0).nonzero().flatten().tolist()}


def max_length(model: nn.Module) -> int:
    """Return the largest number of tokens that a checkpoint's model supports, or `MAX_TOKENS` if it is unspecified."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    names = ("max_position_embeddings", "max_seq_len", "context_length", "max_target_positions")
    limits = (getattr(config, name, None) for name in names)
    return next((number for number in limits if isinstance(number, int) and number > 0), MAX_TOKENS)


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _check_dtypes(files: list[Path], where: str) -> None:
    """Raise UserError for integers and formats below 16 bits, because their values are invalid without scales."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                dtype = opened.get_slice(name).get_dtype()
                if dtype not in _DTYPES and not name.endswith(_BUFFERS):
                    raise UserError(
                        f"{where}: {name} is {dtype} in {file.name}, and config.json has no quantization_config that "
                        f"tells transformers what its values mean; give weights in {', '.join(_DTYPES)}"
                    )


def _check_weights(report: Mapping[str, Any], where: str, beside: Sequence[str] = ()) -> None:
    """Raise UserError unless files and model have the same weights, according to the loading report of transformers.

    The report does not contain weights that a class omits on purpose. The files may have more weights whose names
    contain one of `beside`.
    """
    mismatched = [
        f"{name} is {[*in_file]} in the file, {[*in_config]} by config.json"
        for name, in_file, in_config in report["mismatched_keys"]
    ]
    surplus = [name for name in report["unexpected_keys"] if not name.endswith(_BUFFERS)]
    surplus = [name for name in surplus if not any(part in name for part in beside)]
    for names, problem in (
        (report["missing_keys"], "missing in its files"),
        (mismatched, "of another shape than config.json says"),
        (surplus, "in its files alone: the model of config.json would not compute what was trained"),
    ):
        if names:
            first = first_few(sorted(names), 3)
            raise UserError(f"{where}: weights {problem} ({first}); give the config.json that belongs to these files")


def empty(checkpoint: str, dtype: torch.dtype, where: str | None = None, *, causal: bool = True) -> nn.Module:
    """Return the model that `load` returns on the meta device: shapes without weights."""
    where = where or f"model.checkpoint={checkpoint}"
    config = open_config(checkpoint, where, causal=causal)
    kind = CAUSAL if causal else kind_of(config)
    assert kind is not None
    with quiet(), one_line(where), torch.device("meta"):
        import transformers

        auto_class: Any = getattr(transformers, kind.auto_class)
        model: Any = auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    model.config.use_cache = False
    return cast(nn.Module, model.train())


def add_adapter(model: nn.Module, adapter: AdapterConfig, seed: int) -> None:
    """Freeze the model and add LoRA adapters (peft) to the matching linears, in place.

    A is drawn Kaiming-uniform from `seed` and B is 0, so the function is initially unchanged. Both are stored in FP32
    and compute in the dtype of their input. Raises UserError without peft, if a pattern matches no linear, and if peft
    cannot adapt a linear. It mistakes some names for experts that transformers 5 has fused.
    """
    need("peft", f"model.adapter.rank={adapter.rank}")
    from transformers.pytorch_utils import Conv1D

    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    chosen, unmatched = select(linears, _LORA_TARGETS)
    if unmatched:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise UserError(f"model.adapter.rank={adapter.rank}: no linear is named *_proj; there are {', '.join(kinds)}")
    with quiet(), torch.random.fork_rng(devices=[]):
        from peft import LoraConfig

        torch.manual_seed(seed)
        lora = LoraConfig(
            r=adapter.rank,
            lora_alpha=_LORA_ALPHA,
            lora_dropout=adapter.dropout,
            target_modules=chosen,
            task_type="CAUSAL_LM",
        )
        where = f"model.adapter.rank={adapter.rank}"
        try:
            model.add_adapter(lora)  # type: ignore[operator]
        except Exception as error:  # peft raises many types
            raise UserError(f"{where}: peft cannot adapt the *_proj linears ({first_line(error)})") from error
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if wrong := sorted(adapted ^ {*chosen}):
        raise UserError(f"{where}: peft adapts other parameters than the *_proj linears ({', '.join(wrong[:2])})")
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.cast_input_dtype_enabled = False  # type: ignore[assignment]
            for linear in (*layer.lora_A.values(), *layer.lora_B.values()):  # type: ignore[operator]
                linear.__class__ = _AdapterLinear
                linear.float()


class _AdapterLinear(nn.Linear):
    """A linear with FP32 weights that computes in the dtype of its input.

    At the paper's learning rate (2e-5), most updates are smaller than the resolution of a BF16 weight. If it computed
    in FP32, as peft does, backward would keep a 32-bit copy of every input.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def fingerprint(checkpoint: str) -> str:
    """Return a sha256 over config and weight files; of a hub name, over the files from `local` (1 to 2 s per GB)."""
    names = ("config.json", "model.safetensors.index.json")
    files = sorted(p for p in local(checkpoint).iterdir() if p.name in names or fnmatch(p.name, "[!.]*.safetensors"))
    return hashlib.sha256("".join(f"{p.name} {sha256(p.resolve())}\n" for p in files).encode()).hexdigest()


def save(
    model: nn.Module,
    folder: Path,
    tokenizer: Path | str | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `model` to `folder` in the layout of Hugging Face, under a temporary name that is then renamed.

    A `Llama` is written as `LlamaForCausalLM`. A model with adapters is written without its base, as peft does
    (adapter_config.json, adapter_model.safetensors). `tokenizer` is our tokenizer.json, or the name of the original
    checkpoint. `weights` replace the model's weights, or those of its adapters, if this process has only parts of them.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    with quiet():
        if isinstance(model, Llama):
            as_hugging_face(model, weights).save_pretrained(temporary)
        else:
            model.save_pretrained(temporary, state_dict=None if weights is None else dict(weights))  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer_of(tokenizer).save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def as_hugging_face(model: Llama, weights: Mapping[str, Tensor] | None = None) -> Any:
    """Return a `LlamaForCausalLM` with the weights of `model` or `weights`. Logits are equal up to rounding."""
    need("transformers", "Hugging Face's layout")
    config = model.config
    named = dict(model.named_parameters()) if weights is None else weights
    embedding = named["embed_tokens.weight"]
    with quiet(), torch.random.fork_rng(devices=[]):  # the initialization draws random numbers
        from transformers import AutoModelForCausalLM, LlamaConfig

        llama_config = LlamaConfig(
            vocab_size=embedding.shape[0],
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads or config.num_heads,
            max_position_embeddings=model.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_head,
            initializer_range=model.init_std,
            dtype=embedding.dtype,
        )
        # Built in the weights' dtype: a cast afterwards would round the rotary frequencies.
        llama: Any = AutoModelForCausalLM.from_config(llama_config, attn_implementation="sdpa", dtype=embedding.dtype)
        llama.to(embedding.device)
        renamed = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in named.items()}
        llama.load_state_dict(renamed, strict=not config.tied_head)  # a tied head is not a separate weight here
    return llama.train(model.training)


def open_tokenizer(checkpoint: str) -> Any:
    """Return the tokenizer of a checkpoint as a transformers object. Raises UserError if there is no tokenizer."""
    folder = Path(checkpoint).expanduser()
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        pieces = folder / "tokenizer.model"
        if not pieces.is_file():
            raise UserError(f"{folder}: holds no tokenizer (tokenizer.json or tokenizer.model)")
        with pieces.open("rb") as file:
            of_sentencepiece = file.read(1) == b"\n"  # a protocol buffer; a tiktoken file begins with text
        if of_sentencepiece and find_spec("sentencepiece") is None:
            raise UserError(f"{pieces}: needs sentencepiece, missing here; pip install sentencepiece protobuf")
    with quiet(), one_line(checkpoint, folder.is_dir()):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder if folder.is_dir() else checkpoint, trust_remote_code=False)


def open_processor(checkpoint: str, auto_class: str) -> Any:
    """Return the processor or feature extractor of a checkpoint by its Auto class. Raises UserError if it has none."""
    folder = Path(checkpoint).expanduser()
    with quiet(), one_line(checkpoint, problem="has no processor that can be loaded"):
        import transformers

        place = folder if folder.is_dir() else checkpoint
        return getattr(transformers, auto_class).from_pretrained(place, trust_remote_code=False)


def tokenizer_of(tokenizer: Path | str) -> Any:
    """Return the tokenizer of a checkpoint, or of our tokenizer.json."""
    if isinstance(tokenizer, str):
        return open_tokenizer(tokenizer)
    from transformers import PreTrainedTokenizerFast

    from gnmr.lab.data import tokenizer as bpe

    loaded = bpe.load(tokenizer.read_bytes(), str(tokenizer))
    end = loaded.id_to_token(bpe.end_token(loaded, str(tokenizer)))
    return PreTrainedTokenizerFast(tokenizer_object=loaded, eos_token=end, pad_token=end)


@contextmanager
def one_line(where: str, local: bool = True, problem: str = "cannot be loaded") -> Iterator[None]:
    """Raise UserError with one line for any error of the libraries about an unusable checkpoint."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # they share no type: OSError, ValueError, SafetensorError, ...
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{where}: brings Python code of its own (auto_map), which is never run; use a checkpoint of a model "
                "that transformers has"
            ) from error
        if local:
            raise UserError(f"{where}: {problem} ({first_line(error)})") from error
        raise UserError(
            f"{where}: cannot be read from the hub ({first_line(error)}); give a local folder, or check the network, "
            "HF_ENDPOINT and the token"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hide log messages and progress bars of the libraries."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from huggingface_hub.utils import disable_progress_bars
            from transformers.utils import logging as transformers_logging

            disable_progress_bars()
            transformers_logging.disable_progress_bar()
            yield
    finally:
        logging.disable(before)

"""Name the linears of a model as its checkpoint does.

Since version 5, transformers renames, splits and joins weights when it loads a checkpoint, and undoes that when it
saves one: `mlp.experts.gate_up_proj` of a Mixtral in memory is `block_sparse_moe.experts.0.w1`, `.w3` and so on in its
file. Libraries that change a model in memory (torchao, ModelOpt, Transformer Engine) go by the names in memory. Engines
that load the file (vLLM, SGLang) go by the checkpoint's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.conversion.adapters import operators_in
from gnmr.conversion.targets import roles_of
from gnmr.conversion.unit_names import of_any_expert, operator_names

_STACKED = re.compile(r"(?<=experts)\.\d+(?=\.)")


@dataclass(frozen=True)
class ModelLinears:
    """The linears of a model, with or without low precision: also heads, routers and experts in one tensor."""

    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in the checkpoint, by the name in memory."""
    unloaded: tuple[str, ...] = ()
    """Linears that the checkpoint's file has and the model has not, such as layers that predict further tokens."""

    def renamed(self) -> dict[str, list[str]]:
        """Return the names in the checkpoint where they differ, by the name in memory.

        Engines run all experts of a layer alike, so experts are named by the module that holds them.
        """
        by_holder: dict[str, dict[str, None]] = {}
        for name, saved in self.saved.items():
            by_holder.setdefault(holder_of(name), {}).update(dict.fromkeys(map(holder_of, saved)))
        return {name: [*saved] for name, saved in by_holder.items() if [*saved] != [name]}


def holder_of(name: str) -> str:
    """Return the module that holds all experts of a layer if the linear is part of one; else its name.

    >>> holder_of("model.layers.0.block_sparse_moe.experts.3.w1"), holder_of("model.layers.0.mlp.up_proj")
    ('model.layers.0.block_sparse_moe.experts', 'model.layers.0.mlp.up_proj')
    """
    return of_any_expert(name).partition(".*")[0]


def linears_of(model: nn.Module, folder: str | Path | None = None) -> ModelLinears:
    """Return the names of a model's linears in memory and in its checkpoint.

    Linears are matrices that multiply activations: `nn.Linear`, what adapters declare (`gnmr.conversion.adapters`), and
    any other module with a two-dimensional weight except embeddings, since routers are such modules. Adapters of peft
    are left out.

    Args:
        model: the model, perhaps converted or on the meta device. Its weights are not read.
        folder: the checkpoint's folder. None: the one that transformers loaded the model from, if any.

    Returns:
        The checkpoint's names of each linear, and the linears that only the checkpoint's file has.
    """
    # The parameters of each operator, its expert in them, and what holds them.
    parameters: dict[str, tuple[list[str], int | None]] = {}
    modules: dict[str, Any] = {}
    contained = operators_in(model)
    inner_weights = {operator.weight for operator in contained.values()}
    for name, operator in contained.items():
        parameters[name] = [f"{operator.path}.{operator.parameter_name}".lstrip(".")], operator.expert
        modules[name] = operator
    for name, module in model.named_modules():
        if _is_matrix(module) and module.weight not in inner_weights:
            parameters[name], modules[name] = ([f"{name}.weight"], None), module
        if name.endswith("experts"):  # without an adapter, so all of them are one
            tensors = module.named_parameters(recurse=False)
            stacked = [f"{name}.{key}" for key, x in tensors if x.dim() == 3 and x not in inner_weights]
            if stacked:
                parameters[name] = stacked, None
    roles = roles_of(model, modules)
    names = [name for name in parameters if roles.get(name) != "adapter"]

    # The names in the checkpoint, by parameter.
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    shapes |= {parameters[name][0][0]: module.weight.shape for name, module in modules.items()}
    saved_as, every = _saved_as(model, shapes)
    prefix, inner_model = _transformers_model(model)
    around = operator_names([f"{prefix}.x"])[0].removesuffix("x") if prefix else ""  # what holds the model is not saved
    saved: dict[str, tuple[str, ...]] = {}
    for name, short in zip(names, operator_names(names), strict=True):
        keys, expert = parameters[name]
        tensors_saved = [saved_name for key in keys for saved_name in saved_as.get(key, ())]
        saved[short] = tuple(_of_expert(tensors_saved, expert)) or (short.removeprefix(around),)

    # Linears of the file that this model does not load.
    in_files: list[str] = []
    if inner_model is not None or folder:
        in_files = _in_files(folder or getattr(inner_model, "name_or_path", None))
    every |= {saved_name for saved_names in saved.values() for saved_name in saved_names}
    # Files under other names than a model saves its weights (of an older version) tell nothing.
    unloaded = [name for name in in_files if name not in every] if every & {*in_files} else []
    return ModelLinears(saved, tuple(unloaded))


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    table = isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__
    return isinstance(weight, Tensor) and weight.dim() == 2 and not table


def _of_expert(saved: Sequence[str], expert: int | None) -> Iterator[str]:
    """Yield the names of one expert's matrix among those that its tensor is saved as; None: all of them."""
    for name in saved:
        number = _STACKED.search(name)
        if expert is None or (number is not None and number[0] == f".{expert}"):
            yield name
        elif number is None:  # a tensor of all experts in the file too
            yield re.sub(r"(?<=experts)\.(\w+)$", rf".{expert}.\1", name)


class _Traced(Tensor):
    """A tensor without values that remembers which parameters it was made of."""

    sources: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        outputs = [x for x in _leaves(result) if isinstance(x, _Traced)]
        if outputs:
            sources = frozenset().union(*(x.sources for x in _leaves(args) if isinstance(x, _Traced)))
            for output in outputs:
                output.sources = output.sources | sources
        return result


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in nested tuples and lists."""
    if isinstance(tree, tuple | list):
        for branch in tree:
            yield from _leaves(branch)
    else:
        yield tree


def _transformers_model(model: nn.Module) -> tuple[str, Any]:
    """Return the outermost model of transformers within a model, with its name; ("", None) if there is none."""
    for name, module in model.named_modules():
        bases = [f"{base.__module__}.{base.__name__}" for base in type(module).__mro__]
        if "transformers.modeling_utils.PreTrainedModel" in bases:
            return name, module
    return "", None


def _saved_as(model: nn.Module, shapes: Mapping[str, torch.Size]) -> tuple[dict[str, list[str]], set[str]]:
    """Return the names of the modules under which transformers saves these parameters, where they are others.

    The second result are the names of all modules that it saves.
    """
    prefix, inner_model = _transformers_model(model)
    if inner_model is None:
        return {}, set()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5 the names are the same
        return {}, set()
    before = f"{prefix}." if prefix else ""
    names = [name for name in shapes if name.startswith(before)]
    split = [name.removeprefix(before).rpartition(".") for name in names]
    paths = list(dict.fromkeys(path for path, _, _ in split))
    modules = dict(zip(paths, operator_names(paths), strict=True))
    # transformers' own conversion runs on tensors without values, which remember what they are made of.
    state: dict[str, Any] = {}
    name_in_state: dict[str, str] = {}
    for name, (path, dot, leaf) in zip(names, split, strict=True):
        traced: Any = torch.empty(shapes[name], device="meta").as_subclass(_Traced)
        traced.sources = frozenset([name])
        name_in_state[name] = f"{modules[path]}{dot}{leaf}"
        state[name_in_state[name]] = traced
    try:
        with torch.no_grad():
            saved = revert_weight_conversion(inner_model, state)
    except Exception as error:  # a conversion that cannot be undone; save_pretrained would fail too
        warnings.warn(f"the names in the checkpoint are not known ({error}); exports use those in memory", stacklevel=2)
        return {}, set()
    saved_as: dict[str, list[str]] = {}
    # A saved tensor may be made of several parameters, and a parameter may be saved as several tensors.
    for name, tensor in saved.items():
        for source in getattr(tensor, "sources", ()):
            if name != name_in_state[source]:
                saved_as.setdefault(source, []).append(name.removesuffix(".weight"))
    return saved_as, {name.removesuffix(".weight") for name in saved}


def _in_files(folder: str | Path | None) -> list[str]:
    """Return the linears in the safetensors of a checkpoint's folder, or of the hub's cache; [] if there are none."""
    names: list[str] = []
    with suppress(Exception):  # the folder may be gone, or be a name on the hub that was not fetched
        place = Path(folder).expanduser() if folder else None
        if place is None or not place.is_dir():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(str(folder), "config.json")
            place = Path(cached).parent if isinstance(cached, str) else None
        from safetensors import safe_open

        for file in sorted(place.glob("*.safetensors")) if place else ():
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    module = name.removesuffix(".weight")
                    is_matrix = module != name and len(tensors.get_slice(name).get_shape()) == 2
                    # Embeddings are matrices too, but they multiply nothing.
                    if is_matrix and not re.search(r"embed(?!_out)|\bwte\b|\bwpe\b|shared$", module):
                        names.append(module)
    return names

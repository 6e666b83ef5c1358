"""Read the tensors of a model one by one from the safetensors of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.errors import UserError
from gnmr.measure.blocks import named_blocks
from gnmr.options import require
from gnmr.records.untrusted import first_line


def check_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint, sorted by name.

    Args:
        folder: has a model.safetensors.index.json that lists them; without one, all its *.safetensors count.

    Raises:
        UserError: a file is missing, truncated or cannot be read, or there is none; the line names it.
    """
    from safetensors import safe_open

    file = folder / "model.safetensors.index.json"
    try:
        shards = json.loads(file.read_bytes())["weight_map"].values() if file.is_file() else []
        # Hidden files are not the checkpoint's: file browsers write them.
        files = sorted({folder / name for name in shards} or folder.glob("[!.]*.safetensors"))
        for file in files:
            with safe_open(file, framework="pt"):
                pass
    except Exception as error:  # OSError, SafetensorError, and errors of an incomplete index
        raise UserError(f"{file}: is missing, truncated or cannot be read ({first_line(error)})") from error
    if not files:
        raise UserError(f"{folder}: holds no *.safetensors")
    return files


class StoredWeights:
    """Reads the tensors of a model from a checkpoint's safetensors.

    Since version 5, transformers renames and joins tensors when it loads them: all experts of a layer are one tensor in
    memory and many in the file. Here the same rules are applied to one tensor at a time.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        """Read the headers. Raises UserError if a file is missing or truncated, or of another shape than the model."""
        from safetensors import safe_open

        self._model, self._folder = model, folder
        tensors = self._tensors = model.state_dict()
        self._converters: dict[str, Any] = {}
        in_memory = self._renaming() if hasattr(model, "base_model_prefix") else lambda stored: (stored, None)
        self._files: dict[str, Path] = {}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        """(name in the files, pattern of the rule that converts it) by the name in memory."""
        for file in check_files(folder):
            with safe_open(file, framework="pt") as opened:
                for stored in opened.keys():  # noqa: SIM118
                    self._files[stored] = file
                    name, pattern = in_memory(stored)
                    # A rule that leads to no tensor of the model does not apply to a name that the model has.
                    if name not in tensors and stored in tensors:
                        name, pattern = stored, None
                    self._sources.setdefault(name, []).append((stored, pattern))
                    if pattern is None and name in tensors:  # others have their shape after conversion
                        self._check_shape(name, opened.get_slice(stored).get_shape())

    def _renaming(self) -> Callable[[str], tuple[str, str | None]]:
        """Return a function from a name in the files to (name in memory, pattern of the rule that converts it)."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converters = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, tensors = self._model.base_model_prefix, self._tensors
        return lambda stored: rename_source_key(stored, renamings, converters, prefix, tensors)

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor with this name in the model can be read."""
        return name in self._sources

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the model.

        Returns:
            The tensor in the model's shape and the dtype of the file, on the CPU.

        Raises:
            UserError: its shape after conversion is another one than in the model.
        """
        from transformers.core_model_loading import dot_natural_key

        sources = sorted(self._sources[name], key=lambda source: dot_natural_key(source[0]))
        converter: Any = None
        # One tensor in memory may be many in the files, such as one for each expert.
        for stored, pattern in sources:
            values = self._stored(stored)
            if pattern is None:
                return values
            converter = converter or deepcopy(self._converters[pattern])
            converter.add_tensor(name, stored, pattern, values)
        values = converter.convert(name, model=self._model, config=self._model.config)[name]
        values = values[0] if isinstance(values, list) else values
        self._check_shape(name, values.shape)
        return values

    def _check_shape(self, name: str, in_files: Sequence[int]) -> None:
        """Raise UserError unless the model's tensor has the shape that it has in the files."""
        if list(in_files) != (in_config := list(self._tensors[name].shape)):
            raise UserError(
                f"{self._folder}: weights of another shape than config.json says ({name} is {list(in_files)} in the "
                f"file, {in_config} by config.json); give the config.json that belongs to these files"
            )

    def _stored(self, name: str) -> Tensor:
        """Return a tensor of a file, which is open only meanwhile, so that its pages do not stay in memory."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as opened:
            values: Tensor = opened.get_tensor(name)
            return values.clone()


class NotInFiles(ValueError):
    """A tensor of a model is in no file of its checkpoint under a name of its own."""


Replaced = list[tuple[nn.Module, str, Tensor]]
"""(module, name in it, tensor that stood there before) of tensors that got other values."""


def fill_around_blocks(
    model: nn.Module, weights: StoredWeights, device: torch.device, as_stored: bool = False
) -> Replaced:
    """Give a model on the meta device the weights around its blocks.

    Args:
        model: the model. The caller reads the tensors of its blocks when they are needed.
        weights: reads its checkpoint.
        device: where the weights will be.
        as_stored: keep the dtype of the files, and not that of the model's parameters.

    Returns:
        The tensors on the meta device that were replaced.

    Raises:
        NotInFiles: a tensor of the model, in a block or not, is in no file.
        UserError: a file cannot be read, or is of another model.
    """
    blocks = f"{named_blocks(model)[0]}."
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    # Modules that share a tensor appear once each, because each has to be given the values.
    absent = [
        (module, key, tensor, f"{path}.{key}".lstrip("."))
        for path, module in model.named_modules(remove_duplicate=False)
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if tensor.is_meta
    ]
    # A tied tensor may be in the files under only one of its names.
    names: dict[int, str] = {}
    for _, _, tensor, name in absent:
        readable = next((candidate for candidate in (name, tied.get(name, name)) if candidate in weights), None)
        if readable is not None:
            names.setdefault(id(tensor), readable)
    if missing := next((item for item in absent if id(item[2]) not in names), None):
        remedy = "; make the model with its buffers (accelerate.init_empty_weights does)"
        raise NotInFiles(f"has no {missing[3]} in its files{'' if isinstance(missing[2], nn.Parameter) else remedy}")
    around = [(module, key, tensor) for module, key, tensor, name in absent if not name.startswith(blocks)]
    values_of: dict[str, Tensor] = {}
    for _, _, tensor in around:
        if (readable := names[id(tensor)]) not in values_of:
            values = weights.read(readable).to(device)
            if not as_stored:
                values = values.to(tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            values_of[readable] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    for module, key, tensor in around:
        setattr(module, key, values_of[names[id(tensor)]])
    return around


@contextmanager
def weights_in(folder: str | PathLike[str], model: nn.Module) -> Iterator[Callable[[str], Tensor]]:
    """Give a model on the meta device the weights around its blocks, and take them away afterwards.

    They are in the dtype of the model's parameters, on the device of a tensor of the model that has values, else on the
    CPU.

    Args:
        folder: a checkpoint in safetensors.
        model: the model, whose parameters, or those of its blocks, are on the meta device.

    Yields:
        A function that reads a tensor of a block by its name in the model.

    Raises:
        ValueError: a tensor of the model is in no file, or the model has its weights.
        UserError: the files cannot be read, or are of another model.
    """
    weights = StoredWeights(Path(folder).expanduser(), model)
    tensors = [*model.parameters(), *model.buffers()]
    right = "is for a model on the meta device, and this one has its weights; leave it out"
    require(any(tensor.is_meta for tensor in tensors), "weights", folder, right)
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    try:
        replaced = fill_around_blocks(model, weights, device)
    except NotInFiles as error:
        raise ValueError(f"weights={folder}: {error}") from error
    try:
        yield weights.read
    finally:
        for module, key, tensor in replaced:
            setattr(module, key, tensor)

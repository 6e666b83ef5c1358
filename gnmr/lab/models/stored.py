"""A checkpoint whose blocks stay on disk: all else is in memory, and a block has its weights only while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.errors import UserError
from gnmr.lab.models.pretrained import check_files, local, need, open_config, quiet
from gnmr.measure.blocks import named_blocks, set_tensor


class NotReadByBlocks(UserError):
    """The tensors of a checkpoint cannot be read one by one."""


class StoredWeights:
    """Reads the tensors of a model from a checkpoint's safetensors.

    Since version 5, transformers renames and joins tensors when it loads them: all experts of a layer are one tensor in
    memory and many in the file. Here the same rules are applied to one tensor at a time.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        """Read the headers. Raises UserError if a file is missing or truncated, or of another shape than the model."""
        from safetensors import safe_open
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self._model, self._folder = model, folder
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converters = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        tensors = self._tensors = model.state_dict()
        self._files: dict[str, Path] = {}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        """(name in the files, pattern of the rule that converts it) by the name in memory."""
        for file in check_files(folder):
            with safe_open(file, framework="pt") as opened:
                for stored in opened.keys():  # noqa: SIM118
                    self._files[stored] = file
                    name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, tensors)
                    if name not in tensors and stored in tensors:
                        name, pattern = stored, None
                    self._sources.setdefault(name, []).append((stored, pattern))
                    if pattern is None and name in tensors:  # others have their shape after conversion
                        self._check_shape(name, opened.get_slice(stored).get_shape())

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor with this name in the model can be read."""
        return name in self._sources

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the model, in the dtype of the file."""
        from transformers.core_model_loading import dot_natural_key

        sources = sorted(self._sources[name], key=lambda source: dot_natural_key(source[0]))
        converter: Any = None
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


def open_stored(checkpoint: str, dtype: torch.dtype | None, device: torch.device) -> tuple[nn.Module, StoredWeights]:
    """Return a model without the weights of its blocks, and what reads them.

    The parameters of the blocks are on the meta device; all others have their values on `device`, in `dtype` or
    in that of the files (None).

    Raises:
        UserError: the checkpoint cannot be loaded.
        NotReadByBlocks: a tensor of the model cannot be read alone from its files.
    """
    config = open_config(checkpoint, checkpoint)
    need("accelerate", checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        raise NotReadByBlocks(f"{checkpoint}: its weights are quantized, so its blocks cannot be read one by one")
    with quiet():
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        with init_empty_weights(include_buffers=False):  # rotary frequencies are computed, not read
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        weights = StoredWeights(local(checkpoint, checkpoint), model)
    model.config.use_cache = False
    blocks = f"{named_blocks(model)[0]}."
    kept = model.state_dict()
    tensors: Mapping[str, Tensor] = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in kept
    }
    for name, tensor in tensors.items():
        if name in model.all_tied_weights_keys:
            continue
        if name not in weights:
            raise NotReadByBlocks(
                f"{checkpoint}: its files have no {name} of its own, so its blocks cannot be read one by one"
            )
        if isinstance(tensor, nn.Parameter) and name.startswith(blocks):
            continue
        path, _, key = name.rpartition(".")
        set_tensor(model.get_submodule(path), key, weights.read(name), dtype, device)
    model.tie_weights()
    return model.eval(), weights

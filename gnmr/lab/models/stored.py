"""A checkpoint whose blocks stay on disk: all else is in memory, and a block has its weights only while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.errors import UserError
from gnmr.lab.models.pretrained import local, need, open_config, quiet
from gnmr.measure.blocks import named_blocks, set_tensor
from gnmr.measure.stored_weights import StoredWeights


class NotReadByBlocks(UserError):
    """The tensors of a checkpoint cannot be read one by one."""


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
            # Tables of positions are computed in float32, as `from_pretrained` does.
            stored_dtype = config.dtype
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
            model.config.dtype = stored_dtype
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

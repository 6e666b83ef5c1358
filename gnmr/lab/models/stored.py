"""A checkpoint whose blocks stay on disk: all else is in memory, and a block has its weights only while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gnmr.errors import UserError
from gnmr.lab.models.pretrained import local, need, open_config, quiet
from gnmr.measure.stored_weights import NotInFiles, StoredWeights, fill_around_blocks


class NotReadByBlocks(UserError):
    """The tensors of a checkpoint cannot be read one by one."""


def open_stored(checkpoint: str, dtype: torch.dtype | None, device: torch.device) -> tuple[nn.Module, StoredWeights]:
    """Return a model without the weights of its blocks, and what reads them.

    The parameters of the blocks are on the meta device; all others have their values on `device`, in float32 or in the
    dtype of the files (None).

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
    # Buffers that the files have are read like parameters; all others keep what was computed.
    in_files = model.state_dict()
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if f"{path}.{key}".lstrip(".") in in_files:
                setattr(module, key, buffer.to("meta"))
    try:
        fill_around_blocks(model, weights, device, as_stored=dtype is None)
    except NotInFiles as error:
        raise NotReadByBlocks(f"{checkpoint}: {error}, so its blocks cannot be read one by one") from error
    return model.eval(), weights

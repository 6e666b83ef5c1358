"""Model architectures: llama, gpt, moe, and outlier channels. Precision paths are added from outside.

model = models.build(config.model, vocab_size, seq_len)
model.init_weights(torch.Generator().manual_seed(seed))
add_outlier_channels(model, number, gain, generator)    # optional
logits_BTV = model(tokens_BT)
model.auxiliary_loss        # unless None, training adds it to the cross-entropy of these logits
"""

from gnmr.lab.config import ModelConfig
from gnmr.lab.models import cpu_products
from gnmr.lab.models.decoders import GPT, Decoder, Llama
from gnmr.lab.models.moe import MoE
from gnmr.lab.models.outliers import OutlierWindow, add_outlier_channels

__all__ = ["GPT", "Decoder", "Llama", "MoE", "OutlierWindow", "add_outlier_channels", "build"]


def build(config: ModelConfig, vocab_size: int, max_seq_len: int) -> Decoder:
    """Build the model of `config.name` on the default device and dtype (at no cost under `torch.device("meta")`).

    Its weights are undefined until `init_weights` or `load_state_dict`.
    """
    cpu_products.provide()
    return {"llama": Llama, "pangu": Llama, "gpt": GPT, "moe": MoE}[config.name](config, vocab_size, max_seq_len)

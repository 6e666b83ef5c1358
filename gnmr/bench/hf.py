"""Our plain 16-bit model against Hugging Face's of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.timing import alternate, clock_of
from gnmr.errors import UserError
from gnmr.models import Llama
from gnmr.models.pretrained import as_hugging_face
from gnmr.training.build import assemble, first_batch


def check_hf(setting: Setting) -> None:
    """UserError unless the comparison can be made."""
    config = setting.config
    if find_spec("transformers") is None:
        raise UserError("bench hf: needs Hugging Face's transformers (pip install transformers), which is missing here")
    if config.model.name != "llama":
        raise UserError(f"bench hf: model.name={config.model.name}: the comparison is made for llama")


def hf(setting: Setting) -> list[Figure]:
    """Forward, loss and backward of one batch, no optimizer, taking turns; the weights are the same."""
    plain, converted = (assemble(setting.static("bf16"), Path(), setting.say) for _ in range(2))
    plain.plan.restore()
    assert isinstance(plain.model, Llama), "check_hf refuses the others"
    theirs = as_hugging_face(plain.model)
    block = first_batch(plain)[0]
    assert isinstance(block, Tensor), "models of ours are trained on plain blocks"
    losses: dict[str, float] = {}

    def arm(name: str, model: nn.Module, logits: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            loss = F.cross_entropy(logits(block[:, :-1]).float().flatten(0, 1), block[:, 1:].flatten())
            loss.backward()
            losses[name] = loss.item()
            for parameter in model.parameters():
                parameter.grad = None

        return step

    arms = {
        "theirs": arm("theirs", theirs, lambda tokens: theirs(input_ids=tokens, use_cache=False).logits),
        "ours": arm("ours", plain.model, plain.model),
        "converted": arm("converted", converted.model, converted.model),
    }
    rounds = setting.rounds("hf: forward and backward of both models", 20, warm_up=3)
    seconds = alternate(arms, rounds, clock_of(plain.device, setting.clock))
    note = f"same weights and batch; loss {losses['ours']:.5f} here, {losses['theirs']:.5f} there"
    return [
        median("our plain step over Hugging Face's", seconds["ours"] / seconds["theirs"], "x", 1.0, note, True),
        median("  with linears converted, paths=bf16", seconds["converted"] / seconds["theirs"], "x", interval=True),
        median("Hugging Face's step", seconds["theirs"], "s"),
    ]

"""What a model runs, counted as PyTorch runs it: against sums by hand and torch.utils.flop_counter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gnmr.conversion import PathSpec, convert
from gnmr.measure.coverage import Counting, Coverage, Product, count, percent

TOKENS = torch.arange(64).view(2, 32)
SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 128}
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
MAMBA = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 16}
T5 = {"vocab_size": 320, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def model_of(config: str, auto: str = "AutoModelForCausalLM", **options: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, config)(**options)
    model: nn.Module = getattr(transformers, auto).from_config(made, attn_implementation="eager")
    return model.eval()


def by_kind(found: Coverage) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for one, number in found.products.items():
        kinds[one.kind] = kinds.get(one.kind, 0) + number
    return kinds


@pytest.mark.parametrize(
    ("model", "auto", "options"),
    [
        ("LlamaConfig", "AutoModelForCausalLM", WIDE),
        ("GPT2Config", "AutoModelForCausalLM", GPT2),
        ("MambaConfig", "AutoModelForCausalLM", MAMBA),
        ("T5Config", "AutoModelForSeq2SeqLM", {**T5, "decoder_start_token_id": 0}),
    ],
)
def test_all_products_are_counted_as_torch_counts_them(model: str, auto: str, options: dict[str, object]) -> None:
    made = model_of(model, auto, **options)
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    found = count(made, lambda: made(**batch))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        made(**batch)
    assert 2 * (found.total + found.attention) == counter.get_total_flops()


def test_experts_of_a_mixture_count_the_tokens_that_reach_them() -> None:
    model = model_of("MixtralConfig", **WIDE, **EXPERTS)
    found = count(model, lambda: model(input_ids=TOKENS))
    rows, layers = TOKENS.numel(), 2
    linears = layers * (64 * 64 + 2 * 64 * 32 + 64 * 64) + 64 * 320
    experts = layers * 2 * (64 * 256 + 128 * 64)  # two of them a token
    kinds = {"Linear": rows * linears, "MixtralExperts": rows * experts, "MixtralTopKRouter": rows * layers * 64 * 4}
    assert by_kind(found) == kinds
    names = [name for name in found.called() if name != "lm_head"]
    line = found.line(names)
    assert line.startswith(f"covers {percent(found.share(names))} of the GEMMs' arithmetic; not: experts.gate_up_proj")
    assert "experts.down_proj (MixtralExperts)" in line and "lm_head" in line


class Pieces(nn.Module):
    """Ways to multiply by a weight that no linear knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fused = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.stack = nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)  # (2, 32, 8)
        first = F.linear(x, self.fused.weight[:4])
        chosen = self.stack[torch.zeros(2, dtype=torch.long)]
        each = torch.bmm(x, chosen.to(torch.float64).to(x.dtype).transpose(1, 2))
        logits = first.flatten(0, 1) @ self.stack[0]
        return logits @ self.table.weight.t() + (each.flatten(0, 1) @ x.flatten(0, 1).t()[:4] @ x.flatten(0, 1)).sum()


def test_one_call_in_vmap_counts_all_its_products() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(8, 4) for _ in range(3)]), "down": nn.Linear(4, 8)})
    weights, _ = torch.func.stack_module_state(model["experts"])

    def run() -> None:
        x = torch.randn(5, 8)
        torch.vmap(lambda own: torch.func.functional_call(model["experts"][0], own, (x,)))(weights)
        model["down"](torch.randn(2, 4))

    assert count(model, run).called() == {"experts.0": 3 * 5 * 32, "down": 2 * 32}


def test_weights_are_followed_through_views_and_casts() -> None:
    model = Pieces()
    found = count(model, lambda: model(TOKENS))
    assert found.products == {
        Product("fused", "Linear", called=False): 64 * 8 * 4,
        Product("stack", "Pieces"): 64 * 8 * 4 + 64 * 4 * 8,
        Product("table", "Embedding"): 64 * 8 * 64,
    }
    assert found.attention == 64 * 4 * 64 + 64 * 64 * 8


@pytest.mark.parametrize(
    ("model", "shape", "kinds"),
    [
        (nn.LSTM(16, 32, 2), (5, 3, 16), {"LSTM": 15 * (4 * 32 * (16 + 32) + 4 * 32 * (32 + 32))}),
        (nn.GRU(16, 32, bidirectional=True), (5, 3, 16), {"GRU": 15 * 2 * 3 * 32 * (16 + 32)}),
        (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 8, 8), {"Conv2d": 2 * 36 * 8 * 2 * 9}),
        (nn.Conv1d(4, 8, 3, padding=1), (2, 4, 10), {"Conv1d": 2 * 10 * 8 * 4 * 3}),
        (nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.Flatten(), nn.Linear(16, 10)), (2, 3, 16, 16), None),
    ],
)
def test_recurrent_layers_and_convolutions(model: nn.Module, shape: tuple[int, ...], kinds: dict[str, int]) -> None:
    found = by_kind(count(model, lambda: model(torch.randn(shape))))
    assert found == (kinds or {"Conv2d": 2 * 4 * 4 * 3 * 64, "Linear": 2 * 160})


def test_no_fast_path_goes_around_the_linears() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    found = count(layer, lambda: layer(torch.randn(2, 5, 16)))
    assert found.products == {
        Product("self_attn.in_proj", "MultiheadAttention"): 10 * 16 * 48,
        Product("self_attn.out_proj", "Linear", called=False): 10 * 16 * 16,
        Product("linear1", "Linear"): 10 * 16 * 32,
        Product("linear2", "Linear"): 10 * 16 * 32,
    }
    assert found.attention == 2 * 2 * 5 * 5 * 16
    assert torch.backends.mha.get_fastpath_enabled()


def run_in(autocast: bool, model: nn.Module) -> Callable[[], object]:
    def run() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(TOKENS)

    return run


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("low", ["int4", "fp8_hybrid", "llm_int8"])
def test_converted_linears_count_as_plain_ones(low: str, autocast: bool) -> None:
    model = Pieces()
    model.head = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    forward = model.forward
    model.forward = lambda tokens: model.head(forward(tokens))  # type: ignore[method-assign]
    plain = count(model, run_in(autocast, model))
    recovery = "int8" if low == "int4" else "bf16"
    converted = convert(model, PathSpec(low=low, recovery=recovery, targets=["head*"]))
    assert count(model, run_in(autocast, model), converted.operators) == plain
    assert plain.called() == {"head.0": 64 * 64 * 32, "head.1": 64 * 64 * 32}


def test_a_loop_is_counted_until_it_is_disarmed() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(64, 8), "body": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})
    model["head"] = nn.Linear(8, 64)
    counting = Counting(model)
    counting.arm()
    with torch.no_grad():
        model["head"](torch.randn(3, 8))  # no step of training

    def loss() -> Tensor:
        hidden = model["table"](TOKENS)
        return model["head"](checkpoint(model["body"], hidden, use_reentrant=False)).logsumexp(-1).mean()

    loss().backward()
    with pytest.raises(RuntimeError):
        model["body"](torch.randn(3, 9))
    loss().backward()
    twin, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (twin, read):
        other["head"](torch.randn(3, 8)).sum().backward()
    counting.disarm()
    loss()
    assert counting.coverage.called()["head"] == 2 * 64 * 8 * 64
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    assert not any(hooks)


def test_a_compiled_model_is_not_counted_and_compiles_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    frames: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        frames.append(graph)
        return graph.forward

    counting = Counting(model)
    counting.arm()
    model.compile(backend=backend)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        counting.disarm()
    assert counting.coverage.total == 0 and len(frames) == 1


@pytest.mark.parametrize(
    ("share", "text"),
    [(1, "100%"), (0.9999, "99.99%"), (0.89, "89.0%"), (0.0034, "0.34%"), (0, "0%"), (0.9999999, "100.00%")],
)
def test_only_all_is_100_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_numbers_of_a_step_do_not_change_by_counting() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16)).to(torch.bfloat16)
    x, found = torch.randn(8, 16, dtype=torch.bfloat16), []
    for counted in (False, True):
        torch.manual_seed(1)
        counting = Counting(model)
        if counted:
            counting.arm()
        model.zero_grad()
        model(x).square().mean().backward()
        counting.disarm()
        found.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert a is not None and torch.equal(a, b)


class Grouped(nn.Linear):
    """Eight groups with matrices of their own, as DeepSeek-V4's output projection."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bgi,goi->bgo", x, self.weight.view(8, 32, 64))


class LowRank(nn.Linear):
    """A dense product, and a linear of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Linear(inputs, 4)
        self.up = nn.Parameter(torch.zeros(outputs, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down(x) @ self.up.t()


class Hidden(nn.Linear):
    """A kernel whose products PyTorch does not dispatch."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., None, :] * self.weight).sum(-1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("module", "shape", "products"),
    [
        (Grouped(64, 256), (5, 8, 64), {"": 5 * 8 * 32 * 64}),
        (LowRank(64, 32), (5, 64), {"": 5 * (64 * 32 + 4 * 32), "down": 5 * 4 * 64}),
        (Hidden(64, 32), (5, 64), {"": 5 * 64 * 32}),
        (nn.Linear(64, 32), (5, 64), {"": 5 * 64 * 32}),
    ],
)
def test_a_linear_that_multiplies_less_counts_what_it_multiplies(
    module: nn.Module, shape: tuple[int, ...], products: dict[str, int], training: bool
) -> None:
    model = nn.Sequential(nn.Identity(), module)
    x = torch.randn(shape)
    if training:
        counting = Counting(model)
        counting.arm()
        model(x).sum().backward()
        counting.disarm()
        found = counting.coverage
    else:
        found = count(model, lambda: model(x))
    assert found.called() == {f"1.{name}".rstrip("."): number for name, number in products.items()}
    assert found.total == sum(products.values()) and found.attention == 0


def test_a_converted_linear_with_its_own_forward_counts_once() -> None:
    """It is called, and so is the operator in it."""
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    model = nn.ModuleDict({"up_proj": falcon.FalconLinear(32, 64), "head": nn.Linear(64, 8)})
    run = lambda: model["head"](model["up_proj"](torch.randn(4, 32)))
    plain = count(model, run)
    converted = convert(model, PathSpec.of("mxfp8", "bf16", targets=["up_proj"]))
    found = count(model, run, converted.operators)
    assert found.called() == plain.called() == {"up_proj": 4 * 32 * 64, "head": 4 * 64 * 8}


def test_a_bilinear_counts_its_products() -> None:
    model = nn.ModuleDict({"pair": nn.Bilinear(6, 10, 7), "plain": nn.Linear(7, 3)})
    found = count(model, lambda: model["plain"](model["pair"](torch.randn(2, 5, 6), torch.randn(2, 5, 10))))
    assert found.products == {Product("pair", "Bilinear"): 10 * 6 * 10 * 7, Product("plain", "Linear"): 10 * 7 * 3}
    assert "pair (Bilinear)" in found.line(["plain"])

"""Which modules are exchanged, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial, update_wrapper
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from test_linear import WIDTH, gradients, inputs, model
from test_simulated import same
from torch import nn

import gnmr
from gnmr.conversion import PathLinear, PathSpec, convert
from gnmr.formats import cast
from gnmr.formats.number_formats import FORMATS
from gnmr.formats.recipes import RECIPES


def net(layers: int = 3) -> nn.Module:
    def layer() -> nn.Module:
        return nn.ModuleDict({"up_proj": nn.Linear(4, 8), "down_proj": nn.Linear(8, 4)})

    return nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(layers)), "lm_head": nn.Linear(4, 9)})


def converted(model: nn.Module, *targets: str) -> list[str]:
    converted = convert(model, PathSpec.of("int4", "int8", targets=targets))
    found = [name for name, module in model.named_modules() if isinstance(module, PathLinear)]
    assert found == [operator.operator_name for operator in converted.operators]
    return found


def test_patterns_end_at_component_borders() -> None:
    assert converted(net(), "down_proj") == [f"layers.{i}.down_proj" for i in range(3)]
    assert converted(net(21), "layers.2.*") == ["layers.2.up_proj", "layers.2.down_proj"]
    assert converted(net(), "*_proj", "lm_head")[-1] == "lm_head"
    assert converted(net(), "layers.1.up_proj") == ["layers.1.up_proj"]


@pytest.mark.parametrize("pattern", ["wrong_proj", "proj", "layers.7.*", "layers"])
def test_a_pattern_that_matches_nothing_is_refused_and_nothing_is_changed(pattern: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=rf"{pattern.replace('*', '.')}.*down_proj, lm_head, up_proj"):
        convert(model, PathSpec.of("int4", "int8", targets=["down_proj", pattern]))
    assert not any(isinstance(module, PathLinear) for module in model.modules())


def test_modules_parameters_and_hooks_stay_the_same_objects() -> None:
    model = net()
    module, parameters, calls = model["layers"][0]["up_proj"], list(model.parameters()), []
    module.register_forward_hook(lambda *_: calls.append(1))
    convert(model, PathSpec.of("int4", None))
    assert model["layers"][0]["up_proj"] is module and isinstance(module, nn.Linear)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    module(torch.zeros(1, 4))
    assert calls == [1]


def test_restore_gives_plain_linears_back() -> None:
    model = net()
    convert(model, PathSpec.of("int4", "int8")).restore()
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert converted(model, "*_proj"), "and they can be converted again"


@pytest.mark.parametrize("target", ["*", "linear1"])
def test_no_fast_path_of_an_encoder_goes_around_the_operators(target: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))
    x, padded = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    exact = model(x, src_key_padding_mask=padded)
    plain = [dict(vars(module)) for module in model.modules()]
    paths = convert(model, PathSpec.of("sim_int4", "bf16", targets=[target]))
    low = model(x, src_key_padding_mask=padded)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x, src_key_padding_mask=padded), low) and not torch.equal(low, exact)
        with paths.high_precision():
            torch.testing.assert_close(model(x, src_key_padding_mask=padded), exact)
    paths.restore()
    assert [dict(vars(module)) for module in model.train().modules()] == plain


def test_a_nested_input_is_refused_by_name() -> None:
    model = net()
    convert(model, PathSpec.of("int4", "int8"))
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"^layers.1.up_proj: its input is a nested tensor; .* values\(\)$"):
        model["layers"][1]["up_proj"](nested)
    assert model["layers"][1]["up_proj"](nested.values()).shape == (5, 8)


def test_what_is_refused() -> None:
    model = net()
    convert(model, PathSpec.of("int4", None))
    with pytest.raises(ValueError, match=r"layers\.0\.up_proj has two paths already \(attached twice\?\)"):
        convert(model, PathSpec.of("int4", None))
    for key, value in (("site", "output"), ("rounding", "up")):
        with pytest.raises(ValueError, match=value):
            PathSpec.of("int4", "int8", **{key: value})
    with pytest.raises(ValueError, match="no linear"):
        convert(nn.Sequential(nn.ReLU()), PathSpec.of("int4", None))


@pytest.mark.parametrize("shape", [(0,), (32,), (16, 4)])
def test_a_shard_is_refused_and_nothing_is_changed(shape: tuple[int, ...]) -> None:
    """What FSDP1 and ZeRO-3 leave in place of a weight."""
    model = net()
    model["layers"][1]["down_proj"].weight.data = torch.zeros(shape)
    with pytest.raises(
        ValueError, match=r"^layers\.1\.down_proj is sharded, its weight is \(.*in place of \(4, 8\): [^\n]+$"
    ):
        convert(model, PathSpec.of("int4", "int8"))
    assert not any(isinstance(module, PathLinear) for module in model.modules())


class Quantized(torch.Tensor):
    """As other libraries have them: bfloat16 by name."""


def odd_weight(kind: str) -> nn.Parameter:
    if kind == "quantized":
        return nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16).as_subclass(Quantized), requires_grad=False)
    return nn.Parameter(torch.zeros(4, 8, dtype=getattr(torch, kind)), requires_grad=False)


@pytest.mark.parametrize("kind", ["complex64", "int8", "uint8", "float8_e4m3fn", "quantized"])
@pytest.mark.parametrize("low", ["int4", "llm_int8"])
def test_a_weight_that_is_no_plain_number_is_refused_and_nothing_is_changed(low: str, kind: str) -> None:
    model = net()
    model["layers"][1]["down_proj"].weight = odd_weight(kind)
    with pytest.raises(
        ValueError, match=r"^layers\.1\.down_proj has a weight of torch\.[^\n]+: two paths need plain [^\n]+$"
    ):
        convert(model, PathSpec.of(low, None, backend="simulated" if low == "llm_int8" else "auto"))
    assert not any(isinstance(module, PathLinear) for module in model.modules())


def test_restoring_an_operator_that_was_parametrized_is_refused_and_changes_nothing() -> None:
    model = net()
    converted = convert(model, PathSpec.of("int4", "int8"))
    last = converted.operators[-1]
    expected = model["lm_head"](last(torch.ones(2, 8)))
    nn.utils.parametrizations.weight_norm(last)
    with pytest.raises(ValueError, match=r"layers\.2\.down_proj has become a ParametrizedPathLinear since: undo that"):
        converted.restore()
    assert all(isinstance(operator, PathLinear) for operator in converted.operators)
    nn.utils.parametrize.remove_parametrizations(last, "weight")
    converted.restore()
    assert all(type(operator) is nn.Linear for operator in converted.operators)
    torch.testing.assert_close(model["lm_head"](last(torch.ones(2, 8))), expected)


def test_a_converted_model_can_be_pickled_and_copied_and_restored() -> None:
    plain = model()
    net = copy.deepcopy(plain)
    converted = convert(net, PathSpec.of("fp8_delayed", "bf16"))
    gradients(net, inputs())
    converted.end_step()
    expected = gradients(net, 2 * inputs())
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert same(gradients(other, 2 * inputs()), expected)
    converted.restore()
    assert same(gradients(net, inputs()), gradients(plain, inputs()))


PATHS = [(name, "nearest") for name in RECIPES if name != "bf16"]
PATHS += [(name, "stochastic") for name in FORMATS if name != "bf16"]


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what is made once in a process."""

    def forget() -> None:
        monkeypatch.setattr(cast, "_ROTATIONS", {})
        for fmt in FORMATS.values():
            getattr(fmt, "_tables", {}).clear()

    return forget


@pytest.mark.parametrize(("low", "rounding"), PATHS)
def test_no_path_depends_on_the_default_dtype(low: str, rounding: str, no_tables: Callable[[], None]) -> None:
    plain, x = model(), inputs()

    def two_steps(dtype: torch.dtype) -> list[torch.Tensor]:
        no_tables()
        torch.set_default_dtype(dtype)
        try:
            net = copy.deepcopy(plain)
            converted = convert(net, PathSpec.of(low, None, rounding=rounding))
            first = gradients(net, x)
            converted.end_step()  # delayed scales come from the step before
            return [*first, *gradients(net, 1.5 * x)]
        finally:
            torch.set_default_dtype(torch.float32)

    expected = two_steps(torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        assert same(two_steps(dtype), expected), dtype


def hook(module: nn.Module) -> None:
    """Replace the module's forward as accelerate's hooks do, without needing that library."""
    module._hf_hook, module._old_forward = object(), module.forward
    module.forward = update_wrapper(partial(lambda self, *args: self._old_forward(*args), module), module.forward)


def around(module: nn.Module) -> None:
    """Replace the module's forward by a function that alone knows the forward before."""
    before = module.forward
    module.forward = lambda *args: before(*args)


def plain_and_low(layer: nn.Module) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model of this layer, its outputs without paths, and on the low path."""
    net = nn.ModuleDict({"up_proj": layer})
    x = inputs()
    plain = net["up_proj"](x)
    converted = convert(net, PathSpec.of("nvfp4", None))
    low = net["up_proj"](x)
    converted.restore()
    assert not torch.equal(plain, low)
    return net, plain, low


def conv1d() -> nn.Module:
    module = pytest.importorskip("transformers.pytorch_utils")
    return module.Conv1D(WIDTH, WIDTH)


LAYERS = {"nn.Linear": lambda: nn.Linear(WIDTH, WIDTH), "Conv1D": conv1d}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("hooked", ["before", "after"])
def test_hooks_that_replace_forward_leave_the_path_in_force(kind: str, hooked: str) -> None:
    net, plain, low = plain_and_low(LAYERS[kind]())
    if hooked == "before":
        hook(net["up_proj"])
    converted = convert(net, PathSpec.of("nvfp4", None))
    if hooked == "after":
        hook(net["up_proj"])
    assert torch.equal(net["up_proj"](inputs()), low)
    assert torch.equal(copy.deepcopy(net)["up_proj"](inputs()), low)
    converted.restore()
    assert torch.equal(net["up_proj"](inputs()), plain)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_forward_that_paths_cannot_reach_is_refused_and_a_later_one_outlives_them(kind: str) -> None:
    net, plain, low = plain_and_low(LAYERS[kind]())
    converted = convert(net, PathSpec.of("nvfp4", None))
    around(net["up_proj"])
    assert torch.equal(net["up_proj"](inputs()), low)
    converted.restore()
    assert torch.equal(net["up_proj"](inputs()), plain)
    with pytest.raises(ValueError, match=r"^up_proj: its forward was replaced on the module itself"):
        convert(net, PathSpec.of("nvfp4", None))


def step_of(_process: int, net: nn.Module, norms: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms[0] = torch.stack([gradient.norm() for gradient in gradients(net, inputs())]).sum()


@pytest.mark.parametrize("low", ["nvfp4", "fp8_delayed"])
def test_an_attached_model_crosses_to_another_process_without_a_word(low: str) -> None:
    """What it takes along is pickled and rebuilt here, as `torch.multiprocessing.spawn` has it."""
    net = model()
    controller = gnmr.attach(net, low=low, recovery="bf16", backend="simulated", signal="grad_norm", alpha=1.5)
    gradients(net, inputs())
    controller.step()
    net.zero_grad()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ForkingPickler(buffer).dump(net)
    found, expected = torch.zeros(1), torch.zeros(1)
    step_of(0, pickle.loads(buffer.getvalue()), found)
    step_of(0, net, expected)
    assert torch.equal(found, expected)

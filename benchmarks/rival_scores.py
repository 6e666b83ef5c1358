"""Scores by which other tools and rules of thumb rank operators, for `rivals.py`.

All but the last are re-made from their papers or pages, and measured on the same passes. With x the input, W the
weight, Q the casts of a recipe, D = Q(x) Q(W)^T - x W^T, and g the gradient of the mean loss on the data's labels:

    by element             sum of (g_y D)^2 over the elements of the output: the score of AutoQuantize's gradient mode
    AutoScheme             sum |g_x (x - Q(x))| + sum |g_W (W - Q(W))|: first order, absolute values (SignRoundV2)
    PrismaQuant            1/2 H mean (W - Q(W))^2, with H the trace of the Fisher matrix of the weight. One backward
                           pass of random signs e through sqrt(p) e - p (sqrt(p) . e) per batch, whose covariance is
                           that of drawn labels, gives H = sum g_W^2
    gradient norm          ||g_W||, the same for every recipe; and its square
    MSE of the input       ||x - Q(x)||^2 per token
    MSE of the output      ||D||^2 per token

The last one is the library itself: ModelOpt's AutoQuantize in its modes `gradient` and `kl_div`. Its quantizers run our
casts, and it is free to choose every operator alone: its groups (q, k and v; gate and up) are those of an inference
engine, and would only take choices from it.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.conversion.linear import PathLinear
from gnmr.conversion.unit_names import unit_of
from gnmr.formats.cast import quantize
from gnmr.formats.recipes import RECIPES
from gnmr.measure.gemm_costs import GemmCost
from gnmr.measure.kl import IGNORED
from gnmr.plan.knapsack import Prices

Run = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Returns the logits (S, T, V) of a batch and its targets (S, T)."""
SCORES = (
    "by element",
    "AutoScheme",
    "PrismaQuant",
    "gradient norm",
    "gradient norm squared",
    "MSE of the input",
    "MSE of the output",
)
LIBRARIES = Path(__file__).resolve().parents[1] / ".libraries"
BITS_STEP = 1 / 64
"""Step of the effective bits at which AutoQuantize is asked for its choice."""
_EXACT = "bf16"
"""A model in float32 is exact on this recipe."""


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the tokens that count."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def sign_probe(logits: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Return u = sqrt(p) e - p (sqrt(p) . e) with random signs e, (S, T, V); 0 for tokens without a target.

    E[u u^T] = diag(p) - p p^T is the Fisher matrix of the logits, and the covariance of the gradient with drawn labels.
    """
    p = logits.detach().float().softmax(dim=-1)
    signs = torch.randint(0, 2, p.shape, generator=generator, device=p.device).to(p.dtype).mul_(2).sub_(1)
    root = p.sqrt().mul_(signs)
    probe = root - p * root.sum(dim=-1, keepdim=True)
    return probe.masked_fill_((targets == IGNORED).unsqueeze(-1), 0.0).to(logits.dtype)


def measure_scores(
    model: nn.Module, run: Run, batches: Sequence[Any], operators: Mapping[str, nn.Linear], recipes: Sequence[str]
) -> dict[str, Prices]:
    """Return each of `SCORES` as prices of fprop: {score: {(operator, "fprop"): {recipe: value}}}.

    Args:
        model: a model in float32 and in evaluation mode; it is left as it is.
        run: see `Run`.
        batches: batches, over which the scores are summed.
        operators: the linears by the names of the operators.
        recipes: the low recipe and the ones that a plan may use, by name.
    """
    cast_recipes = [recipe for recipe in recipes if recipe != _EXACT]
    sums = {score: {name: dict.fromkeys(recipes, 0.0) for name in operators} for score in SCORES}
    weights = {
        name: {r: quantize(linear.weight.detach(), RECIPES[r].fprop.weight, 1)[0] for r in cast_recipes}  # type: ignore[arg-type]
        for name, linear in operators.items()
    }

    def add_scores(name: str, x: Tensor, g_y: Tensor) -> None:
        """Add the scores of a batch on the data's labels: x (T, I), g_y (T, O)."""
        weight = operators[name].weight.detach()
        g_x, g_w, exact = g_y @ weight, g_y.T @ x, x @ weight.T
        norm = float(g_w.norm())
        sums["gradient norm"][name][recipes[0]] += norm / len(batches)
        for recipe in cast_recipes:
            cast_input = RECIPES[recipe].fprop.input
            cast_x = x if cast_input is None else quantize(x, cast_input, 1)[0]
            error = cast_x @ weights[name][recipe].T - exact
            first_order = float((g_x * (x - cast_x)).abs().sum() + (g_w * (weight - weights[name][recipe])).abs().sum())
            sums["AutoScheme"][name][recipe] += first_order
            sums["by element"][name][recipe] += float((g_y * error).square().sum())
            sums["MSE of the input"][name][recipe] += float((x - cast_x).square().sum()) / len(x)
            sums["MSE of the output"][name][recipe] += float(error.square().sum()) / len(x)

    def add_fisher(name: str, x: Tensor, g_y: Tensor) -> None:
        """Add PrismaQuant's score of a batch, whose g_y are those of a probe."""
        trace = float((g_y.T @ x).square().sum())
        for recipe in cast_recipes:
            error = float((operators[name].weight.detach() - weights[name][recipe]).square().mean())
            sums["PrismaQuant"][name][recipe] += trace * error / 2

    for place, batch in enumerate(batches):
        for add in (add_scores, add_fisher):
            hooks = [
                linear.register_forward_hook(partial(_on_backward, partial(add, name)))
                for name, linear in operators.items()
            ]
            try:
                with torch.enable_grad():
                    logits, targets = run(model, batch)
                if add is add_scores:
                    mean_loss(logits, targets).backward()
                else:
                    generator = torch.Generator(logits.device).manual_seed(place)
                    logits.backward(sign_probe(logits, targets, generator))
            finally:
                for hook in hooks:
                    hook.remove()
                model.zero_grad(set_to_none=True)
    for name, values in sums["gradient norm"].items():
        sums["gradient norm squared"][name][recipes[0]] = values[recipes[0]] ** 2
    return {
        score: {(name, "fprop"): values for name, values in of_operators.items()}
        for score, of_operators in sums.items()
    }


def estimate_of(row: GemmCost) -> float:
    """Return the estimate of an fprop, in nats, also if its KL was measured: by sequence, or by token without any."""
    nats = row.by_token if row.by_sequence is None else row.by_sequence
    assert nats is not None, f"{row.operator}: no fprop is without an estimate"
    return nats


def _on_backward(
    add: Callable[[Tensor, Tensor], None], _linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    """Have `add` called with the rows of the input and, in the backward pass, of the output's gradient."""
    rows = inputs[0].detach().flatten(0, -2)
    output.register_hook(lambda gradient: add(rows, gradient.detach().flatten(0, -2)))


# ---- ModelOpt's AutoQuantize ----


def import_modelopt() -> Any:
    """Return `modelopt.torch.quantization` of .libraries. Raises ImportError if it is not installed."""
    if LIBRARIES.is_dir() and str(LIBRARIES) not in sys.path:
        sys.path.append(str(LIBRARIES))  # behind the packages of this environment, of which it has older parts
    absent = "transformer_engine"  # ModelOpt imports it if it is there; without its compiled part that fails
    before = sys.modules.get(absent)
    sys.modules[absent] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt.torch.quantization as mtq
    finally:
        if before is None:
            del sys.modules[absent]
        else:
            sys.modules[absent] = before
    return mtq


def _our_cast(x: Tensor, quantizer: Any) -> Tensor:
    """Cast a tensor as a recipe says: the entry point of a backend of ModelOpt's quantizers."""
    wanted = quantizer.backend_extra_args
    cast = getattr(RECIPES[wanted["recipe"]].fprop, wanted["operand"])
    return quantize(x.reshape(-1, x.shape[-1]), cast, 1)[0].view_as(x)


def _format(recipe: str) -> dict[str, Any]:
    """Return a recipe as one of ModelOpt's formats; its bits are those that set the time of a GEMM."""
    bits = max(cast.format.bits for cast in RECIPES[recipe].fprop.casts)
    quantizers = [
        {
            "quantizer_name": f"*{operand}_quantizer",
            "enable": True,
            "cfg": {
                "num_bits": bits,
                "axis": None,
                "backend": "gnmr",
                "backend_extra_args": {"recipe": recipe, "operand": operand},
            },
        }
        for operand in ("weight", "input")
    ]
    disabled = {"quantizer_name": "*", "enable": False}
    return {"quant_cfg": [disabled, *quantizers], "algorithm": None, "effective_bits": float(bits)}


class _ReusedBlocks:
    """Computes logits, and takes the outputs of the blocks before the first quantized one from an earlier pass.

    The mode `kl_div` runs the model without quantizers on a batch, and then with one operator quantized at a time, on
    the same batch. What comes before this operator's block is the same in all these passes, to the last bit.
    """

    def __init__(self, run: Run, blocks: Sequence[nn.Module]) -> None:
        """Replace `forward` of the blocks, which are in the order in which they run."""
        self._run, self._blocks = run, blocks
        self._batch: Any = None
        """The batch of the last pass without quantizers, whose outputs of the blocks are kept."""
        self._records = False
        self._first = 0
        """Index of the first block that runs."""
        self._outputs: list[Any] = [None] * len(blocks)
        for index, block in enumerate(blocks):
            block.forward = partial(self._forward, index, block.forward)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        quantized = [any(map(_quantizes, block.modules())) for block in self._blocks]
        self._records = not any(map(_quantizes, model.modules()))
        if self._records:
            self._batch = batch
        in_blocks = batch is self._batch and any(quantized)
        self._first = quantized.index(True) if in_blocks else 0
        return self._run(model, batch)[0]

    def _forward(self, index: int, forward: Callable[..., Any], *inputs: Any, **named_inputs: Any) -> Any:
        if index < self._first:
            return self._outputs[index]
        output = forward(*inputs, **named_inputs)
        if self._records:
            self._outputs[index] = output
        return output


def _quantizes(module: nn.Module) -> bool:
    """Return whether a module is a quantizer of ModelOpt that is on."""
    return getattr(module, "is_enabled", False) is True


class AutoQuantize:
    """ModelOpt's choice of recipes for any number of effective bits, from one pass of its scores."""

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        batches: Sequence[Any],
        operators: Mapping[str, nn.Linear],
        recipes: Sequence[str],
        method: str,
        checkpoint: Path,
    ) -> None:
        """Run `mtq.auto_quantize`; the arguments are those of `measure_scores`.

        Args:
            model: as there; a copy of it is quantized.
            run: as there.
            batches: as there.
            operators: as there.
            recipes: as there, the low one first; leaving an operator alone is always a choice.
            method: `gradient` or `kl_div`.
            checkpoint: the library's own file, from which a second call goes on.

        Raises:
            ImportError: the library is not installed.
        """
        self._mtq = mtq = import_modelopt()
        self._low = recipes[0]
        self._pins_of: dict[float, dict[str, str]] = {}
        """Its choices by effective bits."""
        from modelopt.torch.quantization import algorithms
        from modelopt.torch.utils import safe_load

        mtq.nn.register_quant_backend("gnmr", _our_cast)
        self._mine = {id(linear): name for name, linear in operators.items()}
        self._name_of = {path: self._mine[id(m)] for path, m in model.named_modules() if id(m) in self._mine}
        others = [path for path, module in model.named_modules() if path and path not in self._name_of]
        other_layers = [path for path in others if hasattr(model.get_submodule(path), "weight")]
        searcher = {"gradient": "AutoQuantizeGradientSearcher", "kl_div": "AutoQuantizeKLDivSearcher"}[method]
        getattr(algorithms, searcher).quant_grouping_rules = []
        logits_alone = method == "kl_div"
        quantized = copy.deepcopy(model)
        forward_step: Callable[[nn.Module, Any], Any] = run
        if logits_alone:
            blocks = dict.fromkeys(unit_of(path, "block") for path in self._name_of)
            inside = [quantized.get_submodule(path) for path in blocks if path not in self._name_of]
            forward_step = _ReusedBlocks(run, inside)
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        # The library writes its file before it measures, and cannot go on from a file without scores.
        if checkpoint.exists() and not safe_load(checkpoint)["candidate_stats"]:
            checkpoint.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, self._state = mtq.auto_quantize(
                quantized,
                constraints={"effective_bits": 16.0},
                quantization_formats=[_format(recipe) for recipe in recipes if recipe != _EXACT],
                data_loader=[*batches],
                forward_step=forward_step,
                loss_func=None if logits_alone else lambda output, _: mean_loss(*output),
                disabled_layers=other_layers,
                num_calib_steps=1,
                num_score_steps=len(batches),
                method=method,
                checkpoint=str(checkpoint),
            )

    def pins(self, bits: float) -> dict[str, str]:
        """Return {operator: recipe} of its choice at this number of effective bits, without those on the low recipe."""
        if bits in self._pins_of:
            return self._pins_of[bits]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = self._mtq.get_auto_quantize_config(self._state, {"effective_bits": bits})
        recipe_of = {}
        for entry in config["quant_cfg"]:
            path, _, quantizer = entry["quantizer_name"].rpartition(".")
            if quantizer == "weight_quantizer" and entry.get("enable") and path in self._name_of:
                recipe_of[self._name_of[path]] = entry["cfg"]["backend_extra_args"]["recipe"]
        chosen = {name: recipe_of.get(name, _EXACT) for name in self._name_of.values()}
        pins = self._pins_of[bits] = {name: recipe for name, recipe in chosen.items() if recipe != self._low}
        return pins

    def within(self, budget: float, extra_of: Callable[[dict[str, str]], float]) -> dict[str, str]:
        """Return the choice of the most extra time within a budget.

        `extra_of` counts the extra time of a choice. The library counts effective bits by weights, so that a choice of
        more bits may take less time: the bits are scanned in steps, and the step above the best of them is bisected.
        The choice of the fewest bits leaves every operator on the low recipe.
        """
        most_time = budget * (1 + 1e-9)
        steps = [BITS_STEP * step for step in range(round(16 / BITS_STEP) + 1)]
        extras = {bits: extra for bits in steps if (extra := extra_of(self.pins(bits))) <= most_time}
        fewest = max(extras, key=lambda bits: (extras[bits], bits))
        most = fewest + BITS_STEP
        for _ in range(16):
            bits = (fewest + most) / 2
            if (extra := extra_of(self.pins(bits))) <= most_time:
                fewest, extras[bits] = bits, extra
            else:
                most = bits
        return self.pins(max(extras, key=extras.__getitem__))


def linears_of_operators(operators: Sequence[PathLinear]) -> dict[str, nn.Linear]:
    """Return the modules of converted operators by their names. Raises ValueError if one is not a linear."""
    modules = {}
    for operator in operators:
        if not isinstance(operator.module, nn.Linear):
            raise ValueError(f"{operator.operator_name}: is no nn.Linear")
        modules[operator.operator_name] = operator.module
    return modules

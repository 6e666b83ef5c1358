"""Exchanging linears by name pattern, in place: what becomes of them is the `Plan`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from gnmr.names import listed, select
from gnmr.paths.backends import check_backend, with_backend
from gnmr.paths.cast_stats import OPERANDS, AmaxHistory
from gnmr.paths.formats import FORMATS, Format
from gnmr.paths.int8_linear import Int8Linear
from gnmr.paths.kernels import te
from gnmr.paths.kernels.int8 import MOST_INPUTS, PER_ROW
from gnmr.paths.linear import PathLinear
from gnmr.paths.memory import SHARDED, is_sharded
from gnmr.paths.plan import Plan
from gnmr.paths.recipes import GEMMS, KEPT, RECIPES, SCALES, ExecutionPath, Gemm, Recipe
from gnmr.paths.shared import SharedState
from gnmr.paths.units import check_unit, grouped, operator_names

WEIGHTS = ("online", "beside", "instead")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def convert(
    model: nn.Module,
    low: str | Recipe,
    recovery: str | Recipe | None,
    targets: Sequence[str] = ("*_proj",),
    site: str = "saved",
    rounding: str = "nearest",
    seed: int = 0,
    recovers: Sequence[str] = GEMMS,
    unit: str = "operator",
    backend: str = "auto",
    weights: str = "online",
    outlier_threshold: float | None = None,
    device: torch.device | None = None,
    store: bool = True,
    shown: bool = True,
) -> Plan:
    """Turns every `nn.Linear` whose name matches into a `PathLinear` on its low-cost path, in place.

    The modules, their parameters, hooks and names stay the same objects, so an optimizer made before stays valid
    (`weights=instead` drops frozen parameters for others). peft may wrap the modules before or after: what it adds to
    their names is no part of the units'.

    Args:
        low, recovery: two formats of the saved input (`gnmr.paths.formats.FORMATS`) or two recipes
            (`gnmr.paths.recipes.RECIPES`), by name; bf16 is both. Or a `Recipe` of one's own (`Recipe.of`).
            `recovery=None` makes the run static.
        targets: patterns with `*` and `?`, matched against the end of the dotted name at a component's border:
            `down_proj` is every layer's, `layers.2.*` is not layer 20's. Under recipes they pass over output heads and
            the gates of experts (`gnmr.paths.recipes.KEPT`), and linears tied to an embedding.
        site: `saved` quantizes what backward keeps; `forward` lets the forward pass read it too.
        rounding: `nearest` or `stochastic`, the latter from a generator seeded with `seed`.
        recovers: the GEMMs (fprop, dgrad, wgrad) that the recovery recipe takes over; the others stay in the low one.
        unit: which operators change their path together: `operator`, `expert`, `layer` or `block`, told by their
            names; a block by the first number in it (`gnmr.paths.units`).
        backend: what runs a recipe: `auto`, `simulated`, `scaled_mm`, `int_mm` or `te` (`gnmr.paths.backends`).
        weights: where the INT8 codes of the weights are that `llm_int8` multiplies: `online` (made in every forward
            pass), `beside` or `instead` of the 16-bit weights, which must be frozen then (`gnmr.paths.kernels.int8`).
        outlier_threshold: columns of the input with a magnitude from here on stay in 16 bits under `llm_int8`.
        device: where a model on the meta device is meant to run, which backends go by; None: where its weights are.
            A model is planned on the meta device, not trained: convert it again where it gets its weights.
        store: False leaves what `weights` asks for to `Plan.store`, which may drop the 16-bit weights.
        shown: False where nobody is shown the plan: a warning then says what is simulated on CPUs too.

    Recipes read `site=saved` and `rounding=nearest` only: they say themselves what each GEMM reads.

    ValueError for an unknown format, recipe, site, rounding, GEMM, unit or backend, a format with a recipe, a pattern
    that matches no linear, or under recipes only such as stay in 16 bits, a linear whose widths the tiles of a recipe
    do not divide, a linear that is a subclass of `nn.Linear` (converted already, or another library's), sharded by
    anything but FSDP2's `fully_shard`, quantized, of integers or complex, linears on several devices, a kind of unit
    that the model does not have, a backend that cannot run the recipe here, and codes that would be kept of trainable
    weights. Warns of a recovery path that is the low path itself, or coarser in any operand or result: fewer bits,
    fewer significant ones, or the same format under a coarser scale (`gnmr.paths.recipes.SCALES`); of `recovers`,
    `backend`, `weights` and `outlier_threshold` where they have no effect; and under backend=auto of recipes that a GPU
    does not run, or nobody is shown as simulated (`gnmr.paths.backends`).
    """
    targets, recovers = listed("targets", targets), listed("recovers", recovers)
    check_backend(backend)
    _check_settings(weights, outlier_threshold)
    low_path, recovery_path = resolve(low, recovery, recovers)
    for name, value, choices in (
        ("site", site, ("saved", "forward")),
        ("rounding", rounding, ("nearest", "stochastic")),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: must be {' or '.join(choices)}")
        if isinstance(low_path, Recipe) and value != choices[0]:
            raise ValueError(
                f"{name}={value!r}: belongs to formats; with the recipe {low_path.name} it must be {choices[0]}"
            )

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names, empty = select(linears, targets)
    if empty or not targets:
        kinds = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise ValueError(
            f"targets {empty}: no linear has such a name; this model has {', '.join(kinds) or 'none'} (what is no "
            "nn.Linear, as GPT-2's Conv1D or experts in one tensor, can be a gnmr.Unit of your own)"
        )
    if isinstance(low_path, Recipe):
        free = _without_kept(model, linears)
        names, empty = select(free, targets)
        if empty:
            kept = sorted({name.rpartition(".")[2] for name in select(linears, empty)[0]})
            raise ValueError(
                f"targets {empty}: recipes keep {', '.join(kept)} in 16 bits (output head and gates); name others"
            )
    chosen = {name: linears[name] for name in names}
    for name, module in chosen.items():
        _check_linear(name, module, model)
        for path in (low_path, recovery_path):
            if isinstance(path, Recipe):
                _check_widths(name, module, path)

    unit_names = operator_names(names)
    check_unit(unit_names, unit)
    integer = any(isinstance(path, Recipe) and path.integer for path in (low_path, recovery_path))
    if integer:
        _check_weights(weights, (low_path, recovery_path), chosen)
    elif weights != "online" or outlier_threshold is not None:
        unread = f"weights={weights!r}" if weights != "online" else f"outlier_threshold={outlier_threshold}"
        warnings.warn(f"{unread}: has no effect without a recipe of integers (llm_int8)", stacklevel=2)
    here, *others = {module.weight.device: None for module in chosen.values()}
    if others:
        raise ValueError(f"targets: linears on several devices ({', '.join(map(str, [here, *others]))}); use one")
    if isinstance(low_path, Recipe):
        low_path = with_backend(_with_outliers(low_path, outlier_threshold), backend, chosen, device or here, shown)
    elif backend != "auto":
        warnings.warn(f"backend={backend!r}: has no effect on formats, which are packed on any machine", stacklevel=2)
    if isinstance(recovery_path, Recipe):
        recovery_path = _with_outliers(recovery_path, outlier_threshold)
        recovery_path = with_backend(recovery_path, backend, chosen, device or here, shown)

    engine = te.engine_for(low_path, recovery_path)
    generator = None
    if rounding == "stochastic":
        generator = torch.Generator(device="cpu" if here.type == "meta" else here)
        generator.manual_seed(seed)
    amax = None
    if isinstance(low_path, Recipe):
        history = max(path.history for path in (low_path, recovery_path) if isinstance(path, Recipe))
        amax = AmaxHistory(len(chosen), history, here)
    shared = SharedState(
        quantize_forward=site == "forward",
        generator=generator,
        amax=amax if engine is None else None,
        engine=engine,
        device=here,
    )
    if engine is not None and engine.delayed:
        engine.around(model, shared, next(p for p in (low_path, recovery_path) if isinstance(p, Recipe) and p.history))
    operators = []
    for index, (name, module) in enumerate(zip(unit_names, chosen.values(), strict=True)):
        module.__class__ = Int8Linear if integer else PathLinear
        assert isinstance(module, PathLinear)
        module.operator_name, module.index, module.low, module.recovery = name, index, low_path, recovery_path
        module.recovering, module.shared, module.fault, module.read, module._node = False, shared, None, None, None
        module.in_graphs = module.tally = None
        if isinstance(module, Int8Linear):
            module.store("online")
        operators.append(module)
    plan = Plan(operators, grouped(operators, unit), low_path, recovery_path, shared)
    if store:
        plan.store(weights)
    return plan


def resolve(
    low: str | Recipe, recovery: str | Recipe | None, recovers: Sequence[str] = GEMMS
) -> tuple[ExecutionPath, ExecutionPath | None]:
    """The paths that these are or name, both formats or both recipes; of the recovery recipe only the GEMMs `recovers`.

    ValueError and warning: see `convert`.
    """
    given = [low] if recovery is None else [low, recovery]
    names = [one.name if isinstance(one, Recipe) else one for one in given]
    for one in given:
        if isinstance(one, Recipe):
            if one.name in FORMATS | RECIPES and (one.name not in RECIPES or one.words() != RECIPES[one.name].words()):
                raise ValueError(f"recipe {one.name}: is not what has this name already; name it otherwise")
        elif not isinstance(one, str) or one not in FORMATS | RECIPES:
            raise ValueError(
                f"{one!r} is not known: use a format ({', '.join(FORMATS)}) or a recipe ({', '.join(RECIPES)})"
            )
    unknown = [gemm for gemm in recovers if gemm not in GEMMS]
    if unknown or not recovers:
        raise ValueError(f"recovers={unknown or list(recovers)}: use some of {', '.join(GEMMS)}")
    some = set(recovers) != set(GEMMS)
    paths: list[ExecutionPath]
    if all(one in FORMATS for one in given):
        paths = [FORMATS[name] for name in names]
        if some and recovery is not None:
            warnings.warn(f"recovers={list(recovers)}: has no effect on formats, which touch wgrad alone", stacklevel=3)
    elif all(isinstance(one, Recipe) or one in RECIPES for one in given):
        # What runs a recipe is for `backend` to say.
        recipes = [replace(one, backend="simulated") if isinstance(one, Recipe) else RECIPES[one] for one in given]
        paths = [recipes[0], *(recipes[0].with_recovered(recipe, recovers) for recipe in recipes[1:])]
    else:
        kinds = [
            f"{name} is a {'format' if one in FORMATS else 'recipe'}" for one, name in zip(given, names, strict=True)
        ]
        raise ValueError(f"{' and '.join(kinds)}: both paths must be of one kind (bf16 is of both)")
    if recovery is None:
        if some:
            warnings.warn(f"recovers={list(recovers)}: has no effect without a recovery path", stacklevel=3)
        return paths[0], None
    low_name, recovery_name = names
    if low == recovery:
        warnings.warn(f"the recovery path {recovery_name} is the low path too: recovery changes nothing", stacklevel=3)
    elif isinstance(paths[1], Recipe) and replace(paths[1], name=low_name) == paths[0]:
        what = f"recovers={list(recovers)}: {recovery_name} has these" if some else f"{recovery_name} has all GEMMs"
        warnings.warn(f"{what} as {low_name} has them: recovery changes nothing", stacklevel=3)
    elif coarser := _coarser(*paths):
        warnings.warn(
            f"the recovery path {recovery_name} is coarser than the low path {low_name}{coarser}", stacklevel=3
        )
    return paths[0], paths[1]


def _coarser(low: ExecutionPath, recovery: ExecutionPath) -> str:
    """Where `recovery` is coarser than `low`, as the end of a warning; empty: nowhere."""
    if isinstance(low, Format) and isinstance(recovery, Format):
        if recovery.bits < low.bits:
            return f" ({recovery.bits} bits, {low.bits})"
        ours, theirs = recovery.significant_bits, low.significant_bits
        return f" ({ours} significant bits, {theirs})" if ours < theirs else ""

    def coarser(gemm: str, operand: str) -> bool:
        before, after = (getattr(getattr(path, gemm), operand) for path in (low, recovery))
        if before is None or after is None:
            return after is not None
        ours, theirs = after.format, before.format
        if ours == theirs:
            return SCALES.index(after.scale) < SCALES.index(before.scale)
        return ours.bits < theirs.bits or ours.significant_bits < theirs.significant_bits

    # Of GEMMs that are not recovered the casts are the low path's own.
    places = [f"{gemm}.{operand}" for gemm in GEMMS for operand in OPERANDS if coarser(gemm, operand)]
    return f" in {', '.join(places)}" if places else ""


def _without_kept(model: nn.Module, linears: dict[str, nn.Linear]) -> dict[str, nn.Linear]:
    """The linears without those that every recipe leaves in 16 bits: by name, and output heads tied to an embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name: module
        for (name, module), short in zip(linears.items(), operator_names(list(linears)), strict=True)
        if short.rpartition(".")[2] not in KEPT and id(module.weight) not in embeddings
    }


def _check_linear(name: str, module: nn.Linear, model: nn.Module) -> None:
    """ValueError for a linear that cannot be given two paths, whatever they are."""
    if isinstance(module, PathLinear):
        raise ValueError(f"{name} has two paths already (attached twice?): detach the first controller before")
    if type(module) is not nn.Linear:
        raise ValueError(
            f"{name} is a {type(module).__name__}: only a plain nn.Linear can be given two paths; name other "
            "targets, or make it a gnmr.Unit of your own"
        )
    weight = module.weight
    shape, whole = tuple(weight.shape), (module.out_features, module.in_features)
    if shape != whole:
        raise ValueError(f"{name} is sharded, its weight is {shape} in place of {whole}: shard no unit (FSDP, ZeRO-3)")
    if is_sharded(weight):
        if not _gathered(model, name):
            raise ValueError(f"{name} has sharded parameters: its weight {SHARDED}")
    elif weight.dtype not in _DTYPES or type(weight) not in (nn.Parameter, Tensor, FakeTensor):
        raise ValueError(
            f"{name} has a weight of {weight.dtype} in a {type(weight).__name__}: two paths need plain weights in "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}; name other targets"
        )


def _gathered(model: nn.Module, name: str) -> bool:
    """Whether FSDP2 makes plain tensors of the parameters there before they are read."""
    from torch.distributed.fsdp import FSDPModule  # there is a DTensor, so there is torch.distributed

    parts = name.split(".")
    return any(isinstance(model.get_submodule(".".join(parts[:i])), FSDPModule) for i in range(len(parts) + 1))


def _check_widths(name: str, module: nn.Linear, recipe: Recipe) -> None:
    """ValueError if a group of elements with one scale would be cut by the linear's widths."""
    widths = {"inputs": module.in_features, "outputs": module.out_features}
    for (kind, width), divisor in zip(widths.items(), recipe.divisors(), strict=True):
        if width % divisor:
            raise ValueError(
                f"{name} has {width} {kind}: the recipe {recipe.name} needs a multiple of {divisor}, the size of its "
                "tiles; use another recipe or width, or leave it out of the targets"
            )


def _with_outliers(recipe: Recipe, threshold: float | None) -> Recipe:
    """The recipe whose integer product leaves the columns from `threshold` on in 16 bits; others as they are."""
    if threshold is None or not recipe.integer:
        return recipe
    assert recipe.fprop.input is not None
    return replace(recipe, fprop=replace(recipe.fprop, input=replace(recipe.fprop.input, outliers=threshold)))


def _check_settings(weights: str, outlier_threshold: float | None) -> None:
    """ValueError for values that mean nothing."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r}: use one of {', '.join(WEIGHTS)}")
    number = isinstance(outlier_threshold, (int, float)) and not isinstance(outlier_threshold, bool)
    if outlier_threshold is not None and not (number and outlier_threshold > 0):
        raise ValueError(f"outlier_threshold={outlier_threshold!r}: must be above 0 (published: 6.0), or None")


def _check_weights(weights: str, paths: Iterable[ExecutionPath | None], linears: dict[str, nn.Linear]) -> None:
    """ValueError where these linears' codes cannot be kept so, or their sums would not fit."""
    for name, linear in linears.items():
        if linear.in_features > MOST_INPUTS:
            raise ValueError(
                f"{name} has {linear.in_features} inputs: int32 sums of INT8 products hold {MOST_INPUTS:,}"
            )
        if weights != "online" and linear.weight.requires_grad:
            raise ValueError(
                f"weights={weights!r}: {name} is trainable, and its codes would soon be an older weight's; freeze it "
                "(requires_grad_(False)) or use weights='online'"
            )
    for path in paths:
        if weights == "instead" and isinstance(path, Recipe) and not _reads_codes(path):
            raise ValueError(
                f"weights='instead': the recipe {path.name} casts a weight of which only INT8 codes are left; use bf16 "
                "or llm_int8, or weights='beside'"
            )


def _reads_codes(recipe: Recipe) -> bool:
    """Whether all that it casts is the weight in INT8, or what meets that in fprop."""
    fprop = Gemm() if recipe.integer else recipe.fprop
    dgrad = replace(recipe.dgrad, weight=None) if recipe.dgrad.weight == PER_ROW else recipe.dgrad
    return not replace(recipe, fprop=fprop, dgrad=dgrad).casts

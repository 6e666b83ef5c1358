"""`attach` gives a model two paths and their controller; `controller_of` makes the controller of a converted model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gnmr.attachment.model_units import costs_of, units_of
from gnmr.attachment.ranks.reduce import DistributedRanks
from gnmr.attachment.ranks.world import rank
from gnmr.attachment.router import Router
from gnmr.control import Controller, ControlSpec, OutputGradients, Unit
from gnmr.control.evidence import EVIDENCE
from gnmr.control.ranks import Ranks
from gnmr.conversion import ConvertedModel, PathSpec, convert
from gnmr.conversion.converting import operator_shapes
from gnmr.conversion.unit_names import module_of
from gnmr.errors import warn
from gnmr.formats import Recipe
from gnmr.options import nearest, whole_number
from gnmr.options import share as check_share
from gnmr.plan.pin_plan import PATHS, PinPlan, read_plan

if TYPE_CHECKING:
    from gnmr.attachment.record import Recording


def specs_of(
    paths: PathSpec | None, control: ControlSpec | None, named: Mapping[str, Any]
) -> tuple[PathSpec, ControlSpec]:
    """Return both specs; `named` may give single fields instead of a spec.

    Raises TypeError, with the nearest name, if a name is not a field of either, or if a spec is something else. Raises
    ValueError if a value is invalid, or if a field is given together with its spec.
    """
    for word, spec, kind in (("paths", paths, PathSpec), ("control", control, ControlSpec)):
        if not isinstance(spec, kind | None):
            raise TypeError(
                f"{word}={spec!r:.40}: must be a {kind.__name__}, not a {type(spec).__name__}; name the options, as "
                "low='int4', recovery='int8', max_o=4"
            )
    path_fields, control_fields = ({field.name for field in fields(spec)} for spec in (PathSpec, ControlSpec))
    for name in named:
        if name not in path_fields | control_fields:
            options = sorted(path_fields | control_fields | {"paths", "control", "steps", "record"})
            raise TypeError(f"attach has no option {name!r}{nearest(name, options)}")
        for spec, spec_fields, word in ((paths, path_fields, "paths"), (control, control_fields, "control")):
            if spec is not None and name in spec_fields:
                raise ValueError(f"{name}: is a field of {word}, which is given too; set it there")
    if paths is None:
        options_of_paths = {name: value for name, value in named.items() if name in path_fields}
        # A recipe that is an object instead of a name goes through `PathSpec.of`, which takes both paths.
        if any(isinstance(options_of_paths.get(path), Recipe) for path in ("low", "recovery")):
            default = PathSpec()
            paths = PathSpec.of(**{"low": default.low, "recovery": default.recovery} | options_of_paths)
        else:
            paths = PathSpec(**options_of_paths)
    if control is None:
        control = ControlSpec(**{name: value for name, value in named.items() if name in control_fields})
    return paths, control


def attach(
    model: nn.Module,
    paths: PathSpec | None = None,
    control: ControlSpec | None = None,
    *,
    plan: PinPlan | str | PathLike[str] | None = None,
    steps: int | None = None,
    seed: int = 0,
    record: str | PathLike[str] | Sequence[str] | None = (),
    share: float | None = None,
    **named: Any,
) -> Router:
    """Give the model's linears two paths, in place, and return the controller that routes them.

    Args:
        model: any module that contains an `nn.Linear`, on its final device and in its final dtype.
        paths: the two paths, and which linears get them. Two formats ("int4", "e4m3", "bf16") compress what the linears
            save for the backward pass and leave the forward pass unchanged. Two recipes ("fp8_hybrid", "llm_int8",
            "bf16") compute in low precision.
        control: signal, routing and thresholds; a warning names thresholds that the signal does not read.
        plan: plan.json of `gnmr diagnose`, or what `Diagnosis.plan` returns. It sets low, recovery, recipes, targets
            and pins, and the threshold of a price signal that has none.
        steps: length of the run, if known; see `gnmr.control.Controller`.
        seed: seed of signals and of stochastic rounding.
        record: a folder for the records of this loop, which `gnmr report` reads (gnmr/attachment/record.py). It is new,
            or the folder of the run that `load_state_dict` resumes from a checkpoint. Names of evidence are accepted
            too; see `gnmr.control.Controller`. None: nothing is recorded.
        share: with several processes, the part of the step's loss from which each one's backward pass starts, as it
            enters the sum of gradients. None: 1 / processes, for losses that DDP and FSDP average. 1: gradients are
            summed, and the loss was divided by the tokens of all processes.
        named: single fields of `PathSpec` and `ControlSpec`, instead of the spec.

    Call `controller.step()` once per optimizer step, after the backward pass of the last micro-batch and before
    clipping. To throw a step away, call `controller.discard()`. Parameters may be exchanged afterwards, but not modules
    (`Router`). The model may change its dtype, but not its device. The operators are differentiable once, so a gradient
    penalty (`create_graph=True`) cannot pass through them. The first `step` counts the model's GEMMs, and raises
    ValueError if no unit fits a budget of these.

    Returns:
        The router of the model's units, each of which is on its low path.

    Raises:
        ValueError: if a value is invalid; the model is then unchanged.
        TypeError: if an option is unknown, or a spec is something else.
    """
    folder, evidence = (Path(record), ()) if isinstance(record, str | PathLike) else (None, record or ())
    if isinstance(record, str) and record in EVIDENCE:
        raise ValueError(f"record={record!r}: must be a list, where evidence is meant: [{record!r}]")
    if not isinstance(plan, PinPlan | str | PathLike | None):
        raise TypeError(f"plan: must be plan.json or what Diagnosis.plan() returns, not a {type(plan).__name__}")
    pins = plan if isinstance(plan, PinPlan | None) else read_plan(plan)
    paths, control = specs_of(paths, control, named) if pins is None else _planned(pins, paths, control, named)
    whole_number(0, seed=seed)
    if share is not None:
        check_share(share=share)
    # Whatever can be refused without changing the model is refused first.
    _check_request(model, paths, control)
    if unread := control.unread():
        warn(f"{', '.join(unread)}: has no effect, the signal {control.signal_name} does not read it")
    if pins is not None:
        pins.refuse_other("plan" if pins is plan else f"plan={plan}", operator_shapes(model, paths))
    # From here on the model is changed; whatever fails gives it back as it was.
    converted = convert(model, paths, seed=seed, store=False, shown=False)
    controller = None
    try:
        controller = controller_of(
            converted, model, control, steps=steps, seed=seed, record=evidence, ranks=DistributedRanks(share)
        )
        _check_trained(converted, controller.units, control)
        converted.warmup_steps = control.warmup_steps if control.warmup_path == "16bit" else 0
        router = Router(converted, controller, model, paths.probe_tokens, paths.price_tokens)
        router.plan_of = None if pins is None else pins.provenance.get("subject", "a model of one's own")
        converted.store(paths.weights)  # late: it cannot be undone to the bit
        router.follow()  # otherwise the units would hold the 16-bit weights
        if folder is not None:
            # One process writes, and the others have to know that it does.
            router.recorded_elsewhere = rank() != 0
            router.recording = _recording(folder, router, paths, seed) if rank() == 0 else None
        router.watch_use()
        # Costs are shares of what the model really runs, which the first step shows.
        router.count_first()
    except BaseException:
        converted.restore()
        if controller is not None:
            controller.measured.close()
        raise
    return router


def controller_of(
    converted: ConvertedModel,
    model: nn.Module,
    spec: ControlSpec,
    *,
    steps: int | None = None,
    seed: int = 0,
    record: Sequence[str] = (),
    ranks: Ranks | None = None,
) -> Controller:
    """Return the controller of the model's units; see `Controller` for the arguments.

    With observe="input_grad" it hooks the units' outputs until `controller.measured.close`.

    Raises:
        ValueError: if `spec` does not fit; no hooks are left.
    """
    # Units, with costs as shares of recovering everything
    costs, pinned = costs_of(converted, spec)
    units = units_of(converted, model, spec.observe, costs)
    names = [module_of(unit.name) for unit in units]
    norms = OutputGradients(model, names) if spec.observe == "input_grad" else None
    try:
        return Controller(
            units,
            spec,
            steps=steps,
            seed=seed,
            record=record,
            norms=norms,
            whole_cost=1.0,
            pinned=pinned,
            counted=converted.cost.work is not None or not isinstance(spec.cost, str),
            ranks=ranks,
        )
    except BaseException:
        # The hooks would outlive a controller that was never made.
        if norms is not None:
            norms.close()
        raise


def _planned(
    pins: PinPlan, paths: PathSpec | None, control: ControlSpec | None, named: Mapping[str, Any]
) -> tuple[PathSpec, ControlSpec]:
    """Return `specs_of` with the paths of a plan. Raises ValueError if other paths are given too."""
    conflicting = [name for name in named if name in PATHS]
    if paths is not None:
        conflicting.insert(0, "paths")
    if conflicting:
        raise ValueError(f"{conflicting[0]}: the plan says which paths; leave one of them out")
    paths, control = specs_of(None, control, {**named, **pins.paths()})
    # The plan knows a threshold for its prices; one that the user gives comes first.
    if threshold := pins.threshold(control.signal, control.options):
        control = replace(control, options={**control.options, **threshold})
    return paths, control


def _recording(folder: Path, router: Router, paths: PathSpec, seed: int) -> Recording:
    """Return the records of this loop, with its known settings. Raises UserError if the folder is not empty."""
    from gnmr.attachment.record import Recording, plain

    spec, header = router.spec, router.header() | {"signal_seed": seed}
    config = {"precision": plain(vars(paths)), "controller": plain(vars(spec)) | {"signal": spec.signal_name}}
    return Recording(folder, config, header, seed=seed, max_o=spec.max_o)


def _check_request(model: nn.Module, paths: PathSpec, control: ControlSpec) -> None:
    """Raise ValueError if the model cannot be attached, or if a warm-up lacks its path."""
    if paths.recovery is None and control.warmup_steps:
        raise ValueError(f"warmup_steps={control.warmup_steps}: a high-fidelity warm-up needs a recovery path")
    if control.warmup_path == "16bit" and not control.warmup_steps:
        raise ValueError("warmup_path='16bit': there is no warm-up; give warmup_steps")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: must be an nn.Module, not {type(model).__name__}")
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported: no model uses FSDP
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "model: is wrapped by FullyShardedDataParallel (FSDP1), which flattens its parameters; use FSDP2 "
            "(torch.distributed.fsdp.fully_shard)"
        )
    if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in model.parameters()):
        raise ValueError(
            "model: was made in torch.inference_mode(), or attach is called there, and inference tensors have no "
            "gradients; make the model and attach outside of it (torch.no_grad() is fine)"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model: has parameters on the meta device; attach when its weights are loaded")


def _check_trained(converted: ConvertedModel, units: Sequence[Unit], control: ControlSpec) -> None:
    """Raise ValueError if the paths change nothing; warn if units have no gradient to monitor."""
    if converted.without_effect:
        raise ValueError(
            f"low={converted.low.name!r}: compresses what the weight gradient reads, and all converted weights are "
            "frozen; use a recipe (low='llm_int8', recovery='bf16') or site='forward'"
        )
    frozen = [unit.name for unit in units if not any(p.requires_grad for p in unit.parameters)]
    # A unit without a gradient is never observed, so it would never be promoted.
    if frozen and control.observe == "parameters":
        warn(
            f"{len(frozen)} of {len(units)} units have no trainable parameter, so no gradient norm to watch "
            f"(the first is {frozen[0]}): they stay on the low-cost path; use observe='adapter' where adapters are "
            "trained in them, else observe='input_grad' (a format does nothing for a frozen weight; a recipe, or "
            "site='forward', does)"
        )

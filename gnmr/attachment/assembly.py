"""Units of a converted model in the form that the controller takes: parameters, switch, cost of recovery."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gnmr.control import Controller, ControlSpec, OutputGradients, Unit
from gnmr.control.norms import adapters
from gnmr.control.ranks import Ranks
from gnmr.control.unit import Slice
from gnmr.conversion import ConvertedModel
from gnmr.conversion.adapters import Contained, bias_of
from gnmr.conversion.cost import nominal_bits
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.unit_names import PathUnit, module_of


def costs_of(converted: ConvertedModel, control: ControlSpec) -> tuple[list[float], float]:
    """Return (cost of recovering each unit, cost of pins), as shares of the cost of recovering everything.

    The cost is the GEMMs' arithmetic, or with a budget whatever `control.cost` says. Raises ValueError if
    `control.cost` is a table of other units.
    """
    cost = control.cost if control.budget is not None else "gemm"
    if isinstance(cost, str):
        return converted.cost.of_units(cost)
    names = [unit.name for unit in converted.units]
    for wrong in (*(set(names) - cost.keys()), *(cost.keys() - set(names))):
        raise ValueError(f"cost: {wrong!r} is {'missing' if wrong in names else 'no unit'}; units are {names[0]} ...")
    if not (every := sum(cost.values())):
        raise ValueError("cost: no unit costs anything")
    pinned = [cost[unit.name] for unit in converted.units if not unit.routable]
    return [cost[name] / every for name in names], sum(pinned) / every


def parameters_of(operator: PathLinear) -> list[nn.Parameter | Slice]:
    """Return the operator's parameters; an operator that is contained in a module has parts of the module's."""
    if not isinstance(operator, Contained):
        return list(operator.parameters())
    tensors = operator.weight, bias_of(operator.owner, operator.parameter_name)
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    if operator.expert is None:
        return [*parameters]
    return [Slice(parameter, operator.expert) for parameter in parameters]


def units_of(
    converted: ConvertedModel,
    model: nn.Module | None = None,
    observe: str = "parameters",
    costs: Sequence[float] | None = None,
    before: Sequence[Unit] = (),
) -> list[Unit]:
    """Return the converted model's units.

    A unit is only monitored if there is no recovery path, or if pins leave nothing to recover. Routing it would waste
    one of the max_o places, and its measurements show what its pin is worth.

    Args:
        converted: the converted model.
        model: the module that contains adapters; needed for observe="adapter".
        observe: "parameters" for the operators' own parameters, or "adapter" for the trainable ones below their names
            in `model` (`gnmr.control.norms`).
        costs: the units' costs; None: shares of the GEMMs' arithmetic.
        before: the previous units. A unit that now has no parameters keeps its previous ones, which have no gradient.
            This happens while adapters are disabled, or if the active one does not reach the unit.

    Extra bytes per token are those of Eq. 5, relative to the low path with its pins, with the bits of the input that
    wgrad reads. They are 1 if recovery adds none. Raises ValueError if a unit without previous parameters has none.
    """
    known = {unit.name: unit.parameters for unit in before}

    def extra_bytes(unit: PathUnit) -> float:
        more = sum(
            o.in_features * max(0, nominal_bits(unit.path_of(o)) - nominal_bits(o.low))
            for o in unit.operators
            if o.recovery is not None
        )
        return more / 8 if more > 0 else 1.0

    def parameters(unit: PathUnit) -> tuple[nn.Parameter | Slice, ...]:
        if observe == "adapter" and model is not None:
            return adapters(model, module_of(unit.name), known.get(unit.name, ()))
        return tuple(parameter for operator in unit.operators for parameter in parameters_of(operator))

    shares = converted.cost.of_units("gemm")[0] if costs is None else costs
    return [
        Unit(
            unit.name,
            parameters(unit),
            unit.switch if unit.routable else None,
            cost=cost,
            extra_bytes=extra_bytes(unit),
        )
        for unit, cost in zip(converted.units, shares, strict=True)
    ]


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

    With observe="input_grad" it hooks the units' outputs (`close_hooks`). Raises ValueError, and leaves no hooks, if
    `spec` does not fit.
    """
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
        if norms is not None:
            norms.close()
        raise


def close_hooks(controller: Controller) -> None:
    """Remove the hooks of `controller_of` from the model."""
    if isinstance(norms := controller.measured.norms, OutputGradients):
        norms.close()

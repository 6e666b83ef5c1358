"""Units of a converted model in the form that the controller takes, and the links from the model to their parameters.

A unit of the controller has parameters, a switch and a cost of recovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, TypeAlias

from torch import nn

from gnmr.control import ControlSpec, Unit
from gnmr.control.output_norms import adapters
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
    # Without a budget nothing reads the costs but the records, which show GEMMs.
    cost = control.cost if control.budget is not None else "gemm"
    if isinstance(cost, str):
        return converted.cost.of_units(cost)
    names = [unit.name for unit in converted.units]
    # A table names every unit and nothing else: one that is forgotten would be free.
    for name in sorted(set(names) ^ cost.keys(), key=str):
        raise ValueError(f"cost: {name!r} is {'missing' if name in names else 'no unit'}; units are {names[0]} ...")
    if not (total := sum(cost.values())):
        raise ValueError("cost: no unit costs anything")
    pinned = [cost[unit.name] for unit in converted.units if not unit.routable]
    return [cost[name] / total for name in names], sum(pinned) / total


def parameters_of(operator: PathLinear) -> list[nn.Parameter | Slice]:
    """Return the operator's parameters; an operator that is contained in a module has parts of the module's."""
    if not isinstance(operator, Contained):
        return list(operator.parameters())
    tensors = operator.weight, bias_of(operator.owner, operator.parameter_name)
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    if operator.expert is None:
        return [*parameters]
    # One tensor holds the weights of all experts, of which this operator is one.
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
            in `model` (`gnmr.control.output_norms`).
        costs: the units' costs; None: shares of the GEMMs' arithmetic.
        before: the previous units. A unit that now has no parameters keeps its previous ones, which have no gradient.
            This happens while adapters are disabled, or if the active one does not reach the unit.

    Extra bytes per token are those of Eq. 5, relative to the low path with its pins, with the bits of the input that
    wgrad reads. They are 1 if recovery adds none.

    Raises:
        ValueError: if a unit without previous parameters has none.
    """
    previous = {unit.name: unit.parameters for unit in before}

    def extra_bytes(unit: PathUnit) -> float:
        # Eq. 5: elements of the saved input, times the bits that recovery adds to each
        bits = sum(
            o.in_features * max(0, nominal_bits(unit.path_of(o)) - nominal_bits(o.low))
            for o in unit.operators
            if o.recovery is not None
        )
        return bits / 8 if bits > 0 else 1.0

    def parameters(unit: PathUnit) -> tuple[nn.Parameter | Slice, ...]:
        if observe == "adapter" and model is not None:
            return adapters(model, module_of(unit.name), previous.get(unit.name, ()))
        return tuple(parameter for operator in unit.operators for parameter in parameters_of(operator))

    # A pinned unit is monitored and never switched.
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


_Link: TypeAlias = tuple[dict[str, Any], str, Any]
"""A module's modules or parameters by name, one of the names, and the object that was there."""


class ModelLinks:
    """The links from a model to some of its modules, and to the parameters in and below the modules that are `read`.

    With `trained` it also records which of these parameters are trained.
    """

    def __init__(
        self, model: nn.Module, modules: Iterable[nn.Module], read: Iterable[nn.Module], trained: bool = False
    ) -> None:
        self._model, self._modules, self._read = model, dict.fromkeys(modules), list(dict.fromkeys(read))
        self._watches_trained = trained
        self.look()

    def look(self) -> None:
        """Record the current state of the model."""
        names = {module: name for name, module in self._model.named_modules()}
        links: dict[tuple[int, str], _Link] = {}
        for module in self._modules:
            parent = self._model
            for name in filter(None, names[module].split(".")):
                # By parent and name, so that ancestors of several operators are checked once.
                links[id(parent), name] = parent._modules, name, parent._modules[name]
                parent = parent.get_submodule(name)
        self._links = list(links.values())
        # The dicts of a module keep their identity, so that a step reads them without walking the model. They are
        # private, and stay so until torch tells when a module or a parameter is exchanged.
        below = {inner: None for module in self._read for inner in module.modules()}
        self._dicts = [by_name for module in below for by_name in (module._modules, module._parameters)]
        self._lengths = [*map(len, self._dicts)]
        self._values = self._current_values()
        parameters = [value for value in self._values if isinstance(value, nn.Parameter)]
        self._parameters = parameters if self._watches_trained else []
        self._trained = [parameter.requires_grad for parameter in self._parameters]

    def _current_values(self) -> list[Any]:
        return [value for by_name in self._dicts for value in by_name.values()]

    def changed(self) -> bool:
        """Return whether anything was exchanged, added, frozen or made trainable since the last `look`."""
        return (
            # Identities alone: comparing values of tensors would wait for the device.
            any(by_name.get(name) is not module for by_name, name, module in self._links)
            or [*map(len, self._dicts)] != self._lengths
            or not all(map(is_, self._current_values(), self._values))
            or [parameter.requires_grad for parameter in self._parameters] != self._trained
        )

    def refuse_missing(self) -> None:
        """Raise ValueError if one of the modules is no longer in the model."""
        inside = set(self._model.modules())
        for module in self._modules:
            if module not in inside:
                name = getattr(module, "operator_name", type(module).__name__)
                raise ValueError(
                    f"{name}: its module is no longer in the model (replaced or taken out since attach), so nothing "
                    "runs on its paths: exchange its parameters instead, or detach and attach again"
                )

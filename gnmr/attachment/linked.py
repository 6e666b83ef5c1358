"""The links from a model to its modules and parameters, to detect exchanges."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any, TypeAlias

from torch import nn

_Link: TypeAlias = tuple[dict[str, Any], str, Any]
"""A module's modules or parameters by name, one of the names, and the object that was there."""


class Linked:
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
        found: dict[tuple[int, str], _Link] = {}
        for module in self._modules:
            at = self._model
            for part in filter(None, names[module].split(".")):
                found[id(at), part] = at._modules, part, at._modules[part]
                at = at.get_submodule(part)
        below = {module: None for one in self._read for module in one.modules()}
        self._read_from = [where for module in below for where in (module._modules, module._parameters)]
        self._there = self._now()
        self._lengths = [*map(len, self._read_from)]
        self._links = list(found.values())
        parameters = [value for value in self._there if isinstance(value, nn.Parameter)]
        self._parameters = parameters if self._watches_trained else []
        self._trained = [one.requires_grad for one in self._parameters]

    def _now(self) -> list[Any]:
        return [value for where in self._read_from for value in where.values()]

    def changed(self) -> bool:
        """Return whether anything was exchanged, added, frozen or made trainable since the last `look`."""
        return (
            any(where.get(name) is not found for where, name, found in self._links)
            or [*map(len, self._read_from)] != self._lengths
            or not all(map(is_, self._now(), self._there))
            or [one.requires_grad for one in self._parameters] != self._trained
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

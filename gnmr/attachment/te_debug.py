"""Run the controller over Transformer Engine's layers through its debug features (package `nvdlfw-inspect`).

    # debug.yaml: which layers are routed, and which of their GEMMs (all three where nothing is said)
    routed:
      enabled: True
      layers: {layer_types: [qkv, proj, fc1, fc2]}
      transformer_engine:
        GnmrRouting: {enabled: True, gemms: [dgrad, wgrad]}

    te_debug.register()
    debug_api.initialize("debug.yaml", feature_dirs=[transformer_engine's debug/features])
    model = ...                                                     # afterwards: layers of Transformer Engine
    controller = gnmr.Controller(te_debug.units(model), gnmr.ControlSpec(max_o=4, alpha=1.5, beta=1.3))
    ...
    loss.backward()
    controller.step()
    optimizer.step()
    debug_api.step()

Before each forward pass, a layer of Transformer Engine asks every debug feature in its config whether a GEMM is in FP8
(`fp8_gemm_enabled`). `GnmrRouting` answers no while the controller has the layer on the recovery path. If two features
answer for a layer, Transformer Engine takes FP8 if one of them does, so name no other feature there. Cached weights
depend on the answer: leave `is_first_microbatch` alone, and keep weights in 16 or 32 bits.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from gnmr.control import Unit
from gnmr.errors import UserError, install
from gnmr.names import GEMMS

try:
    from nvdlfw_inspect.config_manager import ConfigManager
    from nvdlfw_inspect.registry import Registry, api_method
except ImportError as error:
    raise ImportError(f"gnmr.attachment.te_debug needs nvdlfw-inspect: {install('te')}") from error

NAMESPACE = "transformer_engine"


class GnmrRouting:
    """The debug feature that keeps layers in high precision; `nvdlfw_inspect` makes the only instance."""

    def __init__(self) -> None:
        self._recovering: dict[str, bool] = {}
        self._queried: set[str] = set()
        self._switched: Counter[str] = Counter()

    def parse_config_and_api(self, config: Mapping[str, Any], **call: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return (True if the call is for this feature, its config). Raises UserError for an unknown GEMM or key."""
        gemms = config.get("gemms", GEMMS)
        if unknown := [*(set(config) - {"enabled", "gemms"}), *(set(gemms) - set(GEMMS))]:
            raise UserError(f"GnmrRouting: {unknown[0]!r} is unknown; it takes gemms, some of {', '.join(GEMMS)}")
        return call.get("gemm") in gemms, {"gemms": list(gemms)}

    @api_method
    def fp8_gemm_enabled(self, config: Mapping[str, Any], layer_name: str, gemm: str, iteration: int) -> bool:
        """Answer Transformer Engine. Without a second number besides the flag, it asks again in the next iteration."""
        self._queried.add(layer_name)
        # A layer that nobody switched stays in FP8, as it would without this feature.
        return not self._recovering.get(layer_name, False)

    def switch(self, layer_name: str, recovering: bool) -> None:
        """Switch a unit, and warn once if Transformer Engine never asked for the layer.

        The first two switches may come from a new controller and from a state that it loads, so they do not warn.
        """
        self._switched[layer_name] += 1
        if self._switched[layer_name] > 2 and layer_name not in self._queried:
            warnings.warn(
                f"{layer_name}: Transformer Engine never asked for its path, so switching it does nothing: make the "
                "layers after debug_api.initialize, and run them under autocast with an FP8 recipe",
                stacklevel=2,
            )
            self._queried.add(layer_name)
        self._recovering[layer_name] = recovering


def register() -> None:
    """Register the feature before every `debug_api.initialize`, because `end_debug` forgets it."""
    Registry.register_feature(namespace=NAMESPACE)(GnmrRouting)


def units(model: nn.Module) -> list[Unit]:
    """Return the layers of `model` that the debug config gives to `GnmrRouting`, in order, by the library's names.

    A LayerNormMLP is two units (`.fc1`, `.fc2`), and a GroupedLinear one unit per GEMM (`.gemm_0` ...). Norms are those
    of their weights and biases. Raises UserError before `register` and `debug_api.initialize`, and if no layer is
    routed.
    """
    registered = Registry.data.get(NAMESPACE)
    feature = registered.features.get(GnmrRouting.__name__) if registered is not None else None
    if feature is None:
        raise UserError(
            "te_debug: Transformer Engine does not know the feature: call te_debug.register(), then "
            "debug_api.initialize(config, feature_dirs=[the folder debug/features of transformer_engine])"
        )
    layers = [layer for module in model.modules() for layer in _layers(module)]
    routed = []
    for layer, parameters in layers:
        features = ConfigManager.get_config_for_layer(layer).get(NAMESPACE, {})
        if features.get(GnmrRouting.__name__, {}).get("enabled"):
            routed.append(Unit(layer, parameters, partial(feature.switch, layer)))
    if not routed:
        first = ", ".join(layer for layer, _ in layers[:3])
        names = f"its layers are {first} ..." if layers else "it has no layer of Transformer Engine"
        raise UserError(f"te_debug: the debug config routes no layer of the model; {names}")
    return routed


def _layers(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Parameter, ...]]]:
    """Yield Transformer Engine's name of each GEMM of a module and its parameters; nothing for other modules."""
    name, parameters = getattr(module, "name", None), dict(module.named_parameters(recurse=False))
    if not isinstance(name, str):
        return
    names_of: dict[str, tuple[str, ...]] = {}
    if "fc1_weight" in parameters:  # LayerNormMLP
        names_of = {f"{name}.{linear}": (f"{linear}_weight", f"{linear}_bias") for linear in ("fc1", "fc2")}
    elif isinstance(number := getattr(module, "num_gemms", None), int):  # GroupedLinear
        names_of = {f"{name}.gemm_{i}": (f"weight{i}", f"bias{i}") for i in range(number)}
    elif (weights := getattr(module, "weight_names", None)) is not None:  # Linear, LayerNormLinear
        names_of = {name: (*weights, *getattr(module, "bias_names", ()))}
    for layer, names in names_of.items():
        yield layer, tuple(parameters[name] for name in names if name in parameters)

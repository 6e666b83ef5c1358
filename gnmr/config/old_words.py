"""What earlier versions called things: words of the command line, and the keys of configs that were saved then."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from gnmr.errors import UserError
from gnmr.vocabulary import FORMATS, RECIPES

_KEYS = {
    "controller.signal.name": "controller.signal",
    "controller.signal.options": "controller.options",
    "signal.name": "signal",
    "signal.options": "options",
    "recipe.backend": "paths.backend",
    "hierarchy.backend": "paths.backend",
    "hierarchy": "preset",
    "controller/signal": "controller.signal",
    "optim/transform": "optim.transform.name",
}
"""Old key -> new key, with the same values; keys below it move with it. signal.* are words of `gnmr replay`."""
_RANKED = "controller.routing=ranked controller.signal="
_VARIANTS = {
    "gnmr": "controller.signal=gnmr_delta",
    "always_low": "controller.signal=always_low",
    "always_high": "controller.signal=always_high controller.warmup_frac=1.0",
    "random": "controller.signal=random controller.options.share=0.04",
    "random_4_8": "preset=4/8 controller.signal=random controller.options.share=0.072",
    "gnmr_6_8": "preset=6/8",
    "gnmr_4_8": "preset=4/8",
    "gnmr_8_16": "preset=8/16",
    "gnmr_int8_16": "preset=int8/16",
    "gnmr_1.5_1.3": "controller.alpha=1.5 controller.beta=1.3 controller.name=gnmr_1.5_1.3",
    "gnmr_2_1.5": "controller.alpha=2.0 controller.beta=1.5 controller.name=gnmr_2_1.5",
    "gnmr_3_2": "controller.alpha=3.0 controller.beta=2.0 controller.name=gnmr_3_2",
    "adapt": "paths.unit=block controller.signal=static_k controller.routing=ranked controller.max_o=2147483647 "
    "controller.warmup_frac=0.0252 controller.warmup_path=16bit controller.options.calibration_frac=0.0252 "
    "controller.options.k_frac=0.25 controller.name=adapt",
    "ranked_gnmr": f"{_RANKED}gnmr controller.name=gnmr_alone-ranked",
    "ranked_first": f"{_RANKED}first_last controller.options.last=0 controller.name=first-ranked",
    **{
        f"ranked_gap_{one}": f"{_RANKED}gap controller.options.variant={one} controller.name=gap_{one}-ranked"
        for one in ("relative", "per_byte", "times_gnmr")
    },
    **{
        f"two_stage_{init}_{alpha}": f"controller.alpha_init={init} controller.alpha={alpha} controller.beta=null "
        f"controller.name=two_stage_{init}_{alpha}"
        for init, alpha in ((1.1, 1.1), (1.5, 1.1), (1.5, 1.5))
    },
    **{
        f"max_o_{most}": "controller.alpha_init=1.5 controller.alpha=1.1 controller.beta=null "
        f"controller.max_o={most} controller.name=max_o_{most}"
        for most in (2, 6, 8)
    },
}
"""Those that were not a path by itself, or ranked_<signal>."""
_KEY_OF_GROUP = {"stress": "stress.kind", "data": "data.name", "optim": "optim.name"}
"""Groups whose files are a key's values now."""
_KINDS = {"underflow": "scale_up", "saturation": "scale_down", "scale_nan": "nan", "scale_inf": "inf"}
"""Files of conf/stress that were not called as their kind."""
_FILES = {
    "controller=gnmr": "controller.alpha=1.5 controller.beta=1.3",
    "controller=gnmr_cpu": "controller.alpha=3.0 controller.beta=1.75",
    "scores=none": "scores.tasks=[]",
    "scores=four": "scores.tasks=[gsm8k,mmlu,hellaswag,wikitext2]",
    **dict.fromkeys(("paths=default", "training=default", "records=default"), "without it: that is what they are"),
}
"""Files of other groups that are gone."""
_SWEEPS = {
    "figure4": "sweep=paper/table9",
    "table3": "sweep=paper/table1 arm=gnmr_2_1.5,gnmr_3_2",
    "table4": "sweep=paper/table2 arm=gnmr_8_16,fp8,bf16",
    "table5": "sweep=paper/tables arm=two_stage_1.1_1.1,two_stage_1.5_1.1,two_stage_1.5_1.5",
    "table6": "sweep=paper/tables arm=max_o_2,two_stage_1.5_1.1,max_o_6,max_o_8",
}
"""Files of conf/sweep/paper whose cells are another's."""
_SCALES = {
    "recipe_130m": "scale=130m optim.lr=1.0e-3 controller.max_o=3",
    "recipe_350m": "scale=350m optim.lr=5.0e-4 controller.max_o=6",
    "recipe_1.3b": "scale=1.3b model.intermediate_size=5472 optim.lr=5.0e-4 controller.max_o=6",
    "recipe_3b": "scale=1.3b scale_name=3b model.hidden_size=2560 model.intermediate_size=6848 model.num_layers=32 "
    "optim.lr=3.0e-4 controller.max_o=8 training.batch_size=32 training.accumulation=16 training.steps=219727",
    "recipe_cpu_small": "scale=recipe_cpu scale_name=recipe_cpu_small model.hidden_size=64 "
    "model.intermediate_size=192 optim.lr=2.0e-3",
    "recipe_cpu_large": "scale=recipe_cpu scale_name=recipe_cpu_large model.hidden_size=256 "
    "model.intermediate_size=768 optim.lr=1.0e-3",
}
"""Files of conf/scale that changed a few keys of another; arms of sweep=paper/table9 now."""
_PAPER = re.compile(r"table(s|\d+)")


def new_words(word: str) -> str | None:
    """What this word is called now; None for a word that is none of an earlier version."""
    bare = word.lstrip("+~")
    key, _, value = bare.partition("=")
    if word.startswith("~") and key in ("recipe", "hierarchy", "variant"):
        return "~preset" if key == "hierarchy" else "without it: there is no such group"
    if bare == "controller/signal=own":
        return "controller.signal=package.module:Class"
    if bare == "optim/transform=none":
        return "optim.transform.name=null"
    for old, new in _KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return bare.replace(old, new, 1)
    if key == "plan" and value.lower() in ("true", "false"):
        return f"memory_{bare}"
    if key == "sweep" and (sweep := value.removeprefix("paper/")) in _SWEEPS:
        return _SWEEPS[sweep]
    if key == "sweep" and _PAPER.fullmatch(value):
        return f"sweep=paper/{value}"
    if key == "scale" and any(one in _SCALES for one in value.split(",")):
        return " or ".join(_SCALES.get(one, f"scale={one}") for one in value.split(","))
    if bare in _FILES:
        return _FILES[bare]
    if key in _KEY_OF_GROUP and value:
        return f"{_KEY_OF_GROUP[key]}={','.join(_KINDS.get(one, one) for one in value.split(','))}"
    if key in ("paths", "recipe", "variant"):
        several = value.split(",")
        return " or ".join(_of_choice(key, one.strip()) for one in several)
    return None


def _of_choice(group: str, value: str) -> str:
    """The keys that a file of conf/paths, conf/recipe or conf/variant set."""
    if group == "variant" and value in _VARIANTS:
        return _VARIANTS[value]
    if group == "variant" and value.startswith("ranked_"):
        return f"{_RANKED}{value.removeprefix('ranked_')}"
    paths = [*FORMATS, *RECIPES]
    pair = next(
        ((low, value.removeprefix(f"{low}_")) for low in paths if value.removeprefix(f"{low}_") in paths),
        (value, "null"),
    )
    low, recovery = (value, "null") if value in paths else pair
    if low not in paths:
        return "paths.low=... paths.recovery=..." if group != "variant" else "keys, or an arm of a sweep (conf/sweep)"
    static = " controller.warmup_frac=0.0" if group != "paths" and low not in ("int4", "int8") else ""
    return f"paths.low={low} paths.recovery={recovery}{static}"


def refuse_old(words: Iterable[str]) -> None:
    """UserError for a word of an earlier version, with the words that say the same now."""
    for word in words:
        if (new := new_words(word)) is not None:
            raise UserError(f"{word}: is now {new}")


_RATIO = {"history": "cumulative", "decay": 0.99, "window": 100, "two_sided": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gnmr_delta": _RATIO,
    "gnmr": _RATIO,
    "delta_gnmr": _RATIO,
    "ema_ratio": _RATIO | {"threshold": 1.05, "clip": 1.05, "history": "ema", "decay": 0.98, "window": 50, "eps": 1e-8},
    "zscore": {"threshold": 2.5, "warmup": 25, "history": "ema", "decay": 0.97, "window": 50, "eps": 1e-6}
    | {"clipped": True},
    "gsnr": {"threshold": 1.5, "history": "ema", "decay": 0.99, "window": 100, "eps": 1e-8},
    "jacobian": _RATIO | {"threshold": 1.05, "history": "ema", "eps": 1e-8},
    "update_norm": _RATIO | {"threshold": 1.5, "eps": 1e-8},
    "gap": {"variant": "absolute", "threshold": 1.0, "every": 1, "history": "cumulative", "decay": 0.99}
    | {"window": 100, "eps": 1e-8},
    "gap_exact": {"threshold": 1.0, "every": 1},
    "grad_norm": {"threshold": 1.0},
    "grad_to_noise": {"threshold": 1.0},
    "mse": {"threshold": 1e-4},
    "oracle": {"threshold": 1.0},
    "spike_share": {"threshold": 0.001},
    "underflow": {"threshold": 0.05},
    "random": {"share": None},
    "round_robin": {"every": 1, "share": None},
    "first_last": {"first": 1, "last": 1, "share": None},
    "static_k": {"calibration_steps": None, "calibration_frac": 0.05, "k": None, "k_frac": None, "share": None}
    | {"eps": 1e-8},
}
"""Options that the files of a signal spelled out, at the values that its class has where nothing is said."""


def is_old(tree: Any) -> bool:
    """Whether this config was saved by a version with other keys."""
    controller = tree.get("controller") if isinstance(tree, dict) else None
    return isinstance(controller, dict) and isinstance(controller.get("signal"), dict)


def translated(tree: Any) -> Any:
    """A saved config under the keys of today; any other tree as it is. What it says does not change: options that
    only repeat their signal's defaults are left out, so that a run reads alike whoever saved it."""
    if isinstance(tree, dict) and isinstance(tree.get("plan"), bool):  # what memory_plan was called
        tree = {key: value for key, value in tree.items() if key != "plan"} | {"memory_plan": tree["plan"]}
    if not is_old(tree):
        return tree
    signal = tree["controller"]["signal"]
    name, options = signal.get("name", "gnmr_delta"), signal.get("options", {})
    if isinstance(options, dict):
        usual = _DEFAULTS.get(name, {}) if isinstance(name, str) else {}
        options = {key: value for key, value in options.items() if key not in usual or usual[key] != value}
    controller = {key: value for key, value in tree["controller"].items() if key != "signal"}
    controller |= {"signal": name, "options": options}
    if controller.get("name") == "gnmr":  # what both files of conf/controller said, of any signal
        controller["name"] = None
    paths = tree.get("paths")
    start = f"{paths.get('name')}-" if isinstance(paths, dict) else "-"
    arm = tree.get("arm")
    if isinstance(arm, str) and arm.startswith(start) and controller.get("name") is None:
        return tree | {"controller": controller | {"name": arm.removeprefix(start)}, "arm": None}
    return tree | {"controller": controller}

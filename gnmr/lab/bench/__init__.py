"""What the controller and the paths cost on this machine.

Nothing here is asserted: a figure that misses its target says so, and the exit code stays 0. Importing this package
costs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from gnmr.errors import UserError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from gnmr.lab.bench.figures import Figure
    from gnmr.lab.bench.setting import Setting


@dataclass(frozen=True)
class Bench:
    """A benchmark: `PARTS` of its module are functions by name, `CHECKS` what says beforehand that one cannot run."""

    module: str
    parts: tuple[str, ...]
    what: str
    usual: bool = True
    """Whether it runs where no benchmark is named."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts by the name of several."""


_SCENES = {
    "lasting": ("sim_e2m1", "nvfp4", "nvfp4_curve", "int4"),
    "passing": ("broken",),
    "table11": ("table11",),
    "regimes": (
        "regime_mxfp4",
        "regime_sim_int4",
        "regime_e3m2",
        "regime_fp8",
        "regime_int8",
        "regime_int2",
        "regime_int4_saved",
        "regime_int2_saved",
    ),
    "quick": ("regime_quick",),
}
"""Keys of `scenes.SCENES` by group: that module costs torch."""
BENCHMARKS = {
    "step": Bench(
        "gnmr.lab.bench.step",
        ("controller", "signals", "mixture", "hf"),
        "the controller's share of a training step, signals' evidence, a mixture's dispatch, Hugging Face's model",
    ),
    "paths": Bench(
        "gnmr.lab.bench.paths",
        ("saved", "recipes"),
        "steps and bytes of saved activations of few bits, steps under recipes, switching",
    ),
    "decision": Bench("gnmr.lab.bench.decision", ("decision",), "signal and policy alone, for 10,000 units"),
    "price": Bench(
        "gnmr.lab.bench.price",
        ("truth", "sampling", "cadence", "shares", "atlas"),
        "prices against the true rise of the loss, of few tokens, against what forks gain; what a budget holds",
        usual=False,
    ),
    "spend": Bench(
        "gnmr.lab.bench.spend",
        tuple(scene for group in _SCENES.values() for scene in group),
        "forks: the share of the gap that pins and controllers close, against what they spend (hours)",
        usual=False,
        groups=_SCENES,
    ),
    "parallel": Bench(
        "gnmr.lab.bench.parallel",
        ("parallel",),
        "control as a share of a step of 1, 2 and 4 processes, the one sum over ranks for many units",
        usual=False,
    ),
    "compressed": Bench(
        "gnmr.lab.bench.compressed",
        ("compressed",),
        "forks: the share of the gap to dense gradients that arms of compressed ones close (an hour)",
        usual=False,
    ),
    "rise": Bench(
        "gnmr.lab.bench.rise",
        ("rise",),
        "compressed gradients: by how much one matrix's raises the loss of a step, against what could tell it",
        usual=False,
    ),
    "hook": Bench(
        "gnmr.lab.bench.hook",
        ("hook",),
        "steps with compressed gradients over dense ones, of two processes and of virtual workers",
        usual=False,
    ),
    "fair": Bench(
        "gnmr.lab.bench.fair",
        ("forks", "scratch", "more", "lengths"),
        "2-bit saved activations: what of their cost is the optimizer's, the rounding's or the length's (an hour)",
        usual=False,
    ),
    "startup": Bench("gnmr.lab.bench.startup", ("startup",), "gnmr --help, and gnmr train to its first step"),
    "memory": Bench("gnmr.lab.bench.memory", ("memory",), "peak memory of gnmr train"),
    "theory": Bench(
        "gnmr.lab.paper.theory", ("theory",), "the paper's theorems 1 and 2 as numbers: recovery gaps, false triggers"
    ),
}
RENAMED = {
    **{part: f"step only={part}" for part in ("controller", "signals", "mixture", "hf")},
    "saved": "paths only=saved",
    "recipe": "paths only=recipes",
}
"""What earlier versions called benchmarks, and the words that measure the same now."""
_OF_OUR_MODELS = ("saved", "recipes", "mixture", "theory", "hf", "parallel", "hook")


@dataclass(frozen=True)
class Part:
    """Of a benchmark what can be measured here."""

    bench: str
    name: str
    measure: Callable[[Setting], list[Figure]]
    show: Callable[[str, Sequence[Figure], Console], None]
    """Prints the figures under a title."""

    @property
    def title(self) -> str:
        """Above its figures."""
        return self.bench if self.bench == self.name else f"{self.bench}: {self.name}"


def usual() -> list[str]:
    """Names of the benchmarks that run where none is named."""
    return [name for name, bench in BENCHMARKS.items() if bench.usual]


def parts_of(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """`only` with groups of the named benchmarks (the usual ones without names) as their parts. UserError for a word
    that is neither."""
    named = [BENCHMARKS[name] for name in names or usual()]
    groups = {group: parts for bench in named for group, parts in bench.groups.items()}
    parts = [part for bench in named for part in bench.parts]
    if unknown := [word for word in only if word not in groups and word not in parts]:
        told = [part for bench in named for part in (bench.groups or bench.parts)]
        near = nearest(unknown[0], [*groups, *parts]) if groups else ""
        raise UserError(f"only={unknown[0]}: must be of {', '.join(told)}{near}")
    return [part for word in only for part in groups.get(word, (word,))]


def measurable(names: Sequence[str], only: Sequence[str], setting: Setting) -> list[Part]:
    """Parts of the named benchmarks, the usual ones without names; `only` those, where it names some.

    A part that cannot be measured here is left out with a line that says why. Raises `UserError` instead where that
    leaves nothing of a benchmark that was named.
    """
    from gnmr.lab.bench.figures import show

    chosen = list[Part]()
    for name in names or usual():
        mine, refused = list[Part](), list[UserError]()
        module = import_module(BENCHMARKS[name].module)
        for part in (part for part in BENCHMARKS[name].parts if not only or part in only):
            try:
                if setting.config.model.checkpoint is not None and part in _OF_OUR_MODELS:
                    raise UserError(f"bench {name}: {part} is for models of ours, not for model.name=pretrained")
                getattr(module, "CHECKS", {}).get(part, lambda _setting: None)(setting)
            except UserError as error:
                refused.append(error)
            else:
                mine.append(Part(name, part, module.PARTS[part], getattr(module, "SHOW", show)))
        if refused and names and not mine:
            raise refused[0]
        for why in refused:
            setting.say(f"left out: {why}")
        chosen += mine
    return chosen

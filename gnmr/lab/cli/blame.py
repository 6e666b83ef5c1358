"""`gnmr blame RUN`: the steps of a run that spiked or were not finite, and what caused each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnmr.console import for_tables, print_plain
from gnmr.errors import UserError, first_few, plural, printable
from gnmr.lab.cli.parser import Parser, path
from gnmr.lab.report.recorded_run import Run, load
from gnmr.lab.report.units import verdicts
from gnmr.names import SPIKE_WINDOW
from gnmr.pages import Chart, Figure, PageTable, findings_page
from gnmr.records import output
from gnmr.records.find import find_runs

_TEXT = """\
RUN is a run folder. While it trains, `gnmr train` repeats each step whose loss or gradient norm spikes or is not
finite, on other paths: the cause is precision if the spike disappears with higher precision. This command lists the
recorded causes and what to do about them; nothing is run.

  gnmr blame runs/act_quant_stress/RUN html=page.html
"""
_ADVICE = {
    "precision": "always the same units: pin them (precision.pins); changing units: a controller with a larger max_o",
    "precision, no unit": "another recovery path, or gnmr diagnose: no few units remove the spike",
    "data or model": "look at the batch, the weights and the learning rate; lower it, clip, or skip such steps",
    "not reproducible": "a race, a kernel without a fixed order, or hardware: CUDA_LAUNCH_BLOCKING=1, another device",
}
_CAUSED = {"not reproducible": "{} not reproducible"}


@dataclass(frozen=True)
class Spike:
    """A step that was examined."""

    step: int
    cause: str
    units: tuple[str, ...]
    loss: str
    """As it is recorded, after the usual one."""
    norm: str
    complete: bool = True
    """False if fewer units may suffice, because the search ended early."""

    @property
    def named(self) -> str:
        """Return the first units, in the words of the run's own log."""
        return f"{first_few(self.units)}{'' if self.complete else '; perhaps fewer'}"

    @property
    def advice(self) -> str:
        """Return what to do about the cause."""
        no_unit = self.cause == "precision" and not self.units
        return _ADVICE.get("precision, no unit" if no_unit else self.cause, "-")

    def line(self) -> str:
        """Return the spike in one line, in the words of the run's own log."""
        units = f" ({self.named})" if self.units else ""
        return f"step {self.step}  to blame: {self.cause}{units}; loss {self.loss}, norm {self.norm}"


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError if the place is not one run."""
    parser = Parser("blame", "RUN [html=FILE]", _TEXT, bare=False)
    parser.option("html", path, "a file for the same as one page")
    options, place = parser.of_one_place(argv, "run folder")
    if options.html is not None:
        output.check(options.html, f"html={options.html}")
    folders = find_runs([Path(place)])
    if len(folders) > 1:
        raise UserError(f"{place}: holds {len(folders)} runs; name one, such as {folders[0]}")
    run = load(folders[0]).check()
    spikes = spikes_of(run)
    if options.html is not None:
        output.write_text(options.html, page(run, spikes), f"html={options.html}")
    console = for_tables()
    for spike in spikes:
        print_plain(console, printable(spike.line()))
    print_plain(console, printable(f"{run.folder}: {verdict(run, spikes)}"))
    for cause, advice in dict.fromkeys((spike.cause, spike.advice) for spike in spikes):
        print_plain(console, f"{printable(cause)}: {advice}")
    if options.html is not None:
        print_plain(console, printable(f"page: {options.html}"))
    return 0


def spikes_of(run: Run) -> list[Spike]:
    """Return the steps that the run examined, in order."""
    steps = run.steps["step"]

    def of_step(step: int, field: str) -> str:
        before = run.steps[field][(steps < step) & (steps >= step - SPIKE_WINDOW)]
        usual, value = before[np.isfinite(before)], run.steps[field][steps == step]
        shown = f"{value[-1]:.4g}" if len(value) else "unknown"
        return f"{shown} (usually {usual.mean():.4g})" if len(usual) else shown

    incomplete = [row.get("step") for row in run.events if row.get("complete") is False]
    return [
        Spike(
            step,
            cause,
            tuple(units.split()),
            of_step(step, "loss"),
            of_step(step, "grad_norm_pre_clip"),
            step not in incomplete,
        )
        for step, cause, units in verdicts(run, run.last_step)
    ]


def verdict(run: Run, spikes: Sequence[Spike]) -> str:
    """Return the run's spikes in one sentence."""
    if not spikes:
        return f"no spike with a recorded cause in {plural(run.last_step, 'step')}"
    causes = Counter(spike.cause for spike in spikes)
    line = f"{plural(len(spikes), 'spike')} in {plural(run.last_step, 'step')}: "
    line += ", ".join(_CAUSED.get(cause, "{} by {}").format(number, cause) for cause, number in causes.most_common())
    if blamed := _blamed(spikes):
        line += f"; blamed{' most often' if len(spikes) > 1 else ''}: {first_few([unit for unit, _ in blamed], 2)}"
    return line


def _blamed(spikes: Sequence[Spike]) -> list[tuple[str, int]]:
    """Return the blamed units and how often each was, the most frequent one first."""
    return Counter(unit for spike in spikes for unit in spike.units).most_common()


def page(run: Run, spikes: Sequence[Spike]) -> str:
    """Return the page of the run's spikes."""
    causes, tables = Counter(spike.cause for spike in spikes), []
    figures = [Figure("spikes with a cause", f"{len(spikes)}", f"in {plural(run.last_step, 'step')}")]
    figures += [Figure(f"to blame: {cause}", f"{number}") for cause, number in causes.most_common()]
    if spikes:
        columns = ["spike", "to blame", "units", "loss", "gradient norm", "what to do"]
        rows = [
            [
                f"step {spike.step:,}",
                spike.cause,
                spike.named if spike.units else "-",
                spike.loss,
                spike.norm,
                spike.advice,
            ]
            for spike in spikes
        ]
        tables.append(PageTable("Spikes", columns, rows, f"Usually: the mean of up to {SPIKE_WINDOW} steps before."))
    if (blamed := _blamed(spikes)) and len(spikes) > 1:
        rows = [[unit, f"{number} of {causes['precision']}"] for unit, number in blamed]
        tables.append(PageTable("Blamed units", ["unit", "spikes by precision"], rows))
    name = run.folder.resolve().name
    card = {"run": name, "arm": run.arm, "seed": f"{run.seed}", "machine": run.machine, "commit": run.commit}
    marks = [(spike.step, spike.cause) for spike in spikes]
    chart = Chart("Training loss", run.steps["step"].tolist(), run.steps["loss"].tolist(), marks)
    return findings_page("blame", name, card, f"{verdict(run, spikes)}.", figures, tables, run.command, chart)

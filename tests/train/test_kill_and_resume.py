"""Runs that are killed for real (SIGKILL) and started again with the same command.

What they leave must equal, to the last bit, what a run leaves that was never killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everything import differences, everything, in_child

from gnmr.lab.train import run as run_module
from gnmr.lab.train.step import TrainStep
from gnmr.records.append import JsonLines
from gnmr.records.reader import read_json, read_jsonl
from gnmr.records.unit_stream import recorded_units

RICH = [
    "precision.rounding=stochastic",
    "training.accumulation=2",
    "optim.clip_norm=0.5",
    "controller.alpha_init=1.2",
    "controller.warmup_frac=0.25",
]
MOE = ["model.name=moe", "model.num_layers=2", "training.accumulation=2", "controller.t_lock=2"]
LEARNED = [*MOE, "model.experts.number=4", "training.activation_checkpointing=true"]
IDLE = [*MOE, "model.num_layers=1", "model.experts.number=32", "optim.weight_decay=0.1"]
"""So many experts that some have had no token when the checkpoint is written."""
DELAYED = [
    *MOE,
    "model.experts.number=4",
    "precision.low=fp8_delayed",
    "precision.recovery=bf16",
    "precision.unit=expert",
]
"""Delayed scales have a state of their own, in experts that see few tokens too."""
REAL = [
    "precision.low=fp8_delayed",
    "precision.recovery=bf16",
    "precision.backend=scaled_mm",
    "training.accumulation=2",
]
"""In eight bits, which CPUs have too."""
ADAPT = ["model.num_layers=4", "precision.unit=block", "controller.signal=static_k", "controller.routing=ranked"]
ADAPT += ["controller.warmup_frac=0.5", "controller.warmup_path=16bit", "controller.max_o=4"]
ADAPT += ["controller.options.calibration_frac=0.5", "controller.options.k_frac=0.25"]
"""Four steps in 16 bits, in which blocks are ranked."""
SKIP = ["optim.transform.name=skip_step", "optim.transform.options.window=4"]
SKIP += ["optim.transform.options.min_values=3", "optim.transform.options.sigmas=0.3"]
"""So few sigmas that a good part of the steps is left out."""
MEASURED = ["training.steps=6", "controller.routing=ranked"]
"""Signals whose history is made of evidence."""
LAYERS = ["precision.unit=layer", "model.num_layers=2", "training.accumulation=2"]
LAYERS += ["controller.alpha=1", "controller.beta=1"]
Hook = Callable[[], None]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_steps(happens: Callable[[int], object]) -> None:
    """Calls this with the number of every step of this process, before its forward pass."""
    plain = TrainStep.__call__

    def call(self: TrainStep, *args: Any) -> Any:
        happens(self.router.t + 1)
        return plain(self, *args)

    TrainStep.__call__ = call  # type: ignore[method-assign]


def in_step(number: int) -> Hook:
    """Dies before the forward pass of this step; the rows of the step before have been written."""
    return lambda: before_steps(lambda step: die() if step == number else None)


def in_row(number: int) -> Hook:
    """Dies with half of this step's row in the file."""

    def install() -> None:
        plain = JsonLines.write

        def write(self: JsonLines, rows: list[dict[str, Any]]) -> None:
            if self.path.name == "steps.jsonl" and rows[0]["step"] == number:
                self.append(b'{"step": 5, "tok')
                die()
            plain(self, rows)

        JsonLines.write = write  # type: ignore[method-assign]

    return install


def at_file(event: str, name: str) -> Hook:
    """Dies before the first operation of this kind (an audit event of Python) on a file of this name."""

    def install() -> None:
        def hook(seen: str, args: tuple[Any, ...]) -> None:
            if seen == event and any(name in str(arg) for arg in args[:2]):
                die()

        sys.addaudithook(hook)

    return install


KILLS: dict[str, tuple[Hook, list[str]]] = {
    "before_the_config": (at_file("open", "config.yaml.tmp"), []),
    "before_the_first_checkpoint": (in_step(3), []),
    "between_checkpoints": (in_step(5), []),
    "within_a_row": (in_row(5), []),
    "within_the_first_checkpoint": (at_file("open", ".writing-step-00000003/.metadata"), []),
    "within_a_checkpoint": (at_file("open", ".writing-step-00000006/.metadata"), []),
    "before_a_checkpoint_has_its_name": (at_file("os.rename", ".writing-step-00000006"), []),
    "before_an_old_checkpoint_goes": (at_file("shutil.rmtree", "/step-00000003"), RICH),
    "before_done": (at_file("os.rename", "DONE"), []),
    "rich_between_checkpoints": (in_step(6), RICH),
    "moe_between_checkpoints": (in_step(5), LEARNED),
    "moe_with_idle_experts_and_scale": (in_step(5), [*IDLE, "optim.name=scale"]),
    "moe_under_delayed_scales": (in_step(5), DELAYED),
    "in_a_warm_up_in_16_bits": (in_step(4), ADAPT),  # from the checkpoint of step 3
    "scaled_mm_under_delayed_scales": (in_step(5), REAL),
    "faults_of_random_bits": (
        in_step(5),
        ["faults.kind=bit_flip", "faults.windows=[[2,6]]", "precision.rounding=stochastic"],
    ),
    "drawn_faults": (
        in_step(5),
        ["faults.kind=nan", "faults.rate=150"],
    ),
    "steps_skipped_by_faults": (
        in_step(6),
        ["faults.kind=inf", "faults.targets=[up_proj]", "faults.windows=[[4,4]]", "controller.signal=always_low"],
    ),
    "stale_scales": (in_step(5), ["faults.kind=stale_scale", "faults.windows=[[4,4]]"]),
    "outlier_channels": (
        in_step(5),
        [
            *("model.outlier_channels.number=2", "model.outlier_channels.gain=16.0"),
            "model.outlier_channels.window=[2,6]",
        ],
    ),
    "stable_spam": (in_step(8), ["optim.transform.name=stable_spam", "optim.transform.options.reset_every=4"]),
    "skip_step": (in_step(8), SKIP),
    "gradient_stabilizer_and_scale": (
        in_step(8),
        [
            *("optim.name=scale", "optim.transform.name=gradient_stabilizer"),
            *("training.dtype=float32", "optim.clip_norm=0.2"),
        ],
    ),
    "gsnr": (in_step(5), [*MEASURED, "controller.signal=gsnr", "training.accumulation=2"]),
    "static_k": (in_step(5), [*MEASURED, "controller.signal=static_k", "controller.options.calibration_steps=4"]),
    "input_grad": (in_step(5), [*LAYERS, "controller.observe=input_grad"]),
    "adapter": (in_step(5), [*LAYERS, "controller.observe=adapter"]),
    "recovery_gap": (in_step(5), [*MEASURED, "controller.signal=recovery_gap", "controller.options.every=2"]),
}

QUICK = ("between_checkpoints", "within_a_checkpoint", "rich_between_checkpoints")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (name not in QUICK) + [pytest.mark.fp8] * (KILLS[name][1] is REAL)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in KILLS])
def test_a_killed_run_continues_to_the_last_bit(name, train, tmp_path, uninterrupted):
    hook, words = KILLS[name]
    want = uninterrupted(*words)
    folder = tmp_path / "run"

    def doomed() -> None:
        hook()
        train(folder, *words)

    assert in_child(doomed) == -signal.SIGKILL
    assert not (folder / "DONE").exists()
    train(folder, *words)
    assert differences(want, everything(folder)) == []


@pytest.mark.slow
def test_killed_twice(train, tmp_path, uninterrupted):
    """The second time before the continued run has saved anything of its own."""
    folder, said = tmp_path / "run", []

    def doomed(step: int) -> None:
        in_step(step)()
        train(folder, *RICH)

    assert in_child(lambda: doomed(8)) == -signal.SIGKILL
    assert in_child(lambda: doomed(8)) == -signal.SIGKILL
    train(folder, *RICH, say=said.append)
    assert f"continuing after step 6 of {folder}" in said
    assert differences(uninterrupted(*RICH), everything(folder)) == []


SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)]
SIGNALS += [(signal.SIGUSR2, 140), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.slow
def test_a_signal_saves_and_leaves(number, code, train, tmp_path, uninterrupted):
    folder, note = tmp_path / "run", tmp_path / "said"

    def stopped() -> None:
        before_steps(lambda step: os.kill(os.getpid(), number) if step == 4 else None)
        with note.open("a") as file:
            train(folder, say=lambda line: print(line, file=file, flush=True))

    assert in_child(stopped) == code
    name = signal.Signals(number).name
    line = f"stopped after step 4 by {name}, checkpoint saved; the same command continues it"
    assert note.read_text().splitlines()[-1] == line
    assert f"{name}: the run stops after this step; a second one ends the run at once" in note.read_text()
    assert (folder / "checkpoints" / "step-00000004").is_dir()
    assert not (folder / "DONE").exists() and not (folder / "FAILED").exists()
    train(folder)
    got, want = everything(folder), uninterrupted()
    # The checkpoint of step 4 stands where that of step 3 would.
    assert differences({**want, "checkpoints": None}, {**got, "checkpoints": None}) == []


def newest(folder: Path) -> str:
    return max(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 44), (signal.SIGUSR1, 44), (signal.SIGTERM, 44)])
def test_the_handler_of_a_launcher_is_called_after_the_checkpoint(number, code, train, tmp_path):
    """Like that of submitit, which puts the job into the queue again and leaves with a code of its own."""
    folder = tmp_path / "run"

    def requeue(*_: object) -> None:
        assert newest(folder) == "step-00000004" and read_json(folder / "summary.json")["status"] == "interrupted"
        raise SystemExit(code)

    def stopped() -> None:
        signal.signal(number, requeue)
        before_steps(lambda step: os.kill(os.getpid(), number) if step == 4 else None)
        train(folder)

    assert in_child(stopped) == code
    assert read_jsonl(folder / "steps.jsonl")[-1]["step"] == 4
    train(folder)


def test_a_handler_that_returns_leaves_the_end_as_it_is(train, tmp_path):
    def stopped() -> None:
        signal.signal(signal.SIGUSR2, lambda *_: (tmp_path / "requeued").touch())
        before_steps(lambda step: os.kill(os.getpid(), signal.SIGUSR2) if step == 4 else None)
        train(tmp_path / "run")

    assert in_child(stopped) == 128 + signal.SIGUSR2
    assert newest(tmp_path / "run") == "step-00000004" and (tmp_path / "requeued").exists()


@pytest.mark.parametrize("again", [False, True])
def test_under_submitit_a_run_saves_at_sigterm_and_goes_on(again, train, tmp_path):
    """Submitit ignores SIGTERM, because a cluster sends it before or after the signal that it waits for."""
    sent = {4: signal.SIGTERM, 5: signal.SIGTERM} | ({7: signal.SIGUSR2} if again else {})

    def bypassed() -> None:
        os.environ["SUBMITIT_EXECUTOR"] = "slurm"
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGUSR2, lambda *_: exec("raise SystemExit(44)"))
        before_steps(lambda step: os.kill(os.getpid(), sent[step]) if step in sent else None)
        run_module.KEEP_CHECKPOINTS = 9
        train(tmp_path / "run")

    assert in_child(bypassed) == (44 if again else 0)
    saved = {int(path.name.rsplit("-", 1)[1]) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {3, 4, 5, 6, 7 if again else 8}


@pytest.mark.slow
def test_a_signal_that_was_ignored_at_the_start_stays_so(train, tmp_path):
    """As under nohup."""

    def ignoring() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        before_steps(lambda _: os.kill(os.getpid(), signal.SIGHUP))
        train(tmp_path / "run")

    assert in_child(ignoring) == 0
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(train, tmp_path):
    def twice(step: int) -> None:
        for _ in range(2 if step == 4 else 0):  # to this very thread: two that the kernel holds back would be one
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.001)

    def stopped() -> None:
        before_steps(twice)
        try:
            train(tmp_path / "run")
        except KeyboardInterrupt:
            raise SystemExit(99) from None

    assert in_child(stopped) == 99
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000003"]
    assert "second Ctrl-C" in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.slow
def test_wandb_offline_has_no_hole_after_a_kill(train, tmp_path, monkeypatch):
    """The newest part holds every step: W&B replaces the history of a run by that of the part uploaded last."""
    wandb = pytest.importorskip("wandb")
    from wandb_files import history_of, parts_of

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    words = ["training.steps=60", "training.checkpoint_every=20", "records.wandb=offline"]
    folder = tmp_path / "run"

    def doomed() -> None:
        in_step(47)()
        train(folder, *words)

    assert in_child(doomed) == -signal.SIGKILL
    train(folder, *words)
    wandb.teardown()
    first, newest = parts_of(folder)
    history = history_of(newest)
    rows = {row["step"]: row for row in read_jsonl(folder / "steps.jsonl")}
    events = [row["step"] for row in read_jsonl(folder / "events.jsonl") if row["event"] == "promote"]
    assert list(rows) == list(range(1, 61)) == [step for step in sorted(history) if step in rows] and events
    by_step = {rows.step: rows for rows in recorded_units(folder)}
    for step, row in rows.items():
        got = history[step]
        assert (got["train/loss"], got["recovery/num_active"]) == (row["loss"], row["num_active"])
        assert got["recovery/promotions"] == sum(one <= step for one in events)
        assert ("traces/gnmr_table/path" in got) == (step == 60)  # drawn once, at the end
    chart = newest.parent / "files" / history[60]["traces/gnmr_table/path"]
    points = json.loads(chart.read_text())["data"]
    assert (
        sorted({step for step, *_ in points}) == list(range(10, 61, 10)) and len({unit for _, unit, _ in points}) == 5
    )
    for step, unit, value in points:  # a point is the maximum of ten steps
        recent = [by_step[step - back] for back in range(10)]
        assert value == max(rows.columns["gnmr"][rows.units.index(unit)] for rows in recent)
    for row in read_jsonl(folder / "eval.jsonl"):
        assert history[row["step"]]["val/loss"] == row["val_loss"]
    before = history_of(first)  # what the killed process sent is the same
    assert all(before[step]["train/loss"] == rows[step]["loss"] for step in before if step in rows)

"""Attacks on a run while it goes on: kills, signals, full disks, files that vanish, clocks that jump, storms of NaN.

After each of them the same command must give what a run gives that nobody disturbed, or the run must say that it does
not.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .harness import HELD, Arena, Case, Hook, Kind, Outcome, Running, digest, ended, marked, rows, summary

STEPS = 12
IN_CHECKPOINT = "/checkpoints/."
"""In the name of every file of a checkpoint that is being written."""


@dataclass(frozen=True)
class Undisturbed:
    """What a run leaves that nobody disturbs."""

    folder: Path
    digest: str
    seconds: float
    events: int
    """File operations in its folder that Python's audit hooks see."""
    checkpoint_events: int


def undisturbed(arena: Arena) -> Undisturbed:
    """Run once for all cases."""
    if "undisturbed" not in arena.made:
        counts = [0, 0]
        for i, where in enumerate(("", IN_CHECKPOINT)):
            folder, count = arena.folder("whole") / "run", arena.folder("count") / "events"
            outcome = train(arena, folder, hook=Hook(count_events, f"{folder}{where}", str(count)))
            if outcome.code != 0:
                raise RuntimeError(f"the undisturbed run fails: {outcome.err}")
            counts[i] = int(count.read_text())
        arena.made["undisturbed"] = Undisturbed(folder, digest(folder), outcome.seconds, *counts)
    found: Undisturbed = arena.made["undisturbed"]
    return found


def start(arena: Arena, folder: Path, *words: str, hook: Hook | None = None) -> Running:
    """Starts the run that all these attacks disturb, with some words changed."""
    hooks = [] if hook is None else [hook]
    if not words:
        hooks.append(Hook(take_config, str(_config(arena))))
    return arena.start("train", *arena.tiny, *words, f"run_dir={folder}", hook=hooks)


def train(arena: Arena, folder: Path, *words: str, hook: Hook | None = None) -> Outcome:
    """The same, to its end."""
    return start(arena, folder, *words, hook=hook).wait()


def _config(arena: Arena) -> Path:
    """A file with the config of that run."""
    if "config" not in arena.made:
        file = arena.folder("config") / "config.pickle"
        arena.run("train", *arena.tiny, hook=Hook(keep_config, str(file)))
        arena.made["config"] = file
    found: Path = arena.made["config"]
    return found


def continued(arena: Arena, folder: Path) -> str:
    """The verdict on the same command, which must end as if nothing had been."""
    outcome = train(arena, folder)
    if outcome.trouble:
        return outcome.trouble
    if outcome.code != 0 or ended(folder) != "DONE":
        return "not continued"
    if digest(folder) == undisturbed(arena).digest:
        return HELD
    return "other numbers, marked" if marked(folder) else "false final"


def one_line(outcome: Outcome) -> bool:
    """Whether a command said in a line why it ended: FAILED or refused."""
    last = outcome.err.strip().rpartition("\n")[2]
    return outcome.refused or (outcome.code == 1 and last.startswith("gnmr: "))


# What a child does before its command.


def keep_config(file: str) -> None:
    """Writes the config of the run that would begin."""
    from gnmr.lab.train import run as module

    def keep(config: Any, *_: Any, **__: Any) -> None:
        Path(file).write_bytes(pickle.dumps(config))
        raise SystemExit(0)

    module.run = keep


def take_config(file: str) -> None:
    """Runs with that config: Hydra would take as long as all of the run's steps."""
    from gnmr.cli import train
    from gnmr.console import say
    from gnmr.lab.train import run as module

    def main(words: list[str]) -> int:
        config = pickle.loads(Path(file).read_bytes())
        folder = next(word.partition("=")[2] for word in words if word.startswith("run_dir="))
        module.run(replace(config, run_dir=folder), say, command=shlex.join(["gnmr", "train", *words]))
        return 0

    train.main = main


def _watch_events(where: str, seen: Callable[[int], None]) -> None:
    """Calls `seen` with a running number before each file operation on a path that holds `where`."""
    number = 0

    def hook(_event: str, args: tuple[Any, ...]) -> None:
        nonlocal number
        if any(where in str(arg) for arg in args[:2] if isinstance(arg, (str, bytes, os.PathLike))):
            number += 1
            seen(number)

    sys.addaudithook(hook)


def count_events(where: str, file: str) -> None:
    """Counts them in `file`."""
    target = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.write(target, b"0")
    _watch_events(where, lambda number: os.pwrite(target, str(number).encode(), 0) and None)


def die_at_event(where: str, at: int, after_s: float = 0.0) -> None:
    """SIGKILL before that one, or so many seconds after it."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def seen(number: int) -> None:
        if number == at and after_s:
            threading.Timer(after_s, die).start()
        elif number == at:
            die()

    _watch_events(where, seen)


def limit_file_size(size: int) -> None:
    """No file may become larger: an error of the system in whatever writes, C++ included."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def jump(form: str, seed: int) -> None:
    """Lets the wall clock jump."""
    plain, draw, calls = time.time, random.Random(seed), iter(range(10**9))

    def now() -> float:
        call = next(calls)
        if form == "back an hour":
            return plain() - 3600 * (call > 20)
        if form == "on ten years":
            return plain() + 10 * 365 * 86400 * (call > 20)
        if form == "before 1970":
            return plain() - 3e9 * (call > 20)
        if form == "stands still":
            return 1.7e9
        return plain() + draw.uniform(-1e6, 1e6)

    time.time = now
    time.time_ns = lambda: int(now() * 1e9)


def forked_workers() -> None:
    """Joblib's workers are forked and need not import everything again; at the end they are killed."""
    atexit._clear()
    threading._threading_atexits.clear()
    from joblib.externals.loky.backend import context

    context.set_start_method("fork", force=True)


def storm(form: str, share: float, seed: int, told: str) -> None:
    """Non-finite numbers in about this share of the steps; the file `told` appears where a checkpoint gets them."""
    import torch
    from torch.nn import functional as F
    from torch.nn.modules.module import register_module_forward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    draw, optimizers, plain = random.Random(seed), list[Any](), F.cross_entropy
    bad = [float("nan"), float("inf"), float("-inf")]

    def cross_entropy(*args: Any, **options: Any) -> Any:
        loss = plain(*args, **options)
        if form == "evaluation" and not torch.is_grad_enabled() and draw.random() < share:
            return loss * draw.choice(bad)
        if not loss.requires_grad or draw.random() >= share:
            return loss
        if form == "loss":
            return loss * draw.choice(bad)
        if form == "gradient":
            loss.register_hook(lambda gradient: gradient * draw.choice(bad))
        return loss

    def after(_module: Any, _inputs: Any, output: Any) -> Any:
        tensor = isinstance(output, torch.Tensor) and output.requires_grad
        if not tensor or not form.startswith("activation") or draw.random() >= share / 16:
            return None
        if form == "activation":
            mask = torch.zeros_like(output)
            mask.view(-1)[draw.randrange(mask.numel())] = draw.choice(bad)
            return output + mask
        output.register_hook(lambda gradient: gradient * draw.choice(bad))
        return None

    def step(optimizer: Any, _args: Any, _options: Any) -> None:
        optimizers[:] = [optimizer]
        if form == "weight" and draw.random() < share:
            weight = draw.choice(optimizer.param_groups[0]["params"]).data
            weight.view(-1)[draw.randrange(weight.numel())] = draw.choice(bad)

    def renamed(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and "/checkpoints/step-" in str(args[1]):
            weights = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
            if not all(bool(weight.isfinite().all()) for weight in weights):
                os.close(os.open(told, os.O_WRONLY | os.O_CREAT))

    F.cross_entropy = cross_entropy
    register_module_forward_hook(after)
    register_optimizer_step_post_hook(step)
    sys.addaudithook(renamed)


# Kills.


def killed_at_event(at: float, where: str, times: int, after_s: float, arena: Arena) -> str:
    """Killed at this share of the events of the whole run, one or more times."""
    whole = undisturbed(arena)
    events = whole.checkpoint_events if where else whole.events
    folder, number = arena.folder() / "run", 1 + int(at * events)
    for _ in range(times):
        outcome = train(arena, folder, hook=Hook(die_at_event, f"{folder}{where}", number, after_s))
        if outcome.code not in (0, -signal.SIGKILL):
            return outcome.trouble or "wrong exit code"
        number = max(1, number // 2)
    return continued(arena, folder)


def killed_at_time(share: float, arena: Arena) -> str:
    """Killed at this share of the time that the whole run takes, whatever it is doing."""
    whole, folder = undisturbed(arena), arena.folder() / "run"
    running = start(arena, folder)
    running.wait_for(folder.exists)
    time.sleep(share * whole.seconds / 2)
    running.kill()
    outcome = running.wait()
    if outcome.code not in (0, -signal.SIGKILL):
        return outcome.trouble or "wrong exit code"
    return continued(arena, folder)


def killed_in_checkpoint(draw: random.Random, arena: Arena) -> str:
    """Killed from outside while a half-written checkpoint is there."""
    for _ in range(10):
        folder, wanted = arena.folder() / "run", draw.choice((3, 6, 9, 12))
        half_written = partial(_half_written, folder, wanted)
        running = start(arena, folder)
        if running.wait_for(half_written):
            time.sleep(draw.uniform(0, 0.004))
        running.kill()
        running.wait()
        if half_written():
            return continued(arena, folder)
    return "missed"


def _half_written(folder: Path, step: int) -> bool:
    return any(True for _ in (folder / "checkpoints").glob(f".*{step:08d}"))


def kill_cases(draw: random.Random) -> Iterator[Case]:
    for i in range(12):
        at, after_s = (i + draw.random()) / 12, draw.choice((0.0, 0.0, draw.uniform(0, 0.003)))
        yield Case(f"in a checkpoint, at {at:.0%} of its operations", partial(_in_checkpoint, at, after_s))
    for i in range(12):
        own = random.Random(draw.random())
        yield Case(f"in a checkpoint, from outside ({i})", partial(killed_in_checkpoint, own))
    for i in range(14):
        at = (i + draw.random()) / 14
        yield Case(f"at {at:.0%} of all operations", partial(_killed, at, 1))
    for i in range(6):
        at = 1 - draw.random() * 0.15
        yield Case(f"at the end, {at:.1%} of all operations ({i})", partial(_killed, at, 1))
    for i in range(6):
        at, times = draw.uniform(0.3, 1), draw.choice((2, 3))
        yield Case(f"{times} times, from {at:.0%} of all operations ({i})", partial(_killed, at, times))
    for i in range(14):
        share = (i + draw.random()) / 14
        yield Case(f"at {share:.0%} of its time", partial(killed_at_time, share))


def _killed(at: float, times: int, arena: Arena) -> str:
    return killed_at_event(at, "", times, 0.0, arena)


def _in_checkpoint(at: float, after_s: float, arena: Arena) -> str:
    return killed_at_event(at, IN_CHECKPOINT, 1, after_s, arena)


# Signals, and what else is done to a run while it stands still.


def held_still(running: Running, folder: Path, row: int) -> bool:
    """Stops the run when it has written this many steps; False if it has ended, or nearly so."""
    file = folder / "steps.jsonl"
    running.wait_for(lambda: file.exists() and file.read_bytes().count(b"\n") >= row)
    running.kill(signal.SIGSTOP)
    time.sleep(0.002)
    return not running.ended and file.read_bytes().count(b"\n") <= STEPS - 3


def at_row(arena: Arena, row: int) -> tuple[Running, Path]:
    """A run that stands still after about so many steps."""
    for _ in range(10):
        folder = arena.folder() / "run"
        running = start(arena, folder)
        if held_still(running, folder, row):
            return running, folder
        running.kill(signal.SIGCONT)
        running.wait()
    raise RuntimeError("the run is too fast to be caught")


def signalled(number: int, row: int, arena: Arena) -> str:
    running, folder = at_row(arena, row)
    running.kill(number)
    running.kill(signal.SIGCONT)
    outcome = running.wait()
    if outcome.trouble:
        return outcome.trouble
    if outcome.code != 128 + number:
        return "wrong exit code"
    saved = max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)
    if saved != len(rows(folder / "steps.jsonl")) or ended(folder) != "none":
        return "no checkpoint"
    return continued(arena, folder)


def signal_cases(draw: random.Random) -> Iterator[Case]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        for _ in range(4):
            row = draw.randint(1, STEPS - 5)
            yield Case(f"{number.name} after step {row}", partial(signalled, int(number), row))


def tampered(how: str, name: str, row: int, arena: Arena) -> str:
    """The whole folder (name "") or a file of it is removed, moved or replaced in mid-run."""
    running, folder = at_row(arena, row)
    _tamper(how, folder / name if name else folder)
    running.kill(signal.SIGCONT)
    outcome = running.wait()
    if outcome.trouble:
        return outcome.trouble
    if outcome.code != 0:
        return HELD if one_line(outcome) and ended(folder) != "DONE" else "wrong exit code"
    missing = [file for file in ("DONE", "config.yaml", "header.json", "summary.json") if not (folder / file).exists()]
    same = not missing and digest(folder) == undisturbed(arena).digest
    return HELD if same or (not missing and marked(folder)) else "false final"


def _tamper(how: str, path: Path) -> None:
    aside = path.with_name(path.name + ".aside")
    if how in ("moved", "replaced"):
        path.rename(aside)
    if how == "replaced" and aside.is_dir():
        path.mkdir()
    elif how == "replaced":
        path.write_bytes(b"")
    elif how == "copied":
        shutil.copy2(path, aside)
        aside.rename(path)  # the same bytes in another file
    elif how == "halved":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "removed" and path.is_dir():
        shutil.rmtree(path)
    elif how == "removed":
        path.unlink()


def tamper_cases(draw: random.Random) -> Iterator[Case]:
    folders = [("", how) for how in ("removed", "moved", "replaced")]
    folders += [("checkpoints", how) for how in ("removed", "moved", "replaced")] + [("order", "removed")]
    for name in ("steps.jsonl", "ratios.rows", "eval.jsonl", "events.jsonl"):
        folders += [(name, how) for how in ("removed", "moved", "replaced", "copied", "halved", "emptied")]
    folders += [(name, how) for name in ("config.yaml", "header.json") for how in ("removed", "moved")]
    folders += [(".lock", "removed"), (".reserve", "removed")]
    for name, how in folders:
        row = draw.randint(5, STEPS - 5)
        yield Case(f"{name or 'the folder'} {how} after step {row}", partial(tampered, how, name, row))


# Disks, clocks, storms.


def file_too_large(size: int, arena: Arena) -> str:
    folder = arena.folder() / "run"
    return _out_of_space(arena, folder, train(arena, folder, hook=Hook(limit_file_size, size)))


def disk_full(size: int, arena: Arena) -> str:
    """A file system of this size; the limit on a file where we may not mount one."""
    disk = arena.folder("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        return file_too_large(size, arena)
    try:
        outcome = train(arena, disk / "run")
        subprocess.run(["mount", "-o", f"remount,size={1 << 26}", str(disk)], check=True, capture_output=True)
        return _out_of_space(arena, disk / "run", outcome)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, capture_output=True)


def _out_of_space(arena: Arena, folder: Path, outcome: Outcome) -> str:
    if outcome.trouble:
        return outcome.trouble
    if outcome.code != 0 and not one_line(outcome):
        return "wrong exit code"
    if outcome.code != 0 and ended(folder) == "DONE":
        return "false final"
    return continued(arena, folder)


def disk_cases(draw: random.Random) -> Iterator[Case]:
    for i in range(14):
        size = int(280_000 + (i + draw.random()) / 14 * 1_000_000)
        yield Case(f"a disk of {size:,} bytes", partial(disk_full, size))
    for i in range(6):
        size = int(2_000 + (i + draw.random()) / 6 * 290_000)
        yield Case(f"no file above {size:,} bytes", partial(file_too_large, size))


def clock_jumps(form: str, seed: int, arena: Arena) -> str:
    folder = arena.folder() / "run"
    outcome = train(arena, folder, hook=Hook(jump, form, seed))
    if outcome.trouble:
        return outcome.trouble
    if outcome.code != 0 or ended(folder) != "DONE":
        return "wrong exit code"
    return HELD if digest(folder) == undisturbed(arena).digest else "false final"


def clock_cases(draw: random.Random) -> Iterator[Case]:
    for form in ("back an hour", "on ten years", "before 1970", "stands still", "anywhere"):
        yield Case(f"the clock: {form}", partial(clock_jumps, form, draw.randrange(1000)))


def in_storm(form: str, share: float, seed: int, words: list[str], arena: Arena) -> str:
    folder, told = arena.folder() / "run", arena.folder("told") / "non-finite"
    outcome = train(arena, folder, *words, hook=Hook(storm, form, share, seed, str(told)))
    if outcome.trouble:
        return outcome.trouble
    if told.exists():
        return "non-finite weights saved"
    if outcome.code != 0:
        failed = outcome.refused or (one_line(outcome) and ended(folder) == "FAILED")
        return HELD if failed else "wrong exit code"
    finite = isinstance(summary(folder).get("final_val_loss"), float)
    return HELD if ended(folder) == "DONE" and finite else "false final"


def storm_cases(draw: random.Random) -> Iterator[Case]:
    for form in ("loss", "gradient", "activation", "activation gradient", "weight", "evaluation"):
        for share in (0.05, 0.2, 0.5, 1.0):
            for _ in range(2):
                play = partial(in_storm, form, share, draw.randrange(10**6), [])
                yield Case(f"non-finite {form}, {share:.0%} of the steps", play)
    for rate in ("1e2", "1e6", "1e12", "1e20", "1e30", "1e37", "3e38", "1e39", "1e300"):
        for word in (f"optim.lr={rate}", f"optim.weight_decay={rate}"):
            yield Case(word, partial(in_storm, "none", 0.0, 0, [word]))


# Sweeps.

_SEEDS = (0, 1, 2, 3)
_LONGER = ["training.steps=40", "training.checkpoint_every=8", "training.eval_every=20"]
_SIDE_BY_SIDE = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def sweep(arena: Arena, runs: Path, side_by_side: bool) -> list[str]:
    seeds = f"training.seed={','.join(map(str, _SEEDS))}"
    return ["train", "-m", seeds, *arena.tiny, *_LONGER, f"runs_dir={runs}", *(_SIDE_BY_SIDE if side_by_side else [])]


def cells(runs: Path) -> dict[int, Path]:
    """Run folders by seed."""
    return {int(path.name.rpartition("-s")[2]): path for path in (runs / "tiny").glob("*-s*")}


def whole_sweep(arena: Arena) -> dict[int, str]:
    """The digests of a sweep that nobody disturbs, by seed."""
    if "sweep" not in arena.made:
        runs = arena.folder("sweep")
        outcome = arena.run(*sweep(arena, runs, False), limit_s=300)
        if outcome.code != 0:
            raise RuntimeError(f"the undisturbed sweep fails: {outcome.err}")
        arena.made["sweep"] = {seed: digest(folder) for seed, folder in cells(runs).items()}
    found: dict[int, str] = arena.made["sweep"]
    return found


def sweep_killed(who: str, seed: int, row: int, forked: bool, arena: Arena) -> str:
    """The worker that trains this seed is killed, or the sweep itself; then the same command."""
    want, runs = whole_sweep(arena), arena.folder("sweep")
    hook = Hook(forked_workers) if forked else None
    command = sweep(arena, runs, who != "serial")
    running = arena.start(*command, hook=hook, limit_s=240, linger_s=30)
    running.wait_for(lambda: _rows_of(runs, seed) >= row, pause_s=0.002)
    victim = _writer(running, cells(runs).get(seed)) if who == "worker" else running.pid
    if victim is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    outcome = running.wait()
    undone = [folder for folder in cells(runs).values() if ended(folder) != "DONE"]
    missing = len(_SEEDS) - len(cells(runs)) + len(undone)
    if outcome.trouble:
        return outcome.trouble
    if outcome.left:
        return "processes left"
    if who == "worker" and missing > 1:
        return "siblings lost"
    if missing and outcome.code == 0:
        return "wrong exit code"
    outcome = arena.run(*command, hook=hook, limit_s=240)
    if outcome.trouble:
        return outcome.trouble
    if outcome.code != 0 or any(ended(folder) != "DONE" for folder in cells(runs).values()):
        return "not continued"
    return HELD if {seed: digest(folder) for seed, folder in cells(runs).items()} == want else "false final"


def _rows_of(runs: Path, seed: int) -> int:
    with contextlib.suppress(OSError):
        return (cells(runs)[seed] / "steps.jsonl").read_bytes().count(b"\n") if seed in cells(runs) else 0
    return 0


def _writer(running: Running, folder: Path | None) -> int | None:
    """The process that has a file of the folder open."""
    for pid in running.family if folder else ():
        with contextlib.suppress(OSError):
            links = [os.readlink(link) for link in Path("/proc", str(pid), "fd").iterdir()]
            if any(link.startswith(f"{folder}/") for link in links):
                return pid
    return None


def sweep_cases(draw: random.Random) -> Iterator[Case]:
    plan = [("worker", True)] * 8 + [("worker", False)] * 2 + [("serial", False)] * 4 + [("sweep", False)] * 2
    for i, (who, forked) in enumerate([*plan, *[("sweep", True)] * 4]):
        seed, row = draw.choice(_SEEDS), draw.randint(1, 36)
        whom = {"worker": f"the worker of seed {seed}", "sweep": "the sweep", "serial": "the sweep in one process"}[who]
        yield Case(f"{whom} at step {row} ({i})", partial(sweep_killed, who, seed, row, forked))


KINDS = [
    Kind("kills", kill_cases, 6),
    Kind("signals", signal_cases, 4),
    Kind("kills in sweeps", sweep_cases, 1),
    Kind("files gone in mid-run", tamper_cases, 6),
    Kind("full disks", disk_cases, 3),
    Kind("clock jumps", clock_cases, 1),
    Kind("storms of NaN", storm_cases, 6),
]

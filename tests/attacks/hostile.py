"""Hostile folders: run folders, checkpoints and task files of somebody who means harm, read by every command.

A case is one folder and the commands that read it, at the same time. What must not happen: anything runs that the
folder brought; a file outside of the folder is changed; a secret is told; a link is followed; a command hangs, ends in
a traceback or by its memory; markup or escape characters reach a page or the terminal; a sound run beside the odd one
goes unreported.
"""

from __future__ import annotations

import html.parser
import os
import random
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt

from .attaching import in_foreign_folder, on_a_named_machine
from .folders import folders
from .harness import HELD, Arena, Case, Hook, Kind, Outcome
from .inputs import babble
from .spoiling import MARK, SECRET, Hostile, Room, contents, files_below

LIMIT_S = 20.0
"""Three times of it where plots are drawn."""
MEMORY_BYTES = 6 << 30

FLOOD = 200_000
"""Characters that a command may print."""

TRAIN = (
    *("train", "debug=smoke", "data.name=text", "data.vocab_size=300", "model.hidden_size=32", "model.num_layers=1"),
    *("model.intermediate_size=48", "training.seq_len=16", "training.steps=8", "training.checkpoint_every=4"),
    *(
        "controller.alpha=1.05",
        "controller.beta=1.02",
        "controller.max_o=2",
        "faults.kind=noise",
        "faults.windows=[[2,2]]",
    ),
    *("records.live=off", "records.wandb=off", "training.threads=1"),
)
"""A run under a fault, with a busy controller."""


@dataclass(frozen=True)
class Material:
    """What the cases are made of: sound folders, copied and spoilt."""

    folder: Path

    def words(self, *more: str) -> tuple[str, ...]:
        """Those of the sound run."""
        return (*TRAIN, f"data.path={self.folder / 'babble.txt'}", *more)


def material(arena: Arena) -> Material:
    """Made by the first case: `done`, a run; `stopped`, the same after half of its steps; `killed`, with its ratios not
    yet in Parquet; `sound`, another arm, which stands beside the odd ones; `hf`, a checkpoint; `tasks`."""
    if "hostile" in arena.made:
        return Material(arena.made["hostile"])
    folder = arena.folder("material")
    (folder / "babble.txt").write_text(babble())
    made = Material(folder)
    for name, more in (("done", ()), ("sound", ("arm=sound", "training.export_hf=true"))):
        outcome = arena.run(*made.words(f"run_dir={name}", *more), cwd=folder, limit_s=180)
        assert outcome.code == 0, outcome.err
    (folder / "sound" / "hf").rename(folder / "hf")
    shutil.copytree(folder / "done", folder / "stopped")
    (folder / "stopped" / "DONE").unlink()
    shutil.rmtree(folder / "stopped" / "checkpoints" / "step-00000008")
    words = made.words("run_dir=killed", "training.steps=50000", "arm=killed", "training.checkpoint_every=20000")
    running = arena.start(*words, cwd=folder, limit_s=180)
    rows = folder / "killed" / "steps.jsonl"
    assert running.wait_for(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 8, 0.05)
    running.kill()
    running.wait()
    (folder / "text.txt").write_text(babble())
    arena.made["hostile"] = folder
    return made


COMMANDS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "report": (("report", "ODD", "SOUND", "--no-plots", "--out=rep"), (0,)),
    "page": (("report", "ODD", "SOUND", "--no-plots", "--out=rep", "--html=page.html"), (0,)),
    "draw": (("report", "ODD", "SOUND", "--out=rep"), (0,)),
    "own report": (("report", "ODD", "--no-plots"), (0, 2)),
    "own plots": (("report", "ODD"), (0, 2)),
    "replay": (("replay", "ODD", "out=decisions.jsonl"), (0, 2)),
    "replay inside": (("replay", "ODD", "out=odd/decisions.jsonl"), (0, 2)),
    "calibrate": (("replay", "ODD", "calibrate=0.1"), (0, 2)),
    "detect": (("replay", "ODD", "detect=0.1"), (0, 2)),
    "diagnose": (("diagnose", "ODD", "recipe=int4", "batches=2", "held_out=0", "batch_size=2"), (0, 2)),
    "audit": (("audit", "ODD", "batch_size=2"), (0, 1, 2)),
    "checkpoint": (("diagnose", "ODD", "data=TEXT", "batches=2", "held_out=0", "batch_size=1", "block=16"), (0, 2)),
    "tune": (("train", "model=pretrained", "scale=finetune_cpu", "model.checkpoint=odd", "memory_plan=true"), (0, 2)),
    "train": (("TRAIN", "run_dir=odd"), (0, 1, 2)),
    "fork": (("TRAIN", "base=odd", "run_dir=forked"), (0, 1, 2)),
}
"""What is typed, and how it may end."""


def _words(command: str, made: Material) -> tuple[str, ...]:
    places = {name: str(made.folder / name.lower()) for name in ("SOUND", "HF", "STOPPED")}
    words: list[str] = []
    for word in COMMANDS[command][0]:
        if word == "TRAIN":
            words += made.words()
        else:
            words.append(places.get(word, word.replace("TEXT", str(made.folder / "text.txt"))))
    return tuple(words)


def _play(case: Hostile) -> Callable[[Arena], str]:
    def play(arena: Arena) -> str:
        made, folder = material(arena), arena.folder("hostile")
        room = Room(folder, folder / "odd")
        room.outside.mkdir()
        if case.base:
            shutil.copytree(made.folder / case.base, room.odd)
        else:
            room.odd.mkdir()
        case.spoil(room)
        try:
            return _judge(case, room, made, arena)
        finally:
            for path in (room.odd, *(room.odd.iterdir() if room.odd.is_dir() else ())):
                if not path.is_symlink() and path.is_dir() and "immutable" in case.name:
                    subprocess.run(["chattr", "-i", path], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)

    return play


def _judge(case: Hostile, room: Room, made: Material, arena: Arena) -> str:
    places = [room.folder, arena.scratch / "tmp"]
    before, sizes = contents(room.outside), {path: path.lstat().st_mtime_ns for path in files_below(*places)}
    past = 1_000_000_000
    for path in files_below(room.outside):
        if not path.is_symlink():
            os.utime(path, ns=(past, path.stat().st_mtime_ns))
    running = {}
    for command in case.commands:
        words = tuple(_named(word, room, case) for word in _words(command, made))
        running[command] = arena.start(
            *words,
            cwd=room.folder / case.cwd,
            env={"HOSTILE_SECRET": SECRET},
            hook=Hook(in_foreign_folder),
            limit_s=3 * LIMIT_S if command in ("draw", "own plots") else LIMIT_S,
            memory_bytes=MEMORY_BYTES,
        )
    outcomes = {command: one.wait() for command, one in running.items()}
    followed = [p for p in files_below(room.outside) if not p.is_symlink() and p.lstat().st_atime_ns > past]
    found = [_outcome(command, outcome, room) for command, outcome in outcomes.items()]
    told = "".join(outcome.out + outcome.err for outcome in outcomes.values())
    if room.ran.exists():
        return "executed"
    if contents(room.outside) != before:
        return "destroyed"
    new = [path for path in files_below(*places) if sizes.get(path) != path.lstat().st_mtime_ns]
    new = [path for path in new if stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_size < 1 << 26]
    if SECRET in told or any(SECRET.encode() in path.read_bytes() for path in new):
        return "leak"
    if case.links and followed:
        found.append("link followed")
    order = ("hang", "traceback", "stopped the others", "link followed")
    found.sort(key=lambda one: order.index(one) if one in order else len(order))
    return next((one for one in found if one != HELD), HELD)


def _named(word: str, room: Room, case: Hostile) -> str:
    """The hostile folder from where the command stands; it may have been renamed."""
    if case.cwd != ".":
        return {"ODD": ".", "run_dir=odd": "run_dir=.", "base=odd": "base=."}.get(word, word)
    names = [path.name for path in room.folder.iterdir() if path.is_dir() and path.name != "outside"]
    return {"ODD": "odd" if "odd" in names else names[0]}.get(word, word)


def _outcome(command: str, outcome: Outcome, room: Room) -> str:
    """What a single command did wrong."""
    if outcome.trouble:
        return outcome.trouble
    if outcome.code not in COMMANDS[command][1]:
        return "stopped the others" if command in ("report", "page", "draw") else f"exit code {outcome.code}"
    if outcome.code == 2 and not outcome.refused:
        return "not one line"
    if command in ("report", "page", "draw") and "sound" not in outcome.out:
        return "stopped the others"
    if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", outcome.out + outcome.err):
        return "raw control characters"
    if len(outcome.out) + len(outcome.err) > FLOOD:
        return "flood"
    for path in (room.folder / "rep" / "report.md", room.odd / "report" / "report.md"):
        if path.is_file() and not path.is_symlink() and (fault := _in_markdown(path.read_text(encoding="utf-8"))):
            return fault
    page = room.folder / "page.html"
    return _in_page(page.read_text(encoding="utf-8")) if command == "page" and page.is_file() else HELD


def _in_markdown(text: str) -> str | None:
    """What of a payload became markup in a page of Markdown."""
    if len(text) > 5 * FLOOD:
        return "flood"
    if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
        return "raw control characters"
    inside = ""
    reader = MarkdownIt("commonmark").enable("table")
    reader.validateLink = lambda url: True  # type: ignore[method-assign]
    for token in reader.parse(text):
        for one in (token, *(token.children or ())):
            told = f"{one.content} {one.attrs}"
            if one.type.startswith(("html", "link_open", "image", "code_block", "fence")) and MARK in told:
                return "markup in report.md"
            if token.type == "inline" and inside == "heading" and token.content.startswith(MARK):
                return "markup in report.md"
        inside = "heading" if token.type == "heading_open" else ""
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for width, other, row in zip(widths, widths[1:], rows[1:], strict=False):
        if width != other and MARK in row:
            return "a row of report.md of another width"
    return None


class _Tags(html.parser.HTMLParser):
    """Looks for elements and addresses that a payload brought."""

    found = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= MARK in tag or any(MARK in f"{key}{value}" for key, value in attrs if key in ("href", "src"))


def _in_page(text: str) -> str:
    parser = _Tags(convert_charrefs=False)
    parser.feed(text)
    return "markup in the page" if parser.found else HELD


def _own_records() -> Iterator[Case]:
    """What the program itself writes tells nothing of the machine."""

    def play(files: tuple[str, ...]) -> Callable[[Arena], str]:
        def made(arena: Arena) -> str:
            sound, folder = material(arena), arena.folder("hostile")
            shutil.copy(sound.folder / "babble.txt", folder)
            words = (*TRAIN, "data.path=babble.txt", "run_dir=mine")
            names = {"USER": "hostileuser", "LOGNAME": "hostileuser", "HOSTNAME": "hostilehost"}
            outcome = arena.run(*words, cwd=folder, env=names, hook=Hook(on_a_named_machine), limit_s=120)
            if outcome.code == 0 and "report" in files[0]:
                words = ("report", "mine", "--no-plots", "--html=mine/report/page.html")
                outcome = arena.run(*words, cwd=folder, env=names, hook=Hook(on_a_named_machine))
            if outcome.code != 0:
                return outcome.trouble or f"exit code {outcome.code}"
            telling = (str(arena.scratch), "hostilehost", "hostileuser")
            told = "".join((folder / "mine" / name).read_text(encoding="utf-8") for name in files)
            shutil.rmtree(folder, ignore_errors=True)
            return "leak" if any(word in told for word in telling) else HELD

        return made

    for files in (("header.json",), ("config.yaml",), ("report/report.md", "report/page.html")):
        yield Case(f"own records: {', '.join(files)}", play(files))


def cases(draw: random.Random) -> Iterable[Case]:
    """Every folder once, and what the program's own folders tell."""
    made: dict[str, Case] = {}
    for case in folders(draw):
        if "diagnose" in case.commands:  # who reads a checkpoint
            case = replace(case, commands=(*case.commands, "fork"))
        name = case.name.encode("unicode_escape").decode()
        made.setdefault(name, Case(name, _play(case)))
    return [*made.values(), *_own_records()]


KINDS = [Kind("hostile folders", cases, sample=14)]

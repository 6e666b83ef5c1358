"""Hostile folders: run folders, checkpoints and task files of somebody who means harm, read by every command.

A case is one folder and the commands that read it, at the same time. What must not happen: anything runs that the
folder brought; a file outside of the folder is changed; a secret is told; a link is followed; a command hangs, ends in
a traceback or by its memory; markup or escape characters reach a page or the terminal; a sound run beside the odd one
goes unreported.
"""

from __future__ import annotations

import contextlib
import getpass
import gzip
import hashlib
import html.parser
import io
import json
import os
import pickle
import random
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

from .attaching import in_foreign_folder
from .harness import HELD, Arena, Case, Hook, Kind, Outcome
from .inputs import _babble, _deep

LIMIT_S = 20.0
MEMORY_BYTES = 6 << 30
FLOOD = 200_000
"""Characters that a command may print."""
SECRET = "XSECRETX7391"
MARK = "hostile"
"""Stands in every payload of markup."""

TRAIN = (
    *("train", "debug=smoke", "data=text", "data.vocab_size=300", "model.hidden_size=32", "model.num_layers=1"),
    *("model.intermediate_size=48", "training.seq_len=16", "training.steps=8", "training.checkpoint_every=4"),
    *("controller.alpha=1.05", "controller.beta=1.02", "controller.max_o=2", "stress=noise", "stress.windows=[[2,2]]"),
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
    (folder / "babble.txt").write_text(_babble())
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
    (folder / "tasks" / "wikitext2").mkdir(parents=True)
    (folder / "tasks" / "wikitext2" / "test.txt").write_text(" = Title = \n\n" + _babble()[:400] + "\n")
    arena.made["hostile"] = folder
    return made


# One case.


@dataclass(frozen=True)
class Room:
    """Where a case takes place."""

    folder: Path
    odd: Path
    """The hostile folder."""

    @property
    def outside(self) -> Path:
        """A folder that no command may change."""
        return self.folder / "outside"

    @property
    def ran(self) -> Path:
        """A file that code of the folder would make."""
        return self.folder / "CODE-RAN"

    def target(self, name: str, content: str | bytes) -> Path:
        """A file outside."""
        path = self.outside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@dataclass(frozen=True)
class Hostile:
    """A folder and who reads it."""

    name: str
    spoil: Callable[[Room], object]
    commands: tuple[str, ...] = ("report",)
    base: str = "done"
    """The sound folder that is spoilt."""
    cwd: str = "."
    links: bool = False
    """Whether to follow a link is a fault by itself."""


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
    "eval": (("eval", "ODD", "tasks=[wikitext2]", "data=TASKS", "limit=1", "block=16"), (0, 2)),
    "score": (("eval", "ODD", "tasks=[wikitext2]", "data=TASKS", "limit=1", "block=16", "out=scores.json"), (0, 2)),
    "adapt": (("eval", "HF", "adapter=odd", "tasks=[wikitext2]", "data=TASKS", "block=16", "out=scores.json"), (0, 2)),
    "tasks": (
        ("eval", "STOPPED", "tasks=[wikitext2,hellaswag]", "data=odd", "limit=1", "block=16", "out=s.json"),
        (0, 2),
    ),
    "tune": (("train", "model=pretrained", "scale=finetune_cpu", "model.checkpoint=odd", "plan=true"), (0, 2)),
    "train": (("TRAIN", "run_dir=odd"), (0, 1, 2)),
}
"""What is typed, and how it may end."""


def _words(command: str, made: Material) -> tuple[str, ...]:
    places = {name: str(made.folder / name.lower()) for name in ("SOUND", "HF", "STOPPED")}
    words: list[str] = []
    for word in COMMANDS[command][0]:
        if word == "TRAIN":
            words += made.words()
        else:
            words.append(places.get(word, word.replace("TASKS", str(made.folder / "tasks"))))
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
    before, sizes = _contents(room.outside), {path: path.lstat().st_mtime_ns for path in _files(*places)}
    past = 1_000_000_000
    for path in _files(room.outside):
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
            limit_s=LIMIT_S,
            memory_bytes=MEMORY_BYTES,
        )
    outcomes = {command: one.wait() for command, one in running.items()}
    followed = [p for p in _files(room.outside) if not p.is_symlink() and p.lstat().st_atime_ns > past]
    found = [_outcome(command, outcome, room) for command, outcome in outcomes.items()]
    told = "".join(outcome.out + outcome.err for outcome in outcomes.values())
    if room.ran.exists():
        return "executed"
    if _contents(room.outside) != before:
        return "destroyed"
    new = [path for path in _files(*places) if path.is_file() and sizes.get(path) != path.lstat().st_mtime_ns]
    if SECRET in told or any(SECRET.encode() in path.read_bytes() for path in new if not path.is_symlink()):
        return "leak"
    if case.links and followed:
        found.append("link followed")
    order = ("hang", "traceback", "stopped the others", "link followed")
    found.sort(key=lambda one: order.index(one) if one in order else len(order))
    return next((one for one in found if one != HELD), HELD)


def _named(word: str, room: Room, case: Hostile) -> str:
    """The hostile folder from where the command stands; its name may be hostile too."""
    there = next((p.name for p in room.folder.iterdir() if p.name not in ("outside", "odd")), "odd")
    there = there if not room.odd.exists() else "odd"
    if case.cwd != ".":
        return {"ODD": ".", "run_dir=odd": "run_dir=."}.get(word, word)
    return {"ODD": there}.get(word, word)


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
    for token in MarkdownIt("commonmark").enable("table").parse(text):
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


def _files(*folders: Path) -> list[Path]:
    """All that is no folder, links not followed."""
    return [Path(parent, name) for folder in folders for parent, _, files in os.walk(folder) for name in files]


def _contents(folder: Path) -> dict[str, bytes]:
    """Of every file: its kind and content."""
    found = {}
    for path in _files(folder):
        kind = stat.S_IFMT(path.lstat().st_mode)
        found[str(path.relative_to(folder))] = b"%d " % kind + (path.read_bytes() if stat.S_ISREG(kind) else b"")
    return found


# How a folder is spoilt.

HUGE = "1" + "0" * 400
RAW = {
    "missing": None,
    "null": "null",
    "a word": '"word"',
    "a list": "[1]",
    "a mapping": '{"a": 1}',
    "negative": "-1",
    "10**400": HUGE,
    "1e999": "1e999",
    "NaN": "NaN",
    "true": "true",
    "empty": '""',
    "10**19": "1" + "0" * 19,
    "deep": _deep(100_000),
    "long": '"' + "x" * 300_000 + '"',
}
"""JSON as it is written."""


def _replaced(tree: Any, path: list[str], raw: str | None) -> str:
    """`tree` as JSON, with `raw` at the path."""
    tree = json.loads(json.dumps(tree))
    place = tree
    for key in path[:-1]:
        place = place[key]
    if raw is None:
        place.pop(path[-1], None)
        return json.dumps(tree)
    place[path[-1]] = "@RAW@"
    return json.dumps(tree).replace('"@RAW@"', raw)


def _in_object(name: str, key: str, raw: str | None) -> Callable[[Room], None]:
    """A value of a JSON object."""

    def spoil(room: Room) -> None:
        file = room.odd / name
        file.write_text(_replaced(json.loads(file.read_text()), key.split("."), raw) + "\n")

    return spoil


def _in_rows(name: str, key: str, raw: str | None, row: int | None = None) -> Callable[[Room], None]:
    """A value in every row of a .jsonl file, or in that one."""

    def spoil(room: Room) -> None:
        file = room.odd / name
        lines = file.read_text().splitlines()
        for i, line in enumerate(lines):
            if row is None or i == row:
                lines[i] = _replaced(json.loads(line), key.split("."), raw)
        file.write_text("\n".join(lines) + "\n")

    return spoil


def _content(name: str, content: str | bytes | Callable[[bytes], bytes]) -> Callable[[Room], None]:
    """Another content; a function is given the old one."""

    def spoil(room: Room) -> None:
        file = room.odd / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            file.write_bytes(content(file.read_bytes() if file.exists() else b""))
        else:
            file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)

    return spoil


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Room], None]:
    """config.yaml, read, changed and written."""

    def spoil(room: Room) -> None:
        file = room.odd / "config.yaml"
        tree = yaml.safe_load(file.read_text())
        change(tree)
        file.write_text(yaml.safe_dump(tree, sort_keys=False))

    return spoil


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        *above, last = key.split(".")
        for name in above:
            tree = tree[name]
        tree[last] = value

    return change


def _yaml_line(key: str, raw: str) -> Callable[[Room], None]:
    """A key of config.yaml with YAML as it is written."""
    return _several(
        _config(_set(key, "@RAW@")), _content("config.yaml", lambda old: old.replace(b"'@RAW@'", b"@RAW@")),
        _content("config.yaml", lambda old: old.replace(b"@RAW@", raw.encode())),
    )  # fmt: skip


def _several(*spoils: Callable[[Room], object]) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        for one in spoils:
            one(room)

    return spoil


def _remove(name: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        path = room.odd / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    return spoil


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Room], None]:
    """Something else in place of a file or folder."""

    def spoil(room: Room) -> None:
        _remove(name)(room)
        (room.odd / name).parent.mkdir(parents=True, exist_ok=True)
        make(room.odd / name)

    return spoil


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def _link_out(name: str) -> Callable[[Room], None]:
    """The file itself, moved out and with a secret in it, behind a link."""

    def spoil(room: Room) -> None:
        path = room.odd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        target = room.outside / "target"
        if path.is_dir():
            shutil.move(path, target)
        else:
            target.write_bytes(_with_secret(name, path.read_bytes() if path.exists() else b""))
            path.unlink(missing_ok=True)
        path.symlink_to(target)

    return spoil


def _with_secret(name: str, content: bytes) -> bytes:
    """A content as the file's readers expect it, with the secret where they might show it."""
    if name == "config.yaml":
        return content.replace(b"arm: null", f"arm: {SECRET}".encode())
    if name.endswith("header.json"):
        return re.sub(rb'"commit": "[^"]*"', f'"commit": "{SECRET}"'.encode(), content)
    if name.endswith((".jsonl", ".parquet", ".rows", ".gz", ".npy", "distcp", ".metadata")) and content:
        return content
    if name.endswith("summary.json"):
        return content.replace(b'"reason": null', f'"reason": "{SECRET}"'.encode())
    return content or f"{SECRET}\n".encode()


def _link_to(name: str, target: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        place = Path(target) if target.startswith("/") else room.outside / target
        _instead(name, lambda path: path.symlink_to(place))(room)

    return spoil


class _Opens:
    """Unpickled it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def _evil_module(room: Room, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    code = f"open({str(room.ran)!r}, 'w').close()\nclass X:\n    pass\nclass Y(X):\n    pass\n"
    (folder / "evil.py").write_text(code)


# Kinds of folders.


def _links() -> Iterator[Hostile]:
    read = ("report", "replay", "eval")
    files = {
        "config.yaml": read,
        "header.json": read,
        "steps.jsonl": ("report",),
        "eval.jsonl": ("report",),
        "events.jsonl": ("report",),
        "faults.jsonl": ("report", "detect"),
        "ratios.parquet": ("draw", "replay"),
        "summary.json": ("report",),
        "FAILED": ("page",),
        "DONE": ("report",),
        "scores.json": ("report",),
        "scores.jsonl": ("report",),
        "ratios.rows": ("draw", "replay"),
        "steps.jsonl.gz": ("report",),
        "checkpoints": ("eval",),
        "checkpoints/step-00000008": ("eval",),
        **{f"checkpoints/step-00000008/{name}": ("eval",) for name in ("meta.json", ".metadata", "__0_0.distcp")},
    }
    for name, commands in files.items():
        away = [_remove("steps.jsonl")] if name.endswith(".gz") else []
        yield Hostile(f"link: {name} -> a secret", _several(*away, _link_out(name)), commands, links=True)
        yield Hostile(f"link: {name} -> itself", _several(*away, _link_to_self(name)), commands)
        if "/" not in name:
            yield Hostile(f"link: {name} -> /dev/zero", _several(*away, _link_to(name, "/dev/zero")), commands)
    # What a command writes.
    for name in ("report", "report/report.md", "report/custom-cpu-loss.png", "report/report.md.tmp"):
        for target in ("victim", "new"):
            commands = ("own plots",) if name.endswith("png") or name == "report" else ("own report",)
            yield Hostile(f"link: {name} -> {target}", _victim(name, target), commands)
    for name in ("scores.json", "scores.json.tmp"):
        yield from (
            Hostile(f"link: {name} -> {target}", _victim(name, target), ("eval",)) for target in ("victim", "new")
        )
    yield Hostile("link: .decisions.jsonl.writing", _victim(".decisions.jsonl.writing", "victim"), ("replay inside",))
    yield Hostile("link: decisions.jsonl", _victim("decisions.jsonl", "victim"), ("replay inside",))
    written = (
        *(".lock", ".reserve", "FAILED", "DONE", "config.yaml", "header.json", "steps.jsonl", "eval.jsonl"),
        *("events.jsonl", "faults.jsonl", "ratios.rows", "ratios.parquet", "summary.json", "checkpoints", "order"),
        *("config.yaml.tmp", "header.json.tmp", "summary.json.tmp", "ratios.parquet.tmp", "ratios.rows.tmp"),
        *("steps.jsonl.tmp", "order/epoch-0.npy", "checkpoints/.writing-step-00000008", "checkpoints/step-00000008"),
        *("checkpoints/step-00000004", "checkpoints/step-00000004/meta.json", "hf", "wandb", "report"),
    )
    for name in written:
        yield Hostile(f"continue: {name} -> a victim", _kept_victim(name), ("train",), base="stopped")
    for name in (".lock", "steps.jsonl", "config.yaml.tmp", "summary.json.tmp", "checkpoints", "FAILED", "DONE"):
        yield Hostile(f"continue: {name} -> nothing", _victim(name, "new"), ("train",), base="stopped")


def _link_to_self(name: str) -> Callable[[Room], None]:
    return _instead(name, lambda path: path.symlink_to(path.name))


def _victim(name: str, target: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        if target == "victim" and "." in Path(name).name:
            room.target("victim", "do not touch\n")
        elif target == "victim":
            room.target("victim/inside", "do not touch\n")
        _link_to(name, target)(room)

    return spoil


def _kept_victim(name: str) -> Callable[[Room], None]:
    """Behind the link lies what was in its place, or where there was nothing a file."""

    def spoil(room: Room) -> None:
        path, target = room.odd / name, room.outside / "victim"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            shutil.move(path, target)
        elif name in ("hf", "wandb", "report") or "step-" in name:
            room.target("victim/inside", "do not touch\n")
        else:
            room.target("victim", "do not touch\n")
        path.symlink_to(target)

    return spoil


def _others_in_place() -> Iterator[Hostile]:
    read = ("report", "replay", "eval")
    files = {
        "config.yaml": read,
        "header.json": read,
        "steps.jsonl": ("report",),
        "eval.jsonl": ("report",),
        "events.jsonl": ("report",),
        "faults.jsonl": ("report", "detect"),
        "ratios.parquet": ("draw", "replay"),
        "ratios.rows": ("report", "replay"),
        "summary.json": ("report",),
        "FAILED": ("report",),
        "scores.json": ("report",),
        "scores.jsonl": ("report",),
        **{f"checkpoints/step-00000008/{name}": ("eval",) for name in ("meta.json", ".metadata", "__0_0.distcp")},
    }
    makers = {"a pipe": os.mkfifo, "a folder": lambda path: path.mkdir(), "nothing in it": lambda path: path.touch()}
    for name, commands in files.items():
        for what, make in makers.items():
            yield Hostile(f"{name} is {what}", _instead(name, make), commands)
    for name in ("config.yaml", "header.json", "steps.jsonl", "ratios.parquet"):
        yield Hostile(f"{name} is a socket", _instead(name, _socket), ("report", "replay"))
    for name in ("report", "report/report.md"):
        for what, make in makers.items():
            if what != "nothing in it":
                yield Hostile(f"{name} is {what}", _instead(name, make), ("own report",))
    for name in (".lock", "steps.jsonl", "events.jsonl", "config.yaml", "header.json", "summary.json", "checkpoints"):
        for what in ("a pipe", "a folder") if name != "checkpoints" else ("a pipe",):
            yield Hostile(f"continue: {name} is {what}", _instead(name, makers[what]), ("train",), base="stopped")
    for name in ("order/epoch-0.npy", "ratios.parquet", "faults.jsonl", "FAILED", "config.yaml.tmp", "ratios.rows"):
        yield Hostile(f"continue: {name} is a pipe", _instead(name, os.mkfifo), ("train",), base="stopped")

    def immutable(room: Room) -> None:
        subprocess.run(["chattr", "+i", room.odd], capture_output=True, check=False)

    yield Hostile("an immutable folder", immutable, ("own report", "replay inside", "eval"))
    yield Hostile("continue: an immutable folder", immutable, ("train",), base="stopped")


def _configs(draw: random.Random) -> Iterator[Hostile]:
    read = ("report", "replay", "eval")
    resolvers = ("${oc.env:HOSTILE_SECRET}", "a-${oc.env:HOSTILE_SECRET}-b", "${oc.decode:${oc.env:HOSTILE_SECRET}}")
    for key in (
        "arm",
        "experiment_name",
        "scale_name",
        "controller.name",
        "paths.name",
        "data.path",
        "model.checkpoint",
    ):
        yield Hostile(f"config: {key}=${{oc.env:...}}", _config(_set(key, resolvers[0])), ("page", "replay", "eval"))
    for value in resolvers[1:]:
        yield Hostile(f"config: arm={value}", _config(_set("arm", value)), ("page", "replay"))
    for value in (
        "${arm}",
        "${nosuch}",
        "${oc.create:{a: 1}}",
        "${hydra:runtime.cwd}",
        "${oc.env:HOSTILE_SECRET",
        "${",
    ):
        yield Hostile(f"config: arm={value}", _config(_set("arm", value)), ("report", "replay"))
    for key in ("training.steps", "controller.alpha", "optim.lr", "records.evidence"):
        yield Hostile(f"config: {key}=${{...}}", _config(_set(key, "${oc.decode:'[1,2]'}")), ("report", "replay"))
    head = f"{SECRET}: ${{oc.env:HOSTILE_SECRET}}\n"
    yield Hostile(
        "config: a resolver in an unknown key", _content("config.yaml", lambda old: old + head.encode()), read
    )
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9)
    )
    bombs = {
        "an alias bomb": bomb,
        "an alias bomb of mappings": "a0: &a0 {x: y}\n"
        + "".join(f"a{i}: &a{i} {{{','.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)),
        "a bomb of merge keys": merges,
        "an anchor in itself": "a: &a [*a]\n",
        "a mapping in itself": "a: &a {b: *a}\n",
        "deep lists": f"a: {_deep(20_000)}\n",
        "deep mappings": "".join(" " * i + "a:\n" for i in range(3000)),
        "a key of 10 MB": "k" * 10_000_000 + ": 1\n",
        "200,000 keys": "".join(f"k{i}: 1\n" for i in range(200_000)),
        "a number of 400 digits": f"a: {HUGE}\n",
        "a binary": "a: !!binary aGVsbG8=\n",
        "a set": "a: !!set {x, y}\n",
        "a date": "a: 2020-01-01\n",
        "no date": "a: 2020-99-99\n",
        "a sexagesimal": "a: 1:99:99999999999999999999\n",
        "an unknown tag": "a: !nosuch x\n",
        "a key that is a list": "? [a, b]\n: 1\n",
        "a key twice": "training: {}\ntraining: {}\n",
        "a null key": "~: 1\n",
        "two documents": "---\na: 1\n",
    }
    for what, more in bombs.items():
        yield Hostile(f"config: {what}", _content("config.yaml", lambda old, more=more: old + more.encode()), read)
    yield Hostile("config: an alias bomb in use", _several(_config(_set("arm", None)), _bomb_in_use(bomb)), read)
    tags = {
        "!!python/object/apply:builtins.open": "!!python/object/apply:builtins.open [@, w]",
        "!!python/object/new": "!!python/object/new:io.FileIO [@, w]",
        "!!python/name": "!!python/name:os.system",
        "!!python/module": "!!python/module:os",
        "!!python/tuple": "!!python/tuple [1, 2]",
    }
    for what, raw in tags.items():
        yield Hostile(f"config: {what}", _tagged(raw), read)
    whole = {
        "empty": b"",
        "a list": b"[1, 2]\n",
        "a word": b"word\n",
        "null": b"null\n",
        "a number": b"7\n",
        "tabs": b"a:\n\tb: 1\n",
        "UTF-16": "a: 1\n".encode("utf-16"),
        "no UTF-8": b"a: \xff\xfe\n",
        "zeros": b"\0" * 5000,
        "only a comment": b"# a\n",
        "colours": b"a: \x1b[31mb\n",
        "unclosed": b"a: [",
        "a mapping of nothing": b"{}\n",
        "%": b"%YAML 9.9\n---\na: 1\n",
    }
    for what, content in whole.items():
        yield Hostile(f"config.yaml is {what}", _content("config.yaml", content), read)
    odd_values = {
        "training.steps": ("many", -1, 10**400, [1]),
        "training.seed": ("x", None, 10**400, {"a": 1}, 1.5),
        "training.seq_len": ("many", 10**30, [2]),
        "training.batch_size": ("many", 0),
        "training.accumulation": (None, [1]),
        "controller.max_o": ("many", None, [1], 10**400),
        "controller.alpha": ("x", -1, float("nan"), [1]),
        "controller.signal": (None, "x", [1]),
        "controller.signal.options": ("x", [1], {"nosuch": 1}),
        "controller.trigger": ("x", 10**400),
        "controller.delta": (2**40, 0),
        "paths": (None, "int4", [1]),
        "paths.low": (None, 3, ["int4"]),
        "paths.recovery": (3, "nosuch"),
        "paths.recipes": ({"mine": {"fprop": 3}}, {"<b>": {}}, [1]),
        "model": ("llama", None),
        "model.name": (None, 3, "pretrained"),
        "model.num_layers": (10**9, "two"),
        "model.hidden_size": (10**8, 3),
        "data": (None, "text"),
        "data.name": (3, "nosuch"),
        "data.cache_dir": ("/dev/zero", None, "a\0b", "x" * 5000),
        "optim": (None, [1]),
        "stress": (None, "noise"),
        "stress.windows": ("x", [[1]], [[10**400, 1]], None),
        "records": (None,),
        "records.ratios_every": ("x", 10**400),
        "experiment_name": (3, None, ["a"], {"a": 1}, "x" * 100_000),
        "arm": (3, ["a"], {"a": 1}, "x" * 100_000, "../../x"),
    }
    for key, values in odd_values.items():
        for value in draw.sample(values, min(2, len(values))):
            told = repr(value)[:30]
            yield Hostile(f"config: {key} is {told}", _config(_set(key, value)), ("report", "replay"))
    for key in ("controller", "training", "model", "paths", "experiment_name", "data", "optim", "stress"):
        yield Hostile(f"config: no {key}", _config(lambda tree, key=key: tree.pop(key)), read)


def _bomb_in_use(bomb: str) -> Callable[[Room], None]:
    def change(old: bytes) -> bytes:
        return (bomb.encode() + old).replace(b"arm: null", b"arm: *a11")

    return _content("config.yaml", change)


def _tagged(raw: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        _yaml_line("arm", raw.replace("@", str(room.ran)))(room)

    return spoil


def _code() -> Iterator[Hostile]:
    for name in ("evil:X", "evil:", "evil.sub:X", "evil:Y"):

        def spoil(room: Room, name: str = name) -> None:
            _evil_module(room, room.odd)
            _evil_module(room, room.odd / "evil" / "sub") if "." in name else None
            _config(_set("controller.signal.name", name))(room)

        for commands in (("report",), ("replay",), ("eval",), ("calibrate", "detect")):
            if name == "evil:X" or commands == ("replay",):
                yield Hostile(f"code: signal {name}, {commands[0]}", spoil, commands, cwd="odd")
    yield Hostile(
        "code: signal evil:X beside", _several(_beside, _config(_set("controller.signal.name", "evil:X"))), ("replay",)
    )
    for name in (
        "os:system",
        "subprocess:Popen",
        "../x:Y",
        "..x:Y",
        ":",
        "builtins:open",
        "x" * 3000 + ":Y",
        "gnmr:attach",
    ):
        spoil = _config(_set("controller.signal.name", name))
        yield Hostile(f"code: signal {name[:20]}", spoil, ("report", "replay"))

    def metadata(room: Room) -> None:
        for step in (room.odd / "checkpoints").glob("step-*"):
            (step / ".metadata").write_bytes(pickle.dumps(_Opens(room.ran)))
            _seal(step)

    yield Hostile("code: a pickle in .metadata", metadata, ("eval",))
    yield Hostile("code: a pickle in .metadata, continued", metadata, ("train",), base="stopped")
    yield Hostile("code: a pickle in .distcp", _pickled_items, ("eval",))
    yield Hostile("code: a pickle in .distcp, continued", _pickled_items, ("train",), base="stopped")

    def order(room: Room) -> None:
        import numpy as np

        for file in (room.odd / "order").iterdir():
            np.save(file, np.array([_Opens(room.ran)], dtype=object), allow_pickle=True)

    yield Hostile("code: a pickle in the order", order, ("train",), base="stopped")
    yield Hostile("code: sitecustomize and gnmr.py", _shadows, ("report", "replay", "eval"), cwd="odd")


def _beside(room: Room) -> None:
    _evil_module(room, room.folder)


def _shadows(room: Room) -> None:
    for name in ("sitecustomize", "usercustomize", "hydra_plugins", "conftest"):
        (room.odd / f"{name}.py").write_text(f"open({str(room.ran)!r}, 'w').close()\n")


def _seal(step: Path) -> None:
    """meta.json of a checkpoint agrees with its files again, as far as it holds checksums of each."""
    meta = json.loads((step / "meta.json").read_text())
    meta["files"] = {name: hashlib.sha256((step / name).read_bytes()).hexdigest() for name in meta["files"]}
    (step / "meta.json").write_text(json.dumps(meta, indent=1))


def _pickled_items(room: Room) -> None:
    """Every item of the checkpoint becomes an object that opens a file when it is loaded."""
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    buffer = io.BytesIO()
    torch.save(_Opens(room.ran), buffer)
    for step in (room.odd / "checkpoints").glob("step-*"):
        metadata = pickle.loads((step / ".metadata").read_bytes())
        old = (step / "__0_0.distcp").read_bytes()
        (step / "__0_0.distcp").write_bytes(old + buffer.getvalue())
        for index, place in list(metadata.storage_data.items()):
            place.offset, place.length = len(old), len(buffer.getvalue())
            metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
            del metadata.storage_data[index]
            metadata.storage_data[type(index)(index.fqn)] = place
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
        _seal(step)


def _headers(draw: random.Random) -> Iterator[Hostile]:
    fields = (
        *("gnmr", "python", "torch", "commit", "command", "machine", "machine.cpu", "machine.cores", "machine.device"),
        *("data", "data.name", "data.fingerprint", "data.train_tokens", "units", "cost", "recoverable", "paths"),
        *("checkpoint", "parameters", "trained_parameters", "arm", "experiment", "scale", "seed", "run_id"),
    )
    for key in fields:
        for kind in draw.sample(list(RAW), 2):
            commands = ("report", "replay") if key in ("units", "cost") else ("report",)
            commands += ("eval",) if key.startswith("data") else ()
            yield Hostile(f"header: {key} is {kind}", _in_object("header.json", key, RAW[kind]), commands)
    units = {
        "70,000": json.dumps([f"layers.{i}.q_proj" for i in range(70_000)]),
        "twice": json.dumps(["layers.0.self_attn.q_proj"] * 7),
        "numbers": "[1, 2, 3, 4, 5, 6, 7]",
        "lists": "[[1], [2]]",
        "nulls": "[null, null, null]",
        "none": "[]",
        "long": json.dumps(["u" * 100_000] * 7),
        "a mapping": '{"a": 1}',
    }
    for what, raw in units.items():
        yield Hostile(f"header: units are {what}", _in_object("header.json", "units", raw), ("page", "replay"))
    for what, raw in {
        "words": '["a","b"]',
        "few": "[1.0]",
        "negative": "[-1,-1,-1,-1,-1,-1,-1]",
        "NaN": "[NaN,NaN]",
    }.items():
        yield Hostile(f"header: costs are {what}", _in_object("header.json", "cost", raw), ("report", "replay"))
    yield from _whole("header.json", ("report", "replay", "eval"))


def _whole(name: str, commands: tuple[str, ...]) -> Iterator[Hostile]:
    """A JSON file as a whole."""
    contents: dict[str, str | bytes] = {
        "a list": "[]",
        "a number": "3",
        "null": "null",
        "cut": '{"a": ',
        "deep": _deep(200_000),
        "NaN": "NaN",
        "no UTF-8": b'{"a": "\xff"}',
        "a surrogate": '{"arm": "\\ud800"}',
        "deep in a key": f'{{"a": {_deep(100_000)}}}',
        "a number of 400 digits": f'{{"units": {HUGE}}}',
        "100 MB of blanks": b" " * 100_000_000,
        "digits": "9" * 500_000,
    }
    for what, content in contents.items():
        yield Hostile(f"{name} is {what}", _content(name, content), commands)
    yield Hostile(f"{name} is 16 GiB", _sparse(name), commands)


def _sparse(name: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        (room.odd / name).touch()
        os.truncate(room.odd / name, 16 << 30)

    return spoil


def _rows(draw: random.Random) -> Iterator[Hostile]:
    fields = {
        "steps.jsonl": (
            *("tokens", "loss", "lr", "grad_norm_pre_clip", "num_candidates", "num_active", "over", "statistics"),
            *("monitored", "saturation", "saved_bytes", "saved_bytes_predicted", "skipped", "nonfinite_total"),
            *("nonfinite_streak", "nonfinite_unit", "step_time_s"),
        ),
        "eval.jsonl": ("step", "tokens", "val_loss", "val_ppl"),
        "events.jsonl": ("step", "unit", "event", "cause", "risk"),
        "faults.jsonl": ("step", "end", "unit", "kind", "magnitude"),
    }
    for name, keys in fields.items():
        for key in keys:
            for kind in draw.sample(list(RAW), 2):
                commands = ("report", "detect") if name == "faults.jsonl" else ("report",)
                yield Hostile(f"{name}: {key} is {kind}", _in_rows(name, key, RAW[kind]), commands)
    for kind, raw in {**RAW, "0": "0", "1.5": "1.5", '"1"': '"1"', "2**31": str(2**31), "2**63": str(2**63)}.items():
        yield Hostile(f"steps.jsonl: step is {kind}", _in_rows("steps.jsonl", "step", raw), ("report",))
        if len(raw or "") % 2 or kind == "missing":
            spoil = _in_rows("steps.jsonl", "step", raw, 2)
            yield Hostile(f"continue: a step is {kind}", spoil, ("train",), base="stopped")
    for key, raw in (
        ("over", '{"gnmr": "x"}'), ("over", '{"gnmr": null}'), ("over", '{"gnmr": [1]}'), ("over", f'{{"a": {HUGE}}}'),
        ("statistics", '{"layers.0.max_share": "x"}'), ("statistics", '{"a": [1]}'), ("statistics", f'{{"a": {HUGE}}}'),
        ("statistics", json.dumps({f"k{i}": 1 for i in range(20_000)})), ("saturation", '{"input": 3}'),
        ("saturation", '{"input": [1]}'), ("saturation", '{"input": ["x", "y"]}'), ("monitored", '{"a": "x"}'),
        ("monitored", '{"a": null}'),
    ):  # fmt: skip
        yield Hostile(f"steps.jsonl: {key} is {raw[:30]}", _in_rows("steps.jsonl", key, raw), ("report", "page"))
    for name in ("steps.jsonl", "eval.jsonl", "events.jsonl", "faults.jsonl"):
        whole: dict[str, str | bytes | Callable[[bytes], bytes]] = {
            "a number a row": "1\n2\n", "a list a row": "[1]\n[2]\n", "empty objects": "{}\n{}\n", "binary": bytes(range(256)),
            "deep": _deep(200_000) + "\n", "deep in a row": lambda old: old + f'{{"step": {_deep(100_000)}}}\n'.encode(),
            "rows twice": lambda old: old * 2, "rows backwards": lambda old: b"".join(old.splitlines(True)[::-1]),
        }  # fmt: skip
        for what, content in whole.items():
            yield Hostile(
                f"{name} is {what}", _content(name, content), ("report", "detect") if name[0] == "f" else ("report",)
            )
    yield Hostile("steps.jsonl: a row of 16 GiB", _sparse("steps.jsonl"), ("report",))
    yield Hostile("continue: a row of 16 GiB", _sparse("steps.jsonl"), ("train",), base="stopped")
    yield Hostile("faults.jsonl: a row of 16 GiB", _sparse("faults.jsonl"), ("report", "detect"))
    yield Hostile("steps.jsonl: 300,000 rows", _content("steps.jsonl", lambda old: old * 40_000), ("report",))
    yield Hostile("events.jsonl: 800,000 rows", _content("events.jsonl", lambda old: old[:400] * 200_000), ("report",))
    packed = {
        "a bomb": gzip.compress(b"\0" * 64_000_000, 1) * 64,
        "a bomb of one row": gzip.compress(b'{"a": "') + gzip.compress(b"x" * 64_000_000, 1) * 64,
        "none": b"this is no gzip",
        "cut": gzip.compress(b'{"step": 1}\n' * 5000)[:60],
        "in itself": gzip.compress(gzip.compress(b'{"step": 1}\n')),
    }
    for what, content in packed.items():
        spoil = _several(_remove("steps.jsonl"), _content("steps.jsonl.gz", content))
        yield Hostile(f"steps.jsonl.gz is {what}", spoil, ("report",))
    spoil = _several(_remove("steps.jsonl"), _content("steps.jsonl.gz", packed["a bomb"]))
    yield Hostile("continue: steps.jsonl.gz is a bomb", spoil, ("train",), base="stopped")


def _summaries(draw: random.Random) -> Iterator[Hostile]:
    fields = (
        *("status", "reason", "steps", "tokens", "final_val_loss", "final_val_ppl", "promotion_frac", "hit_max_o_frac"),
        *("gnmr_over_frac", "over_frac", "saved_bytes_mean", "peak_memory_bytes", "saturation_total", "monitored"),
        *("nonfinite_total", "wall_time_s", "step_time_median_s", "tokens_per_s"),
    )
    for key in fields:
        for kind in draw.sample([kind for kind in RAW if kind not in ("missing", "null")], 2):
            yield Hostile(f"summary: {key} is {kind}", _in_object("summary.json", key, RAW[kind]), ("report",))
    yield from _whole("summary.json", ("report",))
    metric = '{"value": 1.0, "stderr": null}'
    task = (
        '{"metrics": {"acc": %s}, "items": 1, "items_there": 1, "shots": 0, "tokens_scored": 1, "tokens_generated": 0}'
    )
    for what, tasks in {
        "sound": f'{{"hellaswag": {task % metric}}}', "a word": '"word"', "a list": "[1]", "null tasks": '{"hellaswag": null}',
        "no metrics": '{"hellaswag": {}}', "words": '{"hellaswag": ' + task % '{"value": "x", "stderr": "y"}' + "}",
        "huge": '{"hellaswag": ' + task % f'{{"value": {HUGE}, "stderr": 1}}' + "}", "deep": f'{{"a": {_deep(100_000)}}}',
        "a list of metrics": '{"hellaswag": {"metrics": [1]}}', "many": json.dumps({f"t{i}": {"metrics": {}} for i in range(5000)}),
    }.items():  # fmt: skip
        row = f'{{"step": 8, "path": "16bit", "tasks": {tasks}}}\n'
        for name in ("scores.jsonl", "scores.json"):
            yield Hostile(f"{name}: tasks are {what}", _content(name, row), ("report",))


def _table(
    change: Callable[[Any, Any], Any], commands: tuple[str, ...] = ("report", "replay")
) -> tuple[Any, tuple[str, ...]]:
    """ratios.parquet, read, changed and written."""

    def spoil(room: Room) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = room.odd / "ratios.parquet"
        table = change(pq.read_table(file), pa)
        pq.write_table(table, file)

    return spoil, commands


def _column(name: str, values: Callable[[Any, int], Any]) -> tuple[Any, tuple[str, ...]]:
    """A column replaced."""

    def change(table: Any, pa: Any) -> Any:
        made = values(pa, table.num_rows)
        return table.set_column(table.column_names.index(name), name, made)

    return _table(change, ("report", "replay", "detect"))


def _ratios() -> Iterator[Hostile]:
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for name in ("step", "unit", "norm", "gnmr", "risk", "active"):
        found[f"no {name}"] = _table(lambda table, pa, name=name: table.drop_columns([name]))
        found[f"{name} are words"] = _column(name, lambda pa, n: pa.array(["word"] * n))
        found[f"{name} are null"] = _column(name, lambda pa, n: pa.nulls(n))
        found[f"{name} are lists"] = _column(name, lambda pa, n: pa.array([[1.0]] * n))
        found[f"{name} twice"] = _table(lambda table, pa, name=name: table.append_column(name, table[name]))
    steps: dict[str, Callable[[Any, int], Any]] = {
        "negative": lambda pa, n: pa.array([-1] * n, pa.int32()),
        "2**31 - 1": lambda pa, n: pa.array([2**31 - 1 - i for i in range(n)], pa.int32()),
        "2**63 - 1": lambda pa, n: pa.array([2**63 - 1] * n, pa.int64()),
        "one": lambda pa, n: pa.array([1] * n, pa.int32()),
        "NaN": lambda pa, n: pa.array([float("nan")] * n),
        "unsigned": lambda pa, n: pa.array([2**64 - 1] * n, pa.uint64()),
        "far apart": lambda pa, n: pa.array([1 + i * 30_000_000 for i in range(n)], pa.int32()),
    }
    for what, values in steps.items():
        found[f"steps are {what}"] = _column("step", values)
    for what, values in {
        "all the same": lambda pa, n: pa.array(["a"] * n).dictionary_encode(),
        "all others": lambda pa, n: pa.array([f"u{i}" for i in range(n)]).dictionary_encode(),
        "plain": lambda pa, n: pa.array(["a"] * n),
        "bytes": lambda pa, n: pa.array([b"\xff"] * n).dictionary_encode(),
        "numbers": lambda pa, n: pa.array(list(range(n))).dictionary_encode(),
        "empty": lambda pa, n: pa.array([""] * n).dictionary_encode(),
        "long": lambda pa, n: pa.array(["u" * 1_000_000] * n).dictionary_encode(),
    }.items():
        found[f"units are {what}"] = _column("unit", values)
    found["no rows"] = _table(lambda table, pa: table.slice(0, 0))
    found["rows twice"] = _table(lambda table, pa: pa.concat_tables([table, table]))
    found["no columns"] = _table(lambda table, pa: pa.table({}))
    found["other columns"] = _table(lambda table, pa: pa.table({"a": [1, 2], "b": ["x", "y"]}))
    found["units of metadata deep"] = _table(
        lambda table, pa: table.replace_schema_metadata({"gnmr.units": _deep(100_000)})
    )
    found["units of metadata are a number"] = _table(
        lambda table, pa: table.replace_schema_metadata({"gnmr.units": "7"})
    )
    found["no metadata"] = _table(lambda table, pa: table.replace_schema_metadata({}))
    found["70,000 units"] = _table(_many_units, ("draw", "replay", "calibrate"))
    found["5,000 columns"] = _table(_many_columns, ("draw", "replay"))
    found["Inf and NaN"] = _column("risk", lambda pa, n: pa.array([float("inf"), float("nan")] * n)[:n])
    for what, (spoil, commands) in found.items():
        yield Hostile(f"ratios: {what}", spoil, commands)
    for what, content in {
        "cut": lambda old: old[: len(old) // 2], "its end alone": lambda old: old[-200:], "no Parquet": b"PAR1" + b"x" * 100 + b"PAR1",
        "flipped": lambda old: old[:300] + bytes(255 - byte for byte in old[300:400]) + old[400:],
        "of a huge footer": lambda old: old[:-8] + b"\xff\xff\xff\x7fPAR1",
    }.items():  # fmt: skip
        yield Hostile(f"ratios.parquet is {what}", _content("ratios.parquet", content), ("draw", "replay"))
        yield Hostile(
            f"continue: ratios.parquet is {what}", _content("ratios.parquet", content), ("train",), base="stopped"
        )
    for what, (spoil, _) in list(found.items())[:36:4]:
        yield Hostile(f"continue: ratios: {what}", spoil, ("train",), base="stopped")
    yield from _streams()


def _many_units(table: Any, pa: Any) -> Any:
    number = 70_000
    columns: dict[str, Any] = {"step": pa.array([1, 100] * number, pa.int32())}
    columns["unit"] = pa.array([f"layers.{i // 2}.q_proj" for i in range(2 * number)]).dictionary_encode()
    for name in table.column_names:
        if name not in columns:
            columns[name] = pa.array([1] * 2 * number).cast(table.schema.field(name).type)
    return pa.table(columns)


def _many_columns(table: Any, pa: Any) -> Any:
    for i in range(5000):
        table = table.append_column(f"c{i}", table["norm"])
    return table


def _streams() -> Iterator[Hostile]:
    """ratios.rows of a killed run."""

    def head(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
        def made(old: bytes) -> bytes:
            first, _, rest = old.partition(b"\n")
            tree = json.loads(first)
            tree = change(tree) or tree
            return json.dumps(tree).encode() + b"\n" + rest

        return made

    def field(offset: int, value: bytes) -> Callable[[bytes], bytes]:
        """A field of every record."""

        def made(old: bytes) -> bytes:
            first, _, rest = old.partition(b"\n")
            tree = json.loads(first)
            width = 8 + 8 * (2 + len(tree.get("columns", ()))) + 5
            rows = [rest[i : i + width] for i in range(0, len(rest) - width + 1, width)]
            return first + b"\n" + b"".join(row[:offset] + value + row[offset + len(value) :] for row in rows)

        return made

    contents: dict[str, bytes | Callable[[bytes], bytes]] = {
        "without units": head(lambda tree: tree.pop("units") and None),
        "without columns": head(lambda tree: tree.pop("columns") and None),
        "with a list as head": head(lambda tree: [1]),
        "with units that are a number": head(lambda tree: tree.update(units=7)),
        "with units that are numbers": head(lambda tree: tree.update(units=[1, 2, 3])),
        "with few units": head(lambda tree: tree.update(units=tree["units"][:1])),
        "with columns that are numbers": head(lambda tree: tree.update(columns=[1, 2])),
        "with one column twice": head(lambda tree: tree.update(columns=["gnmr", "gnmr"])),
        "with a column called step": head(lambda tree: tree.update(columns=["step", "unit"])),
        "with 50,000 columns": head(lambda tree: tree.update(columns=[f"c{i}" for i in range(50_000)])),
        "with a deep head": _deep(200_000).encode() + b"\n" + b"x" * 500,
        "with an endless head": b"x" * 50_000_000,
        "with a unit out of range": field(4, (2**30).to_bytes(4, "little")),
        "with a negative unit": field(4, b"\xff\xff\xff\xff"),
        "with a huge step": field(0, (2**31 - 1).to_bytes(4, "little")),
        "with a negative step": field(0, b"\xff\xff\xff\xff"),
        "with an odd bool": field(-5, b"\x07"),
        "with zeros behind": lambda old: old + b"\0" * 5_000_000,
        "cut": lambda old: old[:-17],
    }
    for what, content in contents.items():
        yield Hostile(f"ratios.rows {what}", _content("ratios.rows", content), ("report", "replay"), base="killed")

    def endless(room: Room) -> None:
        os.truncate(room.odd / "ratios.rows", 16 << 30)

    yield Hostile("ratios.rows of 16 GiB", endless, ("report", "replay"), base="killed")


PAYLOADS = {
    "tags": "<hostile-tag>x</hostile-tag>",
    "colours": "\x1b[31mhostile\x1b[0m\x07\x08",
    "the end of a script": "</script><hostile-tag>",
    "a link": "[hostile](javascript:hostile)",
    "a title": "\x1b]0;hostile\x07",
    "an image": "![hostile](http://hostile.invalid/x.png)",
    "an address": "<http://hostile.invalid>",
    "bars": "a|b|c|hostile",
    "a heading": "x\n\n# hostile\n\ny",
    "backticks": "`a` ``` <hostile-tag> ```",
    "C1": "\x9b31mhostile",
    "mathematics": "$x_{hostile$",
    "rich": "[bold red]hostile[/bold red] [/] [link=http://hostile.invalid]x[/link]",
    "length": "hostile " * 10_000,
    "a return": "abc\rhostile",
    "a surrogate": "hostile\ud800",
}


def _markup() -> Iterator[Hostile]:
    places: dict[str, Callable[[str], Callable[[Room], None]]] = {
        "arm": lambda text: _config(_set("arm", text)),
        "experiment_name": lambda text: _config(_set("experiment_name", text)),
        "scale_name": lambda text: _config(_set("scale_name", text)),
        "paths.name": lambda text: _config(_set("paths.name", text)),
        "controller.name": lambda text: _config(_set("controller.name", text)),
        "signal.name": lambda text: _config(_set("controller.signal.name", text)),
        "commit": lambda text: _in_object("header.json", "commit", json.dumps(text)),
        "cpu": lambda text: _in_object("header.json", "machine.cpu", json.dumps(text)),
        "command": lambda text: _in_object("header.json", "command", json.dumps(text)),
        "data.name": lambda text: _in_object("header.json", "data.name", json.dumps(text)),
        "units": _renamed,
        "over": lambda text: _in_rows("steps.jsonl", "over", json.dumps({text: 1})),
        "statistics": lambda text: _in_rows("steps.jsonl", "statistics", json.dumps({f"layers.0.{text}": 1.0})),
        "monitored": lambda text: _in_rows("steps.jsonl", "monitored", json.dumps({text: 1.0})),
        "monitored, in summary": lambda text: _in_object(
            "summary.json", "monitored", json.dumps({text: {"mean": 1.0, "largest_gnmr": 1.0}})
        ),
        "saturation": lambda text: _in_object("summary.json", "saturation_total", json.dumps({text: [1, 1]})),
        "reason": lambda text: _several(_content("FAILED", text), _remove("DONE")),
        "reason, in summary": lambda text: _several(
            _in_object("summary.json", "reason", json.dumps(text)),
            _in_object("summary.json", "status", '"failed"'),
            _remove("DONE"),
        ),
        "kind of a fault": lambda text: _in_rows("faults.jsonl", "kind", json.dumps(text)),
        "a column": _recolumned,
        "a score": lambda text: _content(
            "scores.jsonl",
            json.dumps({"step": 8, "path": text, "tasks": {text: {"metrics": {text: {"value": 1.0, "stderr": None}}}}})
            + "\n",
        ),
        "the folder": _refoldered,
    }
    kinds = list(PAYLOADS)
    for i, (place, make) in enumerate(places.items()):
        chosen = dict.fromkeys(["tags", "colours", *(kinds[(i * 2 + j) % len(kinds)] for j in range(2))])
        for kind in chosen:
            text = PAYLOADS[kind]
            if place == "the folder":
                text = text.replace("/", "-")[:200].strip()
            yield Hostile(f"markup: {kind} in {place}", make(text), ("page",))
    for place in ("arm", "experiment_name", "units", "a column", "scale_name"):
        for kind in ("mathematics", "rich"):
            yield Hostile(f"markup: {kind} in {place}, drawn", places[place](PAYLOADS[kind]), ("draw", "replay"))
    for kind in ("tags", "colours", "a heading"):
        yield Hostile(f"markup: {kind} in units, replayed", _renamed(PAYLOADS[kind]), ("replay", "detect", "calibrate"))
        yield Hostile(
            f"markup: {kind} in an unreadable run", _content("config.yaml", f"a: [\n{PAYLOADS[kind]}"), ("page",)
        )


def _renamed(text: str) -> Callable[[Room], None]:
    """The first unit has another name in all files."""

    def spoil(room: Room) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        old = "layers.0.self_attn.q_proj"
        for name in ("header.json", "events.jsonl", "faults.jsonl"):
            file = room.odd / name
            file.write_text(file.read_text().replace(json.dumps(old), json.dumps(text)))
        file = room.odd / "ratios.parquet"
        table = pq.read_table(file)
        clean = text.encode("utf-8", "replace").decode()
        units = pa.array([clean if unit == old else unit for unit in table["unit"].to_pylist()]).dictionary_encode()
        pq.write_table(table.set_column(1, "unit", units), file)

    return spoil


def _recolumned(text: str) -> Callable[[Room], None]:
    clean = text.encode("utf-8", "replace").decode()
    spoil = _table(lambda table, pa: table.append_column(clean, table["norm"]))[0]
    return _several(spoil, _in_rows("steps.jsonl", "over", json.dumps({text: 1})))


def _refoldered(text: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        with contextlib.suppress(UnicodeEncodeError):
            room.odd.rename(room.folder / text)

    return spoil


def _checkpoints(draw: random.Random) -> Iterator[Hostile]:
    step, both = "checkpoints/step-00000008", ("eval",)
    for key in ("step", "owner", "units", "host", "host.counters", "host.blocks", "host.counters.step", "files"):
        for kind in draw.sample(list(RAW), 1):
            raw = RAW[kind]
            yield Hostile(f"meta.json: {key} is {kind}", _in_object(f"{step}/meta.json", key, raw), both)
            spoil = _in_object("checkpoints/step-00000004/meta.json", key, raw)
            yield Hostile(f"continue: meta.json: {key} is {kind}", spoil, ("train",), base="stopped")
    for what, raw in {
        "none": "{}", "outside": '{"../../../outside/target": "0"}', "absolute": '{"/dev/zero": "0"}', "numbers": '{"a": 3}',
        "itself": '{".": "0"}', "empty": '{"": "0"}', "a zero": '{"a\\u0000b": "0"}', "long": json.dumps({"x" * 5000: "0"}),
    }.items():  # fmt: skip
        yield Hostile(f"meta.json: files are {what}", _in_object(f"{step}/meta.json", "files", raw), both)
    for what, content in {
        "deep": _deep(200_000), "a list": "[]", "cut": '{"step": ', "digits": "9" * 500_000, "binary": bytes(range(256)),
    }.items():  # fmt: skip
        yield Hostile(f"meta.json is {what}", _content(f"{step}/meta.json", content), both)
    yield Hostile("meta.json is 16 GiB", _sparse(f"{step}/meta.json"), both)
    for name in ("step-99999999", "step-00000009"):
        spoil = _instead(f"checkpoints/{name}", lambda path: path.mkdir())
        yield Hostile(f"checkpoints: {name} is empty", spoil, both)
        yield Hostile(f"checkpoints: {name} is a file", _content(f"checkpoints/{name}", "x"), both)
    for name, content in (
        (".metadata", b"x"),
        (".metadata", b""),
        ("__0_0.distcp", b""),
        ("__0_0.distcp", b"x" * 1000),
    ):

        def spoil(room: Room, name: str = name, content: bytes = content) -> None:
            (room.odd / step / name).write_bytes(content)
            _seal(room.odd / step)

        yield Hostile(f"checkpoint: {name} of {len(content)} bytes", spoil, both)
    for what, content in {
        "a pickle of a list": pickle.dumps([1]),
        "no pickle": b"\x80\x04]q\x00.",
        "text": b"abc",
    }.items():

        def spoil(room: Room, content: bytes = content) -> None:
            (room.odd / step / ".metadata").write_bytes(content)
            _seal(room.odd / step)

        yield Hostile(f"checkpoint: .metadata is {what}", spoil, both)
    yield Hostile("checkpoints: 5,000 steps", _many_steps, both)
    for what, content in {
        "text": b"abc",
        "cut": lambda old: old[:50],
        "a huge shape": _huge_shape,
        "nothing": b"",
    }.items():
        spoil = _content("order/epoch-0.npy", content)
        yield Hostile(f"continue: the order is {what}", spoil, ("train",), base="stopped")


def _many_steps(room: Room) -> None:
    for i in range(5000):
        (room.odd / "checkpoints" / f"step-{i + 100:08d}").mkdir()


def _huge_shape(old: bytes) -> bytes:
    return re.sub(rb"\((\d+),\)", lambda found: b"(" + b"9" * len(found[1]) + b",)", old, count=1)


def _hugging_face() -> Iterator[Hostile]:
    read = ("score", "tune")

    def hub(name: str, spoil: Callable[[Room], object], commands: tuple[str, ...] = read) -> Hostile:
        return Hostile(f"hf: {name}", spoil, commands, base="hf")

    def with_code(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Room], None]:
        def spoil(room: Room) -> None:
            _evil_module(room, room.odd)
            tree = json.loads((room.odd / file).read_text()) if (room.odd / file).exists() else {}
            change(tree)
            (room.odd / file).write_text(json.dumps(tree))

        return spoil

    maps = {"AutoConfig": "evil.X", "AutoModelForCausalLM": "evil.Y", "AutoModel": "evil.Y"}
    yield hub("auto_map", with_code("config.json", lambda tree: tree.update(auto_map=maps)))
    yield hub(
        "auto_map of an unknown type",
        with_code("config.json", lambda tree: tree.update(auto_map=maps, model_type="own")),
    )
    yield hub("auto_map of a tokenizer", with_code("tokenizer_config.json", lambda tree: tree.update(auto_map={"AutoTokenizer": ["evil.X", "evil.X"]}, tokenizer_class="X")))  # fmt: skip
    yield hub("auto_map of another place", with_code("config.json", lambda tree: tree.update(auto_map={"AutoConfig": "a/b--evil.X"}, model_type="own")))  # fmt: skip
    yield hub("custom_generate", _several(with_code("generation_config.json", lambda tree: tree), _moved_code))

    def bin_alone(room: Room) -> None:
        for file in room.odd.glob("*.safetensors"):
            file.unlink()
        (room.odd / "pytorch_model.bin").write_bytes(pickle.dumps(_Opens(room.ran)))

    yield hub("pytorch_model.bin alone", bin_alone)
    yield hub("pytorch_model.bin too", _bin_too)
    yield hub("a bin in the index", _bin_in_index)
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        yield hub(f"{name} is a pipe", _instead(name, os.mkfifo))
        yield hub(f"{name} -> a secret", _several(_remove(name), lambda room, name=name: _secret_link(room, name)))
        yield hub(f"{name} is deep", _content(name, _deep(100_000)))
        yield hub(f"{name} is empty", _content(name, ""))
    for key, value in {
        "num_hidden_layers": 10**9, "hidden_size": 10**12, "vocab_size": 10**12, "num_attention_heads": 0, "model_type": "nosuch",
        "architectures": ["<b>"], "rope_parameters": "x", "torch_dtype": "nosuch", "max_position_embeddings": 10**15,
        "intermediate_size": "many", "quantization_config": {"quant_method": "nosuch"}, "hidden_act": "nosuch",
    }.items():  # fmt: skip
        yield hub(f"config.json: {key} is {str(value)[:20]}", _in_object("config.json", key, json.dumps(value)))
    yield hub("config.json is a list", _content("config.json", "[]"))
    yield hub("config.json: a number of 400 digits", _in_object("config.json", "hidden_size", HUGE))
    for what, head in {
        "a huge head": (2**60).to_bytes(8, "little"), "a head of zeros": bytes(8), "a deep head": _headed(_deep(100_000)),
        "offsets beyond": _headed('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999999999]}}'),
        "a huge shape": _headed('{"a": {"dtype": "F32", "shape": [9999999999999], "data_offsets": [0, 4]}}'),
        "other weights": _headed('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + bytes(4),
    }.items():  # fmt: skip
        yield hub(
            f"safetensors: {what}",
            _content("model.safetensors", head + b"x" * 100 if what != "other weights" else head),
        )
    index = "model.safetensors.index.json"
    for what, files in {
        "outside": "../outside/target",
        "absolute": "/dev/zero",
        "a number": 3,
        "long": "x" * 5000,
    }.items():
        tree = json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": files}})
        spoil = _several(_content(index, tree), lambda room: room.target("target", SECRET))
        yield hub(f"index: {what}", spoil)
    yield hub("index: a list", _content(index, "[]"))
    yield hub("a template", _several(_content("chat_template.jinja", "{% for i in range(10**12) %}x{% endfor %}")))
    for what, content in {
        "no object": "[]",
        "nosuch": '{"peft_type": "NOSUCH"}',
        "deep": _deep(100_000),
        "no base": "{}",
    }.items():
        spoil = _content("adapter_config.json", content)
        yield Hostile(f"adapter: {what}", spoil, ("adapt",), base="")
    yield Hostile("adapter: a pickle", _adapter_pickle, ("adapt",), base="")
    yield Hostile("adapter: a pipe", _instead("adapter_config.json", os.mkfifo), ("adapt",), base="")

    def trained_from(room: Room) -> None:
        shutil.copytree(room.folder.parent / "none", room.odd / "hf", dirs_exist_ok=True) if False else None
        (room.odd / "hf").mkdir()
        _evil_module(room, room.odd / "hf")
        (room.odd / "hf" / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": maps}))

        def change(tree: dict[str, Any]) -> None:
            tree["model"] |= {"name": "pretrained", "checkpoint": str(room.odd / "hf")}
            tree["model"]["outlier_channels"]["number"] = 0

        _config(change)(room)

    yield Hostile("hf: a run that began from code", trained_from, ("report", "eval"))


def _moved_code(room: Room) -> None:
    (room.odd / "custom_generate").mkdir()
    shutil.move(room.odd / "evil.py", room.odd / "custom_generate" / "generate.py")


def _bin_too(room: Room) -> None:
    (room.odd / "pytorch_model.bin").write_bytes(pickle.dumps(_Opens(room.ran)))


def _bin_in_index(room: Room) -> None:
    _bin_too(room)
    tree = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    (room.odd / "model.safetensors.index.json").write_text(json.dumps(tree))


def _adapter_pickle(room: Room) -> None:
    tree = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    (room.odd / "adapter_config.json").write_text(json.dumps(tree))
    (room.odd / "adapter_model.bin").write_bytes(pickle.dumps(_Opens(room.ran)))


def _secret_link(room: Room, name: str) -> None:
    (room.odd / name).symlink_to(room.target("target", f'{SECRET} = "password"\n'))


def _headed(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def _task_files() -> Iterator[Hostile]:
    row = {"activity_label": "x", "ctx_a": "A b.", "ctx_b": "c", "endings": ["a", "b", "c", "d"], "label": 0}

    def tasks(name: str, *spoils: Callable[[Room], object]) -> Hostile:
        sound = _several(
            _content("wikitext2/test.txt", " = Title = \n\nabc abd abe\n"), _content("hellaswag/validation.jsonl", json.dumps(row) + "\n")
        )  # fmt: skip
        return Hostile(f"tasks: {name}", _several(sound, *spoils), ("tasks",), base="")

    def functions(room: Room) -> None:
        for folder in (room.odd, room.odd / "wikitext2", room.odd / "hellaswag"):
            _evil_module(room, folder)
            for name in ("wikitext", "hellaswag", "test", "validation"):
                text = f"task: {name}\ndataset_path: json\nprocess_docs: !function evil.X\ninclude: {name}.yaml\n"
                (folder / f"{name}.yaml").write_text(text)

    yield tasks("a YAML file with !function", functions)
    yield tasks(
        "a dataset script",
        lambda room: (room.odd / "hellaswag" / "hellaswag.py").write_text(f"open({str(room.ran)!r}, 'w')"),
    )
    yield tasks(
        "test.txt -> a secret",
        _several(_remove("wikitext2/test.txt"), lambda room: _secret_link(room, "wikitext2/test.txt")),
    )
    yield tasks("validation.jsonl -> a secret", _remove("hellaswag/validation.jsonl"), lambda room: _secret_link(room, "hellaswag/validation.jsonl"))  # fmt: skip
    yield tasks("a pipe", _instead("wikitext2/test.txt", os.mkfifo))
    yield tasks("a pipe of rows", _instead("hellaswag/validation.jsonl", os.mkfifo))
    yield tasks("deep rows", _content("hellaswag/validation.jsonl", f'{{"ctx": {_deep(200_000)}}}\n'))
    yield tasks("colours", _content("hellaswag/validation.jsonl", '{"\\u001b[31mhostile": 1}\n'))
    yield tasks(
        "colours in a value", _content("hellaswag/validation.jsonl", json.dumps(row | {"label": "\x1b[31m"}) + "\n")
    )
    yield tasks(
        "Parquet that is none",
        _remove("hellaswag/validation.jsonl"),
        _content("hellaswag/validation.parquet", b"PAR1xPAR1"),
    )
    yield tasks("a template in a row", _content("hellaswag/validation.jsonl", json.dumps(row | {"ctx_a": "{{ 1/0 }} {% for i in range(10**12) %}"}) + "\n"))  # fmt: skip
    yield tasks("a huge number", _content("hellaswag/validation.jsonl", json.dumps(row)[:-2] + f"{HUGE}}}\n"))


def _own_records() -> Iterator[Case]:
    """What the program itself writes tells nothing of the machine."""

    def play(files: tuple[str, ...]) -> Callable[[Arena], str]:
        def made(arena: Arena) -> str:
            sound, folder = material(arena), arena.folder("hostile")
            shutil.copy(sound.folder / "babble.txt", folder)
            words = (*TRAIN, "data.path=babble.txt", "run_dir=mine")
            outcome = arena.run(*words, cwd=folder, env={"USER": "hostileuser", "HOSTNAME": "hostilehost"}, limit_s=120)
            if outcome.code == 0 and "report" in files[0]:
                outcome = arena.run("report", "mine", "--no-plots", "--html=mine/report/page.html", cwd=folder)
            if outcome.code != 0:
                return outcome.trouble or f"exit code {outcome.code}"
            telling = [str(arena.scratch), socket.gethostname(), "hostileuser", "hostilehost"]
            user = getpass.getuser()
            telling += [f"/{user}/", f"@{user}"] if user else []
            told = "".join((folder / "mine" / name).read_text(encoding="utf-8") for name in files)
            shutil.rmtree(folder, ignore_errors=True)
            return "leak" if any(word in told for word in telling) else HELD

        return made

    for files in (("header.json",), ("config.yaml",), ("report/report.md", "report/page.html")):
        yield Case(f"own records: {', '.join(files)}", play(files))


def folders(draw: random.Random) -> list[Hostile]:
    """All hostile folders."""
    return [
        *_links(), *_others_in_place(), *_configs(draw), *_code(), *_headers(draw), *_rows(draw), *_summaries(draw), *_ratios(),
        *_markup(), *_checkpoints(draw), *_hugging_face(), *_task_files(),
    ]  # fmt: skip


def cases(draw: random.Random) -> Iterable[Case]:
    """Every folder once, and what the program's own folders tell."""
    made: dict[str, Case] = {}
    for case in folders(draw):
        name = case.name.encode("unicode_escape").decode()
        made.setdefault(name, Case(name, _play(case)))
    return [*made.values(), *_own_records()]


KINDS = [Kind("hostile folders", cases, sample=60)]

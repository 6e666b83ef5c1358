"""Attacks on what a run has written: bits flipped, files cut, emptied, exchanged, edited.

An interrupted run is damaged and continued, a finished one damaged and read. Either gives the numbers that it would
have given, or says that it does not.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from .harness import HELD, Arena, Case, Hook, Kind, Outcome, digest, ended, marked
from .kills import at_row, one_line, train, undisturbed

Damage = Callable[[Path, random.Random], None]
"""Damages one file."""

_MARK = re.compile(
    r"damage|incomplete|corrupt|left out|lost|missing|warning|checksum|changed|not whole|cannot be read|failed|"
    r"interrupted|unfinished"
)
_SAID = re.compile(r"step-0*6\b|checkpoint of step 6|damage|corrupt|fall(s|ing)? back|fell back")


def flip(file: Path, draw: random.Random) -> None:
    """One random bit."""
    data = bytearray(file.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def digit(file: Path, draw: random.Random) -> None:
    """One random digit of a text becomes another one: it stays well-formed."""
    data = bytearray(file.read_bytes())
    places = [i for i, byte in enumerate(data) if chr(byte) in "12345678"]
    if places:
        data[draw.choice(places)] += 1
    file.write_bytes(data)


def halve(file: Path, _draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(1, file.stat().st_size)])


def empty(file: Path, _draw: random.Random) -> None:
    file.write_bytes(b"")


def zero(file: Path, draw: random.Random) -> None:
    """Zeros in its second half, as after a crash of the machine."""
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 2] + bytes(size - size // 2))


def extend(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes() + draw.randbytes(80))


def repeat(file: Path, _draw: random.Random) -> None:
    file.write_bytes(file.read_bytes() * 2)


def remove(file: Path, _draw: random.Random) -> None:
    file.unlink()


def folder(file: Path, _draw: random.Random) -> None:
    """A folder of its name."""
    file.unlink()
    file.mkdir()


def utf16(file: Path, _draw: random.Random) -> None:
    file.write_bytes(file.read_bytes().decode("latin-1").encode("utf-16"))


def with_mark(file: Path, _draw: random.Random) -> None:
    """A byte order mark before it, as some editors leave."""
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def binary(file: Path, draw: random.Random) -> None:
    file.write_bytes(draw.randbytes(file.stat().st_size))


ANY: list[Damage] = [flip, flip, flip, halve, cut, empty, zero, extend, repeat, remove, folder]
TEXT: list[Damage] = [*ANY, digit, digit, utf16, with_mark, binary]


def in_rows(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Damage:
    """A damage that is done to the rows of a .jsonl file."""

    def damage(file: Path, draw: random.Random) -> None:
        file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True), draw)))

    damage.__name__ = change.__name__
    return damage


def drop_in_the_middle(lines: list[bytes], _draw: random.Random) -> list[bytes]:
    return lines[: len(lines) // 2 - 1] + lines[len(lines) // 2 :]


def drop_the_first(lines: list[bytes], _draw: random.Random) -> list[bytes]:
    return lines[1:]


def double_a_row(lines: list[bytes], draw: random.Random) -> list[bytes]:
    at = draw.randrange(len(lines))
    return [*lines[: at + 1], *lines[at:]]


def exchange_rows(lines: list[bytes], _draw: random.Random) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]] if len(lines) > 1 else lines


def row_without_step(lines: list[bytes], _draw: random.Random) -> list[bytes]:
    return [re.sub(rb'"step": \d+, ', b"", lines[0]), *lines[1:]]


def odd_row(lines: list[bytes], draw: random.Random) -> list[bytes]:
    odd = [b"{}\n", b"[]\n", b"null\n", b'{"step": "x"}\n', b'{"step": 1e400}\n', b"[" * 5000 + b"\n", b"\n"]
    return [draw.choice(odd), *lines]


def large_step(lines: list[bytes], _draw: random.Random) -> list[bytes]:
    return [re.sub(rb'"step": \d+', b'"step": 9223372036854775808', lines[0]), *lines[1:]]


ROWS: list[Damage] = [
    in_rows(change)
    for change in (
        *(
            drop_in_the_middle,
            drop_the_first,
            double_a_row,
            exchange_rows,
            row_without_step,
            odd_row,
            odd_row,
            large_step,
        ),
    )
]


def in_json(*keys: str, value: Any = None) -> Damage:
    """Sets a value of a JSON file by its keys; None removes it."""

    def damage(file: Path, _draw: random.Random) -> None:
        tree = json.loads(file.read_text())
        inner = tree
        for key in keys[:-1]:
            inner = inner[key]
        if value is None:
            inner.pop(keys[-1], None)
        else:
            inner[keys[-1]] = value
        file.write_text(json.dumps(tree, indent=1))

    damage.__name__ = f"{'.'.join(keys)} {'removed' if value is None else f'= {value}'}"
    return damage


# An interrupted run.


def interrupted(arena: Arena) -> Path:
    """A run that was killed after step 7 or 8, with checkpoints of steps 3 and 6; made once."""
    while "interrupted" not in arena.made:
        running, made = at_row(arena, 7)
        running.kill()
        running.wait()
        saved = sorted(path.name for path in (made / "checkpoints").iterdir())
        if saved == ["step-00000003", "step-00000006"]:
            arena.made["interrupted"] = made
    found: Path = arena.made["interrupted"]
    return found


def other_seed(arena: Arena) -> Path:
    """The same run of another seed; made once."""
    if "other seed" not in arena.made:
        made = arena.folder("other") / "run"
        outcome = train(arena, made, "training.seed=1")
        if outcome.code != 0:
            raise RuntimeError(outcome.err)
        arena.made["other seed"] = made
    found: Path = arena.made["other seed"]
    return found


def copy_of(arena: Arena, source: Path) -> Path:
    target = arena.folder("damaged") / "run"
    shutil.copytree(source, target)
    return target


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def file_of(run: Path, name: str) -> Path:
    """The file that a case means; NEWEST/LARGEST is that of the newest checkpoint."""
    if not name.startswith("NEWEST/"):
        return run / name
    files = sorted(newest(run).iterdir(), key=lambda path: path.stat().st_size)
    return files[-1] if name.endswith("/LARGEST") else newest(run) / name.removeprefix("NEWEST/")


def judged(arena: Arena, run: Path, outcome: Outcome) -> str:
    """The verdict on a run that was damaged and continued."""
    if outcome.trouble:
        return outcome.trouble
    if outcome.code != 0:
        return HELD if one_line(outcome) and ended(run) != "DONE" else "wrong exit code"
    if ended(run) != "DONE":
        return "wrong exit code"
    return HELD if marked(run) or digest(run) == undisturbed(arena).digest else "false final"


def record_damaged(name: str, damage: Damage, seed: float, arena: Arena) -> str:
    run = copy_of(arena, interrupted(arena))
    damage(file_of(run, name), random.Random(seed))
    return judged(arena, run, train(arena, run))


def checkpoint_damaged(name: str, damage: Damage, seed: float, arena: Arena) -> str:
    """The run goes on from the checkpoint before, says so, and ends with the same numbers."""
    run = copy_of(arena, interrupted(arena))
    file = file_of(run, name)
    before = file.read_bytes()
    damage(file, random.Random(seed))
    same = file.is_file() and file.read_bytes() == before
    outcome = train(arena, run)
    verdict = judged(arena, run, outcome)
    if verdict != HELD:
        return verdict
    if outcome.code != 0 or digest(run) != undisturbed(arena).digest:
        return "not continued"
    said = same or any(_SAID.search(line) and "continuing after step 6" not in line for line in _lines(outcome))
    return HELD if said else "silent"


def _lines(outcome: Outcome) -> list[str]:
    return (outcome.out + outcome.err).splitlines()


def exchanged(one: str, other: str, arena: Arena) -> str:
    """Two files, or two checkpoints, change places."""
    run = copy_of(arena, interrupted(arena))
    aside = run / "aside"
    (run / one).rename(aside)
    (run / other).rename(run / one)
    aside.rename(run / other)
    return judged(arena, run, train(arena, run))


def foreign(name: str, arena: Arena) -> str:
    """A file of the same run of another seed."""
    run = copy_of(arena, interrupted(arena))
    shutil.copy(other_seed(arena) / name, run / name)
    return judged(arena, run, train(arena, run))


def all_checkpoints(damage: Damage, seed: float, arena: Arena) -> str:
    """Every file of every checkpoint."""
    run, draw = copy_of(arena, interrupted(arena)), random.Random(seed)
    for file in [path for path in (run / "checkpoints").rglob("*") if path.is_file()]:
        damage(file, draw)
    return judged(arena, run, train(arena, run))


def packed(at: str, value: int) -> Damage:
    """A row of ratios.rows with another step or unit (the first two int32 of a row)."""

    def damage(file: Path, _draw: random.Random) -> None:
        data = file.read_bytes()
        start = data.index(b"\n") + 1
        place = start + (4 if at == "unit" else 0)
        file.write_bytes(data[:place] + struct.pack("<i", value) + data[place + 4 :])

    damage.__name__ = f"{at} {value} in the first row"
    return damage


def drop_bytes(file: Path, _draw: random.Random) -> None:
    """64 bytes in its middle are gone."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + data[len(data) // 2 + 64 :])


def other_head(file: Path, _draw: random.Random) -> None:
    """The first line names other columns."""
    head, _, rest = file.read_bytes().partition(b"\n")
    file.write_bytes(head.replace(b"gnmr", b"gmnr") + b"\n" + rest)


def other_order(file: Path, draw: random.Random) -> None:
    """The same blocks in another order: a file that is sound in itself."""
    import numpy as np

    order = np.load(file)
    np.save(file, np.random.default_rng(draw.randrange(2**32)).permutation(order))


def checkpoint_cases(draw: random.Random) -> Iterator[Case]:
    def case(name: str, damage: Damage) -> Case:
        return Case(f"{name}: {damage.__name__}", partial(checkpoint_damaged, name, damage, draw.random()))

    for name in ("NEWEST/LARGEST", "NEWEST/.metadata"):
        for damage in (*ANY, flip, flip, binary):
            yield case(name, damage)
    for damage in TEXT:
        yield case("NEWEST/meta.json", damage)
    for edit in (
        in_json("step", value=3),
        in_json("step", value=20),
        in_json("files", value={}),
        in_json("files"),
        in_json("host", "counters", "step", value=4),
        in_json("host", "counters", "tokens", value=7),
        in_json("host", "counters", "nonfinite_total", value=3),
        in_json("host", "blocks", "position", value=2),
        in_json("host", "blocks", "epoch", value=1),
        in_json("host", "blocks", "position", value=-1),
        in_json("host", "counters"),
        in_json("host", value=[]),
        in_json("units", value=["x"]),
        in_json("owner", value="somebody else"),
    ):
        yield case("NEWEST/meta.json", edit)


def record_cases(draw: random.Random) -> Iterator[Case]:
    def case(name: str, damage: Damage) -> Case:
        return Case(f"{name}: {damage.__name__}", partial(record_damaged, name, damage, draw.random()))

    for name in ("steps.jsonl", "eval.jsonl", "events.jsonl"):
        for damage in (*TEXT, *ROWS):
            yield case(name, damage)
    rows = [packed("unit", 7), packed("unit", -1), packed("unit", 2**31 - 1), packed("unit", 1), packed("step", 99)]
    for damage in (*ANY, flip, flip, flip, binary, drop_bytes, other_head, *rows, packed("step", -5)):
        yield case("ratios.rows", damage)
    for damage in (*ANY, other_order, binary):
        yield case("order/epoch-0.npy", damage)
    for name in ("config.yaml", "header.json"):
        for damage in TEXT:
            yield case(name, damage)
    for pair in (
        ("steps.jsonl", "eval.jsonl"),
        ("eval.jsonl", "events.jsonl"),
        ("steps.jsonl", "ratios.rows"),
        ("header.json", "config.yaml"),
        ("checkpoints/step-00000003", "checkpoints/step-00000006"),
    ):
        yield Case(f"{pair[0]} and {pair[1]} exchanged", partial(exchanged, *pair))
    for name in ("steps.jsonl", "eval.jsonl", "events.jsonl", "order/epoch-0.npy", "config.yaml"):
        yield Case(f"{name} of another seed", partial(foreign, name))
    for damage in (flip, halve, empty, remove):
        yield Case(f"all checkpoints: {damage.__name__}", partial(all_checkpoints, damage, draw.random()))


# A finished run.


def told(arena: Arena, run: Path) -> tuple[list[Outcome], list[str], list[str]]:
    """The outcomes of report and replay on a run, what the report says of it, and the decisions of the replay."""
    there = {"cwd": run.parent}
    outcomes = [
        arena.run("report", "run", "out=tables", **there),
        arena.run("replay", "run", "alpha=1.2", "beta=1.1", "max_o=2", "out=decisions", **there),
    ]
    report, decisions = run.parent / "tables" / "report.md", run.parent / "decisions"
    tables = report.read_text(errors="replace") if report.exists() else ""
    replayed = outcomes[1].out + (decisions.read_text(errors="replace") if decisions.exists() else "")
    return outcomes, tables.splitlines(), replayed.splitlines()


def whole_telling(arena: Arena) -> tuple[list[Outcome], list[str], list[str]]:
    """Of the undamaged run."""
    if "telling" not in arena.made:
        arena.made["telling"] = told(arena, copy_of(arena, undisturbed(arena).folder))
    found: tuple[list[Outcome], list[str], list[str]] = arena.made["telling"]
    return found


def finished_damaged(name: str, damage: Damage, seed: float, arena: Arena) -> str:
    run = copy_of(arena, undisturbed(arena).folder)
    damage(run / name, random.Random(seed))
    return _telling_judged(arena, run)


def _telling_judged(arena: Arena, run: Path) -> str:
    before, (outcomes, tables, replayed) = whole_telling(arena), told(arena, run)
    for i, (was, now) in enumerate(((before[1], tables), (before[2], replayed))):
        outcome = outcomes[i]
        if outcome.trouble:
            return outcome.trouble
        if outcome.code != 0:
            if outcome.refused:
                continue
            return "wrong exit code"
        new = [line for line in [*now, *_lines(outcome)] if line not in {*was, *_lines(before[0][i])}]
        if _figures(now) - _figures(was) and not any(_MARK.search(line.lower()) for line in new):
            return "false final"
    outcome = train(arena, run)
    if outcome.trouble:
        return outcome.trouble
    return HELD if outcome.code == 0 or one_line(outcome) else "wrong exit code"


def _figures(lines: list[str]) -> Counter[str]:
    """The numbers of a text, up to the table of the runs themselves: that tells of machine, command and commit."""
    text = "\n".join(lines).partition("### Runs")[0]
    return Counter(re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", text))


def foreign_finished(name: str, arena: Arena) -> str:
    run = copy_of(arena, undisturbed(arena).folder)
    shutil.copy(other_seed(arena) / name, run / name)
    return _telling_judged(arena, run)


def finished_cases(draw: random.Random) -> Iterator[Case]:
    def case(name: str, damage: Damage) -> Case:
        return Case(f"{name}: {damage.__name__}", partial(finished_damaged, name, damage, draw.random()))

    for name in ("steps.jsonl", "eval.jsonl", "events.jsonl", "summary.json", "config.yaml", "header.json"):
        for damage in TEXT:
            yield case(name, damage)
    for name in ("steps.jsonl", "eval.jsonl"):
        for damage in ROWS:
            yield case(name, damage)
    for damage in (*ANY, binary, drop_bytes):
        yield case("ratios.parquet", damage)
    for value in ("x", [1], {"a": 1}, 1e308, -1):
        yield case("summary.json", in_json("final_val_ppl", value=value))
    yield case("summary.json", in_json("steps", value=9))
    yield case("DONE", remove)
    for name in ("steps.jsonl", "eval.jsonl", "summary.json", "ratios.parquet"):
        yield Case(f"{name} of another seed", partial(foreign_finished, name))


# The file of ratios, bit by bit.


def read_ratios(run: str) -> None:
    """Reads the ratios as report and replay do and prints their digest; ends with 2 where they are refused."""
    import hashlib

    import pyarrow as pa

    from gnmr.errors import UserError
    from gnmr.records import reader

    try:
        with suppress(ImportError):  # an earlier version has none
            from gnmr.records.ledger import check_records

            check_records(Path(run))
        table = reader.read_ratios(Path(run))
        columns = [(name, table[name].to_pylist()) for name in table.column_names]
    except (UserError, pa.ArrowException, OSError) as error:  # which the commands say in a line
        print(f"refused: {str(error).splitlines()[0]}")
        raise SystemExit(2) from error
    print(hashlib.sha256(repr(columns).encode()).hexdigest())
    raise SystemExit(0)


def many_ratios(arena: Arena) -> tuple[Path, str]:
    """A run with so many of them that most of the file is numbers, without its checkpoints, and their digest."""
    if "ratios" not in arena.made:
        made = arena.folder("ratios") / "run"
        train(arena, made, "training.steps=80", "training.checkpoint_every=80")
        shutil.rmtree(made / "checkpoints")
        arena.made["ratios"] = made, arena.run(hook=Hook(read_ratios, str(made))).out
    found: tuple[Path, str] = arena.made["ratios"]
    return found


def flipped(seed: float, by_replay: bool, arena: Arena) -> str:
    whole, want = many_ratios(arena)
    run = copy_of(arena, whole)
    flip(run / "ratios.parquet", random.Random(seed))
    outcome = arena.run(hook=Hook(read_ratios, str(run)))
    if outcome.trouble:
        return outcome.trouble
    if outcome.code == 0 and outcome.out != want:
        return "read silently"
    if by_replay:
        replayed = arena.run("replay", "run", "alpha=1.2", cwd=run.parent)
        return replayed.trouble or (HELD if replayed.code == 0 or replayed.refused else "wrong exit code")
    return HELD


def flip_cases(draw: random.Random) -> Iterator[Case]:
    for i in range(400):
        yield Case(f"flip {i}", partial(flipped, draw.random(), i % 10 == 0))


KINDS = [
    Kind("damaged checkpoints", checkpoint_cases, 10),
    Kind("damaged records", record_cases, 14),
    Kind("damaged finished runs", finished_cases, 14),
    Kind("flips in ratios.parquet", flip_cases, 30),
]

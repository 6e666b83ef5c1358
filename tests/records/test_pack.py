"""Packs: what goes in comes out, and a damaged or hostile pack is one line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnmr.cli import main
from gnmr.errors import UserError
from gnmr.lab.records import pack
from gnmr.lab.records.pack import ABOUT, Unpacked, is_pack, unpacked, write_pack

FILES = ["config.yaml", "header.json", "eval.jsonl", "units.arrows", "DONE", "scores-w8a16.json", "records.sha256"]
part = st.text("abcdefghij-_.=,äß ", min_size=1, max_size=12).filter(lambda name: not name.startswith("."))
runs = st.dictionaries(part, st.dictionaries(st.sampled_from(FILES[:-1]), st.binary(max_size=300)), max_size=5)
slow = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def about(pack: Path) -> dict[str, Any]:
    """What a pack says of itself."""
    told: dict[str, Any] = json.loads(pq.read_schema(pack).metadata[ABOUT])
    return told


def packed(folder: Path, runs: dict[str, dict[str, bytes]], **more: Any) -> bytes:
    """A pack of runs with these files."""
    for run, files in runs.items():
        (folder / run).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / run / name).write_bytes(content)
    file = io.BytesIO()
    write_pack(file, {run: folder / run for run in runs}, **more)
    return file.getvalue()


def content(path: Path) -> dict[str, dict[str, bytes]]:
    """Every run of a pack, by its name in it."""
    with unpacked([path]) as found:
        folders = [Path(os.path.relpath(found.told(folder), path)) for folder in found.paths]
        return {
            str(name): {file.name: file.read_bytes() for file in folder.iterdir()}
            for name, folder in zip(folders, found.paths, strict=True)
        }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A pack of two runs."""
    path = tmp_path / "two.parquet"
    files = {"config.yaml": b"a: 1\n", "eval.jsonl": b'{"step": 1}\n' * 40, "DONE": b""}
    path.write_bytes(packed(tmp_path, {"one": files, "deep/two": files | {"units.arrows": b"ratios"}}))
    return path


@slow
@given(runs)
def test_what_is_packed_is_read_again_and_gives_the_same_bytes_twice(
    tmp_path_factory: pytest.TempPathFactory, runs: dict[str, dict[str, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    path = folder / "some.parquet"
    path.write_bytes(packed(folder, runs))
    assert packed(folder, runs) == path.read_bytes()
    assert is_pack(path)
    assert content(path) == {run: files for run, files in runs.items() if files}


@slow
@given(st.data())
def test_a_flipped_bit_is_one_line_or_changes_nothing(made: Path, data: st.DataObject) -> None:
    good, whole = content(made), made.read_bytes()
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    made.write_bytes(changed)
    try:
        if is_pack(made):
            assert content(made) == good
    except UserError as error:
        assert str(made) in str(error) and "\n" not in str(error)
    finally:
        made.write_bytes(whole)


@slow
@given(st.data())
def test_a_pack_that_is_cut_is_none_or_one_line(made: Path, data: st.DataObject) -> None:
    whole = made.read_bytes()
    made.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert not is_pack(made)
    made.write_bytes(whole)


@pytest.mark.parametrize("without", ["config.yaml", "nothing.json", "other/*", "*"])
def test_what_cannot_be_left_out(tmp_path: Path, without: str) -> None:
    with pytest.raises(UserError, match=r"left out|fits no file"):
        packed(tmp_path, {"run": {"config.yaml": b"", "DONE": b""}}, without=[without])


def test_parts_of_a_pack(made: Path) -> None:
    with unpacked([made / "deep", made / "o*", made, made.parent]) as found:
        names = [found.told(path) for path in found.paths]
        kept = found.paths[0]
    one, two = f"{made}/one", f"{made}/deep/two"
    assert names == [two, one, two, one, str(made.parent)]
    assert not kept.exists()
    with pytest.raises(UserError, match=r"three: no such run in .*two.parquet"), unpacked([made / "three"]):
        pass


def test_errors_name_the_pack(made: Path) -> None:
    with pytest.raises(UserError, match=rf"^{made}/one: bad$"), unpacked([made / "one"]) as found:
        raise UserError(f"{found.paths[0]}: bad")


def hostile(path: Path, rows: list[tuple[str, str, bytes, bytes | None]], **changes: Any) -> None:
    """A pack of any rows, which says that it holds them."""
    table = pa.Table.from_pylist(
        [dict(zip(("run", "file", "sha256", "content"), row, strict=True)) for row in rows], pack.SCHEMA
    )
    told = {"version": 1, "files": len(rows), "runs": len({row[0] for row in rows})} | changes
    pq.write_table(table.replace_schema_metadata({b"gnmr.pack": json.dumps(told).encode()}), path, compression="zstd")


def row(run: str, name: str = "config.yaml", content: bytes = b"a") -> tuple[str, str, bytes, bytes]:
    return run, name, hashlib.sha256(content).digest(), content


@pytest.mark.parametrize(
    "run", ["../out", "/tmp/out", "a/../../out", ".hidden", "", "a//b", "x" * 400, "a\nb", "a/" * 9]
)
def test_a_run_s_name_leads_nowhere_else(tmp_path: Path, run: str) -> None:
    path = tmp_path / "bad.parquet"
    hostile(path, [row(run)])
    with pytest.raises(UserError, match=r"bad.parquet: cannot be read"), unpacked([path]):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad.parquet"]


@pytest.mark.parametrize(
    "rows",
    [
        [row("a", "evil.py")],
        [row("a", "../config.yaml")],
        [row("a", "left_out.sha256")],
        [row("a"), row("a")],
        [row("a"), row("a/config.yaml")],
        [(*row("a")[:3], b"other")],
    ],
    ids=["unknown", "outside", "ours", "twice", "file as folder", "digest"],
)
def test_rows_that_no_pack_has(tmp_path: Path, rows: list[Any]) -> None:
    path = tmp_path / "bad.parquet"
    hostile(path, rows)
    with pytest.raises(UserError, match=r"^.*bad.parquet: "), unpacked([path]):
        pass


@pytest.mark.parametrize("changes", [{"files": 7}, {"runs": 7}, {"version": 2}])
def test_a_pack_that_says_what_it_is_not(tmp_path: Path, changes: dict[str, int]) -> None:
    path = tmp_path / "bad.parquet"
    hostile(path, [row("a")], **changes)
    with pytest.raises(UserError, match=r"bad.parquet: cannot be read"), unpacked([path]):
        pass


def test_a_pack_that_expands_without_end(tmp_path: Path) -> None:
    """Half a gigabyte of files of two megabytes each, stored as one of a few bytes."""
    path = tmp_path / "bad.parquet"
    same = bytes(1 << 21)
    hostile(path, [row("a", name, same) for name in sorted(pack._FILES - {"ratios.parquet"})])
    assert path.stat().st_size < 1 << 16
    with pytest.raises(UserError, match=r"expands? without end|bytes in"), unpacked([path]):
        pass


def test_other_tables_are_no_packs(tmp_path: Path) -> None:
    norms = tmp_path / "norms.parquet"
    pq.write_table(pa.table({"step": [1], "unit": ["a"], "norm": [1.0]}), norms)
    assert not is_pack(norms)
    with unpacked([norms]) as found:
        assert found.paths == [norms]
    told = {b"gnmr.pack": b'{"version": 1}'}
    pq.write_table(pa.table({"step": [1]}).replace_schema_metadata(told), norms)
    with pytest.raises(UserError, match="not a pack that this version"), unpacked([norms]):
        pass


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"config.yaml": b"a: 1\n", "header.json": b"{}", "steps.jsonl": b"", "DONE": b""}
    packed(tmp_path, {"runs/x/one": files, "runs/y/two": files})
    runs, out = tmp_path / "runs", tmp_path / "all.parquet"
    assert main(["pack", str(runs), f"out={out}", "without=steps.jsonl", "--when", "2026-11-23"]) == 0
    assert re.fullmatch(r".*all.parquet: 2 runs, [\d,]+ bytes, 2 files left out\n", capsys.readouterr().out)
    assert set(content(out)) == {"x/one", "y/two"}
    assert about(out)["about"]["when"] == "2026-11-23"
    assert main(["pack", str(runs / "x" / "one"), "--out", str(out)]) == 0
    assert set(content(out)) == {"one"}
    assert main(["pack", str(runs), "out=all.csv"]) == 2
    assert main(["pack", str(runs), f"out={out}", "without=nothing"]) == 2
    assert set(content(out)) == {"one"}, "what was there stays"
    capsys.readouterr()


def test_a_report_of_a_pack_is_that_of_the_folders(
    tmp_path: Path, text_file: Path, tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from gnmr.lab.train.run import run as train

    runs, out = tmp_path / "some", tmp_path / "some.parquet"
    for seed in (0, 1):
        train(tiny(f"training.seed={seed}", f"runs_dir={tmp_path}", "experiment_name=some"), lambda _: None)
    assert main(["pack", str(runs), f"out={out}"]) == 0
    capsys.readouterr()
    assert main(["report", str(runs), "--no-plots", f"out={tmp_path / 'a'}"]) == 0
    folders = capsys.readouterr().out
    assert main(["report", str(out), "--no-plots", f"out={tmp_path / 'b'}"]) == 0
    assert capsys.readouterr().out == folders.replace(f"{tmp_path}/a/", f"{tmp_path}/b/")
    assert (tmp_path / "a" / "report.md").read_text() == (tmp_path / "b" / "report.md").read_text()


def test_every_pack_is_told_by_its_own_name(tmp_path: Path) -> None:
    """Of more than ten packs too, whose folders' names begin alike."""
    packs = {tmp_path / str(number): Path(f"pack{number}.parquet") for number in range(12)}
    found = Unpacked(packs=packs)
    assert [found.told(folder / "run") for folder in packs] == [f"{pack}/run" for pack in packs.values()]

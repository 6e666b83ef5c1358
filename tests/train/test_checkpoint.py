"""Checkpoints: which are kept, and what is said of one that cannot be used."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import shutil
from io import BytesIO
from pathlib import Path, PosixPath

import pytest
import torch
from everything import differences, everything, same_bits

from gnmr.errors import RunFailed, UserError
from gnmr.lab.data.tokens import prepare
from gnmr.lab.train import checkpoint as checkpoint_module
from gnmr.lab.train import state_files
from gnmr.lab.train.build import Parts, assemble
from gnmr.lab.train.checkpoint import Checkpointer, find, load_model, steps_in


@pytest.fixture(scope="module")
def failed(stopped, tmp_path_factory) -> Path:
    """A run that ended after step 6 of 8: checkpoints of steps 3 and 6."""
    return stopped(tmp_path_factory.mktemp("failed") / "run", at=7)


@pytest.fixture
def half_way(failed, tmp_path) -> Path:
    return shutil.copytree(failed, tmp_path / "run")


@pytest.fixture
def checkpointer(assembled, tmp_path):
    def make(parts=None, owner: str = "a-s0", keep: int = 2) -> Checkpointer:
        parts = parts or assembled()
        return Checkpointer(tmp_path / "checkpoints", owner, keep, parts.model, parts.optimizer, parts.router)

    return make


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> tuple[Parts, Path]:
    """The parts of a run of another seed, and the checkpoints of a run: one of step 3."""
    folder = tmp_path_factory.mktemp("saved")
    parts, other = (assemble(tiny(f"training.seed={seed}"), folder / "unused", lambda _: None) for seed in (0, 1))
    Checkpointer(folder / "checkpoints", "a-s0", 2, parts.model, parts.optimizer, parts.router).save(3, {})
    return other, folder / "checkpoints"


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return shutil.copytree(saved[1], tmp_path / "checkpoints")


@pytest.mark.parametrize("keep", [2, 5])
def test_the_newest_are_kept(keep, checkpointer):
    saver = checkpointer(keep=keep)
    assert saver.newest() is None
    for step in (1, 2, 10, 11):
        saver.save(step, {})
    assert steps_in(saver.folder) == [1, 2, 10, 11][-keep:] and saver.newest() == 11
    assert len(list(saver.folder.iterdir())) == min(keep, 4)


def test_what_a_killed_run_left_is_swept(checkpointer):
    saver = checkpointer()
    saver.save(1, {"counters": 1})
    left = saver.folder / ".writing-step-00000002"
    shutil.copytree(saver.folder / "step-00000001", left)
    assert saver.newest() == 1 and not left.exists()
    assert saver.load(1) == {"counters": 1}


DAMAGE = {
    "a_byte_changed": lambda folder: flip(folder / "__0_0.distcp"),
    "metadata_gone": lambda folder: (folder / ".metadata").unlink(),
    "other_meta": lambda folder: (folder / "meta.json").write_text("[]"),
    "a_link": lambda folder: link(folder / "__0_0.distcp"),
    "position_edited": lambda folder: edit(folder, host={"blocks": {"epoch": 0, "position": 1}}),
    "no_files_and_a_new_sum": lambda folder: edit(folder, True, files={}),
    "step_and_a_new_sum": lambda folder: edit(folder, True, step=2),
    "deep_and_a_new_sum": lambda folder: seal(folder, "[" * 100_000 + "]" * 100_000),
}


def seal(folder: Path, text: str) -> None:
    """meta.json, and meta.sha256 as of it."""
    (folder / "meta.json").write_text(text)
    (folder / "meta.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  meta.json\n")


def edit(folder: Path, sealed: bool = False, **changes: object) -> None:
    text = json.dumps(json.loads((folder / "meta.json").read_text()) | changes, indent=1)
    seal(folder, text) if sealed else (folder / "meta.json").write_text(text)


def link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(damage, saved, copied, checkpointer):
    damage(copied / "step-00000003")
    other = saved[0]
    before = [p.detach().clone() for p in other.model.parameters()]
    with pytest.raises(UserError, match=r"checkpoint .*step-00000003 is corrupt .*: delete .*checkpoints to") as caught:
        checkpointer(other).load(3)
    assert "\n" not in str(caught.value)
    assert all(same_bits(a, b) for a, b in zip(before, other.model.parameters(), strict=True))


def test_files_of_a_file_browser_are_passed_over(saved, copied, checkpointer):
    for name in (".DS_Store", "Thumbs.db", "@eaDir/file"):
        file = copied / "step-00000003" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    assert find(copied).step == 3
    checkpointer(saved[0]).load(3)


def test_a_checkpoint_that_may_not_be_read_is_not_corrupt(saved, copied, checkpointer, monkeypatch):
    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_module, "sha256", refuse)
    with pytest.raises(UserError, match=r"step-00000003/\S+: cannot be read \(Permission denied\); its owner can"):
        checkpointer(saved[0]).load(3)


def test_a_foreign_checkpoint_is_refused(saved, copied, assembled, checkpointer):
    with pytest.raises(UserError, match=r"belongs to another run \(a-s0, this one is b-s0\)"):
        checkpointer(saved[0], owner="b-s0").load(3)
    with pytest.raises(UserError, match="belongs to another run"):
        checkpointer(assembled("model.num_layers=2")).load(3)


def test_a_corrupt_newest_checkpoint_is_set_aside(half_way, train, uninterrupted):
    checkpoints = half_way / "checkpoints"
    flip(checkpoints / "step-00000006" / "__0_0.distcp")
    said: list[str] = []
    with pytest.warns(UserWarning, match=r"step-00000006 is corrupt \(__0_0.distcp is missing or changed\): set aside"):
        train(half_way, say=said.append)
    assert f"continuing after step 3 of {half_way}" in said
    assert (checkpoints / "step-00000006.corrupt" / "meta.json").exists()
    shutil.rmtree(checkpoints / "step-00000006.corrupt")
    assert differences(uninterrupted(), everything(half_way)) == []


def test_a_corrupt_checkpoint_is_set_aside_where_folders_cannot_be_renamed(saved, copied, checkpointer, monkeypatch):
    """As overlayfs answers for a folder of a lower layer."""
    saver = checkpointer(saved[0])
    damaged = shutil.copytree(copied / "step-00000003", copied / "step-00000004")
    rename = os.rename

    def refuse(old: Path, new: Path) -> None:
        if Path(old) == damaged:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(old))
        rename(old, new)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.warns(UserWarning, match=r"set aside as step-00000004.corrupt, step 3 is taken"):
        assert saver.newest() == 3
    assert (saver.folder / "step-00000004.corrupt" / "meta.json").exists() and not damaged.exists()


def test_where_none_is_whole_nothing_is_touched(half_way, train):
    for step in (3, 6):
        flip(half_way / "checkpoints" / f"step-0000000{step}" / "__0_0.distcp")
    before = {p: p.stat().st_mtime_ns for p in half_way.rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(
        UserError, match=r"step-00000006 is corrupt \(__0_0.distcp .*\), and none before it is whole: delete"
    ):
        train(half_way)
    assert before == {p: p.stat().st_mtime_ns for p in half_way.rglob("*") if p.is_file() and p.name != ".lock"}


def content(folder: Path) -> dict[Path, bytes]:
    """All that a run folder holds."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", ["done", "stopped", pytest.param("no checkpoint", marks=pytest.mark.slow)])
def test_a_run_whose_data_changed_is_left_as_it_is(left, train, stopped, tiny, text_file, tmp_path):
    """Whatever it left; and goes on, or is skipped, when text and tokenizer are put back."""
    run, text, own = tmp_path / "run", tmp_path / "text.txt", tmp_path / "tokenizer.json"
    text.write_bytes(text_file.read_bytes())
    own.write_bytes(prepare(tiny().data, 0, len).tokenizer_path.read_bytes())
    words = [f"data.path={text}", f"data.tokenizer={own}"]
    train(run, *words) if left == "done" else stopped(run, *words, at=8)
    if left == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
    before = content(run)
    for key, file in (("path", text), ("tokenizer", own)):
        sound = file.read_bytes()
        file.write_bytes(sound[:-9] + sound[-9:].replace(b"}", b" }").replace(b"a", b"b"))
        assert file.read_bytes() != sound
        with pytest.raises(UserError, match=rf"data\.{key}=.* changed since the run in .* put it back as it was"):
            train(run, *words)
        assert content(run) == before
        file.write_bytes(sound)
    train(run, *words)
    assert (run / "DONE").exists()


def test_a_run_whose_tokens_changed_is_left_as_it_is(train, stopped, text_file, tmp_path):
    """Also where only the tokens tell: of a run of older code, of a data set on the hub, under other tokenizers."""
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_bytes(text_file.read_bytes())
    stopped(run, f"data.path={text}", at=8)
    shutil.rmtree(run / "checkpoints")
    header = json.loads((run / "header.json").read_text())
    del header["data"]["source"]
    (run / "header.json").write_text(json.dumps(header))
    before, sound = content(run), text.read_bytes()
    text.write_bytes(sound.replace(b"a", b"b"))
    with pytest.raises(UserError, match=r"run: the tokens of its data changed since the run began; use the files and"):
        train(run, f"data.path={text}")
    assert content(run) == before
    text.write_bytes(sound)
    train(run, f"data.path={text}")
    assert (run / "DONE").exists()


def test_a_corrupt_checkpoint_of_another_run_is_not_set_aside(half_way, assembled):
    flip(half_way / "checkpoints" / "step-00000006" / "__0_0.distcp")
    before, parts = content(half_way), assembled()
    (half_way / "checkpoints" / ".writing-step-00000007").mkdir()
    other = Checkpointer(half_way / "checkpoints", "b-s0", 1, parts.model, parts.optimizer, parts.router)
    with pytest.raises(UserError, match=r"step-00000003 belongs to another run .*: start again in another run_dir$"):
        other.newest()
    assert content(half_way) == before and (half_way / "checkpoints" / ".writing-step-00000007").is_dir()


class Evil:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


def resealed(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in meta["files"]}
    edit(folder, True, files=files)


def evil_index(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))


def evil_value(folder: Path, mark: Path) -> None:
    """The learning rate is read from a place behind everything else."""
    index, data = folder / ".metadata", folder / "__0_0.distcp"
    metadata, payload = pickle.loads(index.read_bytes()), BytesIO()
    torch.save(Evil(mark), payload)
    (rate,) = [part for key, part in metadata.storage_data.items() if key.fqn.endswith(".lr")][:1]
    rate.offset, rate.length = data.stat().st_size, len(payload.getvalue())
    data.write_bytes(data.read_bytes() + payload.getvalue())
    index.write_bytes(pickle.dumps(metadata))


def elsewhere(folder: Path, mark: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for part in metadata.storage_data.values():
        part.relative_path = "../step-00000003/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("spoil", [evil_index, evil_value, elsewhere])
def test_a_foreign_checkpoint_runs_no_code(spoil, saved, copied, checkpointer, tmp_path):
    parts, mark = saved[0], tmp_path / "mark"
    spoil(copied / "step-00000003", mark)
    resealed(copied / "step-00000003")
    with pytest.raises(UserError, match="does not fit this run") as caught:
        checkpointer(parts).load(3)
    assert "\n" not in str(caught.value) and not mark.exists()
    if spoil is evil_index:
        with pytest.raises(UserError, match=r"asks for posix\.mkdir"):
            load_model(copied, parts.model)
    assert not mark.exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_an_index_is_read_whichever_python_wrote_it(module):
    """Python 3.13 pickles paths under another name."""
    assert state_files._Index(BytesIO(f"c{module}\nPosixPath\n.".encode())).load() is PosixPath


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_numbers_that_are_not_finite_are_not_written(what, assembled, checkpointer, step_of, blocks_of):
    parts = assembled()
    step_of(parts)([blocks_of(parts, 2)], 1e-2)
    saver = checkpointer(parts)
    saver.save(1, {})
    name, parameter = next((n, p) for n, p in parts.model.named_parameters() if p.requires_grad)
    held = parameter.data if what == "weight" else parts.optimizer.state[parameter]["exp_avg_sq"]
    held.view(-1)[-1] = math.inf
    with pytest.raises(RunFailed, match=rf"{name} is not finite after step 2: no checkpoint was written"):
        saver.save(2, {})
    assert [p.name for p in saver.folder.iterdir()] == ["step-00000001"]

"""How a sound folder becomes a hostile one: links, pipes, other values, code, markup."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .inputs import deep

SECRET = "XSECRETX7391"
MARK = "hostile"
"""Stands in every payload of markup."""


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


def files_below(*folders: Path) -> list[Path]:
    """All that is no folder, links not followed."""
    return [Path(parent, name) for folder in folders for parent, _, files in os.walk(folder) for name in files]


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file: its kind and content."""
    found = {}
    for path in files_below(folder):
        kind = stat.S_IFMT(path.lstat().st_mode)
        found[str(path.relative_to(folder))] = b"%d " % kind + (path.read_bytes() if stat.S_ISREG(kind) else b"")
    return found


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
    "deep": deep(100_000),
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


def in_object(name: str, key: str, raw: str | None) -> Callable[[Room], None]:
    """A value of a JSON object."""

    def spoil(room: Room) -> None:
        file = room.odd / name
        file.write_text(_replaced(json.loads(file.read_text()), key.split("."), raw) + "\n")

    return spoil


def in_rows(name: str, key: str, raw: str | None, row: int | None = None) -> Callable[[Room], None]:
    """A value in every row of a .jsonl file, or in that one."""

    def spoil(room: Room) -> None:
        file = room.odd / name
        lines = file.read_text().splitlines()
        for i, line in enumerate(lines):
            if row is None or i == row:
                lines[i] = _replaced(json.loads(line), key.split("."), raw)
        file.write_text("\n".join(lines) + "\n")

    return spoil


def with_content(name: str, content: str | bytes | Callable[[bytes], bytes]) -> Callable[[Room], None]:
    """Another content; a function is given the old one."""

    def spoil(room: Room) -> None:
        file = room.odd / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            file.write_bytes(content(file.read_bytes() if file.exists() else b""))
        else:
            file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)

    return spoil


def with_config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Room], None]:
    """config.yaml, read, changed and written."""

    def spoil(room: Room) -> None:
        file = room.odd / "config.yaml"
        tree = yaml.safe_load(file.read_text())
        change(tree)
        file.write_text(yaml.safe_dump(tree, sort_keys=False))

    return spoil


def key_set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        *above, last = key.split(".")
        for name in above:
            tree = tree[name]
        tree[last] = value

    return change


def yaml_line(key: str, raw: str) -> Callable[[Room], None]:
    """A key of config.yaml with YAML as it is written."""
    return several(
        with_config(key_set(key, "@RAW@")), with_content("config.yaml", lambda old: old.replace(b"'@RAW@'", b"@RAW@")),
        with_content("config.yaml", lambda old: old.replace(b"@RAW@", raw.encode())),
    )  # fmt: skip


def several(*spoils: Callable[[Room], object]) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        for one in spoils:
            one(room)

    return spoil


def removed(name: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        path = room.odd / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    return spoil


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Room], None]:
    """Something else in place of a file or folder."""

    def spoil(room: Room) -> None:
        removed(name)(room)
        (room.odd / name).parent.mkdir(parents=True, exist_ok=True)
        make(room.odd / name)

    return spoil


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def link_out(name: str) -> Callable[[Room], None]:
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


def link_to(name: str, target: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        place = Path(target) if target.startswith("/") else room.outside / target
        instead(name, lambda path: path.symlink_to(place))(room)

    return spoil


class Opens:
    """Unpickled it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def evil_module(room: Room, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    code = f"open({str(room.ran)!r}, 'w').close()\nclass X:\n    pass\nclass Y(X):\n    pass\n"
    (folder / "evil.py").write_text(code)


def link_to_self(name: str) -> Callable[[Room], None]:
    return instead(name, lambda path: path.symlink_to(path.name))


def link_to_victim(name: str, target: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        if target == "victim" and "." in Path(name).name:
            room.target("victim", "do not touch\n")
        elif target == "victim":
            room.target("victim/inside", "do not touch\n")
        link_to(name, target)(room)

    return spoil


def link_to_kept(name: str) -> Callable[[Room], None]:
    """Behind the link lies what was in its place, or where there was nothing a file."""

    def spoil(room: Room) -> None:
        path, target = room.odd / name, room.outside / "victim"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or (path.exists() and path.stat().st_size):
            shutil.move(path, target)
        elif name in ("hf", "wandb", "report") or "step-" in name:
            room.target("victim/inside", "do not touch\n")
        else:
            room.target("victim", "do not touch\n")
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return spoil


def bomb_in_use(bomb: str) -> Callable[[Room], None]:
    def change(old: bytes) -> bytes:
        return (bomb.encode() + old).replace(b"arm: null", b"arm: *a11")

    return with_content("config.yaml", change)


def tagged(raw: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        yaml_line("arm", raw.replace("@", str(room.ran)))(room)

    return spoil


def beside(room: Room) -> None:
    evil_module(room, room.folder)


def shadows(room: Room) -> None:
    for name in ("sitecustomize", "usercustomize", "hydra_plugins", "conftest"):
        (room.odd / f"{name}.py").write_text(f"open({str(room.ran)!r}, 'w').close()\n")


def seal(step: Path) -> None:
    """meta.json of a checkpoint agrees with its files again, as far as it holds checksums of each."""
    meta = json.loads((step / "meta.json").read_text())
    meta["files"] = {name: hashlib.sha256((step / name).read_bytes()).hexdigest() for name in meta["files"]}
    (step / "meta.json").write_text(json.dumps(meta, indent=1))


def pickled_items(room: Room) -> None:
    """Every item of the checkpoint becomes an object that opens a file when it is loaded."""
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    buffer = io.BytesIO()
    torch.save(Opens(room.ran), buffer)
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
        seal(step)


def sparse(name: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        (room.odd / name).touch()
        os.truncate(room.odd / name, 16 << 30)

    return spoil


def table_changed(
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


def column_changed(name: str, values: Callable[[Any, int], Any]) -> tuple[Any, tuple[str, ...]]:
    """A column replaced."""

    def change(table: Any, pa: Any) -> Any:
        made = values(pa, table.num_rows)
        return table.set_column(table.column_names.index(name), name, made)

    return table_changed(change, ("report", "replay", "detect"))


def many_units(table: Any, pa: Any) -> Any:
    number = 70_000
    columns: dict[str, Any] = {"step": pa.array([1, 100] * number, pa.int32())}
    columns["unit"] = pa.array([f"layers.{i // 2}.q_proj" for i in range(2 * number)]).dictionary_encode()
    for name in table.column_names:
        if name not in columns:
            columns[name] = pa.array([1] * 2 * number).cast(table.schema.field(name).type)
    return pa.table(columns)


def many_columns(table: Any, pa: Any) -> Any:
    """The norms again, in a thousand columns."""
    return pa.table({name: table[name] for name in table.column_names} | {f"c{i}": table["norm"] for i in range(1000)})


def unit_renamed(text: str) -> Callable[[Room], None]:
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


def column_added(text: str) -> Callable[[Room], None]:
    clean = text.encode("utf-8", "replace").decode()
    spoil = table_changed(lambda table, pa: table.append_column(clean, table["norm"]))[0]
    return several(spoil, in_rows("steps.jsonl", "over", json.dumps({text: 1})))


def folder_renamed(text: str) -> Callable[[Room], None]:
    def spoil(room: Room) -> None:
        with contextlib.suppress(UnicodeEncodeError):
            room.odd.rename(room.folder / text)

    return spoil


def many_steps(room: Room) -> None:
    for i in range(5000):
        (room.odd / "checkpoints" / f"step-{i + 100:08d}").mkdir()


def huge_shape(old: bytes) -> bytes:
    return re.sub(rb"\((\d+),\)", lambda found: b"(" + b"9" * len(found[1]) + b",)", old, count=1)


def moved_code(room: Room) -> None:
    (room.odd / "custom_generate").mkdir()
    shutil.move(room.odd / "evil.py", room.odd / "custom_generate" / "generate.py")


def bin_too(room: Room) -> None:
    (room.odd / "pytorch_model.bin").write_bytes(pickle.dumps(Opens(room.ran)))


def bin_in_index(room: Room) -> None:
    bin_too(room)
    tree = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    (room.odd / "model.safetensors.index.json").write_text(json.dumps(tree))


def adapter_pickle(room: Room) -> None:
    tree = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    (room.odd / "adapter_config.json").write_text(json.dumps(tree))
    (room.odd / "adapter_model.bin").write_bytes(pickle.dumps(Opens(room.ran)))


def secret_link(room: Room, name: str) -> None:
    (room.odd / name).symlink_to(room.target("target", f'{SECRET} = "password"\n'))


def headed(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()

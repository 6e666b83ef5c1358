"""Which hostile folders there are, and who reads each."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from .inputs import deep
from .spoiling import (
    HUGE,
    RAW,
    SECRET,
    Hostile,
    Opens,
    Room,
    a_socket,
    beside,
    bin_in_index,
    bin_too,
    bomb_in_use,
    column_added,
    column_changed,
    evil_module,
    folder_renamed,
    headed,
    huge_shape,
    in_object,
    in_rows,
    instead,
    key_set,
    link_out,
    link_to,
    link_to_kept,
    link_to_self,
    link_to_victim,
    many_columns,
    many_steps,
    many_units,
    moved_code,
    pickled_items,
    removed,
    seal,
    secret_link,
    several,
    shadows,
    sparse,
    table_changed,
    tagged,
    unit_renamed,
    with_config,
    with_content,
)

_READERS = ("report", "replay", "diagnose", "audit")
_READ_BY: dict[str, tuple[str, ...]] = {
    "config.yaml": _READERS,
    "header.json": _READERS,
    "steps.jsonl": ("report",),
    "eval.jsonl": ("report",),
    "events.jsonl": ("report",),
    "faults.jsonl": ("report", "detect"),
    "ratios.parquet": ("draw", "replay"),
}
"""Who reads which file of a run."""


def _links() -> Iterator[Hostile]:
    files = _READ_BY | {
        "summary.json": ("report",),
        "FAILED": ("page",),
        "scores.json": ("report",),
        "ratios.rows": ("draw", "replay"),
        "steps.jsonl.gz": ("report",),
        "checkpoints": ("diagnose",),
        "checkpoints/step-00000008": ("diagnose",),
        **{f"checkpoints/step-00000008/{name}": ("diagnose",) for name in ("meta.json", ".metadata", "__0_0.distcp")},
    }
    for name, commands in files.items():
        away = [removed("steps.jsonl")] if name.endswith(".gz") else []
        yield Hostile(f"link: {name} -> a secret", several(*away, link_out(name)), commands, links=True)
        if name in ("config.yaml", "header.json", "steps.jsonl", "ratios.parquet", "checkpoints"):
            yield Hostile(f"link: {name} -> itself", several(*away, link_to_self(name)), commands)
        if name in (
            "config.yaml",
            "header.json",
            "steps.jsonl",
            "faults.jsonl",
            "FAILED",
            "ratios.rows",
            "scores.json",
        ):
            yield Hostile(f"link: {name} -> /dev/zero", several(*away, link_to(name, "/dev/zero")), commands)


def _links_to_write() -> Iterator[Hostile]:
    """Where a command writes."""
    for name in ("report", "report/report.md", "report/custom-cpu-loss.png", "report/report.md.tmp"):
        for target in ("victim", "new"):
            commands = ("own plots",) if name.endswith("png") or name == "report" else ("own report",)
            yield Hostile(f"link: {name} -> {target}", link_to_victim(name, target), commands)
    yield Hostile(
        "link: .decisions.jsonl.writing", link_to_victim(".decisions.jsonl.writing", "victim"), ("replay inside",)
    )
    yield Hostile("link: decisions.jsonl", link_to_victim("decisions.jsonl", "victim"), ("replay inside",))
    written = (
        *(".lock", ".reserve", "FAILED", "DONE", "config.yaml", "steps.jsonl", "faults.jsonl"),
        *("ratios.rows", "summary.json", "checkpoints", "order"),
        *("config.yaml.tmp", "header.json.tmp", "summary.json.tmp", "ratios.parquet.tmp", "ratios.rows.tmp"),
        *("steps.jsonl.tmp", "order/epoch-0.npy", "checkpoints/.writing-step-00000008", "checkpoints/step-00000008"),
        *("checkpoints/step-00000004", "checkpoints/step-00000004/meta.json", "hf", "report"),
    )
    for name in written:
        yield Hostile(f"continue: {name} -> a victim", link_to_kept(name), ("train",), base="stopped")
    for name in (".lock", "steps.jsonl", "config.yaml.tmp", "summary.json.tmp", "checkpoints", "FAILED", "DONE"):
        yield Hostile(f"continue: {name} -> nothing", link_to_victim(name, "new"), ("train",), base="stopped")


def _others_in_place() -> Iterator[Hostile]:
    files = _READ_BY | {
        "ratios.rows": ("report", "replay"),
        "summary.json": ("report",),
        "FAILED": ("report",),
        "scores.json": ("report",),
        "scores.jsonl": ("report",),
        **{f"checkpoints/step-00000008/{name}": ("diagnose",) for name in ("meta.json", ".metadata", "__0_0.distcp")},
    }
    makers = {"a pipe": os.mkfifo, "a folder": lambda path: path.mkdir(), "nothing in it": lambda path: path.touch()}
    for name, commands in files.items():
        for what, make in makers.items():
            if what != "nothing in it" or name[-4:] in ("yaml", "rows", "quet", "data"):
                yield Hostile(f"{name} is {what}", instead(name, make), commands)
    for name in ("config.yaml", "header.json", "steps.jsonl", "ratios.parquet"):
        yield Hostile(f"{name} is a socket", instead(name, a_socket), ("report", "replay"))
    for name in ("report", "report/report.md"):
        for what, make in makers.items():
            if what != "nothing in it":
                yield Hostile(f"{name} is {what}", instead(name, make), ("own report",))
    for name in (".lock", "steps.jsonl", "events.jsonl", "config.yaml", "header.json", "summary.json", "checkpoints"):
        for what in ("a pipe", "a folder") if name != "checkpoints" else ("a pipe",):
            yield Hostile(f"continue: {name} is {what}", instead(name, makers[what]), ("train",), base="stopped")
    for name in ("order/epoch-0.npy", "ratios.parquet", "faults.jsonl", "FAILED", "config.yaml.tmp", "ratios.rows"):
        yield Hostile(f"continue: {name} is a pipe", instead(name, os.mkfifo), ("train",), base="stopped")

    def immutable(room: Room) -> None:
        subprocess.run(["chattr", "+i", room.odd], capture_output=True, check=False)

    yield Hostile("an immutable folder", immutable, ("own report", "replay inside", "diagnose"))
    yield Hostile("continue: an immutable folder", immutable, ("train",), base="stopped")


_BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
_MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
_BOMBS = {
    "an alias bomb": _BOMB,
    "an alias bomb of mappings": "a0: &a0 {x: y}\n"
    + "".join(f"a{i}: &a{i} {{{','.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)),
    "a bomb of merge keys": _MERGES,
    "an anchor in itself": "a: &a [*a]\n",
    "a mapping in itself": "a: &a {b: *a}\n",
    "deep lists": f"a: {deep(20_000)}\n",
    "deep mappings": "".join(" " * i + "a:\n" for i in range(3000)),
    "a key of 10 MB": "k" * 10_000_000 + ": 1\n",
    "200,000 keys": "".join(f"k{i}: 1\n" for i in range(200_000)),
    "a number of 400 digits": f"a: {HUGE}\n",
    "no date": "a: 2020-99-99\n",
    "a sexagesimal": "a: 1:99:99999999999999999999\n",
    "an unknown tag": "a: !nosuch x\n",
    "a key that is a list": "? [a, b]\n: 1\n",
    "a null key": "~: 1\n",
}
_TAGS = {
    "!!python/object/apply:builtins.open": "!!python/object/apply:builtins.open [@, w]",
    "!!python/object/new": "!!python/object/new:io.FileIO [@, w]",
    "!!python/name": "!!python/name:os.system",
    "!!python/module": "!!python/module:os",
    "!!python/tuple": "!!python/tuple [1, 2]",
}
_ODD_CONFIGS = {
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
_ODD_VALUES = {
    "training.steps": ("many", -1, 10**400, [1]),
    "training.seed": ("x", None, 10**400, {"a": 1}, 1.5),
    "training.seq_len": ("many", 10**30, [2]),
    "training.batch_size": ("many", 0),
    "training.accumulation": (None, [1]),
    "controller.max_o": ("many", None, [1], 10**400),
    "controller.alpha": ("x", -1, float("nan"), [1]),
    "controller.signal": (None, "x", [1]),
    "controller.options": ("x", [1], {"nosuch": 1}),
    "controller.trigger": ("x", 10**400),
    "controller.delta": (2**40, 0),
    "paths": (None, "int4", [1]),
    "precision.low": (None, 3, ["int4"]),
    "precision.recovery": (3, "nosuch"),
    "precision.recipes": ({"mine": {"fprop": 3}}, {"<b>": {}}, [1]),
    "model": ("llama", None),
    "model.name": (None, 3, "pretrained"),
    "model.num_layers": (10**9, "two"),
    "model.hidden_size": (10**8, 3),
    "data": (None, "text"),
    "data.name": (3, "nosuch"),
    "data.cache_dir": ("/dev/zero", None, "a\0b", "x" * 5000),
    "optim": (None, [1]),
    "stress": (None, "noise"),
    "faults.windows": ("x", [[1]], [[10**400, 1]], None),
    "records": (None,),
    "records.ratios_every": ("x", 10**400),
    "experiment_name": (3, None, ["a"], {"a": 1}, "x" * 100_000),
    "arm": (3, ["a"], {"a": 1}, "x" * 100_000, "../../x"),
}


def _configs(draw: random.Random) -> Iterator[Hostile]:
    read = ("report", "replay", "diagnose", "audit")
    resolvers = ("${oc.env:HOSTILE_SECRET}", "a-${oc.env:HOSTILE_SECRET}-b", "${oc.decode:${oc.env:HOSTILE_SECRET}}")
    for key in (
        "arm",
        "experiment_name",
        "scale_name",
        "controller.name",
        "precision.name",
        "data.path",
        "model.checkpoint",
    ):
        yield Hostile(
            f"config: {key}=${{oc.env:...}}", with_config(key_set(key, resolvers[0])), ("page", "replay", "diagnose")
        )
    for value in resolvers[1:]:
        yield Hostile(f"config: arm={value}", with_config(key_set("arm", value)), ("page", "replay"))
    for value in (
        "${arm}",
        "${nosuch}",
        "${oc.create:{a: 1}}",
        "${hydra:runtime.cwd}",
        "${oc.env:HOSTILE_SECRET",
        "${",
    ):
        yield Hostile(f"config: arm={value}", with_config(key_set("arm", value)), ("report", "replay"))
    for key in ("training.steps", "controller.alpha", "optim.lr", "records.evidence"):
        yield Hostile(
            f"config: {key}=${{...}}", with_config(key_set(key, "${oc.decode:'[1,2]'}")), ("report", "replay")
        )
    head = "unknown: ${oc.env:HOSTILE_SECRET}\n"
    yield Hostile(
        "config: a resolver in an unknown key", with_content("config.yaml", lambda old: old + head.encode()), read
    )
    for what, more in _BOMBS.items():
        yield Hostile(
            f"config: {what}", with_content("config.yaml", lambda old, more=more: old + more.encode()), read[:2]
        )
    yield Hostile("config: an alias bomb in use", several(with_config(key_set("arm", None)), bomb_in_use(_BOMB)), read)
    for what, raw in _TAGS.items():
        yield Hostile(f"config: {what}", tagged(raw), read)
    for what, content in _ODD_CONFIGS.items():
        yield Hostile(f"config.yaml is {what}", with_content("config.yaml", content), read[:2])
    for key, values in _ODD_VALUES.items():
        for value in draw.sample(values, 1):
            told = repr(value)[:30]
            commands = read if key.startswith(("model", "data")) else read[:2]
            yield Hostile(f"config: {key} is {told}", with_config(key_set(key, value)), commands)
    for key in ("controller", "training", "experiment_name", "data"):
        yield Hostile(f"config: no {key}", with_config(lambda tree, key=key: tree.pop(key)), read)


def _code() -> Iterator[Hostile]:
    for name in ("evil:X", "evil:", "evil.sub:X", "evil:Y"):

        def spoil(room: Room, name: str = name) -> None:
            evil_module(room, room.odd)
            evil_module(room, room.odd / "evil" / "sub") if "." in name else None
            with_config(key_set("controller.signal", name))(room)

        for commands in (("report",), ("replay",), ("diagnose",), ("calibrate", "detect")):
            if name == "evil:X" or commands == ("replay",):
                yield Hostile(f"code: signal {name}, {commands[0]}", spoil, commands, cwd="odd")
    yield Hostile(
        "code: signal evil:X beside",
        several(beside, with_config(key_set("controller.signal", "evil:X"))),
        ("replay",),
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
        spoil = with_config(key_set("controller.signal", name))
        yield Hostile(f"code: signal {name[:20]}", spoil, ("report", "replay"))

    def metadata(room: Room) -> None:
        for step in (room.odd / "checkpoints").glob("step-*"):
            (step / ".metadata").write_bytes(pickle.dumps(Opens(room.ran)))
            seal(step)

    yield Hostile("code: a pickle in .metadata", metadata, ("diagnose",))
    yield Hostile("code: a pickle in .metadata, continued", metadata, ("train",), base="stopped")
    yield Hostile("code: a pickle in .distcp", pickled_items, ("diagnose",))
    yield Hostile("code: a pickle in .distcp, continued", pickled_items, ("train",), base="stopped")

    def order(room: Room) -> None:
        import numpy as np

        for file in (room.odd / "order").iterdir():
            np.save(file, np.array([Opens(room.ran)], dtype=object), allow_pickle=True)

    yield Hostile("code: a pickle in the order", order, ("train",), base="stopped")
    yield Hostile("code: sitecustomize and gnmr.py", shadows, ("report", "replay", "diagnose"), cwd="odd")


def _headers(draw: random.Random) -> Iterator[Hostile]:
    fields = (
        *("gnmr", "python", "torch", "commit", "command", "machine", "machine.cpu", "machine.cores", "machine.device"),
        *("data", "data.name", "data.fingerprint", "data.train_tokens", "units", "cost", "recoverable", "paths"),
        *("checkpoint", "parameters", "trained_parameters", "arm", "experiment", "scale", "seed", "run_id"),
    )
    for key in fields:
        for kind in draw.sample(list(RAW), 1):
            commands = ("report", "replay") if key in ("units", "cost") else ("report",)
            commands += ("diagnose",) if key.startswith("data") else ()
            yield Hostile(f"header: {key} is {kind}", in_object("header.json", key, RAW[kind]), commands)
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
        yield Hostile(f"header: units are {what}", in_object("header.json", "units", raw), ("page", "replay"))
    for what, raw in {
        "words": '["a","b"]',
        "few": "[1.0]",
        "negative": "[-1,-1,-1,-1,-1,-1,-1]",
        "NaN": "[NaN,NaN]",
    }.items():
        yield Hostile(f"header: costs are {what}", in_object("header.json", "cost", raw), ("report", "replay"))
    yield from _whole("header.json", ("report", "replay", "diagnose"))


def _whole(name: str, commands: tuple[str, ...]) -> Iterator[Hostile]:
    """A JSON file as a whole."""
    contents: dict[str, str | bytes] = {
        "a list": "[]",
        "a number": "3",
        "null": "null",
        "cut": '{"a": ',
        "deep": deep(200_000),
        "NaN": "NaN",
        "no UTF-8": b'{"a": "\xff"}',
        "a surrogate": '{"arm": "\\ud800"}',
        "deep in a key": f'{{"a": {deep(100_000)}}}',
        "a number of 400 digits": f'{{"units": {HUGE}}}',
        "100 MB of blanks": b" " * 100_000_000,
        "digits": "9" * 500_000,
    }
    for what, content in contents.items():
        yield Hostile(f"{name} is {what}", with_content(name, content), commands)
    yield Hostile(f"{name} is 16 GiB", sparse(name), commands)


def _rows(draw: random.Random) -> Iterator[Hostile]:
    fields = {
        "steps.jsonl": (
            *("tokens", "loss", "lr", "grad_norm_pre_clip", "num_candidates", "num_active", "over", "statistics"),
            *("monitored", "saturation", "saved_bytes", "saved_bytes_predicted", "skipped", "nonfinite_total"),
            *("spent_gemm_frac", "spent_extra_bytes"),
            *("nonfinite_streak", "nonfinite_unit", "step_time_s"),
        ),
        "eval.jsonl": ("step", "tokens", "val_loss", "val_ppl", "val_loss_low", "phase"),
        "events.jsonl": ("step", "unit", "event", "cause", "risk"),
        "faults.jsonl": ("step", "end", "unit", "kind", "magnitude"),
    }
    for name, keys in fields.items():
        for key in keys:
            for kind in draw.sample(list(RAW), 1):
                commands = ("report", "detect") if name == "faults.jsonl" else ("report",)
                yield Hostile(f"{name}: {key} is {kind}", in_rows(name, key, RAW[kind]), commands)
    for kind, raw in {**RAW, "0": "0", "1.5": "1.5", '"1"': '"1"', "2**31": str(2**31), "2**63": str(2**63)}.items():
        yield Hostile(f"steps.jsonl: step is {kind}", in_rows("steps.jsonl", "step", raw), ("report",))
        if len(raw or "") % 2 or kind == "missing":
            spoil = in_rows("steps.jsonl", "step", raw, 2)
            yield Hostile(f"continue: a step is {kind}", spoil, ("train",), base="stopped")
    for key, raw in (
        ("over", '{"gnmr": "x"}'),
        ("over", '{"gnmr": null}'),
        ("over", '{"gnmr": [1]}'),
        ("over", f'{{"a": {HUGE}}}'),
        ("statistics", '{"layers.0.max_share": "x"}'),
        ("statistics", '{"a": [1]}'),
        ("statistics", f'{{"a": {HUGE}}}'),
        ("statistics", json.dumps({f"k{i}": 1 for i in range(20_000)})),
        ("saturation", '{"input": 3}'),
        ("saturation", '{"input": [1]}'),
        ("saturation", '{"input": ["x", "y"]}'),
        ("monitored", '{"a": "x"}'),
        ("monitored", '{"a": null}'),
    ):
        yield Hostile(f"steps.jsonl: {key} is {raw[:30]}", in_rows("steps.jsonl", key, raw), ("report", "page"))


def _row_files() -> Iterator[Hostile]:
    """Files of rows as a whole."""
    for name in ("steps.jsonl", "eval.jsonl", "events.jsonl", "faults.jsonl"):
        whole: dict[str, str | bytes | Callable[[bytes], bytes]] = {
            "a number a row": "1\n2\n",
            "a list a row": "[1]\n[2]\n",
            "empty objects": "{}\n{}\n",
            "binary": bytes(range(256)),
            "deep": deep(200_000) + "\n",
            "deep in a row": lambda old: old + f'{{"step": {deep(100_000)}}}\n'.encode(),
            "rows twice": lambda old: old * 2,
            "rows backwards": lambda old: b"".join(old.splitlines(True)[::-1]),
        }
        for what, content in whole.items():
            commands = ("report", "detect") if name[0] == "f" else ("report",)
            if name[0] == "s" or what in ("a list a row", "binary", "deep"):
                yield Hostile(f"{name} is {what}", with_content(name, content), commands)
    yield Hostile("steps.jsonl: a row of 16 GiB", sparse("steps.jsonl"), ("report",))
    yield Hostile("continue: a row of 16 GiB", sparse("steps.jsonl"), ("train",), base="stopped")
    yield Hostile("faults.jsonl: a row of 16 GiB", sparse("faults.jsonl"), ("report", "detect"))
    yield Hostile("steps.jsonl: 300,000 rows", with_content("steps.jsonl", lambda old: old * 40_000), ("report",))
    yield Hostile(
        "events.jsonl: 800,000 rows", with_content("events.jsonl", lambda old: old[:400] * 200_000), ("report",)
    )
    packed = {
        "a bomb": gzip.compress(b"\0" * 64_000_000, 1) * 64,
        "a bomb of one row": gzip.compress(b'{"a": "') + gzip.compress(b"x" * 64_000_000, 1) * 64,
        "none": b"this is no gzip",
        "cut": gzip.compress(b'{"step": 1}\n' * 5000)[:60],
        "in itself": gzip.compress(gzip.compress(b'{"step": 1}\n')),
    }
    for what, content in packed.items():
        spoil = several(removed("steps.jsonl"), with_content("steps.jsonl.gz", content))
        yield Hostile(f"steps.jsonl.gz is {what}", spoil, ("report",))
    spoil = several(removed("steps.jsonl"), with_content("steps.jsonl.gz", packed["a bomb"]))
    yield Hostile("continue: steps.jsonl.gz is a bomb", spoil, ("train",), base="stopped")


def _summaries(draw: random.Random) -> Iterator[Hostile]:
    fields = (
        *("status", "reason", "steps", "tokens", "final_val_loss", "final_val_ppl", "promotion_frac", "hit_max_o_frac"),
        *("gnmr_over_frac", "over_frac", "saved_bytes_mean", "peak_memory_bytes", "saturation_total", "monitored"),
        *("nonfinite_total", "wall_time_s", "step_time_median_s", "tokens_per_s"),
    )
    for key in fields:
        for kind in draw.sample([kind for kind in RAW if kind not in ("missing", "null")], 1):
            yield Hostile(f"summary: {key} is {kind}", in_object("summary.json", key, RAW[kind]), ("report",))
    yield from _whole("summary.json", ("report",))
    metric = '{"value": 1.0, "stderr": null}'
    task = (
        '{"metrics": {"acc": %s}, "items": 1, "items_there": 1, "shots": 0, "tokens_scored": 1, "tokens_generated": 0}'
    )
    for what, tasks in {
        "sound": f'{{"hellaswag": {task % metric}}}',
        "a word": '"word"',
        "a list": "[1]",
        "null tasks": '{"hellaswag": null}',
        "no metrics": '{"hellaswag": {}}',
        "words": '{"hellaswag": ' + task % '{"value": "x", "stderr": "y"}' + "}",
        "huge": '{"hellaswag": ' + task % f'{{"value": {HUGE}, "stderr": 1}}' + "}",
        "deep": f'{{"a": {deep(100_000)}}}',
        "a list of metrics": '{"hellaswag": {"metrics": [1]}}',
        "many": json.dumps({f"t{i}": {"metrics": {}} for i in range(5000)}),
    }.items():
        row = f'{{"step": 8, "path": "16bit", "tasks": {tasks}}}\n'
        for name in ("scores.jsonl", "scores.json") if what == "sound" else ("scores.jsonl",):
            yield Hostile(f"{name}: tasks are {what}", with_content(name, row), ("report",))


def _ratios() -> Iterator[Hostile]:
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for name in ("step", "unit", "norm", "gnmr", "risk", "active"):
        found[f"no {name}"] = table_changed(lambda table, pa, name=name: table.drop_columns([name]))
        found[f"{name} are words"] = column_changed(name, lambda pa, n: pa.array(["word"] * n))
        found[f"{name} are null"] = column_changed(name, lambda pa, n: pa.nulls(n))
        found[f"{name} are lists"] = column_changed(name, lambda pa, n: pa.array([[1.0]] * n))
        found[f"{name} twice"] = table_changed(lambda table, pa, name=name: table.append_column(name, table[name]))
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
        found[f"steps are {what}"] = column_changed("step", values)
    for what, values in {
        "all the same": lambda pa, n: pa.array(["a"] * n).dictionary_encode(),
        "all others": lambda pa, n: pa.array([f"u{i}" for i in range(n)]).dictionary_encode(),
        "plain": lambda pa, n: pa.array(["a"] * n),
        "bytes": lambda pa, n: pa.array([b"\xff"] * n).dictionary_encode(),
        "numbers": lambda pa, n: pa.array(list(range(n))).dictionary_encode(),
        "empty": lambda pa, n: pa.array([""] * n).dictionary_encode(),
        "long": lambda pa, n: pa.array(["u" * 1_000_000] * n).dictionary_encode(),
    }.items():
        found[f"units are {what}"] = column_changed("unit", values)
    found["no rows"] = table_changed(lambda table, pa: table.slice(0, 0))
    found["rows twice"] = table_changed(lambda table, pa: pa.concat_tables([table, table]))
    found["no columns"] = table_changed(lambda table, pa: pa.table({}))
    found["other columns"] = table_changed(lambda table, pa: pa.table({"a": [1, 2], "b": ["x", "y"]}))
    found["units of metadata deep"] = table_changed(
        lambda table, pa: table.replace_schema_metadata({"gnmr.units": deep(100_000)})
    )
    found["units of metadata are a number"] = table_changed(
        lambda table, pa: table.replace_schema_metadata({"gnmr.units": "7"})
    )
    found["no metadata"] = table_changed(lambda table, pa: table.replace_schema_metadata({}))
    found["70,000 units"] = table_changed(many_units, ("draw", "replay", "calibrate"))
    found["1,000 columns"] = table_changed(many_columns, ("draw", "replay"))
    found["Inf and NaN"] = column_changed("risk", lambda pa, n: pa.array([float("inf"), float("nan")] * n)[:n])
    for i, (what, (spoil, commands)) in enumerate(found.items()):
        yield Hostile(f"ratios: {what}", spoil, commands)
        if i < 36 and i % 4 == 0:
            yield Hostile(f"continue: ratios: {what}", spoil, ("train",), base="stopped")


def _ratio_files() -> Iterator[Hostile]:
    """ratios.parquet as a whole."""
    for what, content in {
        "cut": lambda old: old[: len(old) // 2],
        "its end alone": lambda old: old[-200:],
        "no Parquet": b"PAR1" + b"x" * 100 + b"PAR1",
        "flipped": lambda old: old[:300] + bytes(255 - byte for byte in old[300:400]) + old[400:],
        "of a huge footer": lambda old: old[:-8] + b"\xff\xff\xff\x7fPAR1",
    }.items():
        yield Hostile(f"ratios.parquet is {what}", with_content("ratios.parquet", content), ("draw", "replay"))
        yield Hostile(
            f"continue: ratios.parquet is {what}", with_content("ratios.parquet", content), ("train",), base="stopped"
        )


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
        "with a deep head": deep(200_000).encode() + b"\n" + b"x" * 500,
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
        yield Hostile(f"ratios.rows {what}", with_content("ratios.rows", content), ("report", "replay"), base="killed")

    def endless(room: Room) -> None:
        os.truncate(room.odd / "ratios.rows", 16 << 30)

    yield Hostile("ratios.rows of 16 GiB", endless, ("report", "replay"), base="killed")


PAYLOADS = {
    "tags": "<hostile-tag onclick=x>",
    "colours": "\x1b[31mhostile\x1b[0m\x07\x08",
    "the end of a script": "</script><hostile-tag>",
    "a link": "[hostile](javascript:hostile)",
    "a title": "\x1b]0;hostile\x07",
    "an image": "![hostile](hostile.png)",
    "an address": "<hostile:x>",
    "bars": "a|b|c|hostile",
    "a heading": "x\n\n# hostile\n\ny",
    "backticks": "`a` ``` <hostile-tag> ```",
    "C1": "\x9b31mhostile",
    "mathematics": "$x_{hostile$",
    "rich": "[bold red]hostile[link=hostile]x",
    "length": "hostile " * 10_000,
    "a return": "abc\rhostile",
    "a surrogate": "hostile\ud800",
}


def _markup() -> Iterator[Hostile]:
    places: dict[str, Callable[[str], Callable[[Room], None]]] = {
        "arm": lambda text: with_config(key_set("arm", text)),
        "experiment_name": lambda text: with_config(key_set("experiment_name", text)),
        "scale_name": lambda text: with_config(key_set("scale_name", text)),
        "precision.name": lambda text: with_config(key_set("precision.name", text)),
        "controller.name": lambda text: with_config(key_set("controller.name", text)),
        "controller.signal": lambda text: with_config(key_set("controller.signal", text)),
        "commit": lambda text: in_object("header.json", "commit", json.dumps(text)),
        "cpu": lambda text: in_object("header.json", "machine.cpu", json.dumps(text)),
        "command": lambda text: in_object("header.json", "command", json.dumps(text)),
        "data.name": lambda text: in_object("header.json", "data.name", json.dumps(text)),
        "units": unit_renamed,
        "over": lambda text: in_rows("steps.jsonl", "over", json.dumps({text: 1})),
        "statistics": lambda text: in_rows("steps.jsonl", "statistics", json.dumps({f"layers.0.{text}": 1.0})),
        "monitored": lambda text: in_rows("steps.jsonl", "monitored", json.dumps({text: 1.0})),
        "monitored, in summary": lambda text: in_object(
            "summary.json", "monitored", json.dumps({text: {"mean": 1.0, "largest_gnmr": 1.0}})
        ),
        "saturation": lambda text: in_object("summary.json", "saturation_total", json.dumps({text: [1, 1]})),
        "reason": lambda text: several(with_content("FAILED", text), removed("DONE")),
        "reason, in summary": lambda text: several(
            in_object("summary.json", "reason", json.dumps(text)),
            in_object("summary.json", "status", '"failed"'),
            removed("DONE"),
        ),
        "kind of a fault": lambda text: in_rows("faults.jsonl", "kind", json.dumps(text)),
        "a column": column_added,
        "a score": lambda text: with_content(
            "scores.jsonl",
            json.dumps({"step": 8, "path": text, "tasks": {text: {"metrics": {text: {"value": 1.0, "stderr": None}}}}})
            + "\n",
        ),
        "the folder": folder_renamed,
    }
    kinds = list(PAYLOADS)
    for i, (place, make) in enumerate(places.items()):
        chosen = dict.fromkeys(["tags", "colours", kinds[i % len(kinds)]])
        for kind in chosen:
            text = PAYLOADS[kind]
            if place == "the folder":
                text = text.replace("/", "-")[:200].strip()
            command = "page" if kind in ("tags", "the end of a script") else "report"
            yield Hostile(f"markup: {kind} in {place}", make(text), (command,))
    for place in ("arm", "experiment_name", "units", "a column"):
        for kind in ("mathematics",):
            yield Hostile(f"markup: {kind} in {place}, drawn", places[place](PAYLOADS[kind]), ("draw", "replay"))
    for kind in ("tags", "colours", "a heading"):
        yield Hostile(
            f"markup: {kind} in units, replayed", unit_renamed(PAYLOADS[kind]), ("replay", "detect", "calibrate")
        )
        yield Hostile(
            f"markup: {kind} in an unreadable run", with_content("config.yaml", f"a: [\n{PAYLOADS[kind]}"), ("page",)
        )


def _checkpoints(draw: random.Random) -> Iterator[Hostile]:
    step, both = "checkpoints/step-00000008", ("diagnose",)
    for key in ("step", "owner", "units", "host", "host.counters", "host.blocks", "host.counters.step", "files"):
        for kind in draw.sample(list(RAW), 1):
            raw = RAW[kind]
            yield Hostile(f"meta.json: {key} is {kind}", in_object(f"{step}/meta.json", key, raw), both)
            spoil = in_object("checkpoints/step-00000004/meta.json", key, raw)
            yield Hostile(f"continue: meta.json: {key} is {kind}", spoil, ("train",), base="stopped")
    for what, raw in {
        "none": "{}",
        "outside": '{"../../../outside/target": "0"}',
        "absolute": '{"/dev/zero": "0"}',
        "numbers": '{"a": 3}',
        "itself": '{".": "0"}',
        "empty": '{"": "0"}',
        "a zero": '{"a\\u0000b": "0"}',
        "long": json.dumps({"x" * 5000: "0"}),
    }.items():
        yield Hostile(f"meta.json: files are {what}", in_object(f"{step}/meta.json", "files", raw), both)
    for what, content in {
        "deep": deep(200_000),
        "a list": "[]",
        "cut": '{"step": ',
        "digits": "9" * 500_000,
        "binary": bytes(range(256)),
    }.items():
        yield Hostile(f"meta.json is {what}", with_content(f"{step}/meta.json", content), both)
    yield Hostile("meta.json is 16 GiB", sparse(f"{step}/meta.json"), both)


def _checkpoint_files() -> Iterator[Hostile]:
    step, both = "checkpoints/step-00000008", ("diagnose",)
    for name in ("step-99999999", "step-00000009"):
        spoil = instead(f"checkpoints/{name}", lambda path: path.mkdir())
        yield Hostile(f"checkpoints: {name} is empty", spoil, both)
        yield Hostile(f"checkpoints: {name} is a file", with_content(f"checkpoints/{name}", "x"), both)
    for name, content in (
        (".metadata", b"x"),
        (".metadata", b""),
        ("__0_0.distcp", b""),
        ("__0_0.distcp", b"x" * 1000),
    ):

        def spoil(room: Room, name: str = name, content: bytes = content) -> None:
            (room.odd / step / name).write_bytes(content)
            seal(room.odd / step)

        yield Hostile(f"checkpoint: {name} of {len(content)} bytes", spoil, both)
    for what, content in {
        "a pickle of a list": pickle.dumps([1]),
        "no pickle": b"\x80\x04]q\x00.",
        "text": b"abc",
    }.items():

        def spoil(room: Room, content: bytes = content) -> None:
            (room.odd / step / ".metadata").write_bytes(content)
            seal(room.odd / step)

        yield Hostile(f"checkpoint: .metadata is {what}", spoil, both)
    yield Hostile("checkpoints: 5,000 steps", many_steps, both)
    for what, content in {
        "text": b"abc",
        "cut": lambda old: old[:50],
        "a huge shape": huge_shape,
        "nothing": b"",
    }.items():
        spoil = with_content("order/epoch-0.npy", content)
        yield Hostile(f"continue: the order is {what}", spoil, ("train",), base="stopped")


_MAPS = {"AutoConfig": "evil.X", "AutoModelForCausalLM": "evil.Y", "AutoModel": "evil.Y"}


def _hub(name: str, spoil: Callable[[Room], object]) -> Hostile:
    return Hostile(f"hf: {name}", spoil, ("checkpoint", "tune"), base="hf")


def _with_code(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Room], None]:
    """Code beside a changed JSON file."""

    def spoil(room: Room) -> None:
        evil_module(room, room.odd)
        tree = json.loads((room.odd / file).read_text()) if (room.odd / file).exists() else {}
        change(tree)
        (room.odd / file).write_text(json.dumps(tree))

    return spoil


def _hub_code() -> Iterator[Hostile]:
    yield _hub("auto_map", _with_code("config.json", lambda tree: tree.update(auto_map=_MAPS)))
    yield _hub(
        "auto_map of an unknown type",
        _with_code("config.json", lambda tree: tree.update(auto_map=_MAPS, model_type="own")),
    )
    yield _hub(
        "auto_map of a tokenizer",
        _with_code(
            "tokenizer_config.json",
            lambda tree: tree.update(auto_map={"AutoTokenizer": ["evil.X", "evil.X"]}, tokenizer_class="X"),
        ),
    )
    yield _hub(
        "auto_map of another place",
        _with_code("config.json", lambda tree: tree.update(auto_map={"AutoConfig": "a/b--evil.X"}, model_type="own")),
    )
    yield _hub("custom_generate", several(_with_code("generation_config.json", lambda tree: tree), moved_code))

    def bin_alone(room: Room) -> None:
        for file in room.odd.glob("*.safetensors"):
            file.unlink()
        (room.odd / "pytorch_model.bin").write_bytes(pickle.dumps(Opens(room.ran)))

    yield _hub("pytorch_model.bin alone", bin_alone)
    yield _hub("pytorch_model.bin too", bin_too)
    yield _hub("a bin in the index", bin_in_index)

    def trained_from(room: Room) -> None:
        (room.odd / "hf").mkdir()
        evil_module(room, room.odd / "hf")
        (room.odd / "hf" / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": _MAPS}))

        def change(tree: dict[str, Any]) -> None:
            tree["model"] |= {"name": "pretrained", "checkpoint": str(room.odd / "hf")}
            tree["model"]["outlier_channels"]["number"] = 0

        with_config(change)(room)

    yield Hostile("hf: a run that began from code", trained_from, ("report", "diagnose"))


def _hub_files() -> Iterator[Hostile]:
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        yield _hub(f"{name} is a pipe", instead(name, os.mkfifo))
        yield _hub(f"{name} -> a secret", several(removed(name), lambda room, name=name: secret_link(room, name)))
        yield _hub(f"{name} is deep", with_content(name, deep(100_000)))
        yield _hub(f"{name} is empty", with_content(name, ""))
    for key, value in {
        "num_hidden_layers": 10**9,
        "hidden_size": 10**12,
        "vocab_size": 10**12,
        "num_attention_heads": 0,
        "model_type": "nosuch",
        "architectures": ["<b>"],
        "rope_parameters": "x",
        "torch_dtype": "nosuch",
        "max_position_embeddings": 10**15,
        "intermediate_size": "many",
        "quantization_config": {"quant_method": "nosuch"},
        "hidden_act": "nosuch",
    }.items():
        yield _hub(f"config.json: {key} is {str(value)[:20]}", in_object("config.json", key, json.dumps(value)))
    yield _hub("config.json is a list", with_content("config.json", "[]"))
    yield _hub("config.json: a number of 400 digits", in_object("config.json", "hidden_size", HUGE))


def _weights() -> Iterator[Hostile]:
    for what, head in {
        "a huge head": (2**60).to_bytes(8, "little"),
        "a head of zeros": bytes(8),
        "a deep head": headed(deep(100_000)),
        "offsets beyond": headed('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999999999]}}'),
        "a huge shape": headed('{"a": {"dtype": "F32", "shape": [9999999999999], "data_offsets": [0, 4]}}'),
        "other weights": headed('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + bytes(4),
    }.items():
        yield _hub(
            f"safetensors: {what}",
            with_content("model.safetensors", head + b"x" * 100 if what != "other weights" else head),
        )
    index = "model.safetensors.index.json"
    for what, files in {
        "outside": "../outside/target",
        "absolute": "/dev/zero",
        "a number": 3,
        "long": "x" * 5000,
    }.items():
        tree = json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": files}})
        spoil = several(with_content(index, tree), lambda room: room.target("target", SECRET))
        yield _hub(f"index: {what}", spoil)
    yield _hub("index: a list", with_content(index, "[]"))
    yield _hub("a template", several(with_content("chat_template.jinja", "{% for i in range(10**12) %}x{% endfor %}")))


def folders(draw: random.Random) -> list[Hostile]:
    """All hostile folders."""
    return [
        *_links(),
        *_links_to_write(),
        *_others_in_place(),
        *_configs(draw),
        *_code(),
        *_headers(draw),
        *_rows(draw),
        *_row_files(),
        *_summaries(draw),
        *_ratios(),
        *_ratio_files(),
        *_streams(),
        *_markup(),
        *_checkpoints(draw),
        *_checkpoint_files(),
        *_hub_code(),
        *_hub_files(),
        *_weights(),
    ]

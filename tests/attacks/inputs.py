"""Bad inputs: command lines without sense, and what must become of each.

A mistake is told in one line that names the key or file, exit code 2, with nothing written; what is odd and yet legal
must be accepted. A case's name is its command line; long words are cut there.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from .attaching import CALLS, call, steady_stderr
from .harness import HELD, Arena, Case, Hook, Kind, Outcome

LIMIT_S = 20.0
MEMORY_BYTES = 6 << 30
LONGEST = 1500
"""Characters of a line of ours."""

REFUSED, ACCEPTED, EITHER = "refused", "accepted", "either"
"""Exit code 2 in one line and nothing written; exit code 0; one of the two."""
USAGE = "usage"
"""Exit code 2 and the usage."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Input:
    """A command line, and what must become of it."""

    words: tuple[str, ...]
    expect: str = REFUSED
    named: tuple[str, ...] = ()
    """One of these must stand in the line; none: anything may."""
    name: str = ""

    @property
    def title(self) -> str:
        """The command line as a report shows it."""
        told = self.name or " ".join(word if len(word) < 80 else f"{word[:60]}...({len(word)})" for word in self.words)
        return told.encode("unicode_escape").decode()


def verdict(case: Input, outcome: Outcome, new: list[str]) -> str:
    """What broke, in a word or two, or `HELD`; `new`: what is on the disk and was not before."""
    if outcome.trouble:
        return outcome.trouble
    codes = {REFUSED: (2,), ACCEPTED: (0,), EITHER: (0, 2), USAGE: (2,)}[case.expect]
    if outcome.code not in codes:
        return f"exit code {outcome.code}, not {' or '.join(map(str, codes))}"
    if case.expect == USAGE:
        return HELD if "usage" in outcome.out + outcome.err else "no usage"
    if _CONTROL.search(outcome.out + outcome.err):
        return "raw control characters"
    if outcome.code == 0:
        return HELD
    if not outcome.refused:
        return "not one line"
    line = outcome.err.splitlines()[-1].removeprefix("gnmr: ")
    if not line.strip() or len(line) > LONGEST:
        return "line is empty or too long"
    if case.named and not any(name in line for name in case.named):
        return "line names neither key nor file"
    if "#0 failed" in outcome.out:  # a sweep whose cells were begun may keep its note of them
        new = [name for name in new if name.split("/")[1:2] not in ([], [".multirun"])]
    return f"left {new[0]}" if new else HELD


# What lies in a case's folder, where a word names it.


def babble(seed: int = 0) -> str:
    """Some 20,000 tokens in 600 lines."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(120)]
    return "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(600))


def _json_lines(texts: Iterable[Any]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def _parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)


def _device(path: Path) -> None:
    """As /dev/null, or without the right to make one a link to it, which replacing does no harm."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        path.symlink_to(os.devnull)


def _text(content: str | bytes) -> Callable[[Path], object]:
    if isinstance(content, bytes):
        return lambda path: path.write_bytes(content)
    return lambda path: path.write_text(content, encoding="utf-8")


def _inside(name: str, content: str | bytes) -> Callable[[Path], object]:
    """A folder with one file."""

    def make(path: Path) -> None:
        (path / name).parent.mkdir(parents=True)
        _text(content)(path / name)

    return make


def deep(number: int) -> str:
    return "[" * number + "]" * number


NORMS = "step,unit,norm\n"
_ROW = {"activity_label": "x", "ctx": "A b.", "endings": ["a", "b", "c", "d"], "label": 0}
FILES: dict[str, Callable[[Path], object]] = {
    "babble.txt": _text(babble()),
    "empty.txt": _text(""),
    "blank.txt": _text(" \n\t\n" * 200),
    "short.txt": _text("a b c"),
    "unbroken.txt": _text("".join(random.Random(0).choices("abcdefghij", k=100_000))),
    "zeros.txt": _text(b"\0" * 100_000),
    "binary.txt": _text(bytes(range(256)) * 400),
    "utf16.txt": _text(babble().encode("utf-16")),
    "photo.jpg": _text(b"\xff\xd8\xff"),
    "deep.jsonl": _text('{"text": ' + deep(200_000) + "}\n"),
    "deep.json": _text(deep(200_000)),
    "half.jsonl": _text('{"text": "abc'),
    "list.jsonl": _text("[1, 2]\n"),
    "number.jsonl": _text(_json_lines([1, 2, 3])),
    "nulls.jsonl": _text(_json_lines([None] * 50)),
    "nested.jsonl": _text(_json_lines([{"a": "b"}] * 50)),
    "mixed.jsonl": _text(_json_lines(["a b c", 3, ["x"]])),
    "keyless.jsonl": _text('{"txt": "abc"}\n' * 50),
    "empty.jsonl": _text(""),
    "surrogate.jsonl": _text('{"text": "\\ud800 ' + "abc def " * 50 + '"}\n'),
    "prompts.jsonl": _text('{"prompt": "a", "response": 3}\n' * 50),
    "none.jsonl.gz": _text("this is no gzip"),
    "cut.jsonl.gz": _text(gzip.compress(_json_lines([babble()]).encode())[:200]),
    "bomb.jsonl.gz": _text(gzip.compress(b'{"text": "' + b"\0" * 30_000_000)),
    "wordless.parquet": lambda path: _parquet(path, {"number": [1, 2, 3]}),
    "numbers.parquet": lambda path: _parquet(path, {"text": [1, 2, 3]}),
    "rowless.parquet": lambda path: _parquet(path, {"text": []}),
    "garbage.parquet": _text("PAR1 this is none PAR1"),
    "empty.parquet": _text(""),
    "tokenizer-empty.json": _text(""),
    "tokenizer-none.json": _text('{"version": "1.0"}'),
    "tokenizer-list.json": _text("[]"),
    "tokenizer-deep.json": _text(deep(200_000)),
    "plain_file": _text("I am a file"),
    "empty_folder": lambda path: path.mkdir(),
    "photos": _inside("cat.jpg", "miaow"),
    "folder.txt": lambda path: path.mkdir(),
    "pipe.txt": os.mkfifo,
    "pipe.csv": os.mkfifo,
    "pipe.json": os.mkfifo,
    "device": _device,
    "loop.txt": lambda path: path.symlink_to(path.name),
    "lost.txt": lambda path: path.symlink_to("nowhere"),
    # norms for replay
    "sound.csv": _text(NORMS + "".join(f"{step},{unit},1.{step}\n" for step in range(1, 20) for unit in "ab")),
    "norms-last.csv": _text(NORMS + "9223372036854775807,a,1\n"),
    "norms-beyond.csv": _text(NORMS + "9223372036854775808,a,1\n"),
    "norms-far.csv": _text(NORMS + "1000000000000,a,1\n"),
    "norms-distant.csv": _text(NORMS + "1,a,1\n1000000000,b,1\n"),
    "norms-zero.csv": _text(NORMS + "0,a,1\n"),
    "norms-minus.csv": _text(NORMS + "-1,a,1\n"),
    "norms-half.csv": _text(NORMS + "1.5,a,1\n"),
    "norms-nan.csv": _text(NORMS + "nan,a,1\n"),
    "norms-negative.csv": _text(NORMS + "1,a,-1\n"),
    "norms-word.csv": _text(NORMS + "1,a,large\n"),
    "norms-huge.csv": _text(NORMS + "1,a,1" + "0" * 400 + "\n"),
    "norms-twice.csv": _text(NORMS + "1,a,1\n1,a,2\n"),
    "norms-unitless.csv": _text(NORMS + "1,,1\n"),
    "norms-long.csv": _text(NORMS + "1," + "u" * 2_000_000 + ",1\n"),
    "norms-wide.csv": _text(NORMS.strip() + "".join(f",c{i}" for i in range(20_000)) + "\n1,a,1\n"),
    "norms-more.csv": _text(NORMS + "1,a,1,7\n"),
    "norms-quote.csv": _text(NORMS + '1,"a,1\n'),
    "norms-binary.csv": _text(bytes(range(256)) * 40),
    "norms-headless.csv": _text("1,a,1\n2,a,1\n"),
    "norms-column.csv": _text("step,norm\n1,1\n"),
    "norms-double.csv": _text("step,step,unit,norm\n1,1,a,1\n"),
    "norms-rowless.csv": _text(NORMS),
    "norms-many.csv": _text(NORMS + "".join(f"1,u{i},1\n" for i in range(70_000)) + "100000,u1,1\n"),
    "norms-real.parquet": lambda path: _parquet(path, {"step": [1.5], "unit": ["a"], "norm": [1.0]}),
    "norms-list.parquet": lambda path: _parquet(path, {"step": [1], "unit": [["a"]], "norm": [1.0]}),
    "norms-null.parquet": lambda path: _parquet(path, {"step": [1, None], "unit": ["a", "a"], "norm": [1.0, 1.0]}),
    "norms-last.parquet": lambda path: _parquet(path, {"step": [2**63 - 1], "unit": ["a"], "norm": [1.0]}),
    "norms-none.parquet": _text("hello"),
    # checkpoints and tasks for eval
    "model-empty": _inside("config.json", ""),
    "model-list": _inside("config.json", "[]"),
    "model-unknown": _inside("config.json", '{"model_type": "nothing"}'),
    "model-bare": _inside("config.json", '{"model_type": "llama"}'),
    "model-deep": _inside("config.json", '{"model_type": ' + deep(100_000) + "}"),
    "adapter-only": _inside("adapter_config.json", "{}"),
    "tasks-empty": _inside("wikitext2/test.txt", ""),
    "tasks-none": _inside("wikitext2/train.txt", "a b c"),
    "tasks-deep": _inside("hellaswag/validation.jsonl", deep(200_000) + "\n"),
    "tasks-keyless": _inside("hellaswag/validation.jsonl", "{}\n"),
    "tasks-label": _inside("hellaswag/validation.jsonl", json.dumps(_ROW | {"label": 4}) + "\n"),
    "tasks-endings": _inside("hellaswag/validation.jsonl", json.dumps(_ROW | {"endings": "abcd"}) + "\n"),
    "tasks-context": _inside("hellaswag/validation.jsonl", json.dumps(_ROW | {"ctx": None}) + "\n"),
    "tasks-parquet": _inside("hellaswag/validation.parquet", "PAR1"),
    "tasks-binary": _inside("wikitext2/test.txt", bytes(range(256))),
    "tasks-answer": _inside("gsm8k/test.jsonl", '{"question": "a", "answer": "4"}\n'),
    "tasks-file": _text("I am a file"),
    "conf-empty": lambda path: path.mkdir(),
    "conf-broken": _inside("preset/broken.yaml", "a: ["),
    "conf-bomb": _inside(
        "preset/bomb.yaml",
        "# @package _global_\narm: x\na0: &a0 [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
    ),
    "conf-tag": _inside("preset/tag.yaml", "# @package _global_\narm: !!python/object/apply:os.getcwd []\n"),
    "conf-zero": _inside("preset/zero.yaml", '# @package _global_\narm: "a\\0b"\n'),
}


def _run(arena: Arena) -> Path:
    """A finished run of two steps, made once; cases get copies."""
    if "inputs" not in arena.made:
        folder = arena.folder("material")
        _text(babble())(folder / "babble.txt")
        before = _caches(arena)
        outcome = arena.run(*TRAIN, "run_dir=run", cwd=folder, limit_s=120)
        assert outcome.code == 0, outcome.err
        arena.made["inputs"], arena.made["inputs cache"] = folder / "run", _caches(arena) - before
    return Path(arena.made["inputs"])


def _caches(arena: Arena) -> set[Path]:
    return {path for name in ("cache", "home") for path in (arena.scratch / name).rglob("text-*") if path.is_dir()}


def _above_vocabulary(folder: Path, arena: Arena) -> None:
    """A token cache with sound checksums and ids above the vocabulary; its name goes by the time of the file."""
    shutil.copystat(_run(arena).parent / "babble.txt", folder / "babble.txt")
    (source,) = arena.made["inputs cache"]
    made = Path(shutil.copytree(source, folder / "cache" / source.name))
    content = b"\xfe\xff" * ((made / "train.bin").stat().st_size // 2)
    (made / "train.bin").write_bytes(content)
    meta = json.loads((made / "meta.json").read_text())
    meta["files"]["train.bin"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    bare = {key: value for key, value in meta.items() if key != "fingerprint"}
    meta["fingerprint"] = hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()
    (made / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def _furnish(folder: Path, arena: Arena, words: tuple[str, ...]) -> None:
    """The files that the words name."""
    told = "\0".join(words)
    for name, make in FILES.items():
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", told):
            make(folder / name)
    for name in ("RUN", "OTHER"):
        if re.search(rf"(?<!\w){name}(?!\w)", told):
            shutil.copytree(_run(arena), folder / name)
    if "data.cache_dir=cache" in told:
        _above_vocabulary(folder, arena)


def _listing(*folders: Path) -> dict[str, tuple[int, ...]]:
    """Everything below the folders: type, size and time of change; a run's lock counts for nothing."""
    found = {}
    for folder in folders:
        for parent, names, files in os.walk(folder):
            for name in (*names, *files):
                path = Path(parent, name)
                if name != ".lock" and not str(path).endswith(".wandb"):
                    state = path.lstat()
                    sizes = (0, 0) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)
                    found[str(path.relative_to(folder))] = (stat.S_IFMT(state.st_mode), *sizes)
    return found


def _play(case: Input) -> Callable[[Arena], str]:
    def play(arena: Arena) -> str:
        folder = arena.folder("input")
        _furnish(folder, arena, case.words)
        places = (folder, arena.scratch / "tmp")
        before = _listing(*places)
        hook = Hook(call, case.name) if case.words[0] == "attach" else Hook(steady_stderr)
        words = ("--version",) if case.words[0] == "attach" else case.words
        limit_s = LIMIT_S * (3 if any("joblib" in word for word in words) else 1)  # its workers import all anew
        outcome = arena.run(*words, cwd=folder, hook=hook, limit_s=limit_s, memory_bytes=MEMORY_BYTES)
        after = _listing(*places)
        new = sorted(name for name in after.keys() | before.keys() if after.get(name) != before.get(name))
        found = verdict(case, outcome, new)
        if found == HELD and "device" in before and after.get("device", (0,))[0] != before["device"][0]:
            found = "device destroyed"
        shutil.rmtree(folder, ignore_errors=True)
        return found

    return play


# The command lines.

TRAIN = (
    *("train", "debug=smoke", "data.name=text", "data.path=babble.txt", "data.vocab_size=300", "model.hidden_size=32"),
    *("model.intermediate_size=48", "model.num_layers=1", "training.seq_len=16", "training.steps=2"),
    *("records.live=off", "records.wandb=off", "training.threads=1"),
)
"""Two tiny steps; later words win."""

HUGE = "1" + "0" * 30
_NAMES = ("''", "' '", "n" * 300, "..", "a/b", ".hidden", "a\\\\b", "'a\x07b'", "'a\nb'", "'\x1b[31mred'", "a\udcffb")
_WRONG = {
    "int": ("-1", "nan", "much", "1e39", "[1]", "''", "{a: 1}", "0.5", "null"),
    "float": ("-1", "nan", "inf", "-inf", "much", "[1]", "''", "{a: 1}", "null"),
    "bool": ("much", "nan", "[true]", "''"),
    "choice": ("nosuch", "''", "[nosuch]", "{a: 1}", "n" * 3000),
    "list": ("3", "{a: b}", "[[a]]", "nosuch", "''"),
    "dict": ("3", "[1]", "nosuch"),
}
_CHOICES = {
    *(
        "model.name",
        "data.name",
        "precision.low",
        "precision.recovery",
        "precision.unit",
        "precision.site",
        "precision.rounding",
    ),
    *("precision.backend", "precision.weights", "controller.observe", "controller.routing", "controller.signal"),
    *("optim.name", "optim.transform.name", "faults.kind", "training.dtype", "training.device", "training.resume"),
    *("records.live", "records.wandb", "scores.path"),
}
_PARTS_OF_NAMES = {"experiment_name", "scale_name", "arm", "precision.name"}
_HARMLESS_HUGE = {
    *("training.checkpoint_every", "training.keep_checkpoints", "training.eval_every", "records.plain_every"),
    *("records.wandb_every", "training.max_nonfinite_streak", "data.tokenizer_bytes", "data.max_tokens"),
    *(
        "records.ratios_every",
        "scores.every",
        "scores.limit",
        "scores.shots",
        "scores.batch_size",
        "precision.probe_tokens",
    ),
    *("model.adapter.scaling", "faults.history", "faults.duration", "training.eval_sequences"),
}
"""Keys for which a huge number means: never, or all there is."""


def _keys() -> Iterator[tuple[str, str]]:
    """(key, type as it is written) of every key of the composed config."""
    from gnmr.lab.config import Config

    def walk(cls: Any, prefix: str) -> Iterator[tuple[str, str]]:
        made = cls.__dataclass_fields__
        for one in fields(cls):
            factory = made[one.name].default_factory
            if isinstance(factory, type) and is_dataclass(factory):
                yield from walk(factory, f"{prefix}{one.name}.")
            else:
                yield f"{prefix}{one.name}", str(one.type)

    yield from walk(Config, "")


def _of_key(key: str, kind: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """(value, what must become of it) for a key."""
    optional, bare = "None" in kind, kind.split("|")[0].strip()
    if key in _CHOICES:
        yield draw.choice(_WRONG["choice"]), REFUSED
    elif bare in ("int", "float"):
        wrong = [value for value in _WRONG[bare] if not (optional and value == "null")]
        value = draw.choice((*wrong, HUGE) if bare == "int" else wrong)
        yield value, EITHER if value == HUGE and key in _HARMLESS_HUGE else REFUSED
    elif bare.startswith(("bool", "list", "dict")):
        yield draw.choice(_WRONG[bare[:4]]), REFUSED
    elif key in _PARTS_OF_NAMES:
        names = _NAMES if key == "experiment_name" else draw.sample([name for name in _NAMES if len(name) < 99], 2)
        yield from ((value, REFUSED) for value in names)


def _systematic(draw: random.Random) -> Iterator[Input]:
    for key, kind in _keys():
        for value, expect in _of_key(key, kind, draw):
            more = (("faults.kind=noise",) if key.startswith("stress.") else ()) + (
                ("memory_plan=true",) if expect == EITHER else ()
            )
            yield Input((*TRAIN, *more, f"{key}={value}"), expect, (key.rpartition(".")[2],))


def _lines(base: tuple[str, ...], expect: str, table: str) -> Iterator[Input]:
    """A case for each command line of a table; the line of a mistake must name one of its keys or values."""
    for line in re.split(r"\n+| \| ", table.strip("\n")):
        for short, long in _SHORT.items():
            line = line.replace(short, long)
        words = tuple(re.findall(r"(?:'[^']*'|[^ '])+|'[^ ]*", line))
        yield Input((*base, *words), expect, tuple(_own_names(words)))


def _own_names(words: Iterable[str]) -> list[str]:
    """The last parts of keys, and values that are short."""
    found = []
    for word in words:
        key, _, value = word.partition("=")
        parts = re.split("[./]", key.lstrip("+~"))
        found += [*parts[-2 if len(parts) > 2 else -1 :], Path(value).name if len(value) < 200 else value[:50]]
    found += ["corpus"] if any(word.startswith("data.path=") for word in words) else []
    found += ["scores: "] if any(word.startswith("scores.tasks=") for word in words) else []
    found += ["arm="] if "preset=zero" in words else []
    return [name.replace("\0", "\\x00") for name in found if name]


SENSELESS = """
unknown=1 | +unknown=1 | training.stps=3 | trainig.steps=3 | training.steps.more=3 | hydra.no=1 | training=3
model=lama | scale=7b | experiment=nosuch | sweep=nosuch | precision.low=fp9 | preset=6/7
recipe=fp8_hybrid | hierarchy=6/8 | variant=ranked_gap
model=../gpt
model=/etc/passwd | debug=../../conf/config | controller.signal=z_scores | optim.transform.name=clip | training.seed=0,1
training.steps=${nosuch} | training.steps=${training.steps} | arm=${arm} | training.steps=${oc.env:NOSUCH}
arm=${oc.env:PATH} | training.steps=[1 | hydra/launcher=nosuch | hydra.mode=nosuch | hydra.run.dir=/proc/x
hydra.run.dir=plain_file/x | hydra.output_subdir=/proc/x | data.path=??? | ~training.nosuch | training.steps='1
key{=1

model=moe model.experts.top_k=9 | model.experts.number=8 | model.num_heads=5 | model.num_heads=32
model=gpt data.name=gsm8k | model=gpt training.export_hf=true | model.checkpoint=here
precision.recovery=null controller.warmup_frac=0.1 | precision.unit=expert
precision.low=sim_int4 precision.recovery=null precision.site=forward
preset=6/8 precision.recovery=int8 | preset.colour=red | precision.targets=[nothing] | precision.targets=[''] | precision.recovers=[]
precision.recipes.mine=3 | precision.recipes.mine.nosuch.input=e4m3 | precision.pins=3 | precision.pins.down_proj=[bprop]
precision.pins.nosuch=[fprop,dgrad,wgrad] | precision.pins.down_proj=[] | precision.pins.down_proj=[fprop]
precision.site=forward precision.rounding=stochastic training.activation_checkpointing=true
controller.signal=recovery_gap precision.recovery=null
controller.signal=../x:Y | controller.signal=x: | controller.signal=:Y | controller.signal=.:Y
controller.signal=a..b:Y | controller.signal=json:It | controller.signal=os:system
controller.signal=json:JSONDecoder | controller.options.nosuch=2 | controller.options.window=0
controller.options.decay=nan | controller.options.history=nosuch | controller.init_frac=2
controller.signal=static_k controller.options.calibration_steps=50 | records.evidence=[colour]
records.monitor=[no] | faults.kind=noise faults.windows=[[2,9]]
faults.kind=noise faults.windows=[[1,99999999999999999999]]
faults.kind=noise precision.low=bf16 | faults.kind=noise faults.windows=[[1,2],[2,1]]
faults.kind=noise faults.rate=0 | model.outlier_channels.number=99 | model.outlier_channels.window=[1,3]
model.outlier_channels.gain=1e39 | optim.transform.name=spam optim.transform.options.grace=600 | optim.betas=[nan,0.9]
optim.betas=[0.9] | optim.name=scale optim.transform.name=spam | optim.lr=1e39 | optim.lr=1e30 | optim.lr=0
optim.weight_decay=1e39 | optim.warmup_frac=2 | model.init_std=1e39 | model.norm_eps=1e39 | model.rope_theta=1e400
training.dtype=float16 | training.device=tpu | training.threads=100000 | training.seed=4611686018427387904
scores.tasks=[nosuch] | scores.tasks=[[gsm8k]] | scores.tasks=[wikitext2]
scores.tasks=[wikitext2] scores.data=nowhere

training.batch_size=9999999999999 | training.batch_size=1000000000 | model.hidden_size=100000000
model.num_layers=1000000000 | model.num_layers=100000 | model.intermediate_size=1000000000000
training.seq_len=1000000000000 | training.seq_len=30000
model.hidden_size=1000000000000 model.num_heads=500000000000 | model=moe model.experts.number=1000000000

run_dir='' | run_dir=/proc/x | run_dir=/sys/x | runs_dir=/proc/x | run_dir=plain_file | run_dir=plain_file/x
run_dir=photos | run_dir=device | run_dir=pipe.txt | run_dir=RUN training.seed=5
run_dir=RUN training.resume=never | run_dir=@300
runs_dir=@300 | run_dir=@deep | experiment_name=@300 | run_dir=loop.txt | run_dir=loop.txt/x | data.cache_dir=device/x
data.cache_dir=plain_file | data.cache_dir=/proc/x | data.cache_dir=@300 | run_dir=a\0b | data.path=a\0b

plan='' | plan=nowhere.json | plan=photos | plan=/dev/zero | plan=pipe.txt | plan=photo.jpg | plan=deep.json | plan=@300
data.path= | data.path=nowhere | data.path=empty.txt | data.path=blank.txt | data.path=short.txt | data.path=photo.jpg
data.path=photos | data.path=empty_folder | data.path=folder.txt | data.path=pipe.txt | data.path=device
data.path=loop.txt | data.path=lost.txt | data.path=deep.jsonl | data.path=deep.json | data.path=half.jsonl
data.path=list.jsonl | data.path=number.jsonl | data.path=nulls.jsonl | data.path=nested.jsonl | data.path=mixed.jsonl
data.path=keyless.jsonl | data.path=empty.jsonl | data.path=none.jsonl.gz | data.path=cut.jsonl.gz
data.path=bomb.jsonl.gz | data.path=wordless.parquet | data.path=numbers.parquet | data.path=rowless.parquet
data.path=garbage.parquet | data.path=empty.parquet | data.path=/proc/self/mem | data.path=https://localhost/x.txt
data.path=@300 | data.path=@deep | data.tokenizer=nowhere | data.tokenizer=empty_folder
data.tokenizer=tokenizer-empty.json | data.tokenizer=tokenizer-none.json | data.tokenizer=tokenizer-list.json
data.tokenizer=tokenizer-deep.json | data.tokenizer=pipe.json | data.vocab_size=100
data.text_column= data.path=keyless.jsonl | data.max_tokens=1 | data.name=c4 data.path=null
data.name=gsm8k data.path=null | data.name=instructions data.path=prompts.jsonl

model=pretrained model.checkpoint=nowhere scale=finetune_cpu | model=pretrained model.checkpoint='' scale=finetune_cpu
model=pretrained model.checkpoint=plain_file scale=finetune_cpu
model=pretrained model.checkpoint=a/b scale=finetune_cpu
model=pretrained model.checkpoint=model-empty scale=finetune_cpu
model=pretrained model.checkpoint=model-deep scale=finetune_cpu

--config-dir=nowhere | --config-dir=plain_file | --config-dir=conf-broken preset=broken
--config-dir=conf-bomb preset=bomb | --config-dir=conf-tag preset=tag | --config-dir=conf-zero preset=zero
--nosuch | -x | --cfg=nosuch | --config-name=no | --config-path=/nowhere
"""
"""Behind `gnmr train`: keys and grammar; contradictions; sizes; places; data; checkpoints; the user's own YAML."""

LEGAL = """
memory_plan=true | arm='ä' | arm='x y' | arm='🙂' | run_dir='a b' | run_dir=a/b/c | training.seed=4611686018427387903
controller.max_o=2147483647 | optim.betas=[0,0] | optim.clip_norm=1e-30 | controller.alpha=null controller.beta=null
controller.alpha=1e39 | training.keep_checkpoints=1000000 | training.max_nonfinite_streak=1 | precision.low=bf16
optim.lr=1e-30 | data.path=binary.txt | controller.hold=1000000 | precision.backend=simulated precision.low=bf16
--config-dir=conf-empty
"""

DOUBTFUL = """
training.steps=1000000000000000 memory_plan=true | training.accumulation=99999999999999 memory_plan=true
runs_dir='' | run_dir=' ' | data.cache_dir=cache | data.path=surrogate.jsonl | data.path=unbroken.txt
data.path=zeros.txt | data.path=utf16.txt
model.num_layers=1000000000 memory_plan=true | model.hidden_size=100000000 memory_plan=true
training.batch_size=9999999999999 memory_plan=true | model=moe model.experts.number=100000 memory_plan=true
training.seq_len=1000000000000 memory_plan=true | arm='\u202eabc' | data.vocab_size=2147483648 memory_plan=true
run_dir='a\nb'
run_dir='a\udcffb' | data.text_column='a\udcffb' | records.wandb=online | hydra.output_subdir=.hydra
hydra.job.chdir=true | hydra.run.dir=elsewhere | controller.trigger=1e-300 | +training.steps=1
faults.kind=noise faults.magnitude=1e39 | faults.kind=noise faults.duration=2147483648 | controller.eps=1e-300
"""

SWEEPS = """
memory_plan=true | training.stps=1,2 | nosuch=1,2 | sweep=nosuch | training.steps=-1 | training.steps=-1,-2 | --nosuch
training.seed=0,1 data.path=nowhere | experiment_name=a/b training.seed=0,1 | run_dir='' training.seed=0,1
hydra/launcher=nosuch training.seed=0,1 | hydra.sweep.dir=/proc/x training.seed=0,1 | hydra.sweep.dir=plain_file
training.seed=range(0,10,0) | training.seed=range(0,1000000000) | training.seed=choice() | training.seed=,
training.seed=glob(*) | hydra.sweep.subdir=/proc/x | hydra/launcher=joblib hydra.launcher.n_jobs=much
runs_dir=/proc/x training.seed=0,1 | precision.low=int4 precision.recovery=fp8_hybrid | run_dir=plain_file training.seed=0,1
model.hidden_size=100000000
"""
"""Behind `gnmr train -m`."""

REPORTS = """
nowhere | plain_file | empty_folder | pipe.txt | device | /dev/null | /proc/self | loop.txt | RUN nowhere | @300
@deep | a\0b | RUN --nosuch | RUN --out | RUN --out=plain_file | RUN --out=/proc/x | RUN --out=pipe.txt
RUN --out=@300 | RUN --out=device | RUN --no-plots html=empty_folder | RUN --no-plots html=/proc/x
RUN --no-plots html=plain_file/x | RUN --no-plots html=@300 | RUN against=nosuch | RUN --against | RUN --no-plots=1
RUN --html | RUN against= | - | --
"""

REPLAYS = """
nowhere | empty_folder | plain_file | pipe.csv | device | loop.txt | @300 | @deep | a\0b | RUN max_o=-1 | RUN max_o=0
RUN max_o=much | RUN max_o=@huge | RUN t_lock=@huge | RUN t_lock=nan | sound.csv hold=-1 | sound.csv delta=nan
sound.csv eps=-1 | sound.csv trigger=nan | sound.csv init_frac=-1 | RUN alfa=1 | RUN alpha | RUN alpha=[ | RUN alpha={
RUN alpha=${oc.env:HOME} | RUN alpha.x=1 | RUN routing=nosuch | RUN signal=nosuch | RUN signal=../x:Y | RUN signal=x:Y
RUN signal=: | RUN signal=os:system | RUN signal=json:JSONDecoder | RUN signal=recovery_gap | RUN signal=
RUN options.nosuch=1 | RUN signal=recovery_gap,mse | RUN calibrate=0 | RUN calibrate=2 | RUN calibrate=nan
RUN calibrate= | RUN calibrate=0.1,much | RUN detect=0.1,0.2 | RUN detect=much | RUN calibrate=0.1 detect=0.1
RUN calibrate=0.1 signal=nosuch,gap | RUN out= | RUN out=empty_folder | RUN out=nowhere/x | RUN out=/proc/x
RUN out=plain_file/x | RUN out=@300 | RUN calibrate=0.1 out=plain_file | RUN calibrate=0.1 out=/proc/x
RUN calibrate=0.1 out=device | --nosuch
"""

EVALS = """
nowhere | plain_file | empty_folder | pipe.txt | device | a/b | a/b/c | ../x | loop.txt | @300 | @deep | a\0b
model-empty | model-list | model-unknown | model-bare | model-deep | adapter-only | RUN nosuch=1 | RUN tasks=[]
RUN tasks=[nosuch] | RUN tasks=wikitext | RUN limit=0 | RUN limit=-1 | RUN limit=1e39 | RUN shots=-1
RUN shots=@huge | RUN block=0 | RUN block=1 | RUN batch_size=0 | RUN batch_size=nan | RUN path=nosuch | RUN path=low
RUN device=tpu | RUN adapter=nowhere | RUN data=nowhere | RUN data=plain_file | RUN tasks=[ | RUN out=empty_folder
RUN out=/nowhere/x | RUN out=/proc/x | RUN out=plain_file/x | RUN out=@300 | RUN data=pipe.txt
RUN data=tasks-file tasks=[wikitext2] | RUN tasks=[wikitext2] data=tasks-empty | RUN tasks=[wikitext2] data=tasks-none
RUN tasks=[hellaswag] data=tasks-deep | RUN tasks=[hellaswag] data=tasks-keyless
RUN tasks=[hellaswag] data=tasks-label | RUN tasks=[hellaswag] data=tasks-endings
RUN tasks=[hellaswag] data=tasks-context | RUN tasks=[hellaswag] data=tasks-parquet
RUN tasks=[gsm8k] data=tasks-answer | RUN tasks=[mmlu] data=empty_folder
"""

DIAGNOSES = """
nowhere | plain_file | empty_folder | pipe.txt | device | a/b | loop.txt | @300 | @deep | a\0b | model-empty
model-bare | model-deep | adapter-only | RUN nosuch=1 | RUN budget=0 | RUN budget=200% | RUN budget=nan | RUN budget=
RUN recipe=nosuch | RUN recipe=e5m2 | RUN recipe=bf16 | RUN recipe= | RUN recovery=int2 | RUN recipe=deepseek_v3
RUN plan=nowhere | RUN plan=empty_folder | RUN plan=pipe.json | RUN plan=deep.json | RUN plan=device
RUN plan=RUN/summary.json | RUN recipe=int4 plan=deep.json | RUN batches=1 | RUN batches=@huge | RUN batches=nan
RUN held_out=-1 | RUN tokens=0 | RUN block=1 | RUN block=17 | RUN block=@huge | RUN batch_size=0
RUN batch_size=100000 | RUN device=tpu | RUN data=nowhere | RUN data=short.txt | RUN data=empty.txt
RUN data=binary.txt | RUN data=utf16.txt | RUN data=pipe.txt | RUN data=folder.txt | RUN data=loop.txt
RUN data=device | RUN data=@300 | RUN out=plain_file | RUN out=device | RUN out=nowhere/x | RUN out=/proc/x
RUN out=@300 | RUN html=empty_folder | RUN html=/proc/x | RUN html=plain_file/x
"""

AUDITS = """
nowhere | plain_file | empty_folder | pipe.txt | device | a/b | loop.txt | @300 | @deep | a\0b | model-empty
model-bare | model-deep | adapter-only | RUN nosuch=1 | RUN recipe=nosuch | RUN recipe=e5m2 | RUN recipe=
RUN plan=nowhere | RUN plan=nowhere recipe=mxfp8 | RUN filter_fqns= | RUN modules_to_not_convert=[a(]
RUN filter_fqns=[,] | RUN block=1 | RUN block=17 | RUN block=@huge | RUN batch_size=0 | RUN batch_size=100000
RUN device=tpu | RUN data=nowhere | RUN data=short.txt | RUN data=empty.txt | RUN data=binary.txt
RUN data=pipe.txt | RUN data=folder.txt | RUN data=device | RUN data=@300 | RUN out=empty_folder
RUN out=nowhere/x | RUN out=/proc/x | RUN out=@300 | RUN --nosuch
"""

BENCHES = """
nosuch | decision repeats=0 | decision repeats=nan | decision repeats= | decision -m | decision clock=sun
decision out= | decision out=empty_folder | decision out=/nowhere/x | decision out=/proc/x | decision out=plain_file/x
decision out=@300 | decision training.stps=1 | decision model=lama | decision training.threads=0 | decision --nosuch
theory run= | theory run=nowhere | theory run=empty_folder | theory run=plain_file | decision training.steps=[1 | -x
"""

_SHORT = {"@300": "n" * 300, "@250": "n" * 250, "@deep": "n/" * 3000, "@huge": HUGE}


def inputs(draw: random.Random) -> list[Input]:
    """All command lines; of the keys in order another choice with every seed."""
    every = list(_systematic(draw))
    found = [every[i] for i in sorted(draw.sample(range(len(every)), 80))]
    found += _lines(TRAIN, REFUSED, SENSELESS)
    found += _lines((*TRAIN, "training.steps=1"), ACCEPTED, LEGAL)
    found += _lines((*TRAIN, "training.steps=1"), EITHER, DOUBTFUL)
    found += _lines((*TRAIN, "-m"), REFUSED, SWEEPS)
    tables = {"report": REPORTS, "replay": REPLAYS, "eval": EVALS, "diagnose": DIAGNOSES, "audit": AUDITS}
    tables["bench"] = BENCHES
    for command, table in tables.items():
        found += _lines((command,), REFUSED, table)
    odd = ("", " ", "=", "=1", ".=1", "a..b=1", "~", "+", "@", "word", "\udcff=1", "🙂=1", "a\nb=1", "a." * 500 + "b=1")
    odd += (f"arm={'x' * 100_000}", f"{'x' * 100_000}=1", f"training.steps={deep(5000)}")
    found += [Input((*TRAIN, word)) for word in odd]
    found += [Input((word,)) for word in ("report", "nosuch", "", "--nosuch", "\x1b[1m")]
    found += [Input((command, "")) for command in ("report", "replay", "eval", "diagnose", "audit", "bench")]
    found += [Input((command,), USAGE) for command in ("replay", "eval", "diagnose", "audit")]
    found += [Input(("eval", "RUN", "OTHER")), Input(("replay", "RUN", "OTHER"), named=("OTHER",))]
    norms = [name for name in FILES if name.startswith("norms-")]
    legal = ("norms-long.csv", "norms-wide.csv", "norms-huge.csv")
    found += [Input(("replay", name), EITHER if name in legal else REFUSED, (name,)) for name in norms]
    # Written through, or refused; a device stays a device.
    for line in ("replay RUN out=device", "report RUN --no-plots html=device", "bench decision repeats=1 out=device"):
        found.append(Input(tuple(line.split(" ")), EITHER, ("device",)))
    found += [Input(("attach", name), REFUSED, ("../x",) if "../x" in name else (), name) for name in CALLS]
    return found


def cases(draw: random.Random) -> list[Case]:
    """Every command line once."""
    made: dict[str, Case] = {}
    for case in inputs(draw):
        prefix = " ".join(case.words[: len(TRAIN)]) if case.words[: len(TRAIN)] == TRAIN else ""
        title = case.title.replace(prefix.encode("unicode_escape").decode(), "train", 1) if prefix else case.title
        if case.words[0] == "attach":
            title = f"attach: {case.name}"
        made.setdefault(title, Case(title, _play(case)))
    return list(made.values())


KINDS = [Kind("bad inputs", cases, sample=18)]

"""How an attack is made: commands of the program under attack, what became of them, and the count.

The program under attack is the checkout that GNMR_UNDER_ATTACK names, else the one that this file stands in. A server
process imports it once and forks a child for every command, so that a case costs tens of milliseconds. A child has its
own session, folder and output files, and is killed with all its descendants when its time is over.

    arena = Arena(scratch)
    outcome = arena.run("report", "runs")                          # waits for its end
    running = arena.start("train", "...", hook=Hook(function, 3))  # running.pid, running.kill(), running.wait()

This file runs twice: as a module of the tests, and as the server (`python harness.py ADDRESS`), which knows the modules
beside it as the package `attacks`.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import random
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
MEMORY_BYTES = 12 << 30
TINY = [
    *(
        "data.name=text",
        "data.path={text}",
        "data.vocab_size=300",
        "model.hidden_size=32",
        "model.intermediate_size=48",
    ),
    *("model.num_layers=1", "model.num_heads=2", "training.seq_len=16", "training.batch_size=2", "training.threads=1"),
    *("training.steps=12", "training.eval_every=4", "training.eval_sequences=2", "training.checkpoint_every=3"),
    *("training.keep_checkpoints=2", "controller.alpha=1.05", "controller.beta=1.02", "controller.max_o=2"),
    *("records.live=off", "records.wandb=off", "experiment_name=tiny"),
]
"""Words of a run of twelve steps and seven units, with thresholds so low that the controller is busy."""
_SCOUTS = (
    ["train", *TINY, "run_dir=scout"],
    ["train", "-m", *TINY, "training.steps=1", "training.seed=0,1", "hydra/launcher=joblib", "memory_plan=true"],
    ["report", "scout"],
    ["replay", "scout", "alpha=1.2"],
    ["diagnose", "scout", "recipe=nosuch"],
)
"""Commands that the server lets a child run once: what they import, it imports too."""
_MEASURED = ("time", "crc", "sha", "sum", "hash")
"""Parts of the names of what may differ between the rows of two runs that are the same."""
_FIGURES = (
    *("steps", "tokens", "final_val_loss", "final_val_ppl", "promotion_frac", "hit_max_o_frac", "over_frac"),
    *("saved_bytes_mean", "nonfinite_total"),
)
"""What counts of a summary."""

HELD = "held"


def under_attack() -> Path:
    """The checkout whose program is attacked."""
    return Path(os.environ.get("GNMR_UNDER_ATTACK") or Path(__file__).parents[2]).resolve()


@dataclass(frozen=True)
class Hook:
    """A function that the child calls before the command: `Hook(die_in_step, 3)`.

    A function of a module of this folder, and plain values.
    """

    function: Callable[..., None]
    args: tuple[Any, ...]

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "args", args)

    def request(self) -> list[Any]:
        """What the server is told: module, name, arguments."""
        return [self.function.__module__.rpartition(".")[2], self.function.__name__, list(self.args)]


@dataclass(frozen=True)
class Outcome:
    """What became of a command."""

    code: int
    """Exit code, or minus the number of the signal that ended it."""
    seconds: float
    out: str
    err: str
    hang: bool
    """It was killed when its time was over."""
    left: int
    """Processes that it left behind and that had to be killed."""

    @property
    def traceback(self) -> bool:
        """A traceback in what it wrote, or an end by a fault of its own (SIGSEGV, SIGABRT, SIGBUS)."""
        faults = [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS]
        crashed = self.code in [number for fault in faults for number in (-fault, 128 + fault)]
        return crashed or "Traceback (most recent call last)" in self.out + self.err

    @property
    def trouble(self) -> str | None:
        """What is wrong under any attack: a hang or a traceback."""
        return "hang" if self.hang else "traceback" if self.traceback else None

    @property
    def refused(self) -> bool:
        """Exit code 2 with one line, as for any mistake; warnings may stand before it."""
        lines = [line for line in self.err.splitlines() if not line.startswith("gnmr: warning: ")]
        return self.code == 2 and len(lines) == 1 and lines[0].startswith("gnmr: ")


@dataclass
class Running:
    """A command that was started."""

    pid: int
    _connection: socket.socket
    _out: Path
    _err: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends the signal to the command's process; harmless after its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def family(self) -> list[int]:
        """The living processes that it has started, itself left out."""
        return [pid for pid in _session(self.pid) if pid != self.pid]

    @property
    def ended(self) -> bool:
        """Whether `wait` returns at once."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def wait(self) -> Outcome:
        """Waits for its end, at the latest that of its time."""
        with self._connection, self._connection.makefile() as file:
            end = json.loads(file.readline())
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (self._out, self._err)]
        return Outcome(end["code"], end["seconds"], *texts, hang=end["hang"], left=end["left"])

    def wait_for(self, seen: Callable[[], bool], pause_s: float = 0.0005) -> bool:
        """Waits until `seen()`; False if the command ended before."""
        while not seen():
            if self.ended:
                return False
            time.sleep(pause_s)
        return True


class Arena:
    """A scratch folder, and the server that forks the commands. Close it, or use it as a context."""

    def __init__(self, scratch: Path, checkout: Path | None = None) -> None:
        self.scratch = scratch.resolve()
        self.checkout = checkout or under_attack()
        self.made: dict[Any, Any] = {}
        """What the cases of a kind share, such as a finished run: made by the first that needs it."""
        self._number = 0
        for name in ("home", "cache", "tmp", "work", "output"):
            (self.scratch / name).mkdir(parents=True, exist_ok=True)
        self.environment = {
            **{key: os.environ[key] for key in ("PATH", "LANG", "LD_LIBRARY_PATH") if key in os.environ},
            "PYTHONPATH": str(self.checkout),
            "PYTHONUNBUFFERED": "1",
            "HOME": str(self.scratch / "home"),
            "TMPDIR": str(self.scratch / "tmp"),
            "GNMR_CACHE": str(self.scratch / "cache"),
            "XDG_CACHE_HOME": str(self.scratch / "cache"),
            "MPLCONFIGDIR": str(self.scratch / "home"),
            "MPLBACKEND": "Agg",
            "JOBLIB_TEMP_FOLDER": str(self.scratch / "tmp"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "TERM": "xterm",
        }
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(120)]
        self.text = self.scratch / "babble.txt"
        self.text.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(600)))
        self._address = f"attack-{os.getpid()}-{secrets.token_hex(4)}"
        self._server = subprocess.Popen(
            [sys.executable, __file__, self._address],
            cwd=self.scratch,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{self.checkout}: its server does not start")

    @property
    def tiny(self) -> list[str]:
        """`TINY` over some 20,000 tokens of babble; `run_dir=` is missing."""
        return [word.format(text=self.text) for word in TINY]

    def folder(self, name: str = "case") -> Path:
        """A new, empty folder."""
        self._number += 1
        path = self.scratch / "work" / f"{name}-{self._number:05d}"
        path.mkdir(parents=True)
        return path

    def start(
        self,
        *words: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        hook: Hook | Sequence[Hook] | None = None,
        limit_s: float = LIMIT_S,
        linger_s: float = 0.0,
        memory_bytes: int = MEMORY_BYTES,
        fresh: bool = False,
    ) -> Running:
        """Starts `gnmr WORDS`.

        env: added to the environment. linger_s: how long processes that outlive the command may go on. memory_bytes:
        address space that it may use. fresh: as `python -m gnmr` in a new process, without a hook.
        """
        hooks = [hook] if isinstance(hook, Hook) else list(hook or ())
        assert not (hooks and fresh)
        self._number += 1
        out, err = (self.scratch / "output" / f"{self._number:05d}.{name}" for name in ("out", "err"))
        request = {
            "words": list(words),
            "cwd": str(cwd or self.scratch / "work"),
            "env": env or {},
            "out": str(out),
            "err": str(err),
            "hooks": [each.request() for each in hooks],
            "limit_s": limit_s,
            "linger_s": linger_s,
            "memory_bytes": memory_bytes,
            "fresh": fresh,
        }
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + self._address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        number = b""
        while not number.endswith(b"\n"):
            if not (piece := connection.recv(1)):
                raise RuntimeError("the server ended")
            number += piece
        return Running(int(number), connection, out, err)

    def run(self, *words: str, **options: Any) -> Outcome:
        """Runs `gnmr WORDS` to its end; options as for `start`."""
        return self.start(*words, **options).wait()

    def close(self) -> None:
        """Ends the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Case:
    """One attack: `play` makes it and returns `HELD`, or in a word or two what broke."""

    name: str
    play: Callable[[Arena], str]


@dataclass(frozen=True)
class Kind:
    """Attacks of one kind."""

    name: str
    cases: Callable[[random.Random], Iterable[Case]]
    """All of them, or as many as the whole suite plays; the same for the same generator."""
    sample: int
    """How many of them the tests play."""


@dataclass
class Tally:
    """How many cases of a kind ended how."""

    kind: str
    seconds: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    broken: dict[str, list[str]] = field(default_factory=dict)
    """Names of the cases that did not hold, by verdict."""

    def count(self, name: str, verdict: str) -> None:
        self.verdicts[verdict] += 1
        if verdict != HELD:
            self.broken.setdefault(verdict, []).append(name)

    def tree(self, names: int = 12) -> dict[str, Any]:
        """For JSON; at most so many names of each verdict."""
        return {
            "cases": self.verdicts.total(),
            "held": self.verdicts[HELD],
            "broken": {verdict: self.verdicts[verdict] for verdict in sorted(self.broken)},
            "such as": {verdict: found[:names] for verdict, found in sorted(self.broken.items())},
            "seconds": round(self.seconds, 1),
        }


def attack(
    kind: Kind, arena: Arena, seed: int = 0, number: int | None = None, seen: Callable[[str, str], None] | None = None
) -> Tally:
    """Plays the cases of a kind, or `number` of them, evenly spread; seen: told of each its name and its verdict."""
    tally, began = Tally(kind.name), time.monotonic()
    cases = list(kind.cases(random.Random(f"{kind.name} {seed}")))
    if number is not None and number < len(cases):
        cases = [cases[i * len(cases) // number] for i in range(number)]
    for case in cases:
        verdict = case.play(arena)
        tally.count(case.name, verdict)
        if seen is not None:
            seen(case.name, verdict)
    tally.seconds = time.monotonic() - began
    return tally


def provenance(checkout: Path, seed: int) -> dict[str, Any]:
    """What the counts need beside them to be believed."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "gnmr", "conf"], capture_output=True, text=True).stdout
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "commit": (commit or "unknown") + ("-dirty" if changed.strip() else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpu}, {os.cpu_count()} cores, {platform.system()}",
        "seed": seed,
    }


# What a run left.


def ended(folder: Path) -> str:
    """DONE, FAILED, or "none"; FAILED counts where both are there."""
    return next((name for name in ("FAILED", "DONE") if (folder / name).exists()), "none")


def rows(file: Path) -> list[Any]:
    """Rows of a .jsonl file; a damaged row as its text."""
    if not file.exists():
        return []
    found: list[Any] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append(line)
    return found


def summary(folder: Path) -> dict[str, Any]:
    """summary.json; empty where there is none or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        tree = json.loads((folder / "summary.json").read_text())
        return tree if isinstance(tree, dict) else {}
    return {}


def marked(folder: Path) -> bool:
    """Whether the folder itself says that its figures are not those of a whole run."""
    told = summary(folder)
    return ended(folder) != "DONE" or bool(told.get("incomplete")) or told.get("status", "done") != "done"


def digest(folder: Path) -> str:
    """Of the records' numbers, without times and machine: losses, sets, evaluation, promotion, ratios."""
    import pyarrow.parquet as pq

    tree: dict[str, Any] = {name: rows(folder / f"{name}.jsonl") for name in ("steps", "eval", "events")}
    tree["summary"] = {key: value for key, value in summary(folder).items() if key in _FIGURES}
    with contextlib.suppress(Exception):  # a damaged file is none
        table = pq.read_table(folder / "ratios.parquet", memory_map=False)
        tree["ratios"] = [(name, table[name].to_pylist()) for name in table.column_names]
    return hashlib.sha256(repr(_lasting(tree)).encode()).hexdigest()


def _lasting(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _lasting(tree[key]) for key in sorted(tree) if not any(word in key for word in _MEASURED)}
    return [_lasting(item) for item in tree] if isinstance(tree, list) else tree


# The server.


def _serve(address: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)  # of no file
    listener.listen(64)
    sys.path.remove(str(Path(__file__).parent))
    _as_package()
    for words in _SCOUTS:
        for name in _scouted([word.format(text="babble.txt") for word in words]):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            return
        if listener in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                try:
                    _handle(connection)
                finally:
                    os._exit(0)
            connection.close()


def _as_package() -> None:
    """Makes the modules beside this file the package `attacks`."""
    here = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "attacks", here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None
    sys.modules["attacks"] = importlib.util.module_from_spec(spec)


def _scouted(words: list[str]) -> list[str]:
    """Modules that a command imports, in their order."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        try:
            importlib.import_module("gnmr.cli").main(words)
        except BaseException:
            pass  # the attacks themselves will see it
        finally:
            os.write(write, "\n".join(name for name in sys.modules if name != "__main__").encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        names = file.read().split("\n")
    os.waitpid(pid, 0)
    _end_session(pid)
    return names


def _handle(connection: socket.socket) -> None:
    """Forks the command, says its number, waits for its end and says how it was."""
    with connection, connection.makefile("rw") as file:
        request = json.loads(file.readline())
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _command(request)
        file.write(f"{pid}\n")
        file.flush()
        descriptor = os.pidfd_open(pid)
        hang = not select.select([descriptor], [], [], request["limit_s"])[0]
        if hang:
            _end_session(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        seconds = time.monotonic() - began
        while _session(pid) and time.monotonic() < began + seconds + request["linger_s"]:
            time.sleep(0.05)
        left = _end_session(pid)
        file.write(json.dumps({"code": code, "seconds": seconds, "hang": hang, "left": left}) + "\n")


def _command(request: dict[str, Any]) -> None:
    """The child: never returns."""
    code = 70
    try:
        os.setsid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["out"], flags), 1)
        os.dup2(os.open(request["err"], flags), 2)
        os.closerange(3, 256)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGHUP, signal.SIGUSR1):  # the suite itself may run under nohup
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        words = request["words"]
        if request["fresh"]:
            os.execv(sys.executable, [sys.executable, "-m", "gnmr", *words])
        sys.argv = ["gnmr", *words]
        for module, name, args in request["hooks"]:
            getattr(importlib.import_module(f"attacks.{module}"), name)(*args)
        code = importlib.import_module("gnmr.cli").main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # both as a process does that was not forked: joblib ends its workers here
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _session(leader: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] not in "ZX":
                    found.append(int(entry))
    return found


def _end_session(leader: int) -> int:
    """Kills what lives of a session; returns how many there were."""
    seen = set[int]()
    while alive := _session(leader):
        seen.update(alive)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return len(seen)


if __name__ == "__main__":
    _serve(sys.argv[1])

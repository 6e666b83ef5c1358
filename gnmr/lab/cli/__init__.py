"""Run the command line: words in, exit code out. Nothing heavy is imported before a command needs it.

`--help` lists the exit codes. 1 is also a bug in gnmr (with its traceback), and 141 means that the reader left.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import gnmr
from gnmr import __version__
from gnmr.errors import MAX_LINE, RunFailed, UserError, printable
from gnmr.options import nearest
from gnmr.streams import Unwritable, open_streams, unread, why_unwritable

COMMANDS = {
    "train": ("train a model under the controller; with -m a sweep over arms and seeds", "experiment=act_quant_stress"),
    "demo": ("a minute: what low precision costs, and how much of it recovery recovers", ""),
    "runs": ("which runs there are, how they ended, their perplexity and the GEMM FLOPs they spent", ""),
    "report": ("what runs show: a sentence, a table and a page; finished or running", "runs/act_quant_stress"),
    "replay": (
        "run the controller over recorded norms, without training",
        "RUN_OR_CSV alpha=2.0 beta=1.5 max_o=4 out=decisions.jsonl",
    ),
    "diagnose": (
        "what a recipe costs a model, GEMM by GEMM, and what to keep in 16 bits",
        "RUN_OR_CHECKPOINT recipe=nvfp4 budget=+10% out=plan/",
    ),
    "export": ("a plan as Transformer Engine, Megatron-LM, torchao, torchtitan and others read it", "plan/"),
    "audit": (
        "is the recipe what you think it is: lists of names, precision in force, what the GEMMs really read",
        "RUN_OR_CHECKPOINT filter_fqns=[output,layers.1]",
    ),
    "blame": ("which steps of a run spiked, and whether precision, data or chance caused it", "RUN html=page.html"),
}
"""Purpose and example of each command, which is a module of this package: `main(words)` returns the exit code."""
_PACKAGE = os.path.dirname(gnmr.__file__)
_LINES = "\n".join(
    f"  {name:8} {purpose}\n           gnmr {name} {words}".rstrip() for name, (purpose, words) in COMMANDS.items()
)
_HELP = f"""\
gnmr: runtime stability control for low-precision language model training

usage: gnmr COMMAND [...]        gnmr COMMAND --help explains each

{_LINES}

  --help, --version

`latest` in place of a run's folder is the run below runs/ that was written last, trials (debug=smoke, or fewer than 100
steps) aside.

exit codes: 0 done; 1 a run FAILED, or an audit has findings; 2 a mistake in what was asked for;
            128 + signal (130, 143, 138, 140, 129) after Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP, at which a run
            saves a checkpoint and the same command continues it
"""


def main(argv: list[str] | None = None) -> int:
    """Run the console script or `python -m gnmr`.

    Args:
        argv: the words after `gnmr`; None: those of the process.

    Returns:
        The exit code, as `gnmr --help` lists them, or 141 if standard output lost its reader.
    """
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # ? replaces a letter that ASCII or Latin-1 lacks
    open_streams()
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, because nobody would hear of a failure at the interpreter's end
    except BrokenPipeError as error:
        unread()
        return _mistake(why_unwritable(error)) if isinstance(error, Unwritable) else 141
    return code


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if words else 2
    command, *arguments = words
    if command in ("-V", "--version"):
        print(f"gnmr {__version__}")
        return 0
    if with_nul := [word for word in words if "\0" in word]:
        return _mistake(f"{with_nul[0]}: has a NUL in it, which no name or value has")
    if command not in COMMANDS:
        return _mistake(f"unknown command {command!r}{nearest(command, COMMANDS)} (gnmr --help)")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code: int = import_module(f"gnmr.lab.cli.{command}").main(arguments)
            return code
    except UserError as error:
        return _mistake(str(error))
    except RunFailed as error:
        print(f"gnmr: run FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gnmr: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `main` handles it
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return _mistake(f"{error.filename}: {error.strerror}")  # a name that no file has, wherever it is found
        from gnmr.lab.config.compose import mistake

        # Mistakes in the config, which Hydra and OmegaConf report by their own exceptions; all others are defects.
        if (line := mistake(error)) is None:
            raise
        return _mistake(line)


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
    """Show a warning of this package in one line, and others as Python does."""
    if filename.startswith(_PACKAGE):
        text = f"gnmr: warning: {printable(message)}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno)
    print(text, end="", file=sys.stderr)


def _mistake(line: str) -> int:
    print(f"gnmr: {printable(line)[:MAX_LINE]}", file=sys.stderr)
    return 2

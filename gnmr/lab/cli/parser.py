"""Parse the words of a command line: argparse with options as `name=VALUE` too, and mistakes in one line."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from gnmr import options as checks
from gnmr.errors import UserError, as_user_error, install
from gnmr.options import nearest
from gnmr.records.find import named

Read = Callable[[str, str], Any]
"""(name, text) of an option -> its value; raises ValueError if the text is invalid."""


def needs(command: str, *packages: str) -> None:
    """Raise UserError if a package of the extra `finetune` is missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UserError(f"{command}: {', '.join(missing)} not installed: {install('finetune')}")


class Parser(argparse.ArgumentParser):
    """The options of one command. Other words are left in `words`: places and keys of the config."""

    def __init__(self, command: str, usage: str, text: str, keys: bool = False, bare: bool = True) -> None:
        """Prepare the parser of a command.

        Args:
            command: the name after `gnmr`.
            usage: the words after `gnmr <command>`.
            text: the text that `--help` shows below the options.
            keys: True if `words` may also be key=value, which the command itself reads.
            bare: True if the command runs without any word; otherwise `parse` prints the help and ends with exit code
                2.
        """
        super().__init__(
            prog=f"gnmr {command}",
            usage=f"gnmr {command} {usage}",
            epilog=text,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=16, width=120),
            allow_abbrev=False,
        )
        self._command = command
        self._keys, self._bare = keys, bare
        self._reads: dict[str, Read] = {}
        self._flags: list[str] = []
        self.add_argument("words", nargs="*", help=argparse.SUPPRESS)

    def option(self, name: str, read: Read, about: str, default: Any = None) -> None:
        """Add `--name VALUE` or `name=VALUE`."""
        self._reads[name] = read
        about = f"{about} (default: {default})" if default else about
        self.add_argument(f"--{name}", default=default, help=about)

    def flag(self, name: str, about: str) -> None:
        """Add `--name`."""
        self._flags.append(name)
        self.add_argument(f"--{name}", action="store_true", help=about)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse the words. Raises UserError for an unknown option or an invalid value."""
        # Such a command has nothing to work on without a word.
        if not (argv or self._bare):
            self.print_help()
            raise SystemExit(2)
        # argparse reads --name=VALUE; settings of the config and places stay as they are.
        words = [f"--{word}" if "=" in word and word.partition("=")[0] in self._reads else word for word in argv]
        options, unknown = self.parse_known_intermixed_args(words)
        if not self._keys:
            unknown += settings_and_places(options.words)[0]
        if unknown:
            name = unknown[0].strip("-").partition("=")[0]
            if name in self._flags:
                self.error(f"{unknown[0]}: is written --{name}")
            self.error(f"unknown option {unknown[0]!r}{nearest(name, [*self._reads, *self._flags])}")
        # Defaults are values already, and what was typed is text.
        for name, read in self._reads.items():
            if isinstance(text := getattr(options, name), str):
                if not text:
                    self.error(f"'{name}=' has no value")
                with as_user_error():
                    setattr(options, name, read(name, text))
        return options

    def of_one_place(self, argv: list[str], kind: str) -> tuple[argparse.Namespace, str]:
        """Parse the words, and return the one place besides the options; `kind` describes it in messages."""
        options = self.parse(argv)
        if len(options.words) != 1:
            self.error(f"name one {kind}")
        return options, named(options.words[0])

    def print_help(self, file: Any = None) -> None:
        """Print the help; unlike argparse, raise if output cannot be written."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the message."""
        raise UserError(f"{self._command}: {message} (gnmr {self._command} --help)")


def settings_and_places(words: list[str]) -> tuple[list[str], list[str]]:
    """Separate key=value words from places.

    A place is `latest`, an existing file whose name contains a =, or a path with a folder before its =.
    """
    # lexists, because a link that leads nowhere is a place too.
    settings = [word for word in words if re.match(r"[^/=]*=", word) and not os.path.lexists(word)]
    return settings, [named(word) for word in words if word not in settings]


def text(_name: str, value: str) -> str:
    """Return the text unchanged."""
    return value


def optional(_name: str, value: str) -> str | None:
    """Return the text unchanged, or None for null."""
    return None if value == "null" else value


def path(_name: str, value: str) -> Path:
    """Read a file or folder."""
    return Path(value)


def runs(_name: str, value: str) -> str:
    """Read run folders, separated by commas; `latest` is one."""
    return ",".join(map(named, value.split(",")))


def whole(least: int) -> Read:
    """Return a reader of whole numbers of at least `least`, and of null as None."""

    def read(name: str, value: str) -> int | None:
        if value == "null":
            return None
        # What is no number, or too long for one, goes into the message as it is.
        number: Any = int(value) if value.removeprefix("-").isdecimal() and len(value) < 20 else value
        checks.whole_number(least, **{name: number})
        return int(number)

    return read


def one_of(*choices: str) -> Read:
    """Return a reader of one of the choices."""

    def read(name: str, value: str) -> str:
        checks.one_of(choices, **{name: value})
        return value

    return read


def names_of(_name: str, value: str) -> list[str]:
    """Read names from [a,b] or a,b."""
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return [name.strip(" '\"") for name in inner.split(",")] if inner.strip() else []


def recipe_of(key: str, word: str, of_run: Iterable[str] = ()) -> str:
    """Return the recipe that a word names, and report it for a format; `of_run` are names that the run defines.

    Raises ValueError as `recipe_named`.
    """
    from gnmr.console import say
    from gnmr.plan.compared_paths import recipe_named

    name = recipe_named(word, of_run, key)
    if name != word:
        say(f"gnmr: {key}={word} is a format: read as the recipe {name}, which casts everything to it")
    return name


def number(value: str) -> float:
    """Return the number, or NaN for other text."""
    try:
        return float(value)
    except ValueError:
        return math.nan

"""Mistakes in calls of the Python API. The server runs this file alone, so it imports nothing of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def steady_stderr() -> None:
    """Standard error as Python opens it: a lone surrogate in a message is escaped there."""
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def call(name: str) -> None:
    """Makes the call of that name; a ValueError or TypeError ends the process as a mistake does, with its message."""
    steady_stderr()
    import torch

    import gnmr

    torch.manual_seed(0)
    try:
        CALLS[name](gnmr, torch)
    except (ValueError, TypeError) as error:
        print(f"gnmr: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)


def _model(torch: Any, *widths: int, **options: Any) -> Any:
    """Linears called a_proj, b_proj, ... in a row."""
    model = torch.nn.Sequential()
    for letter, one, other in zip("abcdef", widths, widths[1:], strict=False):
        model.add_module(f"{letter}_proj", torch.nn.Linear(one, other, **options))
    return model


def _attach(**options: Any) -> Callable[[Any, Any], None]:
    def made(gnmr: Any, torch: Any) -> None:
        gnmr.attach(_model(torch, 8, 8, 8), **options)

    return made


def _loaded(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Any], None]:
    """A state that was changed, loaded into the controller that it came from; it must be refused as a whole."""

    def made(gnmr: Any, torch: Any) -> None:
        controller = gnmr.attach(_model(torch, 8, 8, 8), max_o=1)
        before = repr(controller.state_dict())
        state = controller.state_dict()
        try:
            controller.load_state_dict(change(state))
        except (ValueError, TypeError):
            assert repr(controller.state_dict()) == before, "half of a state was loaded"
            raise

    return made


def _with(key: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, key: value(state.get(key))}


CALLS: dict[str, Callable[[Any, Any], None]] = {
    "no model": lambda gnmr, torch: gnmr.attach(3),
    "a model without linears": lambda gnmr, torch: gnmr.attach(torch.nn.Sequential(torch.nn.ReLU())),
    "a model on the meta device": lambda gnmr, torch: gnmr.attach(_model(torch, 8, 8, device="meta")),
    "complex linears": lambda gnmr, torch: gnmr.attach(_model(torch, 8, 8, dtype=torch.complex64)),
    "a format that is none": _attach(low="int9"),
    "a recipe and a format": _attach(low="int4", recovery="fp8_hybrid"),
    "low is a number": _attach(low=4),
    "max_o=0": _attach(max_o=0),
    "max_o=nan": _attach(max_o=float("nan")),
    "max_o=1.5": _attach(max_o=1.5),
    "max_o is a text": _attach(max_o="many"),
    "alpha=-1": _attach(alpha=-1),
    "alpha=nan": _attach(alpha=float("nan")),
    "alpha is a list": _attach(alpha=[1.5]),
    "delta=0": _attach(delta=0),
    "t_lock=-1": _attach(t_lock=-1),
    "warmup_steps=-1": _attach(warmup_steps=-1),
    "warm-up without recovery": _attach(recovery=None, warmup_steps=5),
    "targets is a text": _attach(targets="nothing"),
    "targets=[]": _attach(targets=[]),
    "targets=[3]": _attach(targets=[3]),
    "seed=-1": _attach(seed=-1),
    "unit=nothing": _attach(unit="nothing"),
    "backend=nothing": _attach(backend="nothing"),
    "signal=nothing": _attach(signal="nothing"),
    "signal=../x:Y": _attach(signal="../x:Y"),
    "signal=os:system": _attach(signal="os:system"),
    "signal=3": _attach(signal=3),
    "options is a list": _attach(options=[1]),
    "options of another signal": _attach(options={"nothing": 1}),
    "observe=nothing": _attach(observe="nothing"),
    "trigger=inf": _attach(trigger=float("inf")),
    "hold=0": _attach(hold=0),
    "steps=-5": _attach(signal="random", steps=-5),
    "record=[colour]": _attach(record=["colour"]),
    "probe_tokens=0": _attach(probe_tokens=0),
    "attached twice": lambda gnmr, torch: [gnmr.attach(model) for model in [_model(torch, 8, 8)] for _ in "ab"],
    "a state that is none": _loaded(lambda state: 3),
    "a state without its keys": _loaded(lambda state: {}),
    "a lock of another length": _loaded(_with("lock", lambda lock: lock[:1])),
    "more active units than max_o": _loaded(_with("active", lambda active: active | True)),
    "active of another type": _loaded(_with("active", lambda active: "all")),
    "units of another model": _loaded(_with("units", lambda units: ["x", "y"])),
    "t=-1": _loaded(_with("t", lambda t: -1)),
}
"""Each must be refused in one line: ValueError or TypeError."""


def in_foreign_folder() -> None:
    """As `python -m gnmr` in a folder that is not one's own, by somebody who says yes to every question."""
    import io

    steady_stderr()
    sys.path.insert(0, "")
    sys.stdin = io.StringIO("y\n" * 20)


def on_a_named_machine() -> None:
    """Host and user have names that can be found again."""
    import getpass
    import platform
    import socket

    steady_stderr()
    socket.gethostname = socket.getfqdn = platform.node = lambda *_: "hostilehost"
    getpass.getuser = lambda: "hostileuser"

"""Two processes that run one script, and decisions of theirs that have to be the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnmr.control import Decision


def run_pair(script: Path, folder: Path, *words: str, **environment: str) -> list[Any]:
    """Run `script FOLDER words` in two processes, and return what each saved as FOLDER/RANK.pt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": str(Path(__file__).parent.parent.parent), **environment}
    workers = [
        subprocess.Popen(
            [sys.executable, script, folder, *words],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [worker.communicate(timeout=500)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(text[-3000:] for text in told)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def assert_same(found: list[Decision], wanted: list[Decision], rtol: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.norm, theirs.norm, rtol=rtol)
        np.testing.assert_array_equal(mine.observed, theirs.observed)
        np.testing.assert_array_equal(mine.active, theirs.active)
        np.testing.assert_array_equal(mine.in_force, theirs.in_force)

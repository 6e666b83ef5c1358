"""Data from the hub: the real client libraries against no hub and against one on localhost."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
from small_corpora import DOCUMENTS, build, write_rows

from gnmr.lab.config import DataConfig
from gnmr.lab.data.cache import open_folder

pytestmark = pytest.mark.slow

COMMIT = "0" * 39 + "1"
MOST_REQUESTS = 3
CLIENT = """
import sys
from gnmr.lab.config import DataConfig
from gnmr.lab.data.tokens import prepare
from gnmr.errors import UserError
try:
    config = DataConfig(name="c4", vocab_size=300)
    print(prepare(config, int(sys.argv[1]), lambda line: None).folder)
except UserError as error:
    print(error)
"""


def run_client(
    cache_dir: Path, needed_tokens: int, client: str = CLIENT, **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    inherited.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", client, str(needed_tokens)],
        env=inherited | environment | {"GNMR_CACHE": str(cache_dir)},
        capture_output=True,
        text=True,
        timeout=600,
    )


class Broken(http.server.BaseHTTPRequestHandler):
    """A hub that hangs up on every request, and counts them."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, {}], ids=str)
def test_no_hub_is_one_line_that_says_what_to_do(environment: dict[str, str], tmp_path: Path) -> None:
    asked: list[str] = []
    with answering(type("OurBroken", (Broken,), {"asked": asked})) as address:
        result = run_client(tmp_path / "cache", 1000, **(environment or {"HF_ENDPOINT": address}))
    assert bool(asked) == (not environment) and len(asked) <= MOST_REQUESTS, "the hub was tried again and again"
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(
        r"data.name=c4: allenai/c4 cannot be read from the hub \(.*\); check the network, HF_ENDPOINT and the proxy, "
        r"or download its en/\*\.json\.gz and pass data\.path=FOLDER\n",
        result.stdout,
    )
    assert not list((tmp_path / "cache").glob("*"))


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as streaming one dataset asks for."""

    root: Path
    name = "allenai/c4"

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        if (match := re.fullmatch(rf"/datasets/{self.name}/resolve/\w+/(.*)", path)) and (
            self.root / match[1]
        ).is_file():
            self.send_file(self.root / match[1])
        elif match := re.fullmatch(rf"/api/datasets/{self.name}/tree/{COMMIT}/?(.*)", path):
            self.send_json([self.entry(item) for item in sorted((self.root / match[1]).iterdir())])
        elif re.fullmatch(rf"/api/datasets/{self.name}(/revision/\w+)?", path):
            self.send_json({"id": self.name, "sha": COMMIT, "tags": [], "siblings": []})
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def entry(self, item: Path) -> dict[str, object]:
        kind = "directory" if item.is_dir() else "file"
        name = item.relative_to(self.root).as_posix()
        return {"type": kind, "path": name, "size": item.stat().st_size, "oid": "e" * 40}

    def send_json(self, content: object) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send_file(self, file: Path) -> None:
        content, headers = file.read_bytes(), {"ETag": '"e"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, content[first : last + 1], headers)
        else:
            self.answer(200, content, headers)

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(address, folder with the repository's files)"""
    root = tmp_path / "hub"
    write_rows(root / "en" / "c4-train.00000-of-00001.json.gz", DOCUMENTS[:35])
    write_rows(root / "en" / "c4-validation.00000-of-00001.json.gz", DOCUMENTS[35:])
    splits = "".join(f"  - split: {s}\n    path: en/c4-{s}.*.json.gz\n" for s in ("train", "validation"))
    (root / "README.md").write_text(f"---\nconfigs:\n- config_name: en\n  data_files:\n{splits}---\n")
    with serving(root, "allenai/c4") as address:
        yield address, root


def serving(root: Path, name: str) -> AbstractContextManager[str]:
    """The address of a hub that holds the repository `name`, whose files are in `root`."""
    return answering(type("OurHub", (Hub,), {"root": root, "name": name}))


@contextmanager
def answering(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address at which `handler` answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_hub_equals_a_local_copy(hub: tuple[str, Path], config: Callable[..., DataConfig], tmp_path: Path) -> None:
    address, folder = hub
    local, _ = build(config(name="c4", path=str(folder)))
    needed = 100
    result = run_client(tmp_path / "streamed", needed, HF_ENDPOINT=address)
    assert result.stderr == ""
    streamed = open_folder(Path(result.stdout.strip()))
    assert streamed.tokenizer_path.read_bytes() == local.tokenizer_path.read_bytes()
    assert needed < len(streamed.train) < needed * 1.1, "more was streamed than the run needs"
    assert np.array_equal(streamed.train[:], local.train[: len(streamed.train)])
    assert np.array_equal(streamed.val[:], local.val[:])

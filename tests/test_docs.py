"""README and docs: links lead somewhere, commands are ones that there are, Python runs, doctests hold."""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr as package
from gnmr.lab.cli import COMMANDS
from gnmr.lab.cli.parser import Parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += [ROOT / "benchmarks" / "README.md", ROOT / "runs" / "README.md", ROOT / "plans" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
OLD = ("benchmarks/", "runs/", "CONTRIBUTING.md")
"""Of these pages commands are not checked: what was typed at commits of then, and what needs a change of code first."""


# ---- what stands in a page ----


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(language, lines) of each fenced or indented block; of an indented one the language is ""."""
    language, lines, indented = None, list[str](), list[str]()
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("```"):
            if language is not None:
                yield language, lines
            language, lines = (line[3:], []) if language is None else (None, [])
        elif language is not None:
            lines.append(line)
        elif line.startswith("    ") and not line.lstrip().startswith(("-", "|")):
            indented.append(line[4:])
        elif line and indented:
            yield "", indented
            indented = []


@cache
def commands() -> dict[str, str]:
    """Every command of ours, without what stands behind it, and the first page that has it."""
    found: dict[str, str] = {}
    for page in PAGES:
        if any(old in name_of(page) for old in OLD):
            continue
        for language, lines in blocks(page):
            text = re.sub(r"\\\n\s*", "", "\n".join(lines))
            for line in text.splitlines() if language in ("", "sh") else []:
                line = re.split(r"\s{2,}#|\s{3,}", line.strip())[0]
                line = re.sub(r"^torchrun .* -m gnmr ", "gnmr ", line)
                if re.match(r"(gnmr [a-z]|make )", line) and not re.search(r"gnmr\.|\.\.\.|: ", line):
                    found.setdefault(line, name_of(page))
    return found


# ---- pages ----


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_link_is_dead(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = page if not place else page.parent / place
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_formula_is_lost_as_a_tag(page: Path) -> None:
    """Outside of code the site reads <dy, e> as HTML and shows nothing."""
    text = re.sub(r"(?ms)^```.*?^```|^    [^\n]*|`[^`]*`|<!--.*?-->", "", page.read_text())
    assert not re.findall(r"<[A-Za-z/][^\n]*", text)


# ---- commands ----


class Understood(Exception):
    """The words were read; nothing runs."""


def check_words(line: str) -> None:
    """Raises what the command would raise for words that it does not take."""
    program, command, *words = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), line
    elif command == "train":
        check_train(words)
    else:
        parse = Parser.parse

        def stop(parser: Parser, argv: list[str]) -> Any:
            parse(parser, argv)
            raise Understood

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Understood):
            patch.setattr(Parser, "parse", stop)
            import_module(f"gnmr.lab.cli.{command}").main(words)


def check_train(words: list[str]) -> None:
    """Composes the config, of a sweep that of every cell of its first seed."""
    from gnmr.lab.config.compose import compose, compose_arms

    # A base or plan is no file of ours, and a launcher's options are its plugin's.
    words = [re.sub(r"^base=.*", "base=shipped", word) for word in words if not word.startswith(("plan=", "hydra"))]
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    if "-m" not in words:
        compose(settings)
        return
    own = [word for word in settings if not re.match(r"(arm|fork\.order|training\.seed)=", word)]
    arms = [word[4:].split(",") for word in settings if word.startswith("arm=")] or [None]
    compose_arms(own, arms[0])


UNSCALED = ("recovery_gap", "grad_norm", "oracle")
"""Signals whose default threshold fits no model: unless they are ranked, almost no unit ever recovers."""


def test_signals_without_a_useful_threshold_are_ranked() -> None:
    texts = {name_of(page): page.read_text() for page in [*PAGES, ROOT / "conf" / "config.yaml"]}
    pattern = rf"(?:gnmr train|gnmr\.attach\()[^`\n]*signal=\"?(?:{'|'.join(UNSCALED)})\b[^`\n]*"
    found = [(name, line) for name, text in texts.items() for line in re.findall(pattern, text)]
    assert len(found) >= 5
    for name, line in found:
        assert re.search(r"routing=\"?ranked", line), (name, line)


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["README", "others"])
def test_commands_are_understood(first: bool) -> None:
    lines = [line for line, page in commands().items() if (page == "README.md") == first]
    assert len(lines) >= (3 if first else 50)
    for line in lines:
        check_words(line)


SMALLER = {"diagnose": ["batches=2", "held_out=1", "batch_size=1"]}
"""Words behind a command that is run."""


@pytest.mark.slow
def test_commands_on_a_run(gnmr: Callable[..., Any], tiny_words: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """Each that reads the main experiment's runs is run, in the order of the pages, and then what goes by the plan."""
    monkeypatch.chdir(tmp_path)
    tiny_words = [*tiny_words, "model.intermediate_size=64"]  # MXFP8 needs multiples of 32
    assert gnmr("train", "experiment=act_quant_stress", *tiny_words, "training.steps=80").code == 0
    (run,) = Path("runs/act_quant_stress").iterdir()
    ran = 0
    for line in [line for line in commands() if re.search("runs/act_quant_stress| latest", line)]:
        _, command, *words = shlex.split(line.replace("/RUN", f"/{run.name}"))
        if command != "train":
            done = gnmr(command, *words, *SMALLER.get(command, []))
            assert done.code == 0 or (command, done.code) == ("audit", 1), (line, done.err)
            ran += 1
    assert ran >= 6
    done = gnmr("train", "experiment=act_quant_stress", "plan=plan/plan.json", *tiny_words)
    assert done.code == 0, done.err


# ---- Python ----


class Model(nn.Module):
    """Two blocks with the usual names, wide enough for tiles of 128; gives logits and loss as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 128)
        sizes = {"up_proj": (128, 256), "down_proj": (256, 128)}
        block = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        self.layers = nn.ModuleList([nn.ModuleDict(block)])
        self.head = nn.Linear(128, 16)
        self.logits, self.loss = torch.zeros(()), torch.zeros(())

    def forward(self, tokens: Tensor) -> Model:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer["down_proj"](layer["up_proj"](x).relu())
        self.logits = self.head(x)
        self.loss = F.cross_entropy(self.logits.flatten(0, 1), tokens[:, 1:].flatten())
        return self


class LateLoss:
    """Its forward pass runs when `backward` is called, so behind whatever a block did to the model before."""

    def __init__(self, of: Callable[[], Tensor]) -> None:
        self.of = of

    def backward(self) -> None:
        self.of().backward()


def test_the_example_of_a_run_folder_is_of_todays_code(gnmr: Callable[..., Any]) -> None:
    """It has to be recorded anew when a key of the config changes: see the command in its header.json."""
    assert gnmr("replay", str(ROOT / "runs" / "reference" / "example"), "alpha=2").code == 0


def names_of_a_block() -> dict[str, Any]:
    """What a block of Python may take to be there."""
    torch.manual_seed(0)
    model = Model()
    batches = [{"tokens": torch.randint(0, 16, (2, 33))} for _ in range(6)]

    def loss_of_batch(batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    return {
        "gnmr": package,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": batches[0],
        "batches": batches[:4],
        "others": batches[4:],
        "loss_of_batch": loss_of_batch,
        "usual_loss": 1.0,  # so that the first step is looked into
        "usual_norm": 1.0,
        "loss": LateLoss(lambda: loss_of_batch(batches[0])),
    }


PYTHON = [
    pytest.param("\n".join(lines), id=f"{name_of(page)}-{number}")
    for page in PAGES
    if page.name != "integrations.md"  # the examples are run
    for number, (language, lines) in enumerate(blocks(page))
    if language == "python"
]


@pytest.mark.parametrize("text", PYTHON)
def test_python_of_a_page_runs(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "<block>", "exec"), names_of_a_block())


def test_doctests_hold() -> None:
    files = [file for file in sorted((ROOT / "gnmr").rglob("*.py")) if ">>>" in file.read_text()]
    assert len(files) >= 5
    for file in files:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        result = doctest.testmod(import_module(name))
        assert result.attempted and not result.failed, name


# ---- the site ----


def test_every_command_has_its_help_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert set(re.findall(r"<!-- help: (\w+) -->", page)) == set(COMMANDS)


def test_the_journeys_of_the_design_page_pass_files_that_exist() -> None:
    """Rows such as "| `control/norms.py` `UnitNorms` | ... |": the file has the names, later ones also in the class."""
    tables = (ROOT / "docs/design.md").read_text().split("| module | what happens |")[1:]
    rows_of = [re.findall(r"^\| `([\w/]+)\.py` ((?:`[\w.]+`(?:, )?)+) \|", table, re.M) for table in tables]
    assert len(rows_of) == 4 and all(5 < len(rows) <= 8 for rows in rows_of)
    rows = [row for rows in rows_of for row in rows]
    for file, names in rows:
        module = import_module(f"gnmr.{file.replace('/', '.')}")
        owners: list[Any] = [module]
        for name in re.findall(r"`([\w.]+)`", names):
            first, _, method = name.partition(".")
            assert any(hasattr(owner, first) for owner in owners), name
            if method:
                owners.append(getattr(module, first))
                assert hasattr(owners[-1], method), name

"""README and docs: links lead somewhere, commands are ones that there are, Python runs, doctests hold."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr as package
from gnmr.cli import COMMANDS
from gnmr.cli.words import Parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += [ROOT / "benchmarks" / "README.md", ROOT / "runs" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
OLD = ("results.md", "measurements.md", "benchmarks/", "runs/", "CONTRIBUTING.md")
"""Of these pages commands are not checked: what was typed at commits of then, and what needs a change of code first."""
FIRST = ("README.md",)
"""Checked by the quick tests already."""


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


@dataclass(frozen=True)
class Typed:
    """One command of a page."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """As the shell hands them over."""
        return shlex.split(self.line)


@cache
def commands() -> list[Typed]:
    """Every command of ours, once a page; what stands behind it is cut off."""
    found: dict[Typed, None] = {}
    for page in PAGES:
        if any(old in name_of(page) for old in OLD):
            continue
        for language, lines in blocks(page):
            text = re.sub(r"\\\n\s*", "", "\n".join(lines))
            for line in text.splitlines() if language in ("", "sh") else []:
                line = re.split(r"\s{2,}#|\s{3,}", line.strip())[0]
                line = re.sub(r"^torchrun .* -m gnmr ", "gnmr ", line)
                if re.match(r"(gnmr [a-z]|make )", line) and not re.search(r"gnmr\.|\.\.\.|: ", line):
                    found[Typed(name_of(page), line)] = None
    return [*found]


# ---- pages ----


def test_readme_is_short() -> None:
    """What is longer belongs in docs/."""
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= 7000 and text.count(b"\n") <= 120


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


TAG = re.compile(
    r"<(?!/?(a|b|br|code|details|div|em|h1|i|img|li|p|picture|pre|source|strong|sub|summary|sup)\b|https?:)[A-Za-z/]"
)


def prose(text: str) -> str:
    """The text without comments and code: fenced, in backticks, and indented behind an empty line outside of lists."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^( *)(```|~~~).*?^\1\2", "", text, flags=re.M | re.S)
    kept, code, listed, before = list[str](), False, False, ""
    for line in text.splitlines():
        code = line.startswith("    ") and (code or (not before.strip() and not listed))
        listed = bool(re.match(r" *([-*+]|\d+\.) ", line)) or (listed and (not line.strip() or line.startswith(" ")))
        kept += [] if code else [line]
        before = line
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", "\n".join(kept), flags=re.S)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_formula_is_read_as_html(page: Path) -> None:
    """<g, d> outside of code is a tag to Markdown, and is not shown."""
    text = prose(page.read_text())
    assert [text[found.start() : found.start() + 40] for found in TAG.finditer(text)] == []


def test_no_formula_of_the_reference_is_read_as_html() -> None:
    """Docstrings are Markdown there."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.M):
            parts = name.split(".")
            file = next(
                f
                for n in range(len(parts), 0, -1)
                if (f := ROOT.joinpath(*parts[:n]).with_suffix(".py")).exists()
                or (f := ROOT.joinpath(*parts[:n], "__init__.py")).exists()
            )
            tree: ast.AST = ast.parse(file.read_text())
            own = [node for node in ast.walk(tree) if getattr(node, "name", "") == parts[-1]]
            for node in ast.walk(own[0] if own else tree):
                if (
                    isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                ):
                    told = prose(inspect.cleandoc(node.value.value))
                    assert not TAG.search(told), f"{name}: {told}"


def test_what_is_read_as_html_is_found() -> None:
    lost = "its bias <g, d> / 2", "- a\n\n    twice <e_s, e_t>", "E<e_s, e_t> = 0"
    kept = "`<g, d>`", "text\n\n    <g, d>", "```\n<g, d>\n```", "<b>x</b>", "a <= b", "<https://x.org>", "<!-- a -->"
    assert [bool(TAG.search(prose(text))) for text in (*lost, *kept)] == [True] * len(lost) + [False] * len(kept)


# ---- commands ----


class Understood(Exception):
    """The words were read; nothing runs."""


def check_words(typed: Typed) -> None:
    """Raises what the command would raise for words that it does not take."""
    program, command, *words = typed.words
    if program == "make":
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), typed
    elif command == "train":
        check_train(words)
    else:
        parse = Parser.parse

        def stop(parser: Parser, argv: list[str]) -> Any:
            parse(parser, argv)
            raise Understood

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Understood):
            patch.setattr(Parser, "parse", stop)
            import_module(f"gnmr.cli.{command}").main(words)


def check_train(words: list[str]) -> None:
    """Composes the config, of a sweep that of every cell of its first seed."""
    from gnmr.lab.config.compose import compose, composed_tree

    # What is no file of ours: a base, a plan.
    words = [re.sub(r"^base=.*", "base=shipped", word) for word in words if not word.startswith("plan=")]
    settings = [
        word for word in words if "=" in word and not word.startswith(("-", "hydra"))
    ]  # a launcher's are its plugin's
    if "-m" not in words:
        compose(settings)
        return
    own = [word for word in settings if not re.match(r"(arm|fork\.order|training\.seed)=", word)]
    arms = [word[4:].split(",") for word in settings if word.startswith("arm=")] or [list(composed_tree(own).arms)]
    for arm in arms[0]:
        compose([*own, f"arm={arm}"])


def test_there_are_commands() -> None:
    """That none is found would make the tests below pass."""
    assert len([typed for typed in commands() if typed.page in FIRST]) >= 7
    assert len(commands()) >= 60


def test_commands_of_the_first_pages() -> None:
    for line in dict.fromkeys(typed.line for typed in commands() if typed.page in FIRST):
        check_words(Typed("", line))


@pytest.mark.slow
def test_commands_of_the_other_pages() -> None:
    first = {typed.line for typed in commands() if typed.page in FIRST}
    for line in dict.fromkeys(typed.line for typed in commands()):
        if line not in first:
            check_words(Typed("", line))


SMALLER = {"diagnose": ["batches=2", "held_out=1", "batch_size=1"]}
"""Words behind a command that is run."""


@pytest.mark.slow
def test_commands_on_a_run(gnmr: Callable[..., Any], tiny_words: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """Each that reads the main experiment's runs is run, in the order of the pages, and then what goes by the plan."""
    monkeypatch.chdir(tmp_path)
    assert gnmr("train", "experiment=act_quant_stress", *tiny_words, "training.steps=80").code == 0
    (run,) = Path("runs/act_quant_stress").iterdir()
    lines = dict.fromkeys(typed.line for typed in commands() if re.search("runs/act_quant_stress| latest", typed.line))
    ran = 0
    for line in lines:
        _, command, *words = shlex.split(line.replace("/RUN", f"/{run.name}"))
        if command != "train":
            done = gnmr(command, *words, *SMALLER.get(command, []))
            assert done.code == 0 or (command, done.code) == ("audit", 1), (line, done.err)
            ran += 1
    assert ran >= 8
    done = gnmr("train", "experiment=act_quant_stress", "plan=plan/plan.json", *tiny_words)
    assert done.code == 0, done.err


# ---- Python ----


class Model(nn.Module):
    """Two blocks with the usual names, wide enough for tiles of 128; gives its own loss as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 128)
        sizes = {"up_proj": (128, 256), "down_proj": (256, 128)}
        block = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        self.layers = nn.ModuleList([nn.ModuleDict(block)])
        self.head = nn.Linear(128, 16)
        self.loss = torch.zeros(())

    def forward(self, tokens: Tensor) -> Model:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer["down_proj"](layer["up_proj"](x).relu())
        self.loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return self


class LateLoss:
    """Its forward pass runs when `backward` is called, so behind whatever a block did to the model before."""

    def __init__(self, of: Callable[[], Tensor]) -> None:
        self.of = of

    def backward(self) -> None:
        self.of().backward()


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


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    named = set(re.findall(r"[\w/-]+\.md", menu))
    assert named == pages, "mkdocs.yml, nav"


def test_the_whole_run_of_two_processes_is_told_as_it_was_recorded() -> None:
    page, record = (ROOT / "docs/distributed.md").read_text(), ROOT / "benchmarks/results/two-processes.json"
    found = json.loads(record.read_text())
    equal, two, one = found["equal"], found["two"], found["one"]
    assert two == one and equal["different_weights"] == equal["different_moments"] == []
    assert (equal["losses"], equal["validation_losses"], equal["events"]) == (one["steps"], 10, one["events"])
    told = " ".join(page.split())
    assert f"the losses of all {one['steps']:,} steps, all 10 validation losses, all {one['events']} promotions" in told
    assert f"perplexity {one['perplexity']:.2f};" in told and f"of step {found['after_step']} by one process" in told
    assert f"differ by {equal['largest_relative_difference_of_gradient_norms']:.0e} of themselves" in told


def test_soaks_are_told_as_they_were_recorded() -> None:
    told = " ".join((ROOT / "docs/distributed.md").read_text().split())
    files = ("soak-kills-cpu.json", "soak-cpu.json")
    often, rarely = (json.loads((ROOT / "benchmarks/results" / name).read_text()) for name in files)
    for found in (often, rarely):
        assert (found["processes"], found["parallel"]) == (4, "ddp")
        assert found["disagreements"] == 0 and found["differences"] == []
    assert f"killed {len(often['kills'])} times in {often['steps']:,} steps" in told
    assert f"and {len(rarely['kills'])} times in {rarely['steps']:,} (" in told


def test_the_whole_run_of_compressed_gradients_is_told_as_it_was_recorded() -> None:
    page, record = ROOT / "docs/compressed.md", ROOT / "benchmarks/results/compressed-two-processes.json"
    found, told = json.loads(record.read_text()), " ".join(page.read_text().split())
    equal, one = found["equal"], found["one"]
    assert found["two"] == one and all(not equal[key] for key in equal if key.startswith("different"))
    assert (equal["losses"], equal["validation_losses"], equal["events"]) == (one["steps"], 2, one["events"])
    assert f"all {one['steps']} losses, both validation losses, all {one['events']:,} promotions and releases" in told
    assert f"perplexity {one['perplexity']:.2f}, {one['numbers_sent_frac']:.3f} of the numbers sent" in told
    assert f"from the checkpoint of step {found['after_step']}," in told
    assert f"killed in {found['commands']['killed'].partition(';')[0].rpartition('in ')[2]}," in told


def test_every_command_has_its_help_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert set(re.findall(r"<!-- help: (\w+) -->", page)) == set(COMMANDS)

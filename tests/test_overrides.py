"""Words of the command line as they are typed: what is kept, what is refused, and which quoting is told."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnmr.cli.train import _snapshot
from gnmr.errors import UserError
from gnmr.lab.config.compose import compose
from gnmr.lab.config.overrides import arm_words, as_given, as_text, parsed
from gnmr.lab.config.yaml_files import check_yaml
from gnmr.lab.sweep import combinations_of
from gnmr.lab.train.folder import run_folder

GLOBAL = "# @package _global_\n"


@pytest.mark.parametrize("name", ["10e2", "1_000", "0.50", "true", "False", "0x10", "1e400", "nan", "007", "a b"])
def test_a_name_keeps_its_spelling(name: str) -> None:
    config = compose([f"arm={name}", f"experiment_name={name}", f"controller.name={name}"])
    assert (config.arm, config.experiment_name, config.controller.name) == (name, name, name)
    assert run_folder(config).parent.name == name and run_folder(config).name.startswith(f"{name}-")


def test_null_is_a_name_where_there_is_always_one() -> None:
    config = compose(["arm=null", "experiment_name=null"])
    assert (config.arm, config.experiment_name) == (None, "null")


def test_names_of_a_sweep_keep_their_spelling() -> None:
    arms = {"1e3": "", "10e2": "optim.lr=0.1"}
    assert combinations_of(["arm=10e2,1e3"], {}, arms) == [["optim.lr=0.1"], []]
    assert combinations_of(["arm=10e2"], {}, arms) == [["optim.lr=0.1"]]
    cells = combinations_of(["experiment_name=10e2,true", "data.path=choice(1e3,b)"], {}, {})
    values = [tuple(parsed(word).value() for word in cell) for cell in cells]
    assert values == [("10e2", "1e3"), ("10e2", "b"), ("true", "1e3"), ("true", "b")]


def test_numbers_stay_numbers() -> None:
    words = ["optim.lr=1e-3", "training.steps=1_000", "controller.budget=null", "records.verdicts=true"]
    assert as_given(words) == words
    assert compose(words).training.steps == 1000


@pytest.mark.parametrize("group", ["debug", "experiment", "sweep", "preset"])
def test_nothing_is_chosen_of_a_group_by_null(group: str) -> None:
    assert compose([f"{group}=null"]) == compose([])
    assert as_given([f"{group}=a", "optim.lr=1", f"{group}=null"]) == ["optim.lr=1"]


@pytest.mark.parametrize("word", ["~controller", "~optim", "~scale", "~model", "~arm", "~optim.lr", "~fork=x"])
def test_no_part_of_the_config_is_deleted(word: str, gnmr) -> None:
    told = gnmr("train", "debug=smoke", word).mistake
    assert told.startswith(f"{word}: ") and ("can be deleted" in told or "a run needs one" in told)


def test_options_may_be_deleted() -> None:
    words = ["controller.options.share=0.1", "~controller.options.share", "~debug", "~hydra.sweeper.params"]
    assert as_given(words) == words


@pytest.mark.parametrize(
    "value",
    [
        "/a/[x]",
        "/a/[x",
        "/a{b}",
        "/a(1).txt",
        "/a,b=c",
        "it's",
        "/it's (1)",
        'a "q" b',
        'it\'s "q"',
        "a=b",
        "!x",
        "~/x",
    ],
)
def test_the_quoting_that_is_told_works(value: str, gnmr) -> None:
    told = gnmr("train", "debug=smoke", f"data.path={value}").mistake
    assert told.startswith(f"data.path={value}: has letters that Hydra takes in quotes only: ")
    (word,) = shlex.split(told.split(" only: ", 1)[1])
    assert compose([word, "data.name=text"]).data.path == value


@given(st.text(st.characters(min_codepoint=32, max_codepoint=382, exclude_characters="\x7f"), min_size=1, max_size=12))
def test_any_text_can_be_quoted_or_is_not_promised(text: str) -> None:
    if (word := as_text("data.path", text)) is not None:
        (typed,) = shlex.split(word)
        assert parsed(typed).value() == text
    else:
        assert "\\" in text, "backslashes before a quotation mark alone"


@pytest.mark.parametrize(
    ("word", "told"),
    {
        "optim.lr = 1e-3": "optim.lr = 1e-3: has spaces beside its =: optim.lr=1e-3",
        "optim.betas=[0.9": "optim.betas=[0.9: its brackets do not match",
        "optim.lr==3": "optim.lr==3: cannot be read as a value (",
        "=": "=: must be key=value",
        "training.seed=interval(0,3)": "training.seed=interval(0,3): an interval has no values",
        "data.path=/a, b": "data.path=/a, b: several values are a sweep's: add -m; one text is \"data.path='/a, b'\"",
        "data.path=[x]": "data.path=[x]: has letters that Hydra takes in quotes only: \"data.path='[x]'\"",
        "arm=???": "arm=???: has no value; give one (arm=VALUE) or leave it out",
        "optim.lr:1": "must be key=value: optim.lr:1",
        "--experiment=fork": "--experiment=fork: is written without dashes and with a =: experiment=fork",
        "--optim.lr=3": "--optim.lr=3: is written without dashes and with a =: optim.lr=3",
        "sweep=paper/table8": "use one of paper/table1, paper/table2, paper/table7, paper/table9, paper/table10, ",
        "precision.low=fp8": "did you mean fp8_hybrid?",
        "precision.low=nvfp4": "precision.recovery=int8: must be a recipe, as low=nvfp4 is; add precision.recovery=bf16",
    }.items(),
)
def test_the_line_names_the_key_and_the_reason(word: str, told: str, gnmr) -> None:
    assert told in gnmr("train", "debug=smoke", word).mistake


def test_a_flag_with_its_value_behind_it(gnmr) -> None:
    assert gnmr("train", "--experiment", "fork").mistake.endswith("without dashes and with a =: experiment=fork")


def test_a_signal_that_is_misspelt(gnmr, tiny_words) -> None:
    assert gnmr("train", *tiny_words, "controller.signal=gnmr_dleta").mistake.endswith("; did you mean gnmr_delta?")


def test_words_of_an_arm() -> None:
    assert arm_words("a", None) == arm_words("a", "") == []
    assert arm_words("a", "'data.path=/a b' optim.lr=1") == ["data.path=/a b", "optim.lr=1"]
    for words in ({"optim.lr": 1}, ["a=1"], 3, "data.path='a"):
        with pytest.raises(ValueError, match=r"^hydra\.sweeper\.arms\.a="):
            arm_words("a", words)
    assert combinations_of([], {}, {"a": None, "b": "optim.lr=1"}) == [[], ["optim.lr=1"]]
    with pytest.raises(UserError, match=r"arm=foo: .* use one of a \(the defaults\); b \(optim.lr=1\)"):
        combinations_of(["arm=foo"], {}, {"a": None, "b": "optim.lr=1"})


# ---- YAML files of one's own ----

ARMS = f"{GLOBAL}hydra: {{sweeper: {{arms: %s}}}}\n"
BAD = {
    "no-package": ("optim: {lr: 1}\n", ": its first line must be `# @package _global_`"),
    "comment-first": (f"# mine\n{GLOBAL}optim: {{lr: 1}}\n", ": its first line must be `# @package _global_`"),
    "bom": ("\ufeff" + GLOBAL, ": begins with a byte order mark (BOM)"),
    "empty": ("", ": its first line must be `# @package _global_`, and it is empty"),
    "twice": (f"{GLOBAL}optim: {{lr: 1}}\noptim: {{lr: 2}}\n", ", line 3: found duplicate key optim"),
    "tab": (f"{GLOBAL}optim:\n\tlr: 2\n", ", line 3: found character '\\t'"),
    "open": (f"{GLOBAL}optim: {{lr: 2\n", ", line 3: expected ',' or '}'"),
    "two-documents": (f"{GLOBAL}a: 1\n---\nb: 2\n", ", line 3: but found another document"),
    "tag": (f"{GLOBAL}arm: !!python/object/apply:os.getcwd []\n", ", line 2: could not determine a constructor"),
    "number": (
        f"{GLOBAL}experiment_name: 10e2\n",
        ", line 2: experiment_name: 10e2 is 1000.0 to YAML; put it in quotes",
    ),
    "truth": (f"{GLOBAL}arm: true\n", ", line 2: arm: true is True to YAML; put it in quotes"),
    "list": (f"{GLOBAL}optim: [1, 2]\n", ", line 2: optim=[1, 2]: must be KEY: VALUE lines, and is a list"),
    "arms-list": (ARMS % "[a]", ", line 2: hydra.sweeper.arms=['a']: must be KEY: "),
    "arm-dict": (
        f"{GLOBAL}hydra: {{sweeper: {{arms: {{a: {{b: 1}}}}}}}}\n",
        ", line 2: hydra.sweeper.arms.a={'b': 1}: must",
    ),
    "arm-number": (
        ARMS % "{10e2: ''}",
        ", line 2: the arm: 10e2 is 1000.0 to YAML",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_chosen_names_its_line_and_the_reason(case: str, tmp_path: Path, gnmr) -> None:
    text, told = BAD[case]
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text(text)
    line = gnmr("train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job").mistake
    assert line.startswith(f"{file}{told}"), line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "optim: {lr: fast}\n",
            "In 'experiment/mine': Value 'fast' of type 'str' could not be converted to Float (key optim.lr)",
        ),
        ("optim: {lrr: 1}\n", "In 'experiment/mine': Key 'lrr' not in 'OptimConfig' (key optim.lrr): did you mean lr?"),
    ],
)
def test_a_value_of_a_file_is_told_with_its_key(text: str, told: str, tmp_path: Path, gnmr) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(GLOBAL + text)
    assert gnmr("train", "--config-dir", str(tmp_path), "experiment=mine").mistake == told


def test_foreign_files_stop_nothing(tmp_path: Path, gnmr) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{GLOBAL}optim: {{lr: 0.25}}\n")
    for name, text in {"mkdocs": "a: !!python/name:os.system\n", "two": "a: 1\n---\nb: 2\n", "off": "a: {\n"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    outcome = gnmr("train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job", "-p", "optim")
    assert (outcome.code, outcome.err) == (0, "") and "lr: 0.25" in outcome.out
    with pytest.raises(UserError, match=r"two\.yaml, line 2"):
        check_yaml(tmp_path, ["--config-name", "two"])


def test_a_large_file_without_aliases_is_no_bomb(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("a: [" + "1," * 120_000 + "1]\n")
    check_yaml(tmp_path)
    bomb = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    (tmp_path / "bomb.yaml").write_text(bomb)
    with pytest.raises(UserError, match="its aliases make more than 100,000 values"):
        check_yaml(tmp_path)


def test_a_sweep_copies_the_yaml_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "experiment").mkdir(parents=True)
    (mine / "experiment" / "a.yaml").write_text(GLOBAL)
    (mine / "weights.bin").write_bytes(b"x" * 1000)
    (mine / "latest-run").symlink_to(mine / "nowhere")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "b.yaml").write_text(GLOBAL)
    (mine / "sweep").symlink_to(tmp_path / "shared")
    with _snapshot(["--config-dir", str(mine)]) as (_, words):
        copied = {file.relative_to(words[1]).as_posix() for file in Path(words[1]).rglob("*") if file.is_file()}
    assert copied == {"experiment/a.yaml", "sweep/b.yaml"}


def test_under_o_the_word_is_told(tmp_path: Path) -> None:
    import subprocess
    import sys

    words = ["train", "-m", "debug=smoke", "training.seed=range(0,2)"]
    ended = subprocess.run([sys.executable, "-O", "-m", "gnmr", *words], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2 and re.fullmatch(
        r"gnmr: training\.seed=range\(0,2\): Hydra cannot read this under python -O .*\n", ended.stderr
    )

"""`measure="all"`: the KL of every operator alone, in memory, from disk, interrupted, and of models without blocks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from architectures import CAUSAL
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.errors import UserError
from gnmr.lab.models.stored import open_stored
from gnmr.measure import forward_passes
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.pin_plan import read_plan
from gnmr.records.append import JsonLines

SHAPE = CAUSAL["llama"]


def token_ids(seed: int) -> Tensor:
    return torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(seed))


def diagnosed(model: Any, budget: str = "+20%", **options: Any) -> Diagnosis:
    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return model(tokens, use_cache=False).logits, tokens.roll(-1, dims=1)

    batches = [token_ids(1), token_ids(2)]
    rescue = ["mxfp8", "bf16"]
    return gnmr.diagnose(model, run, batches, held_out=[token_ids(3)], rescue=rescue, budget=budget, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf") / "llama"
    model = transformers.AutoModelForCausalLM.from_config(SHAPE(), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.down_proj" in name:  # so that operators differ
                parameter *= 8
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def in_memory(model: nn.Module) -> Diagnosis:
    return diagnosed(model, measure="all")


def on_disk(checkpoint: Path, **options: Any) -> Diagnosis:
    model, weights = open_stored(str(checkpoint), torch.float32, torch.device("cpu"))
    return diagnosed(model, measure="all", weights=weights.read, **options)


def with_weights_of(checkpoint: Path, weights: dict[str, Tensor], **options: Any) -> Diagnosis:
    """As `on_disk`, with other weights in the blocks."""
    model, _ = open_stored(str(checkpoint), torch.float32, torch.device("cpu"))
    return diagnosed(model, weights=weights.__getitem__, **options)


@pytest.fixture(scope="module")
def from_disk(checkpoint: Path) -> tuple[Diagnosis, int]:
    """The diagnosis of the blocks on disk, and how often it told its progress."""
    steps: list[int] = []
    return on_disk(checkpoint, progress=lambda done, _total: steps.append(done)), len(steps)


def numbers(diagnosis: Diagnosis) -> str:
    return json.dumps(diagnosis.tree())


def test_values_are_those_of_measuring_operator_by_operator(model: nn.Module, in_memory: Diagnosis) -> None:
    estimated = diagnosed(model, confirm=1000)
    singles = {row.operator: row.measured for row in estimated.rows if row.gemm == "fprop"}
    assert len(singles) == 14
    assert {row.operator: row.measured for row in in_memory.rows} == singles
    assert repr(in_memory.measured) == repr(estimated.measured)  # an error of one batch is NaN
    assert repr(in_memory.held_out) == repr(estimated.held_out)
    assert (in_memory.work, in_memory.rest) == (estimated.work, estimated.rest)
    rescued = {row.operator: row.rescued["mxfp8"] for row in in_memory.rows}
    assert all(0 < rescued[name] < value for name, value in singles.items() if value is not None)


def test_the_kl_is_that_of_a_plain_loop(model: Any, in_memory: Diagnosis) -> None:
    """The last down_proj alone: its own two operands cast by the recipe, everything else as it is."""
    from gnmr.formats import RECIPES
    from gnmr.formats.cast import quantize

    name = "model.layers.1.mlp.down_proj"
    linear = model.get_submodule(name)
    casts = RECIPES["nvfp4"].fprop
    kl = tokens = 0.0
    for batch in (token_ids(1), token_ids(2)):
        with torch.no_grad():
            high = F.log_softmax(model(batch).logits.double(), dim=-1)

            def low_product(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
                rows = inputs[0].flatten(0, -2)
                x, weight = (
                    quantize(operand, cast, 1)[0]
                    for operand, cast in ((rows, casts.input), (linear.weight, casts.weight))
                )
                return (x @ weight.t()).view(*inputs[0].shape[:-1], -1)

            handle = linear.register_forward_hook(low_product)
            low = F.log_softmax(model(batch).logits.double(), dim=-1)
            handle.remove()
        kl += float((high.exp() * (high - low)).sum())
        tokens += batch.numel()
    (row,) = [row for row in in_memory.rows if row.operator == name]
    # The product above adds up in another order than the operator's kernel.
    assert row.measured == pytest.approx(kl / tokens, rel=1e-4)


def test_blocks_from_disk_give_the_same_diagnosis(from_disk: tuple[Diagnosis, int], in_memory: Diagnosis) -> None:
    assert numbers(from_disk[0]) == numbers(in_memory)


@pytest.mark.parametrize("interrupted_at", [20, *(pytest.param(passes, marks=pytest.mark.slow) for passes in (1, 34))])
def test_a_measurement_that_was_interrupted_goes_on(
    interrupted_at: int, checkpoint: Path, in_memory: Diagnosis, from_disk: tuple[Diagnosis, int], tmp_path: Path
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(done: int, _total: int | None) -> None:
        if done >= interrupted_at:
            raise Interrupted

    with pytest.raises(Interrupted):
        on_disk(checkpoint, state=tmp_path, progress=interrupt)
    steps: list[int] = []
    again = on_disk(checkpoint, state=tmp_path, progress=lambda done, _total: steps.append(done))
    assert numbers(again) == numbers(in_memory)
    if interrupted_at > 1:  # a block is finished
        assert len(steps) < from_disk[1], "blocks that were done are not run again"


class Residual(nn.Module):
    """Hidden states change between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(300, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32)) for _ in range(3)])
        self.head = nn.Linear(32, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


WHOLE = {"recipe": "mxfp4", "targets": ["blocks.*"]}


def test_a_model_that_cannot_be_followed_is_measured_by_whole_passes() -> None:
    model, batches = Residual(), [token_ids(1), token_ids(2)]
    with pytest.warns(UserWarning, match="Residual cannot be run block by block: the model changes hidden states"):
        measured = gnmr.diagnose(model, model, batches, measure="all", **WHOLE)
    estimated = gnmr.diagnose(model, model, batches, confirm=10, **WHOLE)
    singles = {row.operator: row.measured for row in estimated.rows if row.gemm == "fprop"}
    assert {row.operator: row.measured for row in measured.rows} == singles and len(singles) == 3


@pytest.mark.filterwarnings("ignore:Residual cannot be run block by block")
@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"step": 9, "ba',
        b"no row\n",
        b'{"step": 9}\n',
        b'{"step": 9, "batch": 1, "variant": "all", "kl": [[1]], "loss": 1.0}\n',
    ],
    ids=["whole", "cut off", "damaged", "without numbers", "of another shape"],
)
def test_whole_passes_that_were_interrupted_go_on(damage: bytes, tmp_path: Path) -> None:
    model, batches, calls = Residual(), [token_ids(1), token_ids(2)], []

    def run(tokens: Tensor) -> Tensor:
        calls.append(tokens)
        if len(calls) == stops_at:
            raise KeyboardInterrupt
        return model(tokens)

    stops_at = 0
    uninterrupted = gnmr.diagnose(model, run, batches, measure="all", **WHOLE)
    total = len(calls)
    stops_at = total // 2
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        gnmr.diagnose(model, run, batches, measure="all", state=tmp_path, **WHOLE)
    (file,) = tmp_path.glob("*.jsonl")
    rows = file.read_bytes().count(b"\n")
    file.write_bytes(file.read_bytes() + damage)
    calls.clear()
    stops_at = 0
    again = gnmr.diagnose(model, run, batches, measure="all", state=tmp_path, **WHOLE)
    assert numbers(again) == numbers(uninterrupted)
    assert rows >= 4 and len(calls) == total - rows, "what was measured is not run again"


class Chain(Residual):
    """The same blocks, which can be run one by one."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.filterwarnings("ignore:Residual cannot be run block by block")
@pytest.mark.parametrize("kind", [Residual, Chain])
@pytest.mark.parametrize(
    "other", ["recipe", "rescue", "batches", "split", "weights", "unseen weights", "buffer", "run", "shape"]
)
def test_a_state_of_another_measurement_is_not_used(kind: Any, other: str, tmp_path: Path) -> None:
    """Nobody is told that a folder has been used, so another measurement in it must begin anew."""
    model, options = kind(), {**WHOLE, "held_out": [token_ids(5)]}
    model.register_buffer("shift", torch.zeros(32))
    model.embed.register_forward_hook(lambda _module, _tokens, hidden: hidden + model.shift)
    model.embed.weight.data[:, 0] = 0.0
    batches: list[Any] = [Opaque(token_ids(1)), Opaque(token_ids(2))]
    masked, flat = 0, False

    def run(batch: Any) -> tuple[Tensor, Tensor]:
        tokens = batch if isinstance(batch, Tensor) else batch.tokens
        targets = tokens.roll(-1, dims=1)
        targets[:, :masked] = -100
        logits = model(tokens)
        return (logits.flatten(0, 1), targets.flatten()) if flat else (logits, targets)

    def measured(**state: Path) -> str:
        return numbers(gnmr.diagnose(model, run, batches, measure="all", **state, **options))

    folder = tmp_path / "made" / "here"
    first = measured(state=folder)
    if other in ("recipe", "rescue"):
        options |= {"recipe": {"recipe": "nvfp4"}, "rescue": {"rescue": ["mxfp8"]}}[other]
    elif other == "batches":
        batches = [Opaque(token_ids(3)), Opaque(token_ids(4))]
    elif other == "split":
        batches = [Opaque(tokens) for tokens in torch.cat([token_ids(1), token_ids(2)]).split([1, 3])]
    elif other == "weights":
        next(model.blocks[1].parameters()).data *= 2
    elif other == "unseen weights":  # of an input that is 0, but they set the scale of their neighbours
        next(model.blocks[0].parameters()).data[:, 0] = 50.0
    elif other == "buffer":
        model.shift += 0.5
    elif other == "run":
        masked = 7
    else:
        flat = True
    assert measured(state=folder) == measured() != first


class Opaque:
    """A batch whose content only `run` knows."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class Skipped(nn.Module):
    """A block that was pruned."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class Adding(nn.Module):
    """A block with a residual connection."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(32, 32), in_place

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.add_(self.linear(hidden)) if self.in_place else hidden + self.linear(hidden)


@pytest.mark.filterwarnings("error:.*cannot be written")
def test_a_block_that_returns_its_input_keeps_a_state(tmp_path: Path) -> None:
    model, batches = Chain(), [token_ids(1), token_ids(2)]
    model.blocks.insert(1, Skipped())

    def measured(**more: Any) -> tuple[str, int]:
        steps: list[int] = []
        progress = lambda done, _total: steps.append(done)
        return numbers(gnmr.diagnose(model, model, batches, measure="all", progress=progress, **more, **WHOLE)), len(
            steps
        )

    first, again, without = measured(state=tmp_path), measured(state=tmp_path), measured()
    assert first == without and again[0] == first[0]
    assert again[1] < first[1], "what was measured is not run again"


def test_a_block_that_changes_its_input_is_not_run_alone() -> None:
    """Copies that are born later would read what it left of the hidden states."""

    def measured(in_place: bool) -> str:
        model = Chain()
        torch.manual_seed(1)
        model.blocks.append(Adding(in_place))
        return numbers(gnmr.diagnose(model, model, [token_ids(1), token_ids(2)], measure="all", **WHOLE))

    with pytest.warns(UserWarning, match="cannot be run block by block: a block changes its hidden states in place"):
        whole_passes = measured(in_place=True)
    assert whole_passes == measured(in_place=False)


def test_a_block_that_is_a_linear_itself_counts_once() -> None:
    model, batches = Chain(), [token_ids(1), token_ids(2)]
    model.blocks = nn.ModuleList([block[0] for block in model.blocks])
    with pytest.warns(UserWarning, match="cannot be run block by block: a block of blocks is a linear itself"):
        measured = gnmr.diagnose(model, model, batches, measure="all", **WHOLE)
    # Three of 32 x 32, and a head of 32 x 300.
    assert measured.coverage.share(measured.operators) == 3 * 32 * 32 / (3 * 32 * 32 + 32 * 300)


def test_rows_in_another_order_are_used(tmp_path: Path) -> None:
    model, batches = Residual(), [token_ids(1)]
    with pytest.warns(UserWarning, match="Residual cannot be run block by block"):
        first = gnmr.diagnose(model, model, batches, measure="all", state=tmp_path, **WHOLE)
        file = tmp_path / "batches.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [row | {"step": step} for step, row in enumerate(reversed(rows[2:]))]
        file.write_text("".join(json.dumps(row) + "\n" for row in kept))
        assert numbers(gnmr.diagnose(model, model, batches, measure="all", state=tmp_path, **WHOLE)) == numbers(first)
    assert len(file.read_text().splitlines()) == len(rows)


@pytest.mark.parametrize(
    "damage", [{"blocks": None}, {"blocks": "x"}, {"blocks": "99"}, {"weights": None}, {"paths": "0"}, {}]
)
def test_a_state_that_is_damaged_is_measured_again(damage: dict[str, Any], tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    model, batches, file = Chain(), [token_ids(1), token_ids(2)], tmp_path / "batches.safetensors"
    first = numbers(gnmr.diagnose(model, model, batches, measure="all", state=tmp_path, **WHOLE))
    with safe_open(file, framework="pt") as opened:
        metadata = {key: value for key, value in ({**opened.metadata()} | damage).items() if value is not None}
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    del tensors["1 2"]
    save_file(tensors, file, metadata)
    assert numbers(gnmr.diagnose(model, model, batches, measure="all", state=tmp_path, **WHOLE)) == first


def test_a_plan_of_another_budget_is_measured_anew(checkpoint: Path, tmp_path: Path) -> None:
    """The hidden states of plans on held-out batches are in the folder too."""
    first, second = (on_disk(checkpoint, state=tmp_path, budget=budget) for budget in ("+20%", "+90%"))
    assert numbers(second) == numbers(on_disk(checkpoint, budget="+90%")) != numbers(first)


def test_weights_that_changed_on_disk_are_measured_anew(checkpoint: Path, model: nn.Module, tmp_path: Path) -> None:
    changed = dict(model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    options: dict[str, Any] = {"measure": "all", "state": tmp_path}
    first = with_weights_of(checkpoint, changed, **options)
    changed[name] = changed[name] * 2
    second = with_weights_of(checkpoint, changed, **options)
    assert numbers(second) == numbers(with_weights_of(checkpoint, changed, measure="all")) != numbers(first)


def test_free_memory_is_given_back_on_any_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc would take megabytes more with each pass of a large vocabulary; other C libraries have no such function."""
    trimmed: list[int] = []
    for library in (SimpleNamespace(malloc_trim=trimmed.append), SimpleNamespace()):
        monkeypatch.setattr(forward_passes, "ctypes", SimpleNamespace(CDLL=lambda _, library=library: library))
        monkeypatch.setattr(forward_passes, "sys", SimpleNamespace(platform="linux"))
        forward_passes._release_memory()
    assert trimmed == [0]
    monkeypatch.undo()
    forward_passes._release_memory()  # whatever this system is


@pytest.mark.filterwarnings("ignore:Residual cannot be run block by block")
def test_free_memory_is_given_back_every_32_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[None] = []
    monkeypatch.setattr(forward_passes, "_release_memory", lambda: released.append(None))
    model = Residual()
    # 16 x 7 passes: all operators low, and each of three on the low recipe and on MXFP8.
    batches = [token_ids(seed) for seed in range(16)]
    gnmr.diagnose(model, model, batches, measure="all", **WHOLE)
    assert len(released) == 3


def test_a_linear_in_two_blocks_is_measured_in_both() -> None:
    class Block(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(32, 32)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + torch.tanh(self.own(self.shared(hidden)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(32, 32)
            self.embed, self.head = nn.Embedding(300, 32), nn.Linear(32, 300)
            self.blocks = nn.ModuleList([Block(shared), Block(shared)])

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embed(tokens)
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(hidden)

    torch.manual_seed(0)
    model = Model()
    batches, options = [token_ids(1), token_ids(2)], {"recipe": "mxfp4", "targets": ["*.shared", "*.own"]}
    with pytest.warns(UserWarning, match="several blocks of blocks share"):
        measured = gnmr.diagnose(model, model, batches, measure="all", **options)
    estimated = gnmr.diagnose(model, model, batches, confirm=10, **options)
    singles = {row.operator: row.measured for row in estimated.rows if row.gemm == "fprop"}
    assert {row.operator: row.measured for row in measured.rows} == singles and len(singles) == 3


def test_blocks_that_change_the_shape_are_measured_by_whole_passes() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 64)), nn.Sequential(nn.Linear(64, 32))])

    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.head = nn.Embedding(300, 32), blocks, nn.Linear(32, 300)
            self.norm = nn.LayerNorm(32)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embed(tokens)
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(self.norm(hidden))

    model = Narrowing()
    with pytest.warns(UserWarning, match="a block changes the shape of its hidden states"):
        measured = gnmr.diagnose(model, model, [token_ids(1)], measure="all", recipe="mxfp4", targets=["blocks.*"])
    assert len(measured.rows) == 2 and "nan" not in measured.verdict()


def test_a_checkpoint_of_another_shape_than_its_config_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text()) | {"intermediate_size": 256}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is \[64, 128\] in the file, \[64, 256\] by config.json"):
        open_stored(str(other), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "some"}, "measure=some"),
        ({"measure": "all", "include": ["head"]}, "include=head: is estimated"),
        ({"state": Path("x")}, "is for measure='all'"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str, model: nn.Module) -> None:
    with pytest.raises(ValueError, match=message):
        diagnosed(model, **options)


def test_a_loss_alone_has_no_kl(model: Any) -> None:
    def loss(tokens: Tensor) -> Tensor:
        return model(tokens, labels=tokens, use_cache=False).loss

    with pytest.raises(ValueError, match="must give logits"):
        gnmr.diagnose(model, loss, [token_ids(1)], measure="all")


@pytest.mark.parametrize("kind", ["a loss", "autocast"])
def test_blocks_on_disk_are_refused_before_they_are_measured(kind: str, checkpoint: Path) -> None:
    model, weights = open_stored(str(checkpoint), torch.float32, torch.device("cpu"))
    read: list[str] = []

    def run(tokens: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            output = model(tokens, labels=tokens if kind == "a loss" else None, use_cache=False)
        return output if kind == "a loss" else output.logits

    def read_weight(name: str) -> Tensor:
        read.append(name)
        return weights.read(name)

    message = "must give logits" if kind == "a loss" else "`run` begins autocast"
    with pytest.raises(ValueError, match=message):
        gnmr.diagnose(model, run, [token_ids(1)], measure="all", weights=read_weight)
    assert not any("layers.1." in name for name in read)


@pytest.fixture
def text_command(checkpoint: Path, gnmr: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`gnmr diagnose` of the checkpoint, with a tokenizer of bytes and a text."""
    from tokenizers import ByteLevelBPETokenizer

    if not (checkpoint / "tokenizer.json").exists():
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(["plain text of some words " * 20], vocab_size=300, special_tokens=["<end>"])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<end>")
        fast.save_pretrained(checkpoint)
    text = tmp_path / "text.txt"
    text.write_text("plain text of some words, and of other words that are read twice " * 60)
    words = (f"data={text}", "measure=all", "batches=1", "held_out=1", "block=16", "batch_size=2", "device=cpu")
    return lambda *more: gnmr("diagnose", str(checkpoint), *words, *more)


def test_the_command_reads_the_blocks_from_disk(text_command: Callable[..., Any], tmp_path: Path) -> None:
    ended = text_command(f"out={tmp_path / 'out'}", "rescue=bf16", f"html={tmp_path / 'page.html'}")
    assert ended.code == 0, ended.err
    assert "measuring 14 operators alone, 2 blocks one after the other" in ended.out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"plan.json", "diagnosis.json"}
    tree = json.loads((tmp_path / "out/diagnosis.json").read_text())
    assert tree["estimate"] == "measured" and {row["gemm"] for row in tree["rows"]} == {"fprop"}
    assert all(row["measured"] == row["value"] for row in tree["rows"])
    assert read_plan(tmp_path / "out/plan.json").prices
    assert "measured" in (tmp_path / "page.html").read_text()


def test_a_state_is_for_the_weights_that_it_was_measured_with(
    text_command: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    """A file that was rewritten in its place, with the same date, changes no date of its folder."""
    from safetensors.torch import load_file, save_file

    from gnmr.plan import diagnose

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    file, out = checkpoint / "model.safetensors", f"out={tmp_path / 'out'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnose._Measurement, "_with_held_out", interrupted)
        with suppress(KeyboardInterrupt):
            text_command(out)
    (state,) = (tmp_path / "out").glob(".measuring-*")
    weights, bytes_before, dates = load_file(file), file.read_bytes(), file.stat()
    try:
        weights["model.layers.0.mlp.down_proj.weight"] *= 2
        save_file(weights, file, metadata={"format": "pt"})
        os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
        assert "goes on from" not in text_command(out).out and not state.exists()
    finally:
        file.write_bytes(bytes_before)


def test_a_full_disk_ends_no_measurement(checkpoint: Path, in_memory: Diagnosis, small_disk: Any) -> None:
    state = small_disk("16k")
    with pytest.warns(UserWarning, match="cannot be written .*; what is measured from here on is lost"):
        assert numbers(on_disk(checkpoint, state=state)) == numbers(in_memory)
    assert not [*state.iterdir()]


@pytest.mark.filterwarnings("ignore:Residual cannot be run block by block")
def test_a_disk_that_fills_up_ends_no_measurement_by_whole_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, batches, written = Residual(), [token_ids(1), token_ids(2)], []
    write = JsonLines.write

    def write_three(lines: JsonLines, rows: list[dict[str, Any]]) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.extend(rows)
        write(lines, rows)

    uninterrupted = numbers(gnmr.diagnose(model, model, batches, measure="all", **WHOLE))
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", write_three)
        with pytest.warns(UserWarning, match="cannot be written .*; what is measured from here on is lost"):
            measured = gnmr.diagnose(model, model, batches, measure="all", state=tmp_path, **WHOLE)
    assert numbers(measured) == uninterrupted and len(written) == 3
    assert numbers(gnmr.diagnose(model, model, batches, measure="all", state=f"{tmp_path}", **WHOLE)) == uninterrupted


@pytest.mark.filterwarnings("ignore:Residual cannot be run block by block")
@pytest.mark.parametrize("kind", [Residual, Chain])
@pytest.mark.parametrize("place", ["folder is a file", "below a file", "file is a folder"])
def test_a_place_that_cannot_hold_a_state_ends_no_measurement(kind: Any, place: str, tmp_path: Path) -> None:
    model, batches, state = kind(), [token_ids(1), token_ids(2)], tmp_path / "state"
    if place == "file is a folder":
        for ending in ("jsonl", "safetensors"):
            (state / f"batches.{ending}" / "full").mkdir(parents=True)
    else:
        state.write_text("")
        state = state if place == "folder is a file" else state / "below"
    with pytest.warns(UserWarning, match="cannot be written .*; what is measured from here on is lost"):
        measured = gnmr.diagnose(model, model, batches, measure="all", state=state, **WHOLE)
    assert numbers(measured) == numbers(gnmr.diagnose(model, model, batches, measure="all", **WHOLE))


def test_a_state_that_was_cut_off_is_measured_again(checkpoint: Path, in_memory: Diagnosis, tmp_path: Path) -> None:
    on_disk(checkpoint, state=tmp_path)
    file = tmp_path / "batches.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    assert numbers(on_disk(checkpoint, state=tmp_path)) == numbers(in_memory)


def test_too_little_memory_is_told_before_work_begins(
    text_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnmr.lab.train import memory

    monkeypatch.setattr(memory, "machine_memory", lambda: 10_000_000)
    ended = text_command()
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "measure=all: cannot fit into memory" in ended.err and "use fewer batches=" in ended.err


def test_one_batch_is_enough_only_if_everything_is_measured(text_command: Callable[..., Any]) -> None:
    ended = text_command("measure=estimate")
    assert ended.code == 2 and "batches=1: needs two at least" in ended.err

"""What every signal has to keep: bad numbers, units that are not observed, resuming, options, ranking, no waiting."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from contexts import step as take
from contexts import units
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gnmr.control import Context, Controller, ControlSpec, build_signal, device
from gnmr.control.signals import SIGNALS, BlindSignal
from gnmr.control.signals.blind import AlwaysHigh, AlwaysLow

NAMES = tuple(
    f"layers.{i}.{part}" for i in range(3) for part in ("attn.q_proj", "attn.o_proj", "mlp.up_proj", "mlp.down_proj")
)
U, STEPS = len(NAMES), 40
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gnmr_delta": [{}, {"delta": 3, "beta": None}, {"alpha": None}],
    "recovery_gap": [{}, {"every": 4}],
    "random": [{}, {"active_frac": 0.1}],
    "static_k": [{"calibration_steps": 15}, {"calibration_steps": 25, "k": 2, "active_frac": 0.03}],
}
CASES = [pytest.param(name, o, id=f"{name}-{i}") for name in SIGNALS for i, o in enumerate(OPTIONS.get(name, [{}]))]
every_signal = pytest.mark.parametrize(("name", "options"), CASES)


def context(device: str = "cpu", **changes: Any) -> Context:
    return Context(**{"names": NAMES, "device": torch.device(device), "seed": 5, **changes})


def make(name: str, options: dict[str, Any]):
    return build_signal(name, options, context(steps=STEPS))


def rows(needs: tuple[str, ...], bad: bool = True, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Random evidence; if `bad`, with NaN, Inf, zeros, and units that are not observed."""
    generator = torch.Generator().manual_seed(0)

    def draw(zeros: bool) -> Tensor:
        values = torch.randn(steps, U, generator=generator, dtype=torch.float64).exp()
        if bad:
            luck = torch.rand(steps, U, generator=generator)
            values[luck < 0.03], values[luck > 0.97] = math.nan, math.inf
            if zeros:
                values[(luck > 0.5) & (luck < 0.55)] = 0.0
        return values

    tensors = {name: draw(zeros=True) for name in ("norm", *needs)}
    if "micro_square" in tensors:
        tensors["micro_square"] = tensors["norm"].square() + tensors["micro_square"]
    tensors["observed"] = torch.rand(steps, U, generator=generator) > (0.1 if bad else -1.0)
    return [{name: values[step] for name, values in tensors.items()} for step in range(steps)]


def is_blind(signal: object) -> bool:
    return isinstance(signal, (BlindSignal, AlwaysLow, AlwaysHigh))


@every_signal
def test_risk_is_never_nan_and_infinite_for_what_is_not_finite(name: str, options: dict[str, Any]) -> None:
    signal = make(name, options)
    for step, row in enumerate(rows(signal.needs), 1):
        risk, columns = signal.observe(row, step)
        assert len(columns) == len(signal.columns) == len(signal.thresholds(step))
        assert all(t.shape == (U,) and t.dtype == torch.float64 for t in (risk, *columns))
        assert (risk >= 0).all(), "NaN is not 0 or more"
        if is_blind(signal):
            assert risk.isfinite().all()
        else:
            read = signal.needs if signal.reads(step) else ()
            finite = torch.stack([row[key].isfinite() for key in ("norm", *read)]).all(dim=0)
            assert risk[~row["norm"].isfinite()].isinf().all()
            if name == "jacobian":  # of which a unit's value is its group's
                finite = finite.reshape(-1, 2).all(dim=1).repeat_interleave(2)
            assert risk[finite & row["observed"]].isfinite().all()
        for key, value in signal.state_dict().items():
            assert value.isfinite().all(), f"{key}: state is finite from the start, whatever comes"


@every_signal
def test_bad_evidence_is_a_risk_too(name: str, options: dict[str, Any]) -> None:
    signal = make(name, options)
    good = rows(signal.needs, bad=False)
    for need in signal.needs:
        for step in (1, STEPS + 1):
            row = {key: value.clone() for key, value in good[0].items()}
            row[need][3] = math.nan
            fresh = make(name, options)
            for earlier, there in enumerate(good[: step - 1], 1):
                fresh.observe(there, earlier)
            if not fresh.reads(step):
                continue
            risk, _ = fresh.observe(row, step)
            hit = risk.isinf()
            assert hit[3] or (need == "input_std" and name == "jacobian"), "unit 3 reads the input of up_proj"
            assert not hit[4:].any(), "other groups are not touched"


@every_signal
def test_units_that_are_not_observed_or_not_finite_keep_their_history(name: str, options: dict[str, Any]) -> None:
    signal = make(name, options)
    first, *more = rows(signal.needs, bad=False, steps=10)
    for step, row in enumerate((first, *more), 1):
        signal.observe(row, step)
    before = copy.deepcopy(signal.state_dict())
    row = {key: value * 3 for key, value in first.items()}
    row["observed"] = torch.arange(U) % 4 != 0
    row["norm"] = torch.where(torch.arange(U) % 4 == 1, math.nan, row["norm"])
    signal.observe(row, 11)
    for key, value in signal.state_dict().items():
        same = (value == before[key]).reshape(-1, U).all(dim=0)
        assert same[torch.arange(U) % 4 < 2].all(), key


@every_signal
def test_resuming_continues_exactly(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    whole, resumed = make(name, options), make(name, options)
    evidence = rows(whole.needs)
    for step, row in enumerate(evidence, 1):
        if step == 18:
            torch.save(whole.state_dict(), tmp_path / "state.pt")
            resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
        expected = whole.observe(row, step)
        if step >= 18:
            found = resumed.observe(row, step)
            for a, b in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@every_signal
def test_foreign_states_are_refused_before_anything_changes(name: str, options: dict[str, Any]) -> None:
    signal = make(name, options)
    own = copy.deepcopy(signal.state_dict())
    with pytest.raises(ValueError, match="signal state holds"):
        signal.load_state_dict(own | {"foreign": torch.zeros(U)})
    if own:
        *_, last = own
        with pytest.raises(ValueError, match=f"'{last}' is "):
            signal.load_state_dict({k: torch.ones(2, 3) if k == last else v + 1 for k, v in own.items()})
    assert all(torch.equal(value, own[key]) for key, value in signal.state_dict().items())


class NoWaiting(TorchDispatchMode):
    """Refuses what brings a number to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
        assert func.overloadpacket.__name__ not in waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: nobody looks whether numbers are finite."""
    monkeypatch.setattr(device, "waits_for_nothing", lambda x: False)


@every_signal
def test_observing_reads_nothing_on_the_host(name: str, options: dict[str, Any], unseen: None) -> None:
    signal = make(name, options)
    with NoWaiting():
        for step, row in enumerate(rows(signal.needs, bad=False), 1):
            signal.observe(row, step)


@every_signal
def test_looking_at_numbers_changes_none(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Steps of finite numbers, and some that are not: with the selections that a CPU can leave out and without."""
    signal, evidence = make(name, options), list(rows(make(name, options).needs))
    seen = [signal.observe(row, step) for step, row in enumerate(evidence, 1)]
    request.getfixturevalue("unseen")
    other = make(name, options)
    for step, (row, (risk, columns)) in enumerate(zip(evidence, seen, strict=True), 1):
        again = other.observe(row, step)
        for a, b in zip((again[0], *again[1]), (risk, *columns), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert all(value.equal(signal.state_dict()[key]) for key, value in other.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_signal
def test_observing_does_not_wait_for_the_gpu_and_equals_the_cpu(name: str, options: dict[str, Any]) -> None:
    on_cpu, on_gpu = make(name, options), build_signal(name, options, context("cuda", steps=STEPS))
    for step, row in enumerate(rows(on_cpu.needs), 1):
        there = {key: value.cuda() for key, value in row.items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            risk, columns = on_gpu.observe(there, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = on_cpu.observe(row, step)
        for a, b in zip((expected[0], *expected[1]), (risk, *columns), strict=True):
            torch.testing.assert_close(b.cpu()[row["observed"]], a[row["observed"]], equal_nan=True)


@every_signal
def test_ranked_routing_fills_max_o(name: str, options: dict[str, Any]) -> None:
    signal = make(name, options | {"active_frac": None} if "active_frac" in options else options)
    controller = Controller(units(NAMES), ControlSpec(signal=signal, max_o=4, routing="ranked"))
    full = 2 if options.get("k") == 2 else 4
    for step, row in enumerate(rows(signal.needs, bad=False), 1):
        active = int(take(controller, **row).active.sum())
        calibrating = name == "static_k" and step < options["calibration_steps"]
        assert active == (0 if name == "always_low" or calibrating else full), step


@every_signal
def test_risk_is_the_largest_column_over_its_threshold(name: str, options: dict[str, Any]) -> None:
    """So that a trigger on R and one on the columns are the same."""
    signal = make(name, options)
    for step, row in enumerate(rows(signal.needs, bad=False), 1):
        risk, columns = signal.observe(row, step)
        over = [c / t for c, t in zip(columns, signal.thresholds(step), strict=True) if t is not None]
        if over:
            highest = torch.stack(over).max(dim=0).values
            compared = highest > 0.01
            torch.testing.assert_close(risk[compared], highest[compared], rtol=0, atol=0)
            assert (risk[~compared] <= 0.01).all()


# Options

BAD: dict[str, list[Any]] = {
    **{key: [0, -1.0, math.nan, math.inf, "1.5", True] for key in ("alpha", "beta", "threshold", "eps")},
    **{key: [0, -1, 1.5, True] for key in ("delta", "early", "every", "calibration_steps", "k")},
    "decay": [0.0, 1.0, 1, -0.5, "0.9"],
    **{key: [0, -0.1, 1.1, math.nan, True, "0.1"] for key in ("calibration_frac", "k_frac")},
    "active_frac": [-0.1, 1.1, math.nan, True, "0.1"],
    "evidence": ["prize", None, 1],
    "pin_every": [0, -1, 1.5, True],
    **{key: [0, 0.9, math.nan, "1.5", True] for key in ("up", "down")},
}


@pytest.mark.parametrize("name", SIGNALS)
def test_senseless_options_are_refused_by_name(name: str) -> None:
    base = OPTIONS.get(name, [{}])[0]
    for option in SIGNALS[name].options():
        assert option in BAD, f"{option}: the senseless values of a new option belong in BAD"
        for value in BAD[option]:
            with pytest.raises(ValueError, match=rf"^{option}\b") as caught:
                make(name, base | {option: value})
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SIGNALS)
def test_defaults_can_be_built_and_handed_back(name: str) -> None:
    options = SIGNALS[name].options()
    build_signal(name, options, context(steps=STEPS))
    with pytest.raises(ValueError, match=f"signal {name} has no option 'alfa': it has ") as caught:
        build_signal(name, {"alfa": 1}, context())
    assert all(option in str(caught.value) for option in options)


def test_unknown_signals_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'gnrm' is not known: use one of gnmr_delta, recovery_gap,"):
        build_signal("gnrm", {}, context())
    for name, what in (
        ("no_such_module:Signal", "No module named"),
        ("gnmr.control:NoSignal", "no class 'NoSignal'"),
        (":Signal", "package.module:Class"),
        ("gnmr.control:", "must read package.module:Class"),
    ):
        with pytest.raises(ValueError, match=what):
            build_signal(name, {}, context())


def test_static_sets_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="k=5: at most max_o=4 of 12 units"):
        make("static_k", {"calibration_steps": 3, "k": 5})
    with pytest.raises(ValueError, match="calibration_steps=40: the run has only 40 steps"):
        make("static_k", {"calibration_steps": 40})


@pytest.mark.parametrize("name", ["random", "static_k"])
def test_a_share_that_cannot_be_reached_warns_and_caps(name: str) -> None:
    options = {"calibration_steps": 1} if name == "static_k" else {}
    with pytest.warns(UserWarning, match="the most that"):
        signal = build_signal(name, options | {"active_frac": 0.5}, context())
    over = [(signal.observe(row, t)[0] > 1).sum().item() for t, row in enumerate(rows((), bad=False), 1)]
    assert over == [4] * STEPS


def test_a_third_partys_signal_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(
        "from gnmr.control.signals import LevelSignal\n"
        "class Theirs(LevelSignal):\n"
        "    columns = ('norm',)\n"
        "    def __init__(self, context, *, threshold=2.0):\n"
        "        super().__init__(context, threshold)\n"
        "    def observe(self, evidence, step):\n"
        "        return self.verdict(evidence, step, evidence['norm'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    signal = build_signal("theirs:Theirs", {"threshold": 4.0}, context())
    row = rows((), bad=False)[0]
    assert torch.equal(signal.observe(row, 1)[0], row["norm"] / 4)
    with pytest.raises(ValueError, match="theirs:Theirs has no option 'alpha': it has threshold"):
        build_signal("theirs:Theirs", {"alpha": 1.0}, context())

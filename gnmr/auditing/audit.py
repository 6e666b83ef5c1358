"""Check with `gnmr.audit` that the recipe in force is the one that was meant.

Some apparent instabilities of low precision are silent mistakes: the head was converted too, a list of names was never
applied, a pattern matched too many names, or a scale was off by a factor of 2. An audit reads the precision in force
(`in_force`) and compares it with lists of names (`lists`). It measures the operands that the GEMMs really read in one
forward and backward pass (`seen_operands`). Every finding names the problem, its place, and the remedy. A sound model
has no findings.

**Related work**: torchao's SQNR and Transformer Engine's debug statistics measure the casts that a user names, and
msProbe compares two runs. None of them reports which list was not applied or which scale is wrong.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.auditing.seen_operands import Cause, MeasuredOperand, watching
from gnmr.conversion import PathLinear
from gnmr.conversion.adapters import LinearOperator
from gnmr.conversion.reads import is_sharded
from gnmr.conversion.shared import SharedState
from gnmr.conversion.targets import KEPT
from gnmr.conversion.unit_names import of_any_expert, operator_names, unit_of
from gnmr.errors import first_few, plural, warn
from gnmr.formats import RECIPES, Recipe
from gnmr.measure.absent_weights import is_offloaded, refuse_other_batches, with_weights
from gnmr.measure.coverage import MUCH, Coverage, Product, count, percent
from gnmr.measure.guards import (
    as_it_was,
    not_finite,
    reach_of,
    refuse_constant,
    refuse_not_finite,
    refuse_reentrant,
    refuse_without_gradients,
    scalar,
)
from gnmr.measure.in_force import READS, Operator, operators_of, packed_in
from gnmr.measure.model_passes import Progress
from gnmr.names import GEMMS
from gnmr.options import require
from gnmr.plan.checkpoint_names import linears_of
from gnmr.plan.compared_paths import recipe_named
from gnmr.plan.lists import (
    HEADS,
    LISTS,
    Entry,
    entries_of,
    fits_none,
    in_memory,
    read_lists,
    reads_memory,
    repaired,
    suggested,
)

LOW = 50.0
"""Ratio in dB below which an operator that declares nothing is in low precision.

INT8 gives at most 48.4 dB, for uniform numbers, and products of BF16 operands lie above 51 dB.
"""
_QKV = {"wq", "wk", "wv", "wkv", "wqkv", "qkv_linear"}
"""Names that torchtitan's versions give the linears of an attention's queries, keys and values."""


@dataclass(frozen=True)
class Finding:
    """One problem that the audit found."""

    kind: str
    where: tuple[str, ...]
    """Operators, with GEMM and operand if it is about one (`layers.0.mlp.up_proj fprop input`), or entries of lists."""
    problem: str
    right: str

    def line(self) -> str:
        """Return the finding in one line."""
        return f"{self.kind}: {first_few(self.where, 3)}: {self.problem}; right would be: {self.right}"

    def tree(self) -> dict[str, Any]:
        """Return the finding as a tree for JSON."""
        return {
            "kind": self.kind,
            "where": self.where,
            "what": self.problem,
            "right": self.right,
            "line": self.line(),
        }


@dataclass(frozen=True)
class OperatorRow:
    """The precision in force in one operator, and its measurements."""

    operator: str
    kind: str
    """gnmr, plain, torchao float8, torchao mx, Transformer Engine, or the name of a class."""
    precision: dict[str, str]
    """Precision of each GEMM, in words."""
    measured: dict[str, dict[str, tuple[float, float | None]]]
    """(measured dB, possible dB) by GEMM and operand, with fprop's output. Infinite: never quantized."""
    ran: bool
    low: bool
    """True if it is in low precision: as declared, as its weight is kept, or as measured."""
    note: str = ""


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    findings: tuple[Finding, ...]
    rows: tuple[OperatorRow, ...]
    dynamic: bool
    """True if a batch was run."""
    coverage: Coverage = field(default_factory=Coverage)
    """Products that the model ran in that batch."""

    @property
    def sound(self) -> bool:
        """Return True if there are no findings."""
        return not self.findings

    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        rows = [row for row in self.rows if row.ran] if self.dynamic else self.rows
        num_low, num_measured = sum(row.low for row in rows), sum(bool(row.measured) for row in rows)
        head = f"{len(rows)} linears, {num_low} in low precision"
        head += f", {num_measured} of them measured in one batch" if self.dynamic else ", nothing measured"
        if idle := [row.operator for row in self.rows if row not in rows]:
            head += f"; {first_few(idle, 3)} did not run"
        covered = [row.operator for row in rows if not num_low or row.low]
        if self.coverage.left_out(covered):
            head += f"; {self.coverage.line(covered, 'low precision covers' if num_low else 'linears are')}"
        return f"{head}: " + ("sound" if self.sound else plural(len(self.findings), "finding"))

    def tree(self) -> dict[str, Any]:
        """Return the audit as a tree for JSON."""
        return {
            "verdict": self.verdict(),
            "covers": self.coverage.share([row.operator for row in self.rows if row.ran]),
            "findings": [finding.tree() for finding in self.findings],
            "operators": [asdict(row) for row in self.rows],
        }


def audit(
    model: nn.Module,
    loss_of_batch: Callable[[Any], Tensor] | None = None,
    batch: Any = None,
    *,
    recipe: str | Recipe | None = None,
    lists: Mapping[str, Sequence[str] | str] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Compare the precision in force in the model's linears with the intended precision.

    Args:
        model: a plain model, or one converted by `gnmr.attach`, torchao (float8 and MX training) or Transformer Engine.
            It runs in evaluation mode and without torch.compile. The audit restores weights, gradients, modes, random
            numbers and delayed scales. A controller with observe=input_grad counts the backward pass of the audit: call
            `audit` after a step, then `controller.discard()`.
        loss_of_batch: returns the loss of a batch by `model`, one number with a gradient. None: nothing is run.
        batch: the argument of `loss_of_batch`.
        recipe: the intended recipe of all linears except the output head, routers and linears that a list leaves out.
        lists: entries by list (`gnmr.plan.lists.LISTS`), for example {"filter_fqns": ["output", "layers.1."]}.
        progress: called with the number of passes of linears that are done and the approximate total.

    Returns:
        The findings, and the precision and the measurements of every linear.

    Raises:
        ValueError: an argument is invalid; the message is one line.
    """
    require(isinstance(model, nn.Module), "model", type(model).__name__, "must be an nn.Module")
    texts = read_lists(lists)
    intended = RECIPES[recipe_named(recipe)] if isinstance(recipe, str) else recipe
    operators = operators_of(model)
    right = "has no linear, so no GEMM that a recipe would cast"
    if packed := packed_in(model):
        right = f"has no linear that an audit can read, only {', '.join(dict.fromkeys(packed.values()))}"
    require(operators, "model", type(model).__name__, right)
    observed = _Observed() if loss_of_batch is None else _observe(model, operators, loss_of_batch, batch, progress)
    matched = match_lists(model, texts, [operator.name for operator in operators])
    findings = [
        *_list_findings(matched, model),
        *_conversion_findings(operators, matched, intended, observed),
        *_role_findings(operators, matched.entries, observed),
        *_parameter_findings(model, observed),
        *_packed_findings(packed),
        *_coverage_findings(observed.coverage, operators, intended),
        *(_idle_findings(operators, observed) if loss_of_batch is not None else ()),
        *_operand_findings(observed),
    ]
    dynamic = loss_of_batch is not None
    rows = tuple(_row(operator, observed, dynamic) for operator in operators)
    return Audit(tuple(findings), rows, dynamic, observed.coverage)


# ---- the measured pass ----


@dataclass(frozen=True)
class _Observed:
    """What one forward and backward pass showed; empty if nothing was run."""

    measurements: Mapping[tuple[str, str, str], MeasuredOperand] = field(default_factory=dict)
    """By (operator, GEMM, operand)."""
    ran: frozenset[str] = frozenset()
    """Names of the operators that ran."""
    read: frozenset[str] = frozenset()
    """Names of the operators whose weight has a gradient or was read without a call."""
    coverage: Coverage = field(default_factory=Coverage)
    """Products that the model ran, in another forward pass."""

    def low(self, operator: Operator) -> bool:
        """Return True if the operator declares low precision, or declares nothing and its forward pass shows it.

        The operands show it if their product was seen; otherwise the output does.
        """
        if operator.low is not None:
            return operator.low
        for operand in (*READS["fprop"], "output"):
            measured = self.measurements.get((operator.name, "fprop", operand))
            if measured is None or (operand == "output" and measured.by != "output"):
                continue
            # Without noise the tensor was never quantized; -inf stands for NaN, which tells nothing of precision.
            if measured.noise > 0 and -math.inf < measured.snr < LOW:
                return True
        return False


def _met_not_finite(measurements: Mapping[tuple[str, str, str], MeasuredOperand]) -> bool:
    return any(cause.kind == "not finite" for measured in measurements.values() for cause in measured.causes)


def _observe(
    model: nn.Module,
    operators: Sequence[Operator],
    loss_of_batch: Callable[[Any], Tensor],
    batch: Any,
    progress: Progress | None,
) -> _Observed:
    """Measure one forward and backward pass, and count the model's products in another forward pass.

    Unconverted operators within modules (`LinearOperator`) are known from the counted products alone.
    """
    refuse_without_gradients(model)
    refuse_other_batches(model, [batch], "batch")
    with_gradient: set[int] = set()
    passes = 2 * len(operators)

    def report(done: int) -> None:
        if progress is not None:
            progress(min(done, passes), passes)

    converted = [operator.module for operator in operators if isinstance(operator.module, PathLinear)]
    # The graph would keep offloaded weights anyway, so all of them are in memory for both passes.
    if any(map(is_offloaded, model.modules())):
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.is_meta)
        warn(f"audit: holds all offloaded weights in memory while it runs ({size / 1e9:,.2g} GB)")
    with as_it_was(model), with_weights(model), _without_side_effects(converted), watching(operators, report) as watch:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Both forward passes draw the same numbers, so that they run the same products.
        torch.manual_seed(0)
        loss = scalar(loss_of_batch(batch), "loss_of_batch", bool(trained))
        right = "its loss does not run the linears of this model"
        require(
            watch.ran or any(isinstance(o.module, LinearOperator) for o in operators), "loss_of_batch", "...", right
        )
        # A NaN that an operand shows is a finding of its own, and says more than the loss.
        if not _met_not_finite(watch.measurements):
            refuse_not_finite(float(loss.detach()), "loss_of_batch", model)
        if trained:
            refuse_reentrant(loss)
            gradients = _gradients(loss, trained)
            refuse_constant(loss, reach_of(trained, gradients), "loss_of_batch", "what is trained")
            pairs = zip(trained, gradients, strict=True)
            with_gradient = {id(parameter) for parameter, gradient in pairs if gradient is not None}
            del gradients
        del loss
        torch.manual_seed(0)
        products = count(model, lambda: loss_of_batch(batch), [linear for linear in converted if linear.converted])
    coverage = _by_operator(products, operators)
    called = coverage.called()
    ran = watch.ran | {o.name for o in operators if isinstance(o.module, LinearOperator) and o.name in called}
    require(ran, "loss_of_batch", "...", right)
    with_gradient -= {id(o.module.weight) for o in operators if o.name in ran}  # weights that another linear shares
    read = {o.name for o in operators if o.name in ran or id(o.module.weight) in with_gradient}
    read |= {product.name for product in coverage.products if not product.called}
    return _Observed(watch.measurements, frozenset(ran), frozenset(read), coverage)


def _gradients(loss: Tensor, trained: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of the parameters, which those that are sharded have as a sum over the processes."""
    if not any(map(is_sharded, trained)):
        # Not `backward`, which would run the hooks of a user's step.
        return torch.autograd.grad(loss, trained, allow_unused=True)
    # Private, until a tensor lists its hooks.
    hooked = [p for p in trained if getattr(p, "_post_accumulate_grad_hooks", None)]
    right = "has parameters with hooks that run after their gradient (an optimizer in the backward pass?); remove them"
    require(not hooked, "model", "...", right)
    # FSDP2 makes gradients only of what it gathered; `as_it_was` restores those of the user's step.
    loss.backward()
    return [parameter.grad for parameter in trained]


def _by_operator(coverage: Coverage, operators: Sequence[Operator]) -> Coverage:
    """Return the coverage with products of unconverted inner operators counted as called linears.

    Operators that lie in one tensor share its products evenly.
    """
    by_tensor: dict[str, list[str]] = {}
    for operator in operators:
        if isinstance(operator.module, LinearOperator):
            (name,) = operator_names([replace(operator.module, expert=None).name])
            by_tensor.setdefault(name, []).append(operator.name)
    products = Counter[Product]()
    for product, number in coverage.products.items():
        if inner := by_tensor.get(product.name):
            # The numbers (n + i) // k for i below k add up to n.
            shares = {Product(name, "Linear"): (number + i) // len(inner) for i, name in enumerate(inner)}
            products.update(shares)
        else:
            products[product] += number
    return replace(coverage, products=dict(products))


@contextmanager
def _without_side_effects(linears: Sequence[PathLinear]) -> Iterator[None]:
    """Keep passes of converted operators from changing delayed scales, probes and generators."""
    shared: dict[int, SharedState] = {id(linear.shared): linear.shared for linear in linears}
    before = [(linear, linear.read, linear._node) for linear in linears]
    with ExitStack() as stack:
        for state in shared.values():
            stack.enter_context(_restored(state))
        try:
            yield
        finally:
            for linear, read, node in before:
                linear.read, linear._node = read, node


@contextmanager
def _restored(state: SharedState) -> Iterator[None]:
    effects, probe, prices = state.no_side_effects, state.probe, state.prices
    drawn = None if state.rounding is None else state.rounding.mark()
    replaced = None if state.amax is None else state.amax.replaced
    state.no_side_effects, state.probe, state.prices = True, None, None
    state.forget()
    try:
        yield
    finally:
        state.no_side_effects, state.probe, state.prices = effects, probe, prices
        state.forget()
        if drawn is not None and state.rounding is not None:
            state.rounding.back_to(drawn)
        if replaced is not None and state.amax is not None:
            state.amax.replaced = replaced


# ---- lists ----


@dataclass(frozen=True)
class MatchedLists:
    """Lists of names, matched with the linears of a model."""

    texts: Mapping[str, Sequence[str]]
    """Entries by list."""
    in_checkpoint: Mapping[str, Sequence[str]]
    """The checkpoint's names of the linears by the name in memory; empty if no list is read by them."""
    names: Mapping[str, Mapping[str, str]]
    """By list: the name in memory of each linear, by the name that the list has for it."""
    by_list: Sequence[Entry]
    """The entries with the names that their lists have for the linears."""
    entries: Sequence[Entry]
    """The same entries with the names in memory."""


def match_lists(model: nn.Module, texts: Mapping[str, Sequence[str]], names: Sequence[str]) -> MatchedLists:
    """Match the entries of lists with the linears of a model.

    Engines call a linear as its checkpoint does. Lists with readers of either kind may have both names.

    Args:
        model: the model, perhaps converted; its weights are not read.
        texts: entries by list, as `read_lists` returns them.
        names: the names in memory of its linears.

    Returns:
        The linears that each entry matches, by the names of the list and by those in memory.
    """
    # Undoing the conversions of transformers takes long for a large model, so it waits for a list that needs it.
    by_memory = all(reads_memory(which) and not LISTS[which].of_both for which in texts)
    in_checkpoint = {} if by_memory else linears_of(model).saved
    same = {name: name for name in names}
    saved = {saved_name: name for name in same for saved_name in in_checkpoint.get(name, (name,))}
    by_which: dict[str, dict[str, str]] = {}
    for which in texts:
        by_which[which] = same if reads_memory(which) else saved
        if LISTS[which].of_both:
            by_which[which] = same | saved
    by_list = [entry for which, lines in texts.items() for entry in entries_of(which, lines, [*by_which[which]])]
    return MatchedLists(
        texts, in_checkpoint, by_which, by_list, [in_memory(entry, by_which[entry.which]) for entry in by_list]
    )


def _with_parents(name: str) -> list[str]:
    """Return a name and those of all modules around it."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def _list_findings(matched: MatchedLists, model: nn.Module) -> Iterator[Finding]:
    """Yield entries that match nothing, and entries that match more names than they seem to."""
    # Names of all modules and parameters: in memory, and with those of the checkpoint where linears have others.
    loaded = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    saved = {parent for names in matched.in_checkpoint.values() for name in names for parent in _with_parents(name)}
    renamed = {name for name, names in matched.in_checkpoint.items() if name not in names}
    # Modules that exist in memory alone, such as `mlp` where the checkpoint has `block_sparse_moe`.
    gone = {parent for name in renamed for parent in _with_parents(name)} - saved
    in_file = [*(name for name in loaded if gone.isdisjoint(_with_parents(name))), *saved]
    for entry in matched.by_list:
        names = [*matched.names[entry.which]]
        if entry.trap:
            better = repaired(entry, names)
            first = ", ".join(entry.swept[:2])
            problem = f"means {len(entry.meant)} linears between dots"
            problem += f", and {len(entry.swept)} more within a word ({first})"
            right = f"{better!r}" if better else "whole names"
            yield Finding("substring", (f"{entry.which} {entry.text!r}",), problem, right)
        if not fits_none(entry, names) or _is_alias(entry, matched.by_list):
            continue
        # An entry may match a module and none of its linears, as a list of whole names has no blocks.
        problem, right = "matches no module of this model", suggested(entry.text, names, entry.which)
        if LISTS[entry.which].of_both:
            modules = [*dict.fromkeys((*loaded, *in_file))]
        else:
            modules = loaded if reads_memory(entry.which) else [*dict.fromkeys(in_file)]
        if around := entries_of(entry.which, [entry.text], modules)[0].names:
            linears = {*modules}.intersection(names)
            inside = [[name for name in names if name in linears and name.startswith(f"{path}.")] for path in around]
            if not all(inside):
                continue  # a module without a GEMM: an embedding, a norm
            problem = f"matches {first_few(around, 2)}, and none of the linears in it"
            right = suggested(f"{inside[0][0]}{':off' if ':' in entry.text else ''}", names, entry.which)
            right = right if right.startswith("their") else f"their names, such as {right}"
        yield Finding("no match", (f"{entry.which} {entry.text!r}",), problem, right)


def _is_alias(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Return True if another entry of the list has the same meaning under a name of another library version."""
    words = entry.text.strip(".").split(".")
    for other in entries:
        if other.which != entry.which or not other.names:
            continue
        other_words = other.text.strip(".").split(".")
        # Lists often have the heads of several libraries, of which a model has one.
        if words[-1] in HEADS and other_words[-1] in HEADS:
            return True
        same_block = [word for word in other_words if word.isdigit()] == [word for word in words if word.isdigit()]
        same_linear = other_words[-1] == words[-1] or {other_words[-1], words[-1]} <= _QKV
        if len(words) > 1 and same_linear and same_block:
            return True
    return False


# ---- findings on the conversion ----


def _conversion_findings(
    operators: Sequence[Operator], matched: MatchedLists, recipe: Recipe | None, observed: _Observed
) -> Iterator[Finding]:
    """Yield lists that were not applied, operators that were left out, and recipes other than the intended one."""
    # Pins leave a linear converted: they only say which GEMMs run on the recovery recipe.
    excluded: dict[str, Entry] = {}
    chosen: dict[str, Entry] = {}
    for entry in matched.entries:
        if entry.which != "pins":
            for name in entry.names:
                (chosen if entry.converts else excluded).setdefault(name, entry)
    selects = any(LISTS[which].converts for which in matched.texts)
    listed = any(which != "pins" for which in matched.texts)
    not_applied: dict[str, list[Operator]] = {}
    missing: list[Operator] = []
    any_low = False
    for operator in operators:
        # Low although a list leaves it out, or in 16 bits although nothing does.
        low, name = observed.low(operator), operator.name
        any_low |= low
        if low and name in excluded:
            reason = f"{excluded[name].which} {excluded[name].text!r} leaves it out"
            not_applied.setdefault(reason, []).append(operator)
        elif low and selects and name not in chosen:
            not_applied.setdefault("no entry names it", []).append(operator)
        intended = name in chosen or (name not in excluded and not selects)
        if intended and not low and not operator.role:
            missing.append(operator)
    if recipe is None and not listed:  # some may be left out on purpose
        missing = [operator for operator in missing if any_low and isinstance(operator.module, LinearOperator)]
    for reason, misfits in not_applied.items():
        problem = f"{reason}, and it is in {_in_words(misfits[0])}"
        right = "all GEMMs in 16 bits; hand the list to the conversion itself"
        yield Finding("not applied", tuple(operator.name for operator in misfits), problem, right)
    problem = "is in 16 bits, and nothing leaves it out"
    right = "convert it, or name it in the list (widths may not fit)"
    if not any_low:
        right = "convert before training, and audit the trained model"
        intention = "the lists leave out others alone" if recipe is None else f"recipe={recipe.name} was to be"
        problem = f"no linear is in low precision, {intention}"
        if undeclared := {operator.kind for operator in operators if operator.declared is None}:
            kinds = ", ".join(sorted(undeclared))
            problem = f"no GEMM reads low precision, also in linears of {kinds}, and {intention}"
    if missing:
        yield Finding("not converted", tuple(operator.name for operator in missing), problem, right)
    if recipe is not None:
        yield from _recipe_findings(operators, recipe)
    elif not listed:
        yield from _odd_findings(operators)


def _recipe_findings(operators: Sequence[Operator], recipe: Recipe) -> Iterator[Finding]:
    """Yield GEMMs that are not on this recipe."""
    unlike: dict[tuple[str, str, str], list[str]] = {}
    for operator in operators:
        for gemm in GEMMS if operator.low and operator.declared is not None else ():
            # Libraries declare formats and scales; rounding and rotation are not compared.
            actual = _product_words(operator.grain(gemm, operand) for operand in READS[gemm])
            wanted = _product_words(getattr(getattr(recipe, gemm), operand) for operand in READS[gemm])
            if actual != wanted and gemm not in operator.pinned:
                unlike.setdefault((gemm, actual, wanted), []).append(operator.name)
    for (gemm, actual, wanted), names in unlike.items():
        problem = f"{gemm} is in {actual}, and recipe={recipe.name} has it in {wanted}"
        yield Finding("another recipe", tuple(names), problem, wanted)


def _product_words(casts: Iterable[Any]) -> str:
    """Describe the operands of a product: `e4m3/tensor x e4m3/tensor`, or `16 bits` if none is cast."""
    operands = [_format_and_scale(cast) for cast in casts]
    return " x ".join(operands) if {*operands} != {"16 bits"} else "16 bits"


def _format_and_scale(cast: Any) -> str:
    """Return the format and scale of a cast, without its other options."""
    return "16 bits" if cast is None else "/".join(str(cast).replace("/axis", "/row").split("/")[:2])


def _odd_findings(operators: Sequence[Operator]) -> Iterator[Finding]:
    """Yield the few operators of a kind that differ in precision from the rest of their kind and of their block."""
    kinds: dict[str, list[Operator]] = {}
    blocks: dict[str, list[Operator]] = {}
    for operator in operators:
        if not operator.role and operator.declared is not None and not operator.pinned:
            # One kind: the same name in every block.
            kinds.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", operator.name), []).append(operator)
            blocks.setdefault(unit_of(operator.name, "block"), []).append(operator)
    for alike in kinds.values():
        by_precision: dict[tuple[str, ...], list[Operator]] = {}
        for operator in alike:
            by_precision.setdefault(tuple(operator.words(gemm) for gemm in GEMMS), []).append(operator)
        usual = max(by_precision.values(), key=len)
        for precision, few in by_precision.items():
            if few is usual or len(few) * 4 > len(alike):
                continue
            # A whole block in 16 bits is somebody's choice, and so no finding.
            alone = [o for o in few if any(other.low != o.low for other in blocks[unit_of(o.name, "block")])]
            if alone or any(o.low for o in few):
                names = tuple(o.name for o in alone or few)
                pairs = zip(GEMMS, precision, map(usual[0].words, GEMMS), strict=True)
                gemm, words, usual_words = next(pair for pair in pairs if pair[1] != pair[2])
                problem = f"its {gemm} is in {words}, and that of the {len(usual)} others of its kind in {usual_words}"
                yield Finding("odd one out", names, problem, "the same, or a list that says so")


def _role_findings(operators: Sequence[Operator], entries: Sequence[Entry], observed: _Observed) -> Iterator[Finding]:
    """Yield output heads and routers in low precision, and tied heads that are cast or no longer shared."""
    chosen = {name for entry in entries if entry.converts for name in entry.meant}
    for operator in operators:
        if operator.tied and not operator.shared:
            problem = f"lies in the memory of {operator.tied} and is a parameter of its own: two gradients, one weight"
            right = "tie them again after the conversion, or leave the head out of it"
            yield Finding("tied head", (operator.name,), problem, right)
        # Who names a head in a list of linears to convert wants it; a tied one is the embedding as well.
        tied = operator.tied and operator.shared
        unasked = operator.role in KEPT and operator.name not in chosen and not operator.tied
        if observed.low(operator) and (tied or unasked):
            yield head_or_router(operator, f"in {_in_words(operator)}")


def head_or_router(operator: Operator, state: str) -> Finding:
    """Return the finding on an output head or a router in low precision.

    Args:
        operator: the head or the router; a head that shares its weight with an embedding is a finding of another kind.
        state: completes "it is", such as "in e4m3/tensor x e4m3/tensor".
    """
    if operator.tied and operator.shared:
        problem = f"shares its weight with {operator.tied}, and is {state}"
        return Finding("tied head", (operator.name,), problem, "16 bits: the cast also changes the embedding")
    problem = f"the {'output head' if operator.role == 'head' else 'router of experts'} is {state}"
    return Finding(operator.role, (operator.name,), problem, "16 bits, as every published recipe has it")


def unused_recipes(declared: Sequence[str], named: Sequence[str | None]) -> list[Finding]:
    """Return a finding for each declared recipe that no path is on.

    Args:
        declared: names of recipes that are declared.
        named: names of the paths' recipes; None for a path without one.
    """
    right = f"one of {', '.join(name for name in named if name)}, or a path that names it"
    problem = "is declared, and no path is on it"
    return [Finding("unused recipe", (name,), problem, right) for name in declared if name not in named]


# ---- findings on the model and its pass ----


def _parameter_findings(model: nn.Module, observed: _Observed) -> Iterator[Finding]:
    """Yield non-finite parameters, if a GEMM read NaN or Inf, and one-byte parameters outside linears."""
    if _met_not_finite(observed.measurements) and (wrong := list(not_finite(model))):
        _, number, elements = wrong[0]
        problem = f"{number} of its {elements} elements are not finite{' (the first)' if len(wrong) > 1 else ''}"
        right = "weights from before the loss was NaN"
        yield Finding("not finite", tuple(name for name, _, _ in wrong), problem, right)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.element_size() == 1:
                dtype = str(parameter.dtype).removeprefix("torch.")
                problem = f"a parameter of {type(module).__name__} is kept in {dtype}"
                yield Finding("parameter", (f"{path}.{name}".lstrip("."),), problem, "16 bits")


def _packed_findings(packed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the linears of other classes that keep codes, of which neither precision nor weights are known."""
    by_class: dict[str, list[str]] = {}
    for name, kind in packed.items():
        by_class.setdefault(kind, []).append(name)
    for kind, names in by_class.items():
        problem = f"is a {kind}, no nn.Linear, and keeps its weight in codes that an audit cannot read"
        yield Finding("not examined", tuple(names), problem, "an audit before that conversion, which shows the rest")


def _coverage_findings(coverage: Coverage, operators: Sequence[Operator], recipe: Recipe | None) -> Iterator[Finding]:
    """Yield the share of GEMMs outside linear operators if the model is in low precision or they are most of it."""
    uncovered = {
        product: share
        for product, share in coverage.left_out([o.name for o in operators]).items()
        if product.kind != "Linear" and not product.routes
    }
    share = sum(uncovered.values())
    if share >= (MUCH if recipe is not None or any(o.low for o in operators) else 0.5):
        kinds = ", ".join(dict.fromkeys(product.kind for product in uncovered))
        problem = f"{percent(share)} of the GEMMs' arithmetic is in no linear operator ({kinds}) and in 16 bits"
        right = "put linears in its place, or declare its products (gnmr.conversion.adapters.register)"
        yield Finding("not covered", tuple(product.name or product.kind for product in uncovered), problem, right)


def _idle_findings(operators: Sequence[Operator], observed: _Observed) -> Iterator[Finding]:
    """Yield linears that may be in low precision and did not run.

    An expert that no token reached is not reported if other experts of its kind ran.
    """
    reached = {of_any_expert(name) for name in observed.ran}
    # A parametrization makes plain weights as well as rounded ones, so nothing is said of it.
    maybe_low = [o for o in operators if o.low or (o.low is None and o.kind != "ParametrizedLinear")]
    idle = [o.name for o in maybe_low if of_any_expert(o.name) not in reached]
    if uncalled := tuple(name for name in idle if name in observed.read):
        problem = (
            "its weight has a gradient, and it is never called (F.linear, a wrapped forward): no precision is in force"
        )
        yield Finding("never ran", uncalled, problem, "call the module, or leave it out of the conversion")
    if unreached := tuple(name for name in idle if name not in observed.read):
        problem = "did not run in this batch, so nothing is known of it"
        yield Finding("never ran", unreached, problem, "a batch that reaches it, or leave it out of the conversion")


def _operand_findings(observed: _Observed) -> Iterator[Finding]:
    """Yield the causes that were measured; those of one kind and operand share one finding."""
    alike: dict[tuple[str, str, str], dict[str, Cause]] = {}
    for (name, gemm, operand), measured in observed.measurements.items():
        for cause in measured.causes:
            # One wrong setting shows in many operators, and is one finding.
            alike.setdefault((cause.kind, operand, cause.right), {})[f"{name} {gemm} {operand}"] = cause
    for (kind, _, right), causes in alike.items():
        texts = [cause.text for cause in causes.values()]
        text = texts[0] + (f" (numbers of the first of {len(texts)})" if len({*texts}) > 1 else "")
        yield Finding(kind, tuple(causes), text, right)


def _in_words(operator: Operator) -> str:
    """Return the precision of an operator in low precision for a sentence, with the casts of the GEMMs that are cast.

    Some GEMMs may be in 16 bits, such as those that are pinned.
    """
    by_casts: dict[str, list[str]] = {}
    for gemm in GEMMS:
        if any(operator.grain(gemm, operand) for operand in READS[gemm]):
            by_casts.setdefault(operator.words(gemm), []).append(gemm)
    casts = [
        f"{'all GEMMs' if len(gemms) == len(GEMMS) else ' and '.join(gemms)} in {words}"
        for words, gemms in by_casts.items()
    ]
    return f"low precision ({', '.join(casts) or operator.kind})"


def _row(operator: Operator, observed: _Observed, dynamic: bool) -> OperatorRow:
    measured: dict[str, dict[str, tuple[float, float | None]]] = {}
    output = observed.measurements.get((operator.name, "fprop", "output"))
    for gemm in GEMMS:
        for operand in (*READS[gemm], "output"):
            if (values := observed.measurements.get((operator.name, gemm, operand))) is not None:
                measured.setdefault(gemm, {})[operand] = values.snr, values.best
    # What the measured numbers do not say.
    ran, notes = operator.name in observed.ran, []
    if dynamic and not ran:
        notes.append("did not run in this batch")
    elif output is not None and output.by == "output":
        notes.append("judged by its output: its GEMMs run elsewhere")
    elif dynamic and "fprop" not in measured and not isinstance(operator.module, LinearOperator):
        notes.append("nothing of it could be measured: its class does not give the weight's values")
    if operator.pinned:
        notes.append(f"pinned: {', '.join(operator.pinned)}")
    precision = {gemm: operator.words(gemm) for gemm in GEMMS}
    low = observed.low(operator)
    return OperatorRow(operator.name, operator.kind, precision, measured, ran, low, "; ".join(notes))

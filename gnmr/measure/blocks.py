"""Run a model block by block, so that one pass over its weights measures every operator alone.

A language model is an embedding, L blocks one after the other, and a head. Let h_l be the hidden states that enter
block l. If operator i of block l alone is in low precision, everything before block l is exact, so

    logits_i = head( block_L-1( ... block_l+1( block_l with i low (h_l) ) ) )

The hidden states of all such models go side by side: at block l there is one new copy of h_l for each of its operators,
and every older copy goes through block l exactly. So each block is read once, which is what lets blocks come from disk
one after the other, and the work is half of that of running the model anew for each operator.

Each copy is its own call of the block. A scale of a whole tensor is then that of the copy, and the kernels see the
shapes that they would see in a pass of the whole model, so that the results are equal to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.conversion import ConvertedModel, PathLinear
from gnmr.formats import Recipe
from gnmr.measure.absent_weights import with_weights
from gnmr.measure.price import Sequences
from gnmr.measure.saved_state import SavedHiddenStates, add_tensors, load_state, paths_digest, restored, save_state
from gnmr.names import Pins


class NotFollowed(ValueError):
    """The blocks of a model cannot be run one by one; the message says why, in a few words."""


def named_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the blocks of a model: its `nn.ModuleList` with the most parameters.

    Returns:
        The dotted name and the list; an empty name and an empty list if the model has none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()), default=("", nn.ModuleList()))


@dataclass(frozen=True)
class Variant:
    """A copy of the model in which some operators are in low precision."""

    low: Collection[str]
    """Names of these operators."""
    pins: Pins = field(default_factory=dict)
    """GEMMs of theirs that are on other recipes than the low one."""


@dataclass
class _BlockCall:
    """The arguments with which the model calls a block for one batch, besides the hidden states."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    hidden_name: str | None
    """Name under which the hidden states are given; None: they are the first argument."""

    def __call__(self, block: nn.Module, hidden: Tensor) -> Any:
        if self.hidden_name is None:
            return block(hidden, *self.positional, **self.named)
        return block(*self.positional, **{self.hidden_name: hidden}, **self.named)


_Entering = tuple[Tensor, list[_BlockCall], Any]
"""Hidden states before block 0, arguments of each block, what block 0 returns."""


@contextmanager
def pinned(operators: Iterable[PathLinear], pins: Pins, recipes: Mapping[str, Recipe]) -> Iterator[None]:
    """Put GEMMs of the low path on others of `recipes`, by name, or on the recovery recipe of their operator."""
    before = [(operator, operator.low) for operator in operators]
    try:
        for operator, _ in before:
            for gemm, name in pins.get(operator.operator_name, {}).items():
                recipe = recipes.get(name, operator.recovery)
                assert isinstance(operator.low, Recipe) and isinstance(recipe, Recipe)
                operator.low = operator.low.with_gemms({gemm: recipe})
        yield
    finally:
        for operator, low in before:
            operator.low = low


class Blocks:
    """The blocks of a converted model that every batch passes in their order."""

    def __init__(self, model: nn.Module, operators: Sequence[PathLinear]) -> None:
        """Find the blocks and the `operators` in each.

        Raises:
            NotFollowed: there are no blocks with these operators, a block stands in the list twice or is an operator
                itself, or two blocks share an operator.
        """
        self.name, blocks = named_blocks(model)
        self.modules: list[nn.Module] = [*blocks]
        if len(set(self.modules)) < len(self.modules):
            raise NotFollowed(f"{self.name} has one block in several places")
        if any(operator.module in self.modules for operator in operators):
            # It is called where blocks are passed over, too, and its products would count again.
            raise NotFollowed(f"a block of {self.name} is a linear itself")
        # An operator may be contained in another module, so that module decides which block it is in.
        inside = [set(block.modules()) for block in self.modules]
        self.operators = [[o for o in operators if o.module in modules] for modules in inside]
        """The operators of each block."""
        self.place_of: dict[str, int] = {}
        """Number of the block of each operator that is in one."""
        for place, in_block in enumerate(self.operators):
            for operator in in_block:
                if operator.operator_name in self.place_of:  # it would be low in one block only
                    raise NotFollowed(f"several blocks of {self.name} share {operator.operator_name}")
                self.place_of[operator.operator_name] = place
        if not self.place_of:
            raise NotFollowed("no nn.ModuleList has blocks with these operators")


class BlockByBlock:
    """Outputs of a model for several variants, which go through its blocks side by side."""

    def __init__(
        self,
        converted: ConvertedModel,
        model: nn.Module,
        run: Callable[[Any], Any],
        *,
        recipes: Mapping[str, Recipe] | None = None,
        weights: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Prepare.

        Args:
            converted: the operators, each with a low and a recovery path.
            model: the model, in evaluation mode.
            run: runs `model` on a batch, as that of `gnmr.diagnose`.
            recipes: recipes that pins name, besides the recovery recipe of each operator.
            weights: returns the tensor of a parameter or buffer of a block by its name in the model. It is read when
                the block runs, in the dtype of the model's other parameters, and dropped afterwards. None: the blocks
                have their weights.

        Raises:
            NotFollowed: see `Blocks`.
        """
        self.converted, self._run, self._recipes = converted, run, recipes or {}
        self.blocks = Blocks(model, converted.operators)
        self._loaded: Callable[[int], AbstractContextManager[None]] = lambda place: with_weights(
            self.blocks.modules[place]
        )
        """Returns a context in which the block of this number has its weights."""
        if weights is not None:
            # Weights are read in the dtype and to the device of what the model has in memory: its embedding and head.
            around = next((parameter for parameter in model.parameters() if not parameter.is_meta), None)
            if around is None:
                raise NotFollowed("its embedding and head have no weights")
            converted.shared.move_from_meta(around.device)
            self._loaded = BlockWeights(self.blocks, weights, around.dtype, around.device).loaded
        self._tensors = False
        """True once blocks are known to return the hidden states alone."""
        self.advance: Callable[[int], None] = lambda _calls: None
        """Called with the number of finished calls of blocks."""

    def calls(self, batches: int, variants: Mapping[str, Variant], before: int | None = None) -> int:
        """Return the number of calls of blocks that `outputs` makes, in all blocks or in those `before` one."""
        # Each block runs once for the exact model, and once for each variant that has been born by then.
        end = len(self.blocks.modules) if before is None else before
        return batches * (end + sum(max(0, end - self._first_block(variant)) for variant in variants.values()))

    @torch.no_grad()
    def outputs(
        self,
        batches: Sequence[Any],
        variants: Mapping[str, Variant],
        first_place: int = 0,
        *,
        state: Path | None = None,
        around_exact: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[tuple[int, str | None, Any]]:
        """Yield (number of the batch, variant, what `run` returns), for the exact model (None) and then each variant.

        Args:
            batches: batches of token ids.
            variants: the copies by name.
            first_place: number of the first batch, which seeds PyTorch's generator as in a pass of the whole model.
            state: a file that is written after each block, with which a measurement that was interrupted goes on. If
                it is of other variants, recipes, batches or weights, it is not used, and written anew.
            around_exact: returns a context for the calls of the exact model.

        Raises:
            NotFollowed: the model does something between its blocks, or hands on more than one tensor.
        """
        calls = [self.entering(batch, first_place + at) for at, batch in enumerate(batches)]
        # Hidden states by batch and variant; a variant is there from the block of its first low operator on.
        exact = [hidden for hidden, _, _ in calls]
        copies: list[dict[str, Tensor]] = [{} for _ in batches]
        births = {name: self._first_block(variant) for name, variant in variants.items()}
        begin, weights = 0, hashlib.sha256()
        # Continue after the last block whose hidden states were saved, if they are of this measurement.
        paths = "" if state is None else paths_digest(self.converted, self._recipes, variants)
        if state is not None and (resumed := self._resumed(state, paths, calls, births)) is not None:
            begin, exact, copies, weights = resumed
            self.advance(self.calls(len(batches), variants, before=begin))
        for place, block in enumerate(self.blocks.modules[begin:], begin):
            with self._loaded(place):
                if state is not None:
                    add_tensors(weights, (*block.parameters(), *block.buffers()))
                for at, (_, block_calls, _) in enumerate(calls):
                    for name, variant in variants.items():
                        if births[name] > place:
                            continue
                        # The variant's low path in this block; a copy is born from the exact hidden states.
                        hidden = copies[at].get(name, exact[at])
                        with self._on_paths(place, variant):
                            copies[at][name] = _leaving(block_calls[place], block, hidden)
                        self._after_call()
                    with self._on_paths(place, Variant(())), around_exact():
                        exact[at] = _leaving(block_calls[place], block, exact[at])
                    self._after_call()
            if state is not None:
                # Keys are "batch" for the exact model, and "batch number of the variant" for a copy.
                tensors = {f"{at}": hidden for at, hidden in enumerate(exact)}
                tensors |= {
                    f"{at} {number}": of_batch[name]
                    for at, of_batch in enumerate(copies)
                    for number, name in enumerate(variants)
                    if name in of_batch
                }
                if not save_state(state, SavedHiddenStates(paths, place + 1, weights.hexdigest(), tensors)):
                    state = None
        # The head turns what left the last block into outputs; each copy is dropped afterwards.
        for at, (batch, (_, _, like)) in enumerate(zip(batches, calls, strict=True)):
            with around_exact():
                result = self._tail(batch, first_place + at, exact[at], like)
            yield at, None, result
            for name in variants:
                yield at, name, self._tail(batch, first_place + at, copies[at].pop(name), like)

    @torch.no_grad()
    def forward(
        self,
        batch: Any,
        place: int,
        low: Collection[str] = (),
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """Return what `run` gives for batch number `place` with the operators `low` on the low path.

        Args:
            batch: a batch.
            place: its number, which seeds PyTorch's generator.
            low: names of operators.
            around: returns a context for each block, and for what follows them.

        Raises:
            NotFollowed: see `outputs`.
        """
        hidden, calls, like = self.entering(batch, place)
        variant = Variant(low)
        for at, block in enumerate(self.blocks.modules):
            with self._loaded(at), self._on_paths(at, variant), around():
                hidden = _leaving(calls[at], block, hidden)
            self.advance(1)
        with around():
            return self._tail(batch, place, hidden, like)

    def backward(
        self,
        batch: Any,
        place: int,
        objective_of: Callable[[Any], tuple[Tensor, Tensor | None]],
        sequences: Sequences | None = None,
    ) -> None:
        """Run a batch on the recovery path, and the backward pass of its objective from the last block to the first.

        Between the blocks only hidden states are kept, and gradients of them alone are asked for. So the graph and the
        weights in use are those of one block at a time. What watches operators (`gnmr.measure.price`) sees the passes.
        They end at a block without a gradient.

        Args:
            batch: a batch.
            place: its number, which seeds PyTorch's generator.
            objective_of: returns the scalar to differentiate, and its part of each sequence, (S,) or None, of what
                `run` returned.
            sequences: finds the sequence of each row, if the first dimension of the hidden states numbers sequences.

        Raises:
            NotFollowed: see `outputs`.
        """
        # Forward: only the hidden states that enter each block are kept.
        with torch.no_grad():
            hidden, calls, like = self.entering(batch, place)
            entering: list[Tensor] = []
            for at, block in enumerate(self.blocks.modules):
                entering.append(hidden)
                with self._loaded(at):
                    hidden = _leaving(calls[at], block, hidden)
                self.advance(1)
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            objective, by_sequence = objective_of(self._tail(batch, place, hidden, like))
            if sequences is not None and by_sequence is not None:  # of a head that is measured
                sequences.find(by_sequence)
            # The head: dL/dh of what leaves the last block.
            (gradient,) = torch.autograd.grad(objective, hidden, allow_unused=True)
            number = 0 if by_sequence is None else len(by_sequence)
            del objective, by_sequence
            # The blocks from the last to the first; `gradient` is dL/dh of what leaves block `at`.
            for at in reversed(range(len(self.blocks.modules))):
                with self._loaded(at):
                    hidden = entering.pop().detach().requires_grad_()
                    # The block runs again with a graph, as in activation checkpointing.
                    leaving = _hidden_of(calls[at](self.blocks.modules[at], hidden), hidden)
                    # The loss depends on nothing before this place.
                    if gradient is None or not leaving.requires_grad:
                        break
                    # Further backward passes of the block, which show the sequence that each row belongs to.
                    if sequences is not None and number == len(hidden):
                        sequences.mark(number, hidden.device, partial(_weighted_backward, leaving, hidden, gradient))
                    (gradient,) = torch.autograd.grad(leaving, hidden, gradient, allow_unused=True)
                    del leaving
                self.advance(2)
        self.converted.end_step()

    def _first_block(self, variant: Variant) -> int:
        """Return the first block with an operator of the variant in low precision."""
        return min(self.blocks.place_of[name] for name in variant.low)

    @contextmanager
    def _on_paths(self, place: int, variant: Variant) -> Iterator[None]:
        """Put the operators of a block on the variant's paths."""
        operators = self.blocks.operators[place]
        try:
            for operator in operators:
                operator.switch(operator.operator_name not in variant.low)
            with pinned(operators, variant.pins, self._recipes):
                yield
        finally:
            for operator in operators:
                operator.switch(True)

    def _resumed(
        self, state: Path, paths: str, calls: Sequence[_Entering], births: Mapping[str, int]
    ) -> tuple[int, list[Tensor], list[dict[str, Tensor]], Any] | None:
        """Return how many blocks a state has passed, exact hidden states and copies by batch, and a digest of weights.

        None if there is no state, or it is of other numbers than the exact model gives now.
        """
        if (saved := load_state(state, paths)) is None:
            return None
        exact, weights = self._exact_after(saved.blocks, calls)
        born = [(number, name) for number, name in enumerate(births) if births[name] < saved.blocks]
        copies = restored(saved, exact, weights.hexdigest(), born)
        return None if copies is None else (saved.blocks, exact, copies, weights)

    def _exact_after(self, blocks: int, calls: Sequence[_Entering]) -> tuple[list[Tensor], Any]:
        """Return the hidden states of the exact model after this number of blocks, and a digest of their weights."""
        exact, weights = [hidden for hidden, _, _ in calls], hashlib.sha256()
        for place, block in enumerate(self.blocks.modules[:blocks]):
            with self._loaded(place), self._on_paths(place, Variant(())):
                add_tensors(weights, (*block.parameters(), *block.buffers()))
                for at, (_, block_calls, _) in enumerate(calls):
                    exact[at] = _leaving(block_calls[place], block, exact[at])
                    self.converted.end_step()
        return exact, weights

    def _after_call(self) -> None:
        self.converted.end_step()
        self.advance(1)

    # ---- the model around its blocks ----

    def entering(self, batch: Any, place: int) -> _Entering:
        """Return what enters the blocks in a pass over a batch.

        The model runs with blocks that return their input, so that no weight of a block is read but those of block 0.
        """
        calls: list[_BlockCall] = []
        entering: list[Tensor] = []
        like: list[Any] = []
        devices = ("cpu", "cuda")
        autocast = [torch.is_autocast_enabled(device) for device in devices]

        # Takes the place of every block, records its arguments, and hands on the hidden states as they came.
        def record(at: int, *positional: Any, **named: Any) -> Any:
            call, hidden = _split(positional, named)
            if len(calls) != at:
                raise NotFollowed(f"{self.blocks.name} is not called once a pass and in its order")
            # Stubs hand on the tensor itself, so another object was computed between two blocks.
            if at and hidden is not entering[0]:
                raise NotFollowed(f"the model changes hidden states between blocks of {self.blocks.name}")
            if at == 0:
                if [torch.is_autocast_enabled(device) for device in devices] != autocast:
                    raise NotFollowed("`run` begins autocast, which blocks that are called outside of it would miss")
                entering.append(hidden)
                # Blocks that return a tensor alone need no example.
                if self._tensors:
                    like.append(hidden)
                    calls.append(call)
                    return hidden
                # Block 0 runs, because its result shows in which form the model expects the results of blocks.
                with self._loaded(0), self._on_paths(0, Variant(())), _unstubbed(self.blocks.modules[0], forwards[0]):
                    like.append(call(self.blocks.modules[0], hidden))
                self.converted.end_step()
                if not isinstance(like[0], Tensor | tuple):
                    raise NotFollowed(f"a block returns a {type(like[0]).__name__}")
                _hidden_of(like[0], hidden)
                self._tensors = isinstance(like[0], Tensor)
            else:
                _refuse_handed_on(call, like[0])
            calls.append(call)
            return _with_hidden(like[0], hidden)

        with _stubbed(self.blocks.modules, record) as forwards:
            torch.manual_seed(place)
            self._run(batch)
        if len(calls) < len(self.blocks.modules):
            raise NotFollowed(f"{len(self.blocks.modules) - len(calls)} blocks of {self.blocks.name} are not called")
        return entering[0], calls, like[0]

    def without_blocks(self, batch: Any) -> Any:
        """Return what `run` gives if hidden states skip all blocks: of the kind of its results, with other numbers."""
        hidden, _, like = self.entering(batch, 0)
        return self._tail(batch, 0, hidden, like)

    def _tail(self, batch: Any, place: int, hidden: Tensor, like: Any) -> Any:
        """Return what `run` gives if `hidden` leaves the last block."""
        last = len(self.blocks.modules) - 1

        # Only what the last block returns reaches the head; what the others hand on is replaced by it.
        def skip(at: int, *positional: Any, **named: Any) -> Any:
            return _with_hidden(like, hidden if at == last else _split(positional, named)[1])

        with _stubbed(self.blocks.modules, skip):
            torch.manual_seed(place)
            result = self._run(batch)
        self.converted.end_step()
        return result


def _weighted_backward(leaving: Tensor, hidden: Tensor, gradient: Tensor, weights: Tensor) -> None:
    """Run the backward pass of a block with the gradient (S, ...) of each sequence times its weight (S,)."""
    # (S,) to (S, 1, ..., 1): one weight for all elements of a sequence.
    weights = weights.to(gradient).view(-1, *[1] * (gradient.dim() - 1))
    torch.autograd.grad(leaving, hidden, gradient * weights, retain_graph=True)


def _split(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[_BlockCall, Tensor]:
    """Return a call of a block and the hidden states in it. Raises NotFollowed if it has none, or keeps a cache."""
    for value in (*positional, *named.values()):
        if type(value).__name__.endswith("Cache"):
            raise NotFollowed("blocks keep keys and values of former passes: run the model with use_cache=False")
    if positional and isinstance(positional[0], Tensor):
        return _BlockCall(positional[1:], named, None), positional[0]
    name = "hidden_states"
    if not isinstance(named.get(name), Tensor):
        raise NotFollowed("a block is not given its hidden states as the first argument")
    others = {key: value for key, value in named.items() if key != name}
    return _BlockCall(positional, others, name), named[name]


def _leaving(call: _BlockCall, block: nn.Module, entering: Tensor) -> Tensor:
    """Return the hidden states that leave a block. Raises NotFollowed if it changes those `entering` it."""
    # Other copies, which are born later, read the same tensor.
    before = None if entering.is_inference() else entering._version
    hidden = _hidden_of(call(block, entering), entering)
    if before is not None and entering._version != before:
        raise NotFollowed("a block changes its hidden states in place")
    return hidden


def _hidden_of(result: Any, entering: Tensor) -> Tensor:
    """Return the hidden states in what a block returns: a tensor, or a tuple that begins with them.

    Raises NotFollowed unless they have the shape of those `entering` it, which the code between blocks may depend on.
    """
    hidden: Tensor = result if isinstance(result, Tensor) else result[0]
    if hidden.shape != entering.shape:
        raise NotFollowed("a block changes the shape of its hidden states")
    return hidden


def _with_hidden(like: Any, hidden: Tensor) -> Any:
    """Return hidden states in the form in which blocks return them."""
    return hidden if isinstance(like, Tensor) else (hidden, *like[1:])


def _refuse_handed_on(call: _BlockCall, like: Any) -> None:
    """Raise NotFollowed if a block reads something besides the hidden states that an earlier one returned."""
    returned = [] if isinstance(like, Tensor) else [item for item in like[1:] if item is not None]
    if any(value is item for value in (*call.positional, *call.named.values()) for item in returned):
        raise NotFollowed("a block reads more than the hidden states of the one before")


@contextmanager
def _stubbed(blocks: Sequence[nn.Module], stub: Callable[..., Any]) -> Iterator[list[Any]]:
    """Run `stub(number of the block, *arguments)` in place of each block; yield the forwards of the instances."""
    forwards = [vars(block).get("forward") for block in blocks]
    for place, block in enumerate(blocks):
        # An attribute of the instance hides the forward of its class.
        block.forward = partial(stub, place)
    try:
        yield forwards
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            _set_forward(block, forward)


@contextmanager
def _unstubbed(block: nn.Module, forward: Any) -> Iterator[None]:
    """Run the block itself again, by the instance's own `forward` (of a wrapper) or its class's (None)."""
    stub = vars(block)["forward"]
    _set_forward(block, forward)
    try:
        yield
    finally:
        block.forward = stub


def _set_forward(block: nn.Module, forward: Any) -> None:
    """Restore the instance's own forward, or its class's (None)."""
    if forward is None:
        del block.forward
    else:
        block.forward = forward


def set_tensor(module: nn.Module, key: str, values: Tensor, dtype: torch.dtype | None, device: torch.device) -> None:
    """Give a module the values of its parameter or buffer `key`, floating-point ones in `dtype` (None: as they are)."""
    values = values.to(device)
    if values.is_floating_point() and dtype is not None:
        values = values.to(dtype)
    parameter = isinstance(getattr(module, key), nn.Parameter)
    setattr(module, key, nn.Parameter(values, requires_grad=False) if parameter else values)


class BlockWeights:
    """The weights of blocks, which are read and widened while a block runs, and dropped afterwards."""

    def __init__(self, blocks: Blocks, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Prepare.

        Args:
            blocks: the blocks, whose parameters may be on the meta device.
            read: returns the tensor of a parameter or a buffer by its name in the model, in any dtype.
            dtype: dtype of weights while they are in use; float32 keeps rounding out of small KLs.
            device: where the blocks run.
        """
        self._blocks, self._read, self._dtype, self._device = blocks, read, dtype, device

    @contextmanager
    def loaded(self, place: int) -> Iterator[None]:
        """Give block number `place` its weights."""
        block, prefix = self._blocks.modules[place], f"{self._blocks.name}.{place}."
        stored: list[tuple[nn.Module, str, Tensor]] = []
        try:
            for path, module in block.named_modules():
                where = f"{prefix}{path}." if path else prefix
                # Buffers that have values, such as rotary frequencies, stay as they are.
                buffers = [(key, buffer) for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
                for key, tensor in [*module.named_parameters(recurse=False), *buffers]:
                    values = self._read(where + key)
                    stored.append((module, key, tensor))
                    set_tensor(module, key, values, self._dtype, self._device)
            yield
        finally:
            for module, key, tensor in stored:
                setattr(module, key, tensor)

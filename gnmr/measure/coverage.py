"""Count the GEMMs that a model's forward passes really run, and the share of some operators in their arithmetic.

A linear that is called counts rows times inputs times outputs, whatever kernels run inside. A subclass of `nn.Linear`
may multiply less (grouped, low rank), so it counts the products inside, if PyTorch dispatches any. All other products
are counted as PyTorch dispatches them, by the formulas of `torch.utils.flop_counter` and a few more (grouped products,
recurrent kernels). They belong to the parameter that they read: fused experts, `Conv1D`, the `in_proj` of an attention,
convolutions, recurrent layers, and a linear whose weight is read without a call. Products of two activations belong to
attention; they are counted separately and enter no share. A library's kernel that is not a PyTorch product is not seen,
nor are products of nested tensors outside of linears.

    found = count(model, lambda: model(batch))
    found.line(["layers.0.mlp.up_proj", ...])    # covers 11.2% of the GEMMs' arithmetic; not: experts.gate_up_proj 59%
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from gnmr.conversion.cost import Work
from gnmr.conversion.linear import PathLinear, transformed
from gnmr.conversion.passes import in_backward
from gnmr.conversion.unit_names import of_any_expert, operator_names
from gnmr.errors import first_few

_NAMED = 4
"""Number of operators that a line names."""
_LITTLE = 0.0005
"""Shares below this one are not named."""
READ = "its weight is read without calling it"
"""A reason why a linear may never be called."""
MUCH = 0.01
"""Share of the arithmetic above which an omission is worth a warning or a finding."""
_SUMS = ("addmm", "baddbmm")
"""Products whose first operand is added to the result."""
_LAYOUT = (
    "is_contiguous",
    "is_strides",
    "is_non_overlapping",
    "sym_",
    "size",
    "stride",
    "storage",
    "numel",
    "dim",
    "layout",
)
"""Prefixes of operations that query the layout of a tensor."""
_LOOKUPS = ("index", "index_select", "gather")
"""Operations that take rows of a matrix as activations, and matrices of a 3-D parameter as weights."""


class Product(NamedTuple):
    """The operator whose weight a product reads."""

    name: str
    """Name of the operator, or of a parameter that is not a `weight`: `layers.0.mlp.experts.down_proj`."""
    kind: str
    """Class of its module; `Linear` for all linears."""
    called: bool = True
    """False: a linear's weight was read without calling it."""


@dataclass(frozen=True)
class Coverage:
    """The products of forward passes, in multiplications."""

    products: Mapping[Product, int] = field(default_factory=dict)
    attention: int = 0
    """Products of two activations."""

    @staticmethod
    def total(several: Iterable[Coverage]) -> Coverage:
        """Return the sum of several counts."""
        products, attention = Counter[Product](), 0
        for one in several:
            products.update(one.products)
            attention += one.attention
        return Coverage(dict(products), attention)

    @property
    def whole(self) -> int:
        """Return all products that read a weight."""
        return sum(self.products.values())

    def called(self) -> dict[str, int]:
        """Return the multiplications of every linear that was called."""
        return {one.name: number for one, number in self.products.items() if one.called and one.kind == "Linear"}

    def share(self, names: Collection[str]) -> float:
        """Return the share of the linears of these names in `whole`; 0 if nothing ran."""
        called = self.called()
        return sum(called.get(name, 0) for name in set(names)) / (self.whole or 1)

    def others(self, names: Collection[str]) -> dict[Product, float]:
        """Return the shares of everything except the linears of these names, the largest first.

        Products whose names differ only by a number are added up.
        """
        taken, found = set(names), Counter[Product]()
        for one, number in self.products.items():
            if not (one.name in taken and one.called):
                found[one._replace(name=re.sub(r"(?<![^.])\d+(?![^.])", "*", one.name))] += number
        return {one: number / self.whole for one, number in found.most_common()}

    def missed(self, names: Iterable[str]) -> dict[str, str]:
        """Return the reason for each of these operators that was never called."""
        called, read = self.called(), {one.name for one in self.products if not one.called}
        return {name: READ if name in read else "it never ran" for name in names if name not in called}

    def line(self, names: Collection[str], verb: str = "covers") -> str:
        """Return one line: the share of these operators, and the other products with their shares."""
        alike: dict[str, float] = {}
        for one, share in self.others(names).items():
            alike[_short(one)] = alike.get(_short(one), 0.0) + share
        others = sorted(((name, n) for name, n in alike.items() if n >= _LITTLE), key=lambda pair: -pair[1])
        told = [f"{name} {percent(share)}" for name, share in others[:_NAMED]]
        rest = sum(share for _, share in others[_NAMED:])
        told += [f"{len(others) - _NAMED} more {percent(rest)}"] if rest else []
        beside = self.attention / (self.whole + self.attention or 1)
        apart = f" (in addition, an attention's own products take {percent(beside)} of all)" if beside >= 0.1 else ""
        left = f"; not: {', '.join(told)}" if told else ""
        return f"{verb} {percent(self.share(names))} of the GEMMs' arithmetic{left}{apart}"

    def told(self, operators: Sequence[PathLinear], verb: str = "covers") -> list[str]:
        """Return lines on a converted model: its share, and operators whose weight was read without a call."""
        names = [operator.operator_name for operator in operators]
        read = [name for name, why in self.missed(names).items() if why == READ]
        more = [f"never in low precision, as {READ}: {first_few(read)}"] if read else []
        return [self.line(names, verb), *more]

    def work(self, operators: Sequence[PathLinear], verb: str = "covers") -> Work:
        """Return the multiplications of a converted model for its cost.

        Experts of one layer count alike, because one batch does not show which of them the next tokens reach.
        """
        called, alike = self.called(), dict[str, list[int]]()
        kinds = [of_any_expert(operator.operator_name) for operator in operators]
        for kind, operator in zip(kinds, operators, strict=True):
            alike.setdefault(kind, []).append(called.get(operator.operator_name, 0))
        counts = tuple(round(sum(alike[kind]) / len(alike[kind])) for kind in kinds)
        return Work(counts, max(0, self.whole - sum(counts)), tuple(self.told(operators, verb)))

    def misses(self, operators: Sequence[PathLinear]) -> bool:
        """Return True if at least 1% of the arithmetic within blocks is left out, not counting routers."""
        others = self.others([operator.operator_name for operator in operators])
        inside = {one: share for one, share in others.items() if "*" in one.name and not routes(one)}
        return sum(inside.values()) >= MUCH


def routes(one: Product) -> bool:
    """Return True if it is a router or a part of one, by its name or class."""
    return bool({*one.name.split(".")} & {"gate", "router"}) or "Router" in one.kind


def percent(share: float) -> str:
    """Format a share as 100%, 89%, 3.4% or 0.05%; only the whole is 100%."""
    digits = 0 if share >= 0.995 or share == 0 else 1 if share >= 0.01 else 2
    found = f"{100 * share:.{digits}f}%"
    return found if share == 1 or not found.startswith("100") else f"{100 * share:.2f}%"


def _short(one: Product) -> str:
    """Return a short name: `experts.down_proj (MixtralExperts)`, `dt_proj (read without a call)`, `mlp.up_proj`."""
    name = ".".join([part for part in one.name.split(".") if part != "*"][-2:])
    if not name:  # a layer of an nn.Sequential
        return one.kind
    if one.kind == "Linear" and one.called:
        return name
    return f"{name} ({one.kind if one.called else 'read without a call'})".lstrip()


class _Call:
    """A call of a linear."""

    def __init__(self, product: Product, module: nn.Module) -> None:
        self.product, self.counted, self.has_inner = product, 0, False
        """`counted` are the multiplications that were dispatched inside; linears inside count their own."""
        self.number: int | None = None
        """Multiplications of a dense linear; None: another one that is being called counts them, or nobody."""
        self.dense = type(module) is nn.Linear or isinstance(module, PathLinear) or not isinstance(module, nn.Linear)
        """True if `number` is right, whatever kernels run inside: `nn.Linear`, ours and TransformerEngine's."""


class Counting(TorchDispatchMode):
    """Count the products inside `all`, or after `arm` in a loop's own passes, without reading values of tensors."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, operators: Sequence[PathLinear] = ()) -> None:
        """Prepare to count; `operators` are those of a converted model, which need not all be its modules."""
        super().__init__()
        self._model = model
        self._products, self._attention = Counter[Product](), 0
        found = {name: module for name, module in model.named_modules() if _is_linear(module)}
        short = operator_names(list(found))
        self._linears = {module: name for name, module in zip(short, found.values(), strict=True)}
        self._linears |= {operator: operator.operator_name for operator in operators}
        self._weights: dict[int, tuple[StorageWeakRef, Product]] = {}
        self._sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        self._calls: list[_Call] = []
        """The linears that are being called, the innermost last."""
        self._depth = 0
        """Number of modules of a loop's own pass that are being called."""
        self._open = False
        """True if everything is counted, inside a module or not (`all`)."""
        self._outermost: tuple[int, FrameType] | None = None
        """Thread and frame of the outermost module call of a loop's own pass that is being counted."""
        self._start: tuple[Counter[Product], int, BaseException | None] = Counter(), 0, None
        """Products and attention before this pass, and the exception that was being handled then."""
        self._ran: set[nn.Module] = set()
        """Modules whose forward pass was counted; activation checkpointing may repeat it in the backward pass."""
        self._handles: list[Any] = []
        self._compiled = _frames_compiled()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return nothing for a copy of a model or a controller, which counts nothing."""
        return type(None), ()

    @property
    def found(self) -> Coverage:
        """Return the coverage counted so far."""
        return Coverage(dict(self._products), self._attention)

    @property
    def compiled(self) -> bool:
        """Return True if passes may have been missed because something was compiled."""
        return _frames_compiled() != self._compiled or any(map(_is_compiled, self._model.modules()))

    # ---- which passes ----

    @contextmanager
    def all(self) -> Iterator[None]:
        """Count everything inside, in eager mode and without the fast paths that go around modules."""
        fast = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(self.disarm)
            self._hook(self._linears, self._before, self._after)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._look()
            self._open = True
            stack.enter_context(self)
            yield

    def arm(self) -> None:
        """Count the model's own passes with gradients from now on, whatever module is called first, until `disarm`.

        Passes of a compiled model are not counted, nor is the recomputation of activation checkpointing.
        """
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if isinstance(mode, Counting):
                mode._end_interrupted()
        self._hook(self._model.modules(), self._enter, self._leave)
        self._hook(self._linears, self._before, self._after)

    def disarm(self) -> None:
        """Remove all hooks."""
        self._end_interrupted()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open = False

    def _hook(self, modules: Iterable[nn.Module], before: Callable[..., None], after: Callable[..., None]) -> None:
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(_Hook(before), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_Hook(after), always_call=True))

    def _end_interrupted(self) -> None:
        """End the pass that was being counted if it was interrupted: a KeyboardInterrupt calls no hooks."""
        if self._outermost is None or self._outermost[0] != get_ident():
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outermost[1]:
            frame = frame.f_back
        if frame is None and _get_current_dispatch_mode_stack()[-1] is self:  # else another mode would be left
            self._depth = 0
            self._calls.clear()
            self._close(failed=True)

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._end_interrupted()
        recomputes = in_backward()
        counts = torch.is_grad_enabled() and not (recomputes and module in self._ran)
        if self._depth == 0 and counts and not any(map(_is_compiled, self._model.modules())):
            self._look()
            self._open, self._outermost = True, (get_ident(), sys._getframe(2))
            self._start = self._products.copy(), self._attention, sys.exception()
            self.__enter__()
        if self._open and not recomputes:
            self._ran.add(module)
        self._depth += 1

    def _leave(self, *_: object) -> None:
        if self._depth == 0:  # a hook before `_enter` failed, in this module or in one inside of it
            return
        self._depth -= 1
        if self._depth == 0 and self._open:
            self._close(failed=sys.exception() is not self._start[2])

    def _close(self, failed: bool) -> None:
        """End the counting of a pass, and forget a pass that failed, of which some modules did not run."""
        self._open, self._outermost = False, None
        if failed:
            self._products, self._attention, _ = self._start
        self._start = Counter(), 0, None
        self.__exit__(None, None, None)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call, x = _Call(Product(self._linears[module], "Linear"), module), next(_tensors((args, kwargs)), None)
        call.dense = call.dense and not transformed()  # vmap runs one call for many rows or weights
        if x is not None and self._open and not any(one.dense for one in self._calls):
            call.number = x.numel() // x.size(-1) * _area(module)
            if self._calls:
                self._calls[-1].has_inner = True
        self._calls.append(call)

    def _after(self, *_: object) -> None:
        if self._calls:
            call = self._calls.pop()
            if call.number is not None and (call.counted or not call.has_inner):
                self._products[call.product] += call.counted or call.number

    # ---- products ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _opname(func).startswith(_LAYOUT):  # a subclass asks for what its own methods answer
            return NotImplemented
        if any(one.is_nested for one in _tensors((args, kwargs))):  # has kernels of its own, and no shape
            return func(*args, **kwargs)
        formula = _formula(func)
        if formula is None and isinstance(func, OpOverload) and func is not torch.ops.prim.device.default:
            with self:
                whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        out = func(*args, **kwargs)
        if any(call.dense for call in self._calls):
            return out
        if self._calls and formula is not None:
            self._calls[-1].counted += formula(args, kwargs, out)
            return out
        if formula is not None:
            self._count(formula(args, kwargs, out), [*_tensors((args, kwargs))][_opname(func) in _SUMS :])
        elif (name := _opname(func)) != "embedding" and (name not in _LOOKUPS or args[0].dim() > 2):
            self._follow(args, kwargs, out)
        return out

    def _count(self, number: int, operands: Sequence[Tensor]) -> None:
        found = self._read(operands)
        if found is None and self._sharded:  # FSDP2 has put other tensors in the parameters' places
            self._look()
            found = self._read(operands)
        if found is None:
            self._attention += number
        else:
            self._products[found] += number

    def _read(self, operands: Iterable[Tensor]) -> Product | None:
        known = (self._weights.get(key) for one in operands if (key := _storage(one)[0]))
        return next((one[1] for one in known if one is not None), None)

    def _follow(self, args: Any, kwargs: Any, out: Any) -> None:
        """Let the result of operations on one parameter alone (a view, a cast) stand for the parameter."""
        operands = [one for one in _tensors((args, kwargs)) if one.is_floating_point()]
        known = [self._weights.get(_storage(one)[0]) for one in operands]
        if known and all(known):
            assert known[0] is not None
            for made in _tensors(out):
                if (place := _storage(made))[1] is not None:
                    self._weights.setdefault(place[0], (place[1], known[0][1]))

    def _look(self) -> None:
        """Record where the parameters lie now."""
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                key, storage = _storage(parameter)
                if storage is not None and parameter.dim() > 1:
                    self._weights[key] = storage, self._named(path, module, name)

    def _named(self, path: str, module: nn.Module, name: str) -> Product:
        if module in self._linears:
            return Product(self._linears[module], "Linear", called=False)
        whole = operator_names([path])[0]
        if name != "weight" and not isinstance(module, nn.RNNBase):
            whole = f"{whole}.{name.removesuffix('_weight')}".lstrip(".")
        return Product(whole, type(module).__name__.removeprefix("FSDP"))  # fully_shard renames classes


def count(model: nn.Module, run: Callable[[], object], operators: Sequence[PathLinear] = ()) -> Coverage:
    """Return the products of `run` in the model, without gradients and in the model's mode.

    Random numbers that it draws and values that it writes are not restored.
    """
    counting = Counting(model, operators)
    with torch.no_grad(), counting.all():
        run()
    return counting.found


class _Hook:
    """A hook that does nothing in a graph of torch.compile, and that copies of the model lack."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: object) -> None:
    """Replace a hook in a copy."""


def _is_linear(module: nn.Module) -> bool:
    transformer_engine = type(module).__module__.startswith("transformer_engine.") and type(module).__name__ == "Linear"
    return isinstance(module, nn.Linear) or transformer_engine


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _frames_compiled() -> int:
    """Return how many functions torch.compile has looked at in this process."""
    return int(torch._dynamo.utils.counters["frames"]["total"])


def _area(module: Any) -> int:
    """Return the multiplications per row in the pass that is about to begin."""
    if isinstance(module, PathLinear) and module.given is not None:
        return module.given[0].numel()
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return prod(widths if all(isinstance(one, int) for one in widths) else module.weight.shape)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield all tensors in a tree, from left to right."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, tuple | list):
        for one in tree:
            yield from _tensors(one)


def _storage(x: Tensor) -> tuple[int, StorageWeakRef | None]:
    """Return the storage of a tensor (of a DTensor's own part) and its number, unique while the storage is known.

    Returns (0, None) for a tensor without a storage.
    """
    with suppress(NotImplementedError, RuntimeError):
        found = StorageWeakRef(getattr(x, "_local_tensor", x).untyped_storage())
        return found.cdata, found
    return 0, None


# ---- formulas ----


def _formula(func: Any) -> Callable[[Any, Any, Any], int] | None:
    """Return a function of (args, kwargs, result) that counts a forward product; None for other functions."""
    name = _opname(func)
    if "backward" in name:
        return None
    packet = func.overloadpacket if isinstance(func, OpOverload) else func
    if (found := flop_registry.get(packet)) is not None:
        return lambda args, kwargs, out: found(*args, **kwargs, out_val=out) // 2
    return next((own for part, own in _FORMULAS.items() if part in name), None)


def _opname(func: Any) -> str:
    return func._opname if isinstance(func, OpOverload) else str(func)


def _inner(args: Any, _kwargs: Any, out: Any) -> int:
    """Count (..., K) x (..., K, N): K multiplications per element of the result."""
    return int(next(_tensors(out)).numel() * args[0].shape[-1])


def _of_attention(args: Any, _kwargs: Any, _out: Any) -> int:
    query, key, value = args[:3]
    return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _trilinear(args: Any, _kwargs: Any, _out: Any) -> int:
    """Count i1 x i2 x i3, each expanded by its dimensions: the product of the sizes of all dimensions."""
    sizes: dict[int, int] = {}
    for one, expanded in zip(args[:3], args[3:6], strict=True):
        there = (dim for dim in range(one.dim() + len(expanded)) if dim not in expanded)
        sizes |= {dim: max(size, sizes.get(dim, 1)) for dim, size in zip(there, one.shape, strict=True)}
    return prod(sizes.values())


def _recurrent(args: Any, _kwargs: Any, _out: Any) -> int:
    """Count a recurrent layer, whose matrices are the next arguments, or all layers, with matrices in a list.

    Each row passes through each matrix.
    """
    weights = args[1] if isinstance(args[1], list | tuple) else args[1:5]
    return sum(w.numel() for w in weights if w.dim() == 2) * (args[0].numel() // args[0].shape[-1])


_FORMULAS = {
    "grouped_mm": _inner,
    "_int_mm": _inner,
    "_weight_int": _inner,
    "_trilinear": _trilinear,
    "mkldnn_rnn_layer": _recurrent,
    "cudnn_rnn": _recurrent,
    "miopen_rnn": _recurrent,
    "_scaled_dot_product_flash_attention_for_cpu": _of_attention,
    "_scaled_dot_product_fused_attention_overrideable": _of_attention,
}
"""Formulas, by a part of the name, that `torch.utils.flop_counter` lacks."""

"""Count the GEMMs that a model's forward passes really run, and the share of some operators in their arithmetic.

A linear that is called counts rows times inputs times outputs, whatever kernels run inside. A subclass of `nn.Linear`
may multiply less (grouped, low rank), so it counts the products inside, if PyTorch dispatches any. All other products
are counted as PyTorch dispatches them, by the formulas of `torch.utils.flop_counter` and a few more (grouped products,
recurrent kernels). They belong to the parameter that they read: fused experts, `Conv1D`, the `in_proj` of an attention,
convolutions, recurrent layers, and a linear whose weight is read without a call. Products of two activations belong to
attention; they are counted separately and enter no share. A library's kernel that is not a PyTorch product is not seen,
nor are products of nested tensors outside of linears.

    coverage = count(model, lambda: model(batch))
    coverage.line(["layers.0.mlp.up_proj", ...])  # covers 11.2% of the GEMMs' arithmetic; not: experts.gate_up_proj 59%
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from gnmr.compiler import between_graphs, compiled_code_eagerly, compiler_loaded, functions_compiled
from gnmr.conversion.cost import Work
from gnmr.conversion.linear import PathLinear, transformed
from gnmr.conversion.passes import in_backward
from gnmr.conversion.unit_names import of_any_expert, operator_names
from gnmr.errors import first_few
from gnmr.formats.dispatch_modes import TorchDispatchMode
from gnmr.measure.absent_weights import has_absent_weights
from gnmr.measure.in_force import is_te_linear

_MOST_NAMES = 4
"""Number of operators that a line names."""
_LITTLE = 0.0005
"""Shares below this one are not named."""
READ = "its weight is read without calling it"
"""A reason why a linear may never be called."""
MUCH = 0.01
"""Share of the arithmetic above which an omission is worth a warning or a finding."""
_SUMS = ("addmm", "baddbmm")
"""Products whose first operand is added to the result."""
_LAYOUT = ("is_contiguous", "is_strides", "is_non_overlapping", "sym_", "size", "stride", "storage", "numel", "dim")
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

    @property
    def label(self) -> str:
        """A short name: `experts.down_proj (MixtralExperts)`, `dt_proj (read without a call)`, `mlp.up_proj`."""
        name = ".".join([word for word in self.name.split(".") if word != "*"][-2:])
        if not name:  # a layer of an nn.Sequential
            return self.kind
        if not self.called:
            return f"{name} (read without a call)"
        return name if self.kind == "Linear" else f"{name} ({self.kind})"

    @property
    def routes(self) -> bool:
        """Whether it is a router or a part of one, by its name or class."""
        return bool({*self.name.split(".")} & {"gate", "router"}) or "Router" in self.kind


@dataclass(frozen=True)
class Coverage:
    """The products of forward passes, in multiplications."""

    products: Mapping[Product, int] = field(default_factory=dict)
    attention: int = 0
    """Products of two activations."""

    @staticmethod
    def sum_of(coverages: Iterable[Coverage]) -> Coverage:
        """Return the sum of several counts.

        Args:
            coverages: one for each batch or pass; none gives an empty count.
        """
        products, attention = Counter[Product](), 0
        for coverage in coverages:
            products.update(coverage.products)
            attention += coverage.attention
        return Coverage(dict(products), attention)

    @property
    def total(self) -> int:
        """The multiplications of all products that read a weight."""
        return sum(self.products.values())

    def called(self) -> dict[str, int]:
        """Return the multiplications of every linear that was called, by name."""
        return {
            product.name: number
            for product, number in self.products.items()
            if product.called and product.kind == "Linear"
        }

    def share(self, names: Collection[str]) -> float:
        """Return the share of these linears in `total`, from 0 to 1.

        Args:
            names: operators, each counted once; one that was not called adds 0.
        """
        called = self.called()
        return sum(called.get(name, 0) for name in set(names)) / (self.total or 1)

    def left_out(self, names: Collection[str]) -> dict[Product, float]:
        """Return the shares of everything except the linears of these names.

        Returns:
            {product: share of `total`}, the largest first. Products whose names differ only by a number are added up;
            their name has a star for the number.
        """
        # The 32 layers of a model are one line: numbers become stars.
        names, numbers = set(names), Counter[Product]()
        for product, number in self.products.items():
            if not (product.name in names and product.called):
                pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", product.name)
                numbers[product._replace(name=pattern)] += number
        return {product: number / self.total for product, number in numbers.most_common()}

    def never_called(self, names: Iterable[str]) -> dict[str, str]:
        """Return why operators were never called.

        Returns:
            {name: reason} of those among `names` that were not called, in their order.
        """
        called, read = self.called(), {product.name for product in self.products if not product.called}
        return {name: READ if name in read else "it never ran" for name in names if name not in called}

    def line(self, names: Collection[str], verb: str = "covers") -> str:
        """Return one line: the share of these operators, and the other products with their shares.

        Args:
            names: names of linears.
            verb: the beginning of the line.
        """
        by_label = Counter[str]()
        for product, share in self.left_out(names).items():
            by_label[product.label] += share  # type: ignore[assignment]
        shares = [(label, share) for label, share in by_label.most_common() if share >= _LITTLE]
        words = [f"{label} {percent(share)}" for label, share in shares[:_MOST_NAMES]]
        if more := shares[_MOST_NAMES:]:
            words.append(f"{len(more)} more {percent(sum(share for _, share in more))}")
        line = f"{verb} {percent(self.share(names))} of the GEMMs' arithmetic"
        if words:
            line += f"; not: {', '.join(words)}"
        attention = self.attention / (self.total + self.attention or 1)
        if attention >= 0.1:
            line += f" (in addition, an attention's own products take {percent(attention)} of all)"
        return line

    def work(self, operators: Sequence[PathLinear], verb: str = "covers") -> Work:
        """Return the multiplications of a converted model for its cost.

        Experts of one layer count alike, because one batch does not show which of them the next tokens reach.

        Args:
            operators: the operators, in the order in which `Work` has them.
            verb: the beginning of the note on what they cover, see `line`.
        """
        called, by_kind = self.called(), dict[str, list[int]]()
        names = [operator.operator_name for operator in operators]
        kinds = [of_any_expert(name) for name in names]
        for kind, name in zip(kinds, names, strict=True):
            by_kind.setdefault(kind, []).append(called.get(name, 0))
        counts = tuple(round(sum(by_kind[kind]) / len(by_kind[kind])) for kind in kinds)
        notes = [self.line(names, verb)]
        if read := [name for name, reason in self.never_called(names).items() if reason == READ]:
            notes.append(f"never in low precision, as {READ}: {first_few(read)}")
        return Work(counts, max(0, self.total - sum(counts)), tuple(notes))

    def leaves_out_much(self, operators: Sequence[PathLinear]) -> bool:
        """Return True if at least 1% of the arithmetic within blocks is left out, not counting routers.

        Args:
            operators: what is not left out. A product is in a block if a part of its name is a number.
        """
        left_out = self.left_out([operator.operator_name for operator in operators])
        return sum(share for product, share in left_out.items() if "*" in product.name and not product.routes) >= MUCH


def percent(share: float) -> str:
    """Format a share as 100%, 89%, 3.4% or 0.05%; only a share of exactly 1 is 100%.

    Args:
        share: a number from 0 to 1.
    """
    digits = 2
    if share >= 0.995 or share == 0:
        digits = 0
    elif share >= 0.01:
        digits = 1
    text = f"{100 * share:.{digits}f}%"
    return f"{100 * share:.2f}%" if share != 1 and text.startswith("100") else text


@dataclass
class _LinearCall:
    """A call of a linear that has not returned yet."""

    product: Product
    dense: bool
    """Whether rows times inputs times outputs is right, whatever kernels run inside."""
    multiplications: int | None = None
    """Those of a dense linear; None: an enclosing call counts them, or nobody."""
    dispatched: int = 0
    """Multiplications that were dispatched inside; linears inside count their own."""
    contains_linear: bool = False


class Counting(TorchDispatchMode):
    """Count the products inside `all`, or after `arm` in a loop's own passes, without reading values of tensors."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, operators: Sequence[PathLinear] = ()) -> None:
        """Prepare to count; `operators` are those of a converted model, which need not all be its modules."""
        super().__init__()
        self._model = model
        self._products, self._attention = Counter[Product](), 0
        linears = {name: module for name, module in model.named_modules() if _is_linear(module)}
        names = operator_names(list(linears))
        self._linears = {module: name for name, module in zip(names, linears.values(), strict=True)}
        self._linears |= {operator: operator.operator_name for operator in operators}
        self._weights: dict[int, tuple[StorageWeakRef, Product]] = {}
        """The product that reads each storage, by the number of the storage."""
        self._absent = has_absent_weights(model)
        self._calls: list[_LinearCall] = []
        """The innermost last."""
        self._open = False
        """Whether products are counted now."""
        self._outermost: nn.Module | None = None
        """The module that was called first in the loop's pass that is being counted."""
        self._before_pass: tuple[Counter[Product], int, BaseException | None] = Counter(), 0, None
        """Products and attention before this pass, and the exception that was being handled then."""
        self._ran: set[nn.Module] = set()
        """Modules whose forward pass was counted; activation checkpointing may repeat it in the backward pass."""
        self._handles: list[Any] = []
        self._functions_compiled = functions_compiled()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return nothing for a copy of a model or a controller, which counts nothing."""
        return type(None), ()

    @property
    def coverage(self) -> Coverage:
        """The products that were counted so far."""
        return Coverage(dict(self._products), self._attention)

    @property
    def compiled(self) -> bool:
        """Whether passes may have been missed because something was compiled."""
        return functions_compiled() != self._functions_compiled or any(map(_is_compiled, self._model.modules()))

    # ---- which passes ----

    @contextmanager
    def all(self) -> Iterator[None]:
        """Count everything inside, in eager mode and without the fast paths that go around modules."""
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._hook(self._linears, self._enter_linear, self._leave_linear)
        self._find_weights()
        self._open = True
        try:
            with compiled_code_eagerly(), self:
                yield
        finally:
            self.disarm()
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def arm(self) -> None:
        """Count the model's own passes with gradients from now on, whatever module is called first, until `disarm`.

        Passes of a compiled model are not counted, nor is the recomputation of activation checkpointing.
        """
        # A loop may call the model, a wrapper of it, or only parts of it.
        self._hook(self._model.modules(), self._enter, self._leave)
        self._hook(self._linears, self._enter_linear, self._leave_linear)

    def disarm(self) -> None:
        """Remove all hooks, and forget a pass that was interrupted. Not for use within a pass."""
        if self._outermost is not None:
            self._close(failed=True)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open = False

    def _hook(self, modules: Iterable[nn.Module], before: Callable[..., None], after: Callable[..., None]) -> None:
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(_Hook(before), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_Hook(after), always_call=True))

    def _enter(self, module: nn.Module, *_: object) -> None:
        if module is self._outermost:  # the last pass never returned: a KeyboardInterrupt calls no hooks
            self._close(failed=True)
        recomputes = in_backward()
        counts = torch.is_grad_enabled() and not (recomputes and module in self._ran)
        if self._outermost is None and counts and not any(map(_is_compiled, self._model.modules())):
            self._find_weights()
            self._open, self._outermost = True, module
            self._before_pass = self._products.copy(), self._attention, sys.exception()
            self.__enter__()
        # Re-entrant checkpointing runs without gradients first, which counts within an open pass.
        if self._open and not recomputes:
            self._ran.add(module)

    def _leave(self, module: nn.Module, *_: object) -> None:
        # An exception that was not being handled when the pass began was raised inside it.
        if module is self._outermost:
            self._close(failed=sys.exception() is not self._before_pass[2])

    def _close(self, failed: bool) -> None:
        """End the counting of a pass, and forget a pass that failed, of which some modules did not run."""
        self._open, self._outermost = False, None
        if failed:
            self._calls.clear()
            self._products, self._attention, _ = self._before_pass
        self._before_pass = Counter(), 0, None
        self.__exit__(None, None, None)

    def _enter_linear(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A subclass of `nn.Linear` may multiply less than a dense linear. vmap runs one call for many rows or weights.
        dense = type(module) is nn.Linear or isinstance(module, PathLinear) or not isinstance(module, nn.Linear)
        call = _LinearCall(Product(self._linears[module], "Linear"), dense and not transformed())
        x = next(_tensors((args, kwargs)), None)
        # A dense linear counts for all that runs inside it.
        if x is not None and self._open and not any(outer.dense for outer in self._calls):
            call.multiplications = x.numel() // x.size(-1) * _area(module)
            if self._calls:
                self._calls[-1].contains_linear = True
        self._calls.append(call)

    def _leave_linear(self, *_: object) -> None:
        if not self._calls:
            return
        call = self._calls.pop()
        # What was dispatched inside is exact. Without it, the dense product counts, unless linears inside did.
        if call.multiplications is not None and (call.dispatched or not call.contains_linear):
            self._products[call.product] += call.dispatched or call.multiplications

    # ---- products ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._dispatch_between_graphs if compiler_loaded() else self._dispatch)(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch imports its compiler in order to keep `__torch_dispatch__` out of graphs."""
        # Private. If it goes, the compiler is imported again, and nothing else changes.
        return False

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name_of(func)
        if name.startswith(_LAYOUT):  # a subclass asks for what its own methods answer
            return NotImplemented
        if any(call.dense for call in self._calls):  # the call counts already, whatever runs inside
            return func(*args, **kwargs)
        if any(x.is_nested for x in _tensors((args, kwargs))):  # has kernels of its own, and no shape
            return func(*args, **kwargs)
        formula = _formula(func)
        # A composite operation (einsum, linear in inference mode) is counted by the products that it is made of.
        if formula is None and hasattr(func, "decompose") and func is not torch.ops.prim.device.default:
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if formula is None:
            # Rows of a table are activations, so their products are not the table's.
            if name != "embedding" and (name not in _LOOKUPS or args[0].dim() > 2):
                self._follow(args, kwargs, output)
        elif self._calls:
            self._calls[-1].dispatched += formula(args, kwargs, output)
        else:
            operands = [*_tensors((args, kwargs))]
            self._count(formula(args, kwargs, output), operands[1:] if name in _SUMS else operands)
        return output

    _dispatch_between_graphs = between_graphs(_dispatch)

    def _count(self, multiplications: int, operands: Sequence[Tensor]) -> None:
        product = self._product_of(operands)
        if product is None and self._absent:  # other tensors are in the parameters' places while a module runs
            self._find_weights()
            product = self._product_of(operands)
        if product is None:
            self._attention += multiplications
        else:
            self._products[product] += multiplications

    def _product_of(self, operands: Iterable[Tensor]) -> Product | None:
        numbers = (_storage(x)[0] for x in operands)
        return next((self._weights[number][1] for number in numbers if number in self._weights), None)

    def _follow(self, args: Any, kwargs: Any, output: Any) -> None:
        """Let the result of operations on one parameter alone (a view, a cast) stand for the parameter."""
        operands = [x for x in _tensors((args, kwargs)) if x.is_floating_point()]
        numbers = [_storage(x)[0] for x in operands]
        if numbers and all(number in self._weights for number in numbers):
            product = self._weights[numbers[0]][1]
            for x in _tensors(output):
                number, storage = _storage(x)
                if storage is not None:
                    self._weights.setdefault(number, (storage, product))

    def _find_weights(self) -> None:
        """Record where the parameters lie now."""
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                number, storage = _storage(parameter)
                if storage is not None and parameter.dim() > 1:
                    self._weights[number] = storage, self._reader(path, module, name)

    def _reader(self, path: str, module: nn.Module, name: str) -> Product:
        if module in self._linears:
            return Product(self._linears[module], "Linear", called=False)
        (operator,) = operator_names([path])
        if name != "weight" and not isinstance(module, nn.RNNBase):
            operator = f"{operator}.{name.removesuffix('_weight')}".lstrip(".")
        return Product(operator, type(module).__name__.removeprefix("FSDP"))  # fully_shard renames classes


def count(model: nn.Module, run: Callable[[], object], operators: Sequence[PathLinear] = ()) -> Coverage:
    """Return the products of `run` in the model, without gradients and in the model's mode.

    Random numbers that it draws and values that it writes are not restored.

    Args:
        model: the model, perhaps converted.
        run: calls the model.
        operators: the converted operators, if any.
    """
    counting = Counting(model, operators)
    with torch.no_grad(), counting.all():
        run()
    return counting.coverage


class _Hook:
    """A hook that does nothing in a graph of torch.compile, and in copies of the model."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_te_linear(module)


def _is_compiled(module: nn.Module) -> bool:
    # Private, until a module says whether `nn.Module.compile` was called; the class is that of torch.compile(module).
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _area(module: Any) -> int:
    """Return the multiplications per row in the pass that is about to begin."""
    if isinstance(module, PathLinear) and module.given is not None:
        return module.given[0].numel()
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return prod(widths if all(isinstance(width, int) for width in widths) else module.weight.shape)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield all tensors in a tree, from left to right."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from _tensors(branch)


def _storage(x: Tensor) -> tuple[int, StorageWeakRef | None]:
    """Return the number of a tensor's storage (of a DTensor's own shard), unique while the storage is known, and it.

    Returns (0, None) for a tensor without a storage.
    """
    with suppress(NotImplementedError, RuntimeError):
        # Private, because the public `to_local` of a DTensor makes another tensor with every call.
        storage = StorageWeakRef(getattr(x, "_local_tensor", x).untyped_storage())
        return storage.cdata, storage
    return 0, None


# ---- formulas ----


def _formula(func: Any) -> Callable[[Any, Any, Any], int] | None:
    """Return a function of (args, kwargs, result) that counts a forward product; None for other functions."""
    name = _name_of(func)
    if "backward" in name:
        return None
    if (flops := flop_registry.get(getattr(func, "overloadpacket", func))) is not None:
        return lambda args, kwargs, output: flops(*args, **kwargs, out_val=output) // 2
    return next((formula for pattern, formula in _FORMULAS.items() if pattern in name), None)


@cache
def _name_of(func: Any) -> str:
    """Return the name of an operation without namespace and overload: `mm`."""
    return str(getattr(func, "overloadpacket", func)).rpartition(".")[2]


def _inner(args: Any, _kwargs: Any, output: Any) -> int:
    """Count (..., K) x (..., K, N): K multiplications per element of the result."""
    return int(next(_tensors(output)).numel() * args[0].shape[-1])


def _of_attention(args: Any, _kwargs: Any, _output: Any) -> int:
    query, key, value = args[:3]
    return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _trilinear(args: Any, _kwargs: Any, _output: Any) -> int:
    """Count i1 x i2 x i3, each expanded by its dimensions: the product of the sizes of all dimensions."""
    sizes: dict[int, int] = {}
    for x, expanded in zip(args[:3], args[3:6], strict=True):
        dims = (dim for dim in range(x.dim() + len(expanded)) if dim not in expanded)
        sizes |= {dim: max(size, sizes.get(dim, 1)) for dim, size in zip(dims, x.shape, strict=True)}
    return prod(sizes.values())


def _recurrent(args: Any, _kwargs: Any, _output: Any) -> int:
    """Count a recurrent layer, whose matrices are the next arguments, or all layers, with matrices in a list.

    Each row passes through each matrix.
    """
    # cuDNN and MIOpen take all weights in a list; oneDNN takes those of one layer as arguments.
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

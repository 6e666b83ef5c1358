"""Docstrings: a function that another package uses says what it takes, returns or raises."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "gnmr").rglob("*.py"))}
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in TREES}
"""The file of each module, by its dotted name."""
IMPORT = re.compile(r"from (gnmr[\w.]*) import (\([^)]*\)|.*)")
SECTION = re.compile(r"^(Args|Returns|Raises):", re.MULTILINE)


def package_of(path: Path) -> str:
    """Return the package below gnmr; all single files are one."""
    first, *rest = path.relative_to(ROOT / "gnmr").parts
    return first if rest else "."


def imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name, name here) of each import from our own modules."""
    for module, names in IMPORT.findall(path.read_text()):
        for name, alias in re.findall(r"(\w+)(?: as (\w+))?", re.sub(r"#.*", "", names)):
            yield module, name, alias or name


def uses() -> dict[tuple[Path, str], set[str]]:
    """Return the packages that use each (file, name), by imports of names and by attributes of imported modules."""
    # `__init__.py` passes on names of the modules below it.
    passed_on = {(path, name): FILES[module] for path in FILES.values() for module, name, _ in imports(path)}
    packages = defaultdict[tuple[Path, str], set[str]](set)
    for path in FILES.values():
        for module, name, name_here in imports(path):
            file = FILES[module]
            packages[passed_on.get((file, name), file), name].add(package_of(path))
            if (imported := FILES.get(f"{module}.{name}")) is not None:
                for attribute in re.findall(rf"\b{name_here}\.(\w+)", path.read_text()):
                    packages[imported, attribute].add(package_of(path))
    return packages


def functions(definition: ast.stmt) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield a function, or the public methods of a class, with their names."""
    if isinstance(definition, ast.FunctionDef):
        yield definition.name, definition
    elif isinstance(definition, ast.ClassDef):
        for method in definition.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                yield f"{definition.name}.{method.name}", method


def takes_arguments(function: ast.FunctionDef) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return bool(arguments.vararg or arguments.kwarg or {argument.arg for argument in named} - {"self", "cls"})


def test_a_function_that_another_package_uses_says_what_it_takes_or_gives() -> None:
    packages = uses()
    silent = [
        f"{path.relative_to(ROOT)}:{function.lineno} {name}"
        for path, tree in TREES.items()
        for definition in tree.body
        if isinstance(definition, ast.FunctionDef | ast.ClassDef)
        and packages[path, definition.name] - {package_of(path)}
        for name, function in functions(definition)
        if takes_arguments(function) and not SECTION.search(ast.get_docstring(function) or "")
    ]
    assert not silent, "these functions need Args, Returns or Raises in their docstrings:\n" + "\n".join(silent)

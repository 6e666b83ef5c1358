"""Run the code cells of a notebook from top to bottom, and save what they print and show into it.

    python examples/run_notebook.py examples/where_does_nvfp4_hurt.ipynb

It needs no Jupyter. The value of a cell's last expression is shown as SVG, HTML or text, whichever it has first.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

SHOWN_AS = {"_repr_svg_": "image/svg+xml", "_repr_html_": "text/html"}


def outputs_of(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell in a namespace, and return its outputs in the notebook's format."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {kind: getattr(value, method)() for method, kind in SHOWN_AS.items() if hasattr(value, method)}
        outputs.append({"output_type": "display_data", "data": data or {"text/plain": repr(value)}, "metadata": {}})
    return outputs


def run(notebook: dict[str, Any]) -> None:
    """Run all code cells in one namespace, and put their outputs into the notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        cell.update(execution_count=number, outputs=outputs_of("".join(cell["source"]), names))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    notebook = json.loads(file.read_text())
    run(notebook)
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

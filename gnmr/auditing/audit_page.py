"""An audit, or a comparison of two sides, as one page of HTML (`gnmr.pages`)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gnmr.auditing.audit import Audit, Finding, OperatorRow
from gnmr.auditing.sides import SideComparison
from gnmr.errors import first_few, plural
from gnmr.measure.coverage import percent
from gnmr.pages import Figure, PageTable, findings_page


def page(result: Audit | SideComparison, name: str, origin: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        result: the audit or the comparison.
        name: the name of the model or run.
        origin: the `command` and the `commit` that it comes from, as far as they are known.
    """
    if isinstance(result, Audit):
        figures, tables = _figures(result), [_kinds(result.rows), _operators(result.rows)]
        findings: Sequence[Finding] = result.findings
    else:
        figures, tables = _side_figures(result), [_modules(result)]
        findings = (*result.findings, *result.notes)
    if findings:
        tables.insert(0, _findings(findings))
    card = {"subject": name, "commit": f"{origin.get('commit') or ''}"}
    command = f"{origin.get('command') or 'gnmr.audit'}"
    return findings_page("audit", name, card, f"{result.verdict()}.", figures, tables, command)


def operator_lines(rows: Iterable[OperatorRow]) -> list[list[str]]:
    """Return a line of a table for every GEMM.

    Args:
        rows: the operators. Those without a measurement have a note or a dash.

    Returns:
        Operator, GEMM, precision in force, and measured / possible dB of each operand, as texts.
    """
    lines = []
    for row in rows:
        for i, (gemm, precision) in enumerate(row.precision.items()):
            ratios = [f"{operand} {_db(*values)}" for operand, values in row.measured.get(gemm, {}).items()]
            note = row.note if i == 0 else ""
            lines.append([row.operator, gemm, precision, ", ".join(ratios) or note or "-"])
    return lines


def _db(measured: float, possible: float | None) -> str:
    values = [measured] if possible is None else [measured, possible]
    words = {math.inf: "inf", -math.inf: "NaN"}  # zeros have no ratio, and -inf is that of values that are not finite
    return "/".join("zeros" if math.isnan(value) else words.get(value, f"{value:.0f}") for value in values)


def _findings(findings: Iterable[Finding]) -> PageTable:
    rows = [[finding.kind, first_few(finding.where), finding.problem, finding.right] for finding in findings]
    return PageTable("Findings", ["finding", "where", "what is wrong", "what would be right"], rows)


def _figures(audit: Audit) -> list[Figure]:
    """Return the numbers of the verdict as tiles."""
    rows = [row for row in audit.rows if row.ran or not audit.dynamic]
    kinds = Counter(finding.kind for finding in audit.findings)
    number_of_kinds = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    measured = f"{sum(bool(row.measured) for row in rows)} measured in one batch" if audit.dynamic else "not measured"
    figures = [
        Figure("findings", f"{len(audit.findings)}", number_of_kinds or "sound"),
        Figure("linears in low precision", f"{sum(row.low for row in rows)} of {len(rows)}", measured),
    ]
    if audit.coverage.products:
        low = [row.operator for row in rows if row.low]
        share = audit.coverage.share(low or [row.operator for row in rows])
        detail = "in low precision" if low else "in linears; nothing is in low precision"
        figures.append(Figure("GEMM FLOPs", percent(share), detail))
    return figures


def _kinds(rows: Iterable[OperatorRow]) -> PageTable:
    """Return the linears whose names differ by numbers only, and whose precision is the same, in one row each."""
    numbers: dict[tuple[str, str, bool], list[str]] = {}
    for row in rows:
        by_precision: dict[str, list[str]] = {}
        for gemm, precision in row.precision.items():
            by_precision.setdefault(precision, []).append(gemm)
        words = "; ".join(f"{', '.join(gemms)}: {precision}" for precision, gemms in by_precision.items())
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.operator)
        numbers.setdefault((pattern, words, row.low), []).append(row.operator)
    lines = [
        [kind, f"{len(names)}" if len(names) > 1 or names == [kind] else names[0], "low" if low else "16 bits", words]
        for (kind, words, low), names in numbers.items()
    ]
    return PageTable("Precision in force", ["linears", "number", "precision", "GEMMs"], lines)


def _operators(rows: Sequence[OperatorRow]) -> PageTable:
    lead = "An operand has as many dB as an ideal cast of its tensor if both numbers are equal; inf: never quantized."
    columns = ["operator", "GEMM", "in force", "dB measured / possible"]
    return PageTable(f"All {plural(len(rows), 'linear')}", columns, operator_lines(rows), lead, folded=True)


def _side_figures(sides: SideComparison) -> list[Figure]:
    """Return the numbers of linears that each side quantizes."""
    unlike = sum(linear.low != sides.rollout[name].low for name, linear in sides.trainer.items())
    detail = "both sides agree" if sides.sound else plural(len(sides.findings), "finding")
    quantized = [
        Figure(f"quantized by the {side}", f"{sum(linear.low for linear in linears.values())} of {len(linears)}")
        for side, linears in (("trainer", sides.trainer), ("rollout", sides.rollout))
    ]
    return [Figure("treated differently", f"{unlike}", detail), *quantized]


def _modules(sides: SideComparison) -> PageTable:
    rows = [[name, f"{by_trainer}", f"{sides.rollout[name]}"] for name, by_trainer in sides.trainer.items()]
    return PageTable(f"All {plural(len(rows), 'linear')}", ["linear", "trainer", "rollout"], rows, folded=True)

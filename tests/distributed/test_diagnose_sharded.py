"""Diagnoses and audits of a model that FSDP2 shards over two processes give the numbers of the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("options", [{"include": ["head"]}, {"measure": "all"}])
def test_each_process_has_the_diagnosis_of_the_whole_model(pair: Callable[..., Any], options: dict[str, Any]) -> None:
    answers = pair("diagnosed", **options)
    assert all(isinstance(answer, tuple) for answer in answers), answers
    (whole, sharded), other = answers
    # The same kernels run on the same layout, so the bits are equal.
    assert sharded == whole and other == answers[0]
    assert len(json.loads(whole)["rows"]) == 6 * (1 if options.get("measure") == "all" else 3)


@pytest.mark.parametrize("key", ["batches", "held_out"])
def test_processes_with_other_batches_are_told(pair: Callable[..., Any], key: str) -> None:
    for answer in pair("diagnosed", differ=key):
        assert answer.startswith(f"ValueError: {key}=...: differ between the processes"), answer


def test_processes_share_no_state(pair: Callable[..., Any], tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    for answer in pair("diagnosed", differ="batches", measure="all", state=state):
        assert answer.startswith(f"ValueError: state={state}: the processes of a sharded model"), answer


@pytest.mark.parametrize("recipe", [None, "fp8_hybrid"])
def test_an_audit_measures_what_was_gathered(pair: Callable[..., Any], recipe: str | None) -> None:
    answers = pair("audited", recipe=recipe)
    assert all(isinstance(answer, list) for answer in answers), answers
    (whole, sharded), other = answers
    assert sharded == whole and other == answers[0]
    assert json.loads(whole)["findings"] == []


def test_an_audit_measures_what_tensor_parallelism_shards(pair: Callable[..., Any]) -> None:
    answers = pair("audited_in_parts")
    assert all(isinstance(answer, list) for answer in answers), answers
    whole, sharded = (json.loads(audit) for audit in answers[0])
    assert answers[1] == answers[0] and len(whole["operators"]) == 7
    for operators in (whole["operators"], sharded["operators"]):
        for operator in operators:  # a sum over two processes is rounded otherwise
            assert operator["measured"]["fprop"].pop("output")[0] > 120
    assert sharded == whole

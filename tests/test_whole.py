"""One run from its words to its page: `gnmr train`, `plan`, `report` and `replay` behind each other."""

from __future__ import annotations

from gnmr.records.reader import read_json, read_jsonl


def test_a_run_is_trained_reported_and_replayed(gnmr, tiny_words, tmp_path):
    words = [*tiny_words, "experiment=act_quant_stress", "training.steps=8", "training.eval_every=4"]
    run, page, sets = tmp_path / "run", tmp_path / "page.html", tmp_path / "sets.jsonl"

    trained = gnmr("train", *words, f"run_dir={run}")
    assert (trained.code, trained.err) == (0, "")
    rows = read_jsonl(run / "steps.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9)) and rows[-1]["loss"] < rows[0]["loss"]
    assert read_json(run / "summary.json")["status"] == "done"

    reported = gnmr("report", str(run), f"html={page}", "--out", str(tmp_path / "report"))
    assert reported.code == 0 and "int4_int8-gnmr" in reported.out
    assert "int4_int8-gnmr" in page.read_text() and "int4_int8-gnmr" in (tmp_path / "report/report.md").read_text()

    replayed = gnmr("replay", str(run), f"out={sets}")
    assert (replayed.code, replayed.err) == (0, "")
    decided = [len(row["active"]) for row in read_jsonl(sets)]  # what step t decides is in force in step t + 1
    assert decided[:-1] == [row["num_active"] for row in rows[1:]] and sum(decided) > 0

"""Scores findings against verdicts on natural traces, which an expert wrote down before findings were run.

    python benchmarks/natural/run.py                    # both halves, from the folder in ETLOOM_DATA
    python benchmarks/natural/run.py --half even        # the half on which rules are improved
    python benchmarks/natural/run.py --only nsys --show # the traces with this in their names, with their findings
    python benchmarks/natural/run.py --write            # update the table of docs/findings.md

Traces that are absent are skipped and counted. The exit status is 1 if a goal below is missed.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import etloom
from etloom.core.errors import EtloomError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "diagnosis"))

from inject.bases import DATA
from verdicts import NONE, VERDICTS, Verdict

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/findings.md"
BEGIN, END = "<!-- natural traces: begin -->", "<!-- natural traces: end -->"
LEAST_FIRST_PCT, MOST_FALSE = 90.0, 0
ALARM_PCT, LEAST_FALSE_PCT = 5.0, 1.0
"""The share of the job from which a finding is a cause where none is right, and where its pattern is ruled out."""
NO_CAUSE = {"unrecorded-time"}
"""Findings that say what is not known."""


@dataclass
class Score:
    """How the answer to one trace compares with its verdict.

    Attributes:
        place: That of the first right answer, 0 for the first one; None if there is none.
        false: Wrong causes of medium or high confidence.
        gain_error_pct: How far the gain lies outside of the verdict's; None without one.
        answers: What was answered, in order.
    """

    verdict: Verdict
    place: int | None = None
    false: list[str] = field(default_factory=list)
    gain_error_pct: float | None = None
    answers: list[str] = field(default_factory=list)

    @property
    def half(self) -> str:
        return ("even", "odd")[zlib.crc32(self.verdict.trace.encode()) % 2]


def find_path(verdict: Verdict) -> Path:
    return (ROOT if verdict.trace.startswith("tests/") else DATA) / verdict.trace


def score_findings(score: Score) -> None:
    """Compare the findings of a trace with its verdict."""
    verdict = score.verdict
    table = etloom.analyze(etloom.open(find_path(verdict)), "findings")
    rows = [row for row in table.iter_rows(named=True) if row["pattern"] not in NO_CAUSE]
    for row in rows:
        row["pct"] = row["pct"] or 0.0 if row["job_gain_pct"] is None else row["job_gain_pct"]
    score.answers = [
        f"{row['pattern']} {(row['cost_ns'] if row['job_gain_ns'] is None else row['job_gain_ns']) / 1e6:.3f} ms"
        f" {row['pct']:.1f} % {row['confidence']} rank {row['rank']}"
        for row in rows
    ]
    sure = [row for row in rows if row["confidence"] != "low"]
    score.false = [
        row["pattern"] for row in sure if row["pattern"] in verdict.never and row["pct"] >= LEAST_FALSE_PCT
    ]
    places = [i for i, row in enumerate(rows) if row["pattern"] in verdict.first]
    alarms = [
        row["pattern"] for row in sure if row["pct"] >= ALARM_PCT and row["pattern"] not in verdict.first
    ]
    if NONE not in verdict.first or places[:1] == [0]:
        score.place = places[0] if places else None
    elif not alarms:
        score.place = 0
    else:
        score.place = places[0] if places else None
        score.false += [name for name in alarms if name not in score.false]
    if places and verdict.gain_ms:
        row = rows[places[0]]
        gain = (row["cost_ns"] if row["job_gain_ns"] is None else row["job_gain_ns"]) / 1e6
        least, most = verdict.gain_ms
        score.gain_error_pct = 100 * max(least - gain, gain - most, 0.0) / (least if gain < least else most)


def score_hang(score: Score) -> None:
    """Compare the ranks that a hang's verdict names."""
    report = etloom.hangs(find_path(score.verdict))
    score.answers = [report.sentence]
    if report.cause and {str(rank) for rank in report.cause.ranks} == set(score.verdict.first):
        score.place = 0


def score_memory(score: Score) -> None:
    """Compare the place that holds most memory at the peak of the recording."""
    table = etloom.analyze(etloom.open(find_path(score.verdict)), "memory-timeline")
    row = table.sort("peak_bytes", descending=True).row(0, named=True)
    score.answers = [
        f"{row['operator']} {row['operator_bytes'] / 1e9:.2f} of {row['peak_bytes'] / 1e9:.2f} GB"
    ]
    if any(place in (row["operator"] or "") for place in score.verdict.first):
        score.place = 0


QUESTIONS = {"findings": score_findings, "hangs": score_hang, "memory-timeline": score_memory}


def score_trace(verdict: Verdict) -> Score:
    score = Score(verdict)
    try:
        QUESTIONS[verdict.question](score)
    except EtloomError as error:
        score.answers = [f"{type(error).__name__}: {error}"]
        # A refusal in one line is right where nothing can be decided.
        score.place = 0 if NONE in verdict.first else None
    return score


def describe(scores: Sequence[Score]) -> list[str]:
    """Return a row of the table: traces, first, among three, false causes, error of the gain."""
    first = sum(score.place == 0 for score in scores)
    third = sum(score.place is not None and score.place < 3 for score in scores)
    false = sum(bool(score.false) for score in scores)
    errors = [score.gain_error_pct for score in scores if score.gain_error_pct is not None]
    inside = sum(error == 0 for error in errors)
    count = max(1, len(scores))
    return [
        str(len(scores)),
        f"{100 * first / count:.0f} %",
        f"{100 * third / count:.0f} %",
        str(false),
        f"{inside} of {len(errors)}",
    ]


def write_table(scores: Sequence[Score]) -> str:
    """Return the table of both halves, all, and those whose cause has to be named, as Markdown."""
    head = [
        "half",
        "traces",
        "right cause first",
        "among three",
        "traces with a false cause",
        "gain in the expected range",
    ]
    rows = [head, ["---"] * len(head)]
    for half in ("even", "odd"):
        rows.append([half, *describe([score for score in scores if score.half == half])])
    rows.append(["all", *describe(scores)])
    rows.append(["all that have a cause", *describe([s for s in scores if NONE not in s.verdict.first])])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def update_page(table: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Score findings against verdicts on natural traces")
    parser.add_argument("--half", choices=("odd", "even"), help="only this half of the traces")
    parser.add_argument("--only", default="", help="only traces with this in their names")
    parser.add_argument(
        "--show", action="store_true", help="print the answers of every trace, not of misses only"
    )
    parser.add_argument("--write", action="store_true", help="update the table of docs/findings.md")
    options = parser.parse_args()
    chosen = [verdict for verdict in VERDICTS if options.only in verdict.trace]
    chosen = [verdict for verdict in chosen if options.half in (None, Score(verdict).half)]
    scores = []
    for verdict in chosen:
        if not find_path(verdict).exists():
            continue
        score = score_trace(verdict)
        scores.append(score)
        is_right = score.place == 0 and not score.false and not score.gain_error_pct
        print(f"{'ok  ' if is_right else 'MISS'} {score.half:4} {verdict.trace}", flush=True)
        if options.show or not is_right:
            print(f"     expected {', '.join(verdict.first)}, gain {verdict.gain_ms}; false: {score.false}")
            print(*(f"     {answer}" for answer in score.answers[:5]), sep="\n", flush=True)
    if absent := len(chosen) - len(scores):
        print(f"{absent} of {len(chosen)} traces are absent and were skipped")
    if not scores:
        raise SystemExit(f"{DATA}: no traces; set ETLOOM_DATA to their folder")
    table = write_table(scores)
    print(f"\n{table}")
    if options.write:
        update_page(table)
    first = 100 * sum(score.place == 0 for score in scores) / len(scores)
    sys.exit(0 if first >= LEAST_FIRST_PCT and not any(score.false for score in scores) else 1)


if __name__ == "__main__":
    main()

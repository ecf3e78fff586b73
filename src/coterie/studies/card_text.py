"""A study's outcome as text: its table, the claims, the cost, and where it was run."""

import math
from collections.abc import Sequence
from statistics import mode
from typing import NamedTuple

from ..views import words
from ..views.words import NONE
from .outcome import FAILS, HOLDS, NOT_RUN, Judged, StudyNumber, StudyOutcome
from .records import CellRecord
from .study import StudyColumn

# ---- warnings ------------------------------------------------------------------------------------

WARNING = "Careful:"  # what stands before each of them


def warnings(outcome: StudyOutcome, column: StudyColumn) -> list[str]:
    """One sentence per alarm and per group of methods with equal models, with its seeds."""
    found: dict[str, set[int]] = {}
    alike: dict[tuple[int, str], list[str]] = {}  # methods that predict with the same models
    for method in column.config.methods():
        for record in outcome.of(column, method.label):
            for alarm in record.summary.get("alarms", ()):
                found.setdefault(alarm["text"].rstrip("."), set()).add(record.seed)
            if digest := record.summary.get("digest"):
                alike.setdefault((record.seed, digest), []).append(words.label(method.label))
    for (seed, _), labels in alike.items():
        if len(labels) > 1:
            text = f"{', '.join(labels[:-1])} and {labels[-1]} end with the same models"
            found.setdefault(text, set()).add(seed)
    return [
        f"{text} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))})"
        for text, seeds in found.items()
    ]


MARKS = {HOLDS: "✓", FAILS: "✗"}


def markdown(outcome: StudyOutcome, command: str = "") -> str:
    """The outcome in Markdown; ``command`` is what a reader types to repeat it."""
    study = outcome.study
    done, wanted = outcome.counts
    lines = [f"# {study.name} {study.title}", ""]
    typed = f"`{command}`: " if command else ""
    lines += [f"{typed}{done} of {wanted} runs. State: **{outcome.state}**.", ""]
    lines += [*(f"- {note}" for note in study.notes), ""] if study.notes else []
    found = study_table(outcome)
    lines += [*(f"- {text}" for text in found.about), ""] if found.about else []
    if found.rows:
        lines += words.markdown(found.heads, found.rows, "lr")
    lines += ["", f"Not run: {', '.join(found.missing)}."] if found.missing else []
    lines += [""]
    if told := careful(outcome):
        lines += [*(f"- **{WARNING}** {text}" for text in told), ""]
    if outcome.judged:
        lines += ["## Claims", "", *(f"- {line}" for line in _short_claims(outcome)), ""]
    keys = {cell.key for cell in study.cells()}
    if used := [record for key, record in outcome.records.items() if key in keys]:
        seeds = ", ".join(map(str, sorted({record.seed for record in used})))
        lines.append(f"Seeds {seeds}. Run on: {'; '.join(_environments(used))}.")
    return "\n".join(lines).rstrip() + "\n"


def careful(outcome: StudyOutcome) -> list[str]:
    """Each kind of warning once, up to its colon, with the columns that have it."""
    found: dict[str, dict[str, None]] = {}
    for column in outcome.study.columns:
        for text in warnings(outcome, column):
            found.setdefault(text.partition(":")[0], {})[column.name] = None
    return [f"{text}: {', '.join(names)}." for text, names in found.items()]


class StudyTable(NamedTuple):
    """One row per method that was run, one column per column; as Markdown has them."""

    about: list[str]  # what the columns show, and how to read a cell
    heads: list[str]
    rows: list[list[str]]
    missing: list[str]  # names of the columns and methods that were not run


def study_table(outcome: StudyOutcome) -> StudyTable:
    """The table of a study, as its page and the terminal show it."""
    rows: dict[str, dict[str, StudyNumber]] = {}
    for entry in outcome.entries:
        rows.setdefault(entry.method, {})[entry.column] = entry
    ran = {method: row for method, row in rows.items() if any(e.seeds for e in row.values())}
    names = [c.name for c in outcome.study.columns]
    shown = [n for n in names if any(n in row and row[n].seeds for row in ran.values())]
    usual = mode([e.seeds for row in ran.values() for e in row.values() if e.seeds] or [0])
    missing = [n for n in names if n not in shown]
    return StudyTable(
        _abouts(outcome, shown, usual) if shown else [],
        ["method", *shown],
        [
            [words.label(method), *(_cell(row.get(name), usual) for name in shown)]
            for method, row in ran.items()
        ],
        missing + [words.label(method) for method in rows if method not in ran],
    )


def _abouts(outcome: StudyOutcome, shown: list[str], usual: int) -> list[str]:
    """What the columns show, columns of one kind together, and how to read a cell."""
    about: dict[str, dict[str, list[str]]] = {}
    for column in outcome.study.columns:
        if column.name in shown:
            numbers = about.setdefault(_experiment(column), {})
            numbers.setdefault(_number(column), []).append(column.name)
    lines = []
    for experiment, numbers in about.items():
        alone = len(about) == len(numbers) == 1
        parts = [
            number if alone else f"{', '.join(names)} ({number})"
            for number, names in numbers.items()
        ]
        lines.append(f"{experiment}: {'; '.join(parts)}.")
    legend = f"{usual} seed{'s' * (usual != 1)} unless a cell says otherwise."
    if any(entry.printed is not None for entry in outcome.entries):
        bound = f"{outcome.study.tolerance:g}"
        legend += f" Ours (the paper's number); bold: within the paper's deviation or {bound}."
    return [*lines, legend]


def _cell(entry: StudyNumber | None, usual: int) -> str:
    """Ours and the paper's number, and how many seeds if that is not the usual number."""
    if entry is None or not entry.seeds:
        return NONE
    ours = spread(entry.ours.mean, entry.ours.deviation)
    if entry.inside:
        ours = f"**{ours}**"
    if entry.printed:
        ours += f" ({spread(entry.printed.mean, None)})"
    return ours if entry.seeds == usual else f"{ours}, seeds: {entry.seeds}"


def _number(column: StudyColumn) -> str:
    clients = column.clients
    return column.number + (f" of client {', '.join(map(str, clients))}" if clients else "")


def _experiment(column: StudyColumn) -> str:
    config = column.config
    names = (config.data.name, config.partition.name, config.model.name)
    return f"{', '.join(names)}, {config.run.rounds} rounds"


def spread(mean: float, deviation: float | None) -> str:
    """A mean with its deviation, if there is one."""
    if math.isnan(mean):
        return NONE
    text = f"{mean:.2f}"
    if deviation is not None and not math.isnan(deviation):
        text += f" ± {deviation:.2f}"
    return text.replace("-", words.MINUS)


def claim_lines(outcome: StudyOutcome) -> list[str]:
    """One line per claim: whether it holds, the numbers, and the cause of a failure."""
    return [_claim(one, "; ".join(one.evidence)) for one in outcome.judged]


def _claim(one: Judged, numbers: str) -> str:
    told = one.state if one.ours is None else f"{one.state} (ours: {one.ours.state})"
    text = f"{MARKS.get(one.state, '·')} {told}: {one.claim.text}"
    if numbers:
        text += f" ({numbers})"
    if one.claim.cause and (one.state == FAILS or one.leans is False):
        text += f". Cause: {one.claim.cause}"
    return text


def _short_claims(outcome: StudyOutcome) -> list[str]:
    """The claims that were judged; the numbers of one column only, as the table has the others."""
    judged = [one for one in outcome.judged if one.state != NOT_RUN]
    lines = [_claim(one, one.evidence[0] if len(one.evidence) == 1 else "") for one in judged]
    rest = len(outcome.judged) - len(judged)
    return [*lines, f"{rest} of {len(outcome.judged)} not judged yet"] if rest else lines


def _environments(records: Sequence[CellRecord]) -> list[str]:
    """Where the runs were computed, one line per machine, with the commits by engine."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for record in records:
        where = record.environment
        commit = where.get("git_commit")  # None in a copy of the source that is no checkout
        code = commit[:7] if commit else f"source {str(where.get('source'))[:10]}"
        name = where.get("device_name") or where.get("device")
        machine = f"{name}, {where.get('precision')}, torch {where.get('torch')}"
        found.setdefault(machine, {}).setdefault(str(where.get("engine")), {})[code] = None
    used = {
        machine: (f"{engine} at {', '.join(commits)}" for engine, commits in engines.items())
        for machine, engines in found.items()
    }
    return [f"{machine} ({'; '.join(some)})" for machine, some in used.items()]

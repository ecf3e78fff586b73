"""A study's outcome as text: its table, the claims, the cost, and where it was run."""

import math
from collections.abc import Sequence
from statistics import mode

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
    """The outcome in Markdown, one table with a row per method and a column per column.

    The page (``study_page``) has one table per column, with its costs and tests. ``command`` is
    what a reader types to repeat it.
    """
    study = outcome.study
    done, wanted = outcome.counts
    lines = [f"# {study.name} {study.title}", ""]
    typed = f"`{command}`: " if command else ""
    lines += [f"{typed}{done} of {wanted} runs. State: **{outcome.state}**.", ""]
    lines += [*(f"- {note}" for note in study.notes), ""] if study.notes else []
    lines += [*_table(outcome), ""]
    careful: dict[str, dict[str, None]] = {}  # each kind once, up to its colon, with its columns
    for column in study.columns:
        for text in warnings(outcome, column):
            careful.setdefault(text.partition(":")[0], {})[column.name] = None
    lines += [f"- **{WARNING}** {text}: {', '.join(names)}." for text, names in careful.items()]
    lines += [""] if careful else []
    if outcome.judged:
        lines += ["## Claims", "", *(f"- {line}" for line in _short_claims(outcome)), ""]
    keys = {cell.key for cell in study.cells()}
    if used := [record for key, record in outcome.records.items() if key in keys]:
        seeds = ", ".join(map(str, sorted({record.seed for record in used})))
        lines.append(f"Seeds {seeds}. Run on: {'; '.join(_environments(used))}.")
    return "\n".join(lines).rstrip() + "\n"


def _table(outcome: StudyOutcome) -> list[str]:
    """One row per method that was run, and the names of the columns and methods that were not."""
    rows: dict[str, dict[str, StudyNumber]] = {}
    for entry in outcome.entries:
        rows.setdefault(entry.method, {})[entry.column] = entry
    ran = {method: row for method, row in rows.items() if any(e.seeds for e in row.values())}
    names = [c.name for c in outcome.study.columns]
    shown = [n for n in names if any(n in row and row[n].seeds for row in ran.values())]
    usual = mode([e.seeds for row in ran.values() for e in row.values() if e.seeds] or [0])
    lines = _abouts(outcome, shown, usual)
    if ran:
        cells = (
            [words.label(method), *(_cell(row.get(name), usual) for name in shown)]
            for method, row in ran.items()
        )
        lines += words.markdown(["method", *shown], cells, "lr")
    missing = [n for n in names if n not in shown]
    missing += [words.label(method) for method in rows if method not in ran]
    return lines + (["", f"Not run: {', '.join(missing)}."] if missing else [])


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
        lines.append(f"- {experiment}: {'; '.join(parts)}.")
    legend = f"- {usual} seed{'s' * (usual != 1)} unless a cell says otherwise."
    if any(entry.printed is not None for entry in outcome.entries):
        bound = f"{outcome.study.tolerance:g}"
        legend += f" Ours (the paper's number); bold: within the paper's deviation or {bound}."
    lines += [legend] if lines else []
    return [*lines, ""] if lines else []


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


def about_column(column: StudyColumn) -> str:
    """Which number a column shows, and of which experiment."""
    return f"{_number(column)}; {_experiment(column)}."


def _number(column: StudyColumn) -> str:
    clients = column.clients
    return column.number + (f" of client {', '.join(map(str, clients))}" if clients else "")


def _experiment(column: StudyColumn) -> str:
    config = column.config
    names = (config.data.name, config.partition.name, config.model.name)
    return f"{', '.join(names)}, {config.run.rounds} rounds"


def column_table(outcome: StudyOutcome, column: StudyColumn) -> list[list[str]]:
    """The heads and rows of a column's table; empty if nothing is known of it."""
    entries = [entry for entry in outcome.entries if entry.column == column.name]
    shown = [entry for entry in entries if entry.seeds or entry.printed is not None]
    if not shown:
        return []
    printed = any(entry.printed is not None for entry in entries)
    paper, beside = (["paper"], ["difference", "inside"]) if printed else ([], [])
    heads = ["method", *paper, "ours", *beside, "seeds", "s per run", "bytes per client"]
    return [heads, *(_row(entry, printed) for entry in shown)]


def _row(entry: StudyNumber, printed: bool) -> list[str]:
    ours = spread(entry.ours.mean, entry.ours.deviation) if entry.seeds else "not run"
    seconds = NONE if math.isnan(entry.seconds) else f"{entry.seconds:.1f}"
    cost = [f"{entry.seeds}", seconds, words.size(entry.bytes_per_client)]
    if not printed:
        return [words.label(entry.method), ours, *cost]
    gap = entry.difference
    beside = [
        NONE if math.isnan(gap) else f"{gap:+.2f}".replace("-", words.MINUS),
        {None: NONE, True: "yes", False: "no"}[entry.inside],
    ]
    paper = entry.printed and spread(entry.printed.mean, entry.printed.deviation)
    return [words.label(entry.method), paper or NONE, ours, *beside, *cost]


def spread(mean: float, deviation: float | None) -> str:
    """A mean with its deviation, if there is one."""
    if math.isnan(mean):
        return NONE
    text = f"{mean:.2f}"
    if deviation is not None and not math.isnan(deviation):
        text += f" ± {deviation:.2f}"
    return text.replace("-", words.MINUS)


def tests(outcome: StudyOutcome, column: StudyColumn) -> str:
    """Wilcoxon's test of the best method against every other one; empty if there is no other."""
    entries = [e for e in outcome.entries if e.column == column.name and e.seeds]
    entries = [e for e in entries if not math.isnan(e.ours.mean)]
    score = column.number.startswith(("accuracy", "bmta", "best_of_rounds"))
    if len(entries) < 2 or column.clients or not score:
        return ""
    best = max(entries, key=lambda entry: entry.ours.mean).method
    found = []
    for entry in entries:
        tested = outcome.paired(column, best, entry.method) if entry.method != best else None
        if tested is not None and tested.n:
            found.append(f"{words.label(entry.method)} {words.chance(tested.p)} (n = {tested.n})")
    name = words.label(best)
    return f"Signed-rank test over clients, {name} against: {'; '.join(found)}." if found else ""


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

"""A study's outcome as text: its table, the claims, the cost, and where it was run."""

import math
from collections.abc import Iterator, Mapping
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
    found: dict[str, list[int]] = {}
    for text, seed in (*_alarms(outcome, column), *_equal(outcome, column)):
        found.setdefault(text, []).append(seed)
    return [f"{text} ({_named(seeds)})" for text, seeds in found.items()]


def _alarms(outcome: StudyOutcome, column: StudyColumn) -> Iterator[tuple[str, int]]:
    for method in column.config.methods():
        for record in outcome.of(column, method.label):
            for alarm in record.summary.get("alarms", ()):
                yield alarm["text"].rstrip("."), record.seed


def _equal(outcome: StudyOutcome, column: StudyColumn) -> Iterator[tuple[str, int]]:
    """Methods whose clients predict with the same models, bit for bit."""
    alike: dict[tuple[int, str], list[str]] = {}
    for method in column.config.methods():
        for record in outcome.of(column, method.label):
            digest = record.summary.get("digest")
            if digest:
                alike.setdefault((record.seed, digest), []).append(words.label(method.label))
    for (seed, _), labels in alike.items():
        if len(labels) > 1:
            yield f"{', '.join(labels[:-1])} and {labels[-1]} end with the same models", seed


def _named(seeds: list[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"


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
    careful = _careful(outcome)
    lines += [*careful, ""] if careful else []
    claims = _short_claims(outcome)
    if claims:
        lines += ["## Claims", "", *(f"- {line}" for line in claims), ""]
    lines += [_where(outcome)]
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


def _careful(outcome: StudyOutcome) -> list[str]:
    """Each kind of warning once, up to its colon, with the columns that it holds for."""
    found: dict[str, dict[str, None]] = {}
    for column in outcome.study.columns:
        for text in warnings(outcome, column):
            found.setdefault(text.partition(":")[0], {})[column.name] = None
    return [f"- **{WARNING}** {text}: {', '.join(names)}." for text, names in found.items()]


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


def _where(outcome: StudyOutcome) -> str:
    keys = {cell.key for cell in outcome.study.cells()}
    used = {key: record for key, record in outcome.records.items() if key in keys}
    if not used:
        return ""
    seeds = sorted({record.seed for record in used.values()})
    return f"Seeds {', '.join(map(str, seeds))}. Run on: {'; '.join(_environments(used))}."


def _environments(records: Mapping[str, CellRecord]) -> list[str]:
    """Where the runs were computed, one line per machine, with the commits by engine."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for record in records.values():
        where = record.environment
        commit = where.get("git_commit")  # None in a copy of the source that is no checkout
        code = commit[:7] if commit else f"source {str(where.get('source'))[:10]}"
        name = where.get("device_name") or where.get("device")
        machine = f"{name}, {where.get('precision')}, torch {where.get('torch')}"
        found.setdefault(machine, {}).setdefault(str(where.get("engine")), {})[code] = None
    lines = []
    for machine, engines in found.items():
        used = [f"{engine} at {', '.join(commits)}" for engine, commits in engines.items()]
        lines.append(f"{machine} ({'; '.join(used)})")
    return lines

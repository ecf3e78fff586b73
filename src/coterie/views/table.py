"""The columns of a comparison's table: one row of COLUMNS for each."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from ..core.inference import MeanGain
from ..core.metrics import METRICS
from ..errors import ConfigError, did_you_mean
from ..runs.kinds import number
from ..runs.run import LOCAL
from ..runs.summary import BY_VALIDATION, LAST, score_field
from . import judgement, words
from .clinical import companions

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from ..runs.run import Run
    from .comparison import Comparison, MethodRow


class Heading(NamedTuple):
    """The heading of a column and what the column means."""

    head: str
    meaning: str = ""


@dataclass(frozen=True)
class TableColumn:
    """One column of the table: its heading, its meaning, its cells and when it is shown.

    A column with a ``name`` can also be asked for by it.
    ``{unit}`` and ``{metric}`` in the texts are replaced by the comparison's unit and metric.
    """

    head: str
    meaning: str
    cell: Callable[["MethodRow", "Comparison"], str]
    shown: Callable[["Comparison"], bool] = lambda _: True
    name: str = ""

    def heading(self, comparison: "Comparison") -> Heading:
        """The heading for this comparison, with unit and metric filled in."""
        metric = METRICS[comparison.metric]
        title = f"{metric.title}, {metric.unit}," if metric.unit else metric.title
        unit = words.unit(comparison.metric).strip()
        texts = (text.format(unit=unit, metric=title) for text in (self.head, self.meaning))
        return Heading(*(text.strip() for text in texts))


def _some_serve_few(comparison: "Comparison") -> bool:
    """Whether the methods serve different numbers of clients; the table then shows the numbers."""
    return len({row.served for row in comparison.rows}) > 1


def _score(name: str) -> Callable[["MethodRow", "Comparison"], str]:
    """A function that gives the cell for a field of the row that is a score over seeds."""
    return lambda row, on: words.spread(getattr(row, name), on.metric)


def _mean(row: "MethodRow", on: "Comparison") -> str:
    """The mean, and the texts that alarms put beside it, each once."""
    beside = dict.fromkeys(f"({alarm.beside})" for alarm in row.alarms if alarm.beside)
    return " ".join([words.spread(row.mean, on.metric), *beside])


def _worse_off(row: "MethodRow", on: "Comparison") -> str:
    if row.method == LOCAL:
        return words.NONE
    if on.folds is not None:  # a client is one, however many folds it has
        gained = on.site_gain(row.method)
        return f"{(gained < 0).sum()} of {np.isfinite(gained).sum()}"
    clients = row.compared // max(1, len(on.of_method(row.method)))
    return f"{words.count(row.worse_than_local)} of {clients}"


COLUMNS = (
    TableColumn("method", "", lambda row, _: words.label(row.method)),
    TableColumn("mean {unit}", "mean {metric} over clients, last round", _mean),
    TableColumn(
        "federated %",
        "accuracy of the global model on the federated test set, last round",
        lambda row, _: words.spread(row.federated_accuracy, "accuracy"),
        shown=lambda on: any(not math.isnan(row.federated_accuracy.mean) for row in on.rows),
    ),
    TableColumn(
        "serves",
        "clients that have a model of this method; the star compares methods that serve the same",
        lambda row, _: str(row.served),
        shown=_some_serve_few,
    ),
    TableColumn(
        "alone",
        "the mean of Local over the clients that the method serves",
        lambda row, on: words.NONE if row.method == LOCAL else words.spread(row.alone, on.metric),
        shown=_some_serve_few,
    ),
    TableColumn(
        "worst tenth",
        "mean of the tenth of the clients with the worst scores, last round",
        _score("worst_tenth"),
    ),
    TableColumn(
        "worse off", "clients worse off than with their own local model, per run", _worse_off
    ),
    TableColumn(
        "bytes per client",
        "bytes that one client sends and receives for training, whole run",
        lambda row, _: words.size(row.bytes_per_client.mean),
    ),
    TableColumn(
        "in group",
        "share of the weight on other clients, over all rounds, inside the true group",
        lambda row, _: words.part(row.in_group_weight.mean),
        shown=lambda on: any(run.roster.groups is not None for run in on.runs),
    ),
    TableColumn(
        "best by val.",
        "mean in the round with the best validation score",
        _score("best_by_validation"),
    ),
    TableColumn(
        "best on test",
        "mean in the best round on test data (BMTA): optimistic",
        _score("best_on_test"),
    ),
    *(
        TableColumn(head, meaning, _score(name), shown=lambda _: False, name=name)
        for name, head, meaning in (
            ("weighted_mean", "pooled", "mean weighted by test samples, last round"),
            ("best_tenth", "best tenth", "mean of the tenth of the clients with the best scores"),
            ("variance", "variance", "variance over clients, last round"),
            ("variance_best_tenth", "VarB", "variance over the best tenth of the clients"),
            ("variance_worst_tenth", "VarW", "variance over the worst tenth of the clients"),
        )
    ),
)


def checked_columns(names: Iterable[str]) -> tuple[str, ...]:
    """The names of columns that are asked for; refuses one that there is not."""
    known = [column.name for column in COLUMNS if column.name]
    for name in (found := tuple(names)):
        if name not in known:
            raise ConfigError(f"columns: no column is called '{name}'; {did_you_mean(name, known)}")
    return found


# ---- the table of a comparison, as plain text, for a terminal and as HTML; all have the same cell


class Line(NamedTuple):
    """One row of the table: the cells of one method."""

    cells: tuple[str, ...]
    best: bool = False  # whether its mean is the best among methods that serve the same clients
    local: bool = False
    alarm: bool = False


class Table(NamedTuple):
    """Columns and lines; the first cell of each line is the method's name."""

    columns: tuple[Heading, ...]
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, heads: Iterable[str], lines: Iterable[Line]) -> "Table":
        """A table whose headings need no explanation."""
        return cls(tuple(map(Heading, heads)), tuple(lines))


def methods_table(comparison: "Comparison", further: Sequence[str] = ()) -> Table:
    """The table of a comparison, with the further columns of these names."""
    best = comparison.best_on_test
    columns = [c for c in COLUMNS if c.name in further or c.shown(comparison)]
    lines = tuple(
        Line(
            tuple(column.cell(row, comparison) for column in columns),
            best=row.method == best,
            local=row.method == LOCAL,
            alarm=bool(row.alarms),
        )
        for row in comparison.rows
    )
    return Table(tuple(column.heading(comparison) for column in columns), lines)


def tests(comparison: "Comparison") -> list[tuple[str, ...]]:
    """For every method but Local: its mean gain over Local, and the tests of that gain."""
    lines: list[tuple[str, ...]] = []
    for row in comparison.rows:
        found = (comparison.judgements or {}).get(row.method)
        if row.paired is None:
            continue
        means = [getattr(found, name, None) for name in judgement.QUESTIONS]
        cells = [_gain_cells(mean, comparison.metric) for mean in means]
        if found is None or not found.tested:
            cells[0] = (cells[0][0], words.NONE)
        lines.append(
            (
                words.label(row.method),
                *(cell for some in cells for cell in some),
                str(row.paired.n),
                words.chance(row.paired.p),
            )
        )
    return lines


def _gain_cells(mean: MeanGain | None, metric: str) -> tuple[str, str]:
    """A mean gain with its interval, and its p-value."""
    if mean is None:
        return words.NONE, words.NONE
    return words.gain_cell(mean.gain, mean.low, mean.high, metric), words.chance(mean.p)


FOR_USE = "The model for use is that of {}: its validation score is the median of the folds."
FOLDS = (
    "The answer is about the mean of the models of {} folds (as many trainings), each tested on "
    "rows that it never saw."
)
MERGED = (
    "merge_val = true: methods that do not use validation data otherwise were trained on it too, "
    "so no round is chosen by validation."
)


def notes(comparison: "Comparison") -> list[str]:
    """What stands under the table: what folds answer, what belongs beside an AUC, limits."""
    found, choice = [], comparison.choice
    if comparison.folds is not None:
        found.append(FOLDS.format(comparison.folds))
        if choice is not None:
            fold = judgement.median_fold(comparison, choice.method)
            found[0] += " " + FOR_USE.format(f"{fold.method}/seed-{fold.seed}")
    for method in dict.fromkeys([LOCAL if choice is None else choice.method, LOCAL]):
        if said := companions(comparison.told(method)):
            which = f" ({judgement.models_of(comparison)})" if len(comparison.seeds) > 1 else ""
            found.append(f"{words.label(method)}{which}, all test rows: {said}.")
    found += [MERGED] if any(run.merge_val for run in comparison.runs) else []
    lacking = {c: None for run in comparison.runs for c in run.roster.without_validation}
    if lacking and MERGED not in found:
        who = words.listing(list(lacking))
        found.append(f"Best by validation is chosen without {who}: no validation data.")
    spent = {run.method: spent_text(run.summary) for run in comparison.runs}
    return found + [f"{words.label(method)}: {text}" for method, text in spent.items() if text]


def spent_text(summary: Mapping[str, Any]) -> str:
    """What a run spent of its clients' privacy, and what that does not cover; or nothing."""
    found = summary.get("privacy")
    if found is None:
        return ""
    most = max(map(number, found["epsilon"].values()))
    how = "simulated: its noise follows from the seed" if found["simulated"] else "at every site"
    said = (
        f"private with ε ≤ {most:.3g}" if math.isfinite(most) else "clipped without noise (ε = ∞)"
    )
    return (
        f"{said} at δ = {found['delta']:g}, {how}; noise {found['noise']:.4g}, clip "
        f"{found['clip']:g}. Training samples only. Without noise: {found['leaves']}; scores, and "
        "what stays with a client."
    )


def to_text(shown: Table) -> str:
    """The table as plain text; ``*`` marks the best mean, ``!`` a row with an alarm."""
    heads = ["", *(column.head for column in shown.columns)]
    marks = ("!" if line.alarm else "*" if line.best else " " for line in shown.lines)
    body = [[mark, *line.cells] for mark, line in zip(marks, shown.lines, strict=True)]
    widths = [max(map(len, cells)) for cells in zip(heads, *body, strict=True)]
    lines = [_aligned(heads, widths), "  ".join("─" * width for width in widths)]
    return "\n".join([*lines, *(_aligned(cells, widths) for cells in body)])


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([*left, *right]).rstrip()


def to_rich(shown: Table) -> "RichTable":
    """The table for a terminal, in colour if it has any; narrow, to fit 80 columns."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(shown.columns):
        head = column.head.replace(" ", "\n")
        made.add_column(head, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in shown.lines:
        style = "red" if line.alarm else "bold green" if line.best else "dim" if line.local else ""
        made.add_row(*(Text(cell.replace(" ± ", "±"), style) for cell in line.cells))
    return made


_HEAD = Markup('<th scope="col" title="{}">{}</th>')
_ROW = Markup('<tr class="{}"><th scope="row">{}</th>{}</tr>')


def to_html(shown: Table) -> Markup:
    """The table as HTML, for a page or a notebook; every text is escaped."""
    head = Markup("").join(_HEAD.format(c.meaning, c.head) for c in shown.columns)
    body = Markup("\n").join(
        _ROW.format(
            " ".join(name for name in ("best", "local", "alarm") if getattr(line, name)),
            line.cells[0],
            Markup("").join(Markup("<td>{}</td>").format(cell) for cell in line.cells[1:]),
        )
        for line in shown.lines
    )
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, body)


def comparison_text(comparison: "Comparison", further: Sequence[str] = ()) -> str:
    """The table, with further columns, and the verdict, as ``repr`` shows them."""
    seeds = len(comparison.seeds)
    over = f", mean ± deviation over {seeds} {comparison.trainings}" if seeds > 1 else ""
    title = f"{METRICS[comparison.metric].title} of {len(comparison.methods)} methods{over}"
    shown = to_text(methods_table(comparison, further))
    return "\n\n".join([title, shown, *notes(comparison), comparison.verdict])


def comparison_html(comparison: "Comparison") -> str:
    """The table and the verdict, as a notebook shows them."""
    body = Markup("<p>{}</p>{}").format(comparison.verdict, to_html(methods_table(comparison)))
    said = Markup("").join(Markup("<p>{}</p>").format(note) for note in notes(comparison))
    return str(Markup("<div>{}{}</div>").format(body, said))


def run_facts(result: "Run") -> list[tuple[str, str]]:
    """The numbers of one run, each with its name."""
    found, metric = result.summary, result.metric

    def text(value: float | None) -> str:
        return words.NONE if value is None else words.number(float(value), metric)

    last = found[score_field(LAST, metric)]
    traffic = (found["bytes_up"] + found["bytes_down"]) / max(1, found["clients"])
    inside = found["in_group_weight"]
    return [
        (f"mean {METRICS[metric].title}", f"{text(last)}{words.unit(metric)}"),
        *([("all test rows", beside)] if (beside := companions([result])) else []),
        ("worst tenth", text(found["worst_tenth"])),
        ("best by validation", text(found[score_field(BY_VALIDATION, metric)])),
        *([("merge_val", "true: trained on validation data too")] if found["merge_val"] else []),
        ("best on test", text(found["bmta"])),
        ("each client's best round", text(found["best_of_rounds"])),
        ("bytes per client", words.size(traffic)),
        ("own models", _seen(result)),
        ("weight in group", words.part(inside)),
        ("seconds", f"{found['seconds']:.1f}"),
        ("digest", str(found["digest"])[:16]),
        ("folder", str(result.path or words.NONE)),
        *([("privacy", spent_text(found))] if found.get("privacy") else []),
        *(("alarm", alarm["text"]) for alarm in found["alarms"]),
    ]


def _seen(result: "Run") -> str:
    """How many others had a client's own model."""
    from .reliance import seen_by

    most = int(seen_by(result).max(initial=0))
    return f"each seen by up to {most} other clients" if most else "seen by no other client"


def _run_title(result: "Run") -> str:
    found = result.summary
    return (
        f"{words.label(result.method)}: {found['rounds']} rounds, {found['clients']} clients, "
        f"seed {result.seed}"
    )


def run_text(result: "Run") -> str:
    """One run as ``repr`` shows it."""
    facts = run_facts(result)
    width = max(len(name) for name, _ in facts)
    return "\n".join([_run_title(result), *(f"  {name:<{width}}  {text}" for name, text in facts)])


# ---- the table of a comparison as Markdown and LaTeX; both have the cells of the terminal --------

_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", words.MINUS: "$-$", words.NONE: "--", "∞": r"$\infty$", "²": "$^2$"},
}


def to_markdown(shown: Table) -> str:
    """A table of GitHub's Markdown; the best mean is bold.

    Texts are escaped so that nothing in them is read as Markdown or HTML.
    """
    heads = [_markdown(column.head) for column in shown.columns]
    body = (_marked([*map(_markdown, line.cells)], line, "**{}**") for line in shown.lines)
    return "\n".join(words.markdown(heads, body, "lr")) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|&~!])", r"\\\1", text)


def _marked(cells: list[str], line: Line, bold: str) -> list[str]:
    """The cells, with the method and the mean in bold if the mean is the best."""
    return [bold.format(cell) for cell in cells[:2]] + cells[2:] if line.best else cells


def to_latex(shown: Table) -> str:
    r"""A ``tabular`` with the rules of the package booktabs; the best mean is bold."""
    columns = "l" + "r" * (len(shown.columns) - 1)
    heads = [_latex(column.head) for column in shown.columns]
    body = [_marked([*map(_latex, line.cells)], line, r"\textbf{{{}}}") for line in shown.lines]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _row(heads), r"\midrule"]
    lines += [*map(_row, body), r"\bottomrule", r"\end{tabular}"]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(mark, mark) for mark in text)


FORMATS: dict[str, Callable[[Table], str]] = {
    "markdown": to_markdown,
    "latex": to_latex,
}

"""The table of a comparison, as plain text, for a terminal and as HTML; all have the same cells."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from ..core.metrics import METRICS
from ..results.judgement import LOCAL
from ..results.summary import BY_VALIDATION, LAST, score_field
from . import words
from .table_columns import COLUMNS, Heading

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from .outcomes import Comparison, RunResult


class Line(NamedTuple):
    """One row of the table: the cells of one method."""

    cells: tuple[str, ...]
    best: bool  # whether its mean is the best among methods that serve the same clients
    local: bool
    alarm: bool


class Table(NamedTuple):
    """Columns and lines; the first cell of each line is the method's name."""

    columns: tuple[Heading, ...]
    lines: tuple[Line, ...]


def table(comparison: "Comparison", further: Sequence[str] = ()) -> Table:
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


MERGED = (
    "merge_val = true: methods that do not use validation data otherwise were trained on it too, "
    "so no round is chosen by validation."
)


def notes(comparison: "Comparison") -> list[str]:
    """Notes under the table: how the choice by validation was limited, if it was."""
    found = [MERGED] if any(run.history.merge_val for run in comparison.runs) else []
    lacking = {c: None for run in comparison.runs for c in run.history.roster.without_validation}
    if lacking and not found:
        who = words.listing(list(lacking))
        found.append(f"Best by validation is chosen without {who}: no validation data.")
    return found


def to_text(shown: Table) -> str:
    """The table as plain text; ``*`` marks the best mean, ``!`` a row with an alarm."""
    heads = ["", *(column.head for column in shown.columns)]
    body = [[_mark(line), *line.cells] for line in shown.lines]
    widths = [max(map(len, cells)) for cells in zip(heads, *body, strict=True)]
    lines = [_aligned(heads, widths), "  ".join("─" * width for width in widths)]
    return "\n".join([*lines, *(_aligned(cells, widths) for cells in body)])


def _mark(line: Line) -> str:
    return "!" if line.alarm else "*" if line.best else " "


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
    over = f", mean ± deviation over {seeds} seeds" if seeds > 1 else ""
    title = f"{METRICS[comparison.metric].title} of {len(comparison.methods)} methods{over}"
    shown = to_text(table(comparison, further))
    return "\n\n".join([title, shown, *notes(comparison), comparison.verdict])


def comparison_html(comparison: "Comparison") -> str:
    """The table and the verdict, as a notebook shows them."""
    body = Markup("<p>{}</p>{}").format(comparison.verdict, to_html(table(comparison)))
    said = Markup("").join(Markup("<p>{}</p>").format(note) for note in notes(comparison))
    return str(Markup("<div>{}{}</div>").format(body, said))


def run_facts(result: "RunResult") -> list[tuple[str, str]]:
    """The numbers of one run, each with its name."""
    found, metric = result.data.summary, result.history.metric

    def text(value: float | None) -> str:
        return words.NONE if value is None else words.number(float(value), metric)

    last = found[score_field(LAST, metric)]
    traffic = (found["bytes_up"] + found["bytes_down"]) / max(1, found["clients"])
    inside = found["in_group_weight"]
    return [
        (f"mean {METRICS[metric].title}", f"{text(last)}{words.unit(metric)}"),
        ("worst tenth", text(found["worst_tenth"])),
        ("best by validation", text(found[score_field(BY_VALIDATION, metric)])),
        *([("merge_val", "true: trained on validation data too")] if found["merge_val"] else []),
        ("best on test", text(found["bmta"])),
        ("each client's best round", text(found["best_of_rounds"])),
        ("bytes per client", words.size(traffic)),
        ("weight in group", words.NONE if inside is None else f"{100 * inside:.0f} %"),
        ("seconds", f"{found['seconds']:.1f}"),
        ("digest", str(found["digest"])[:16]),
        ("folder", str(result.path or words.NONE)),
        *(("alarm", alarm["text"]) for alarm in found["alarms"]),
    ]


def _run_title(result: "RunResult") -> str:
    found = result.data.summary
    return (
        f"{words.label(result.method)}: {found['rounds']} rounds, {found['clients']} clients, "
        f"seed {result.seed}"
    )


def run_text(result: "RunResult") -> str:
    """One run as ``repr`` shows it."""
    facts = run_facts(result)
    width = max(len(name) for name, _ in facts)
    return "\n".join([_run_title(result), *(f"  {name:<{width}}  {text}" for name, text in facts)])


def run_html(result: "RunResult") -> str:
    """One run as a notebook shows it."""
    cell = Markup('<tr><th scope="row" style="text-align:left">{}</th><td>{}</td></tr>')
    rows = Markup("").join(cell.format(name, text) for name, text in run_facts(result))
    return str(Markup("<table><caption>{}</caption>{}</table>").format(_run_title(result), rows))

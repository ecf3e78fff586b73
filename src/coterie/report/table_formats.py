"""The table of a comparison as Markdown, LaTeX and CSV; all have the cells of the terminal."""

import csv
import io
import re
from collections.abc import Callable

from . import words
from .table import Line, Table

_SPLIT = " ± "
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
    rule = [":---", *["---:"] * (len(heads) - 1)]
    body = [
        _marked([_markdown(cell) for cell in line.cells], line, "**{}**") for line in shown.lines
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *body))


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


def to_csv(shown: Table) -> str:
    """CSV text; a deviation over seeds is a column of its own, and what is not known is empty."""
    split = [
        any(_SPLIT in line.cells[i] for line in shown.lines) for i in range(len(shown.columns))
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = zip((column.head for column in shown.columns), split, strict=True)
    writer.writerow(
        [name for head, two in heads for name in ([head, f"{head} ±"] if two else [head])]
    )
    for line in shown.lines:
        cells = zip(line.cells, split, strict=True)
        writer.writerow([part for cell, two in cells for part in _parts(cell, two)])
    return text.getvalue()


def _parts(cell: str, two: bool) -> list[str]:
    plain = "" if cell == words.NONE else cell.replace(words.MINUS, "-")
    if not two:
        return [plain]
    value, _, deviation = plain.partition(_SPLIT)
    return [value, deviation]


FORMATS: dict[str, Callable[[Table], str]] = {
    "markdown": to_markdown,
    "latex": to_latex,
    "csv": to_csv,
}

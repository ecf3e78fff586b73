"""The results that the commands print on stdout; plain text if piped."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ..errors import printable_lines
from ..runs.comparison_folder import REPORT
from ..storage import files
from ..views.comparison import Comparison


def show_comparison(
    comparison: Comparison,
    columns: Sequence[str] = (),
    pair: tuple[str, str] | None = None,
    like: bool = False,
) -> None:
    """Print the table with further columns, the verdict, and the paths of folder and page.

    The verdict is followed by a sentence about a pair of methods, and one about sites like these,
    if they are asked for.
    """
    from ..views.table import methods_table, notes, to_rich, to_text
    from ..views.verdict import contrasted, like_these

    console, shown = Console(), methods_table(comparison, columns)
    if console.is_terminal:
        console.print(to_rich(shown))
    else:
        show(to_text(shown) + "\n")
    for note in notes(comparison):
        show(f"{note}\n")
    show(comparison.verdict)
    if pair is not None:
        show(f"\n{contrasted(comparison, *pair)}")
    if like:
        show(f"\n{like_these(comparison)}")
    if comparison.path is not None:
        show(f"\nfolder: {comparison.path}\npage:   {comparison.path / REPORT}")


def comparison_value(
    comparison: Comparison, pair: tuple[str, str] | None = None, like: bool = False
) -> dict[str, Any]:
    """The comparison for JSON: ``comparison.json``, what was asked for, and where its folder is."""
    from ..views.judgement import contrast
    from ..views.verdict import contrasted, like_these

    at = comparison.path
    found = {**comparison.to_dict(), "folder": at and str(at), "page": at and str(at / REPORT)}
    if pair is not None:
        found["contrast"] = {
            "methods": pair,
            "sentence": contrasted(comparison, *pair),
            "gain": contrast(comparison, *pair),
        }
    if like:
        found["like_these"] = like_these(comparison)
    return found


def show_json(value: object) -> None:
    """Print one JSON value; all characters beyond ASCII are escaped, control codes among them."""
    print(json.dumps(files.plain(value), indent=2, allow_nan=False))


def show(text: object) -> None:
    """Print lines, without control codes that names in data, configs or folders may contain."""
    print(printable_lines(text))

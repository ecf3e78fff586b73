"""The command ``coterie report``: pages, tables and figures of finished runs."""

import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import ConfigError, StoreError, printable, printable_lines
from .arguments import POSITIVE, SPECIFIC

if TYPE_CHECKING:
    from ..runs.run import Run
    from ..views.clinical import ClinicalChoice
    from ..views.comparison import Comparison

TableFormat = Literal["markdown", "latex"]


def report(
    folders: Annotated[
        list[str],
        typer.Argument(
            help="folder of a comparison or of a run; or those of several runs, one of them of "
            "'local'",
            metavar="RUN...",
        ),
    ],
    site: Annotated[
        str | None,
        typer.Option("--for", metavar="SITE", help="only this site's view, without the others"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="the file to write; default: report.html, or stdout for --table"
        ),
    ] = None,
    table: Annotated[
        TableFormat | None,
        typer.Option(help="instead: the table of methods as markdown or latex"),
    ] = None,
    figures: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="instead: the page's figures as SVG files"),
    ] = None,
    specificity: Annotated[float, SPECIFIC] = 0.9,
    positive: Annotated[str | None, POSITIVE] = None,
) -> None:
    """Write the page of finished runs to one file, for everybody or for one site.

    The view for one site has its own rows and curves and no name, count or score of another site,
    so that it can be handed out.
    """
    from ..storage import files
    from ..views.clinical import ClinicalChoice

    choice = ClinicalChoice.checked(specificity, positive)
    places = [files.folder_of(folder, "RUN") for folder in folders]
    asked = [f"--{name}" for name, value in (("table", table), ("figures", figures)) if value]
    if len(asked) + (site is not None) > 1:
        several = ["--for"] * (site is not None) + asked
        raise ConfigError(f"{', '.join(several)}: found several; give one of them")
    if table is not None:
        _table(_read(places), table, out, places)
    elif figures is not None:
        _figures(_read(places), figures, places, choice)
    else:
        safe = re.sub(r"\W+", "-", unicodedata.normalize("NFC", site or ""))
        target = _target(out or f"report{'' if site is None else f'-{safe}'}.html", places)
        files.write_text(target, _page(_read(places), site, choice))
        print(f"page: {printable(target)}")


def _page(found: "Comparison | Run", site: str | None, choice: "ClinicalChoice") -> str:
    from ..runs.run import Run
    from ..views.page import page, run_page
    from ..views.site_page import site_page

    if site is not None:
        return site_page(found, site, choice)
    if isinstance(found, Run):
        return run_page(found, choice)
    return page(found, choice)


def _table(found: "Comparison | Run", kind: str, out: str | None, places: list[Path]) -> None:
    from ..runs.run import Run
    from ..storage import files
    from ..views.table import FORMATS, methods_table

    if isinstance(found, Run):
        raise ConfigError(
            "--table: found one run; expected a comparison, or several runs, one of them of 'local'"
        )
    text = FORMATS[kind](methods_table(found))
    if out is None:
        print(printable_lines(text), end="")
        return
    target = _target(out, places)
    files.write_text(target, text)
    print(f"table: {printable(target)}")


def _figures(
    found: "Comparison | Run", folder: str, places: list[Path], choice: "ClinicalChoice"
) -> None:
    from ..storage import files
    from ..views.figure_files import page_figures, standalone

    target = files.folder_of(_target(f"{folder}/figure", places).parent, "--figures")
    made = page_figures(found, choice)
    with files.writing(target):
        target.mkdir(parents=True, exist_ok=True)
    for name, drawn in made.items():
        files.write_text(target / f"{name}.svg", standalone(drawn))
    print(printable(f"figures: {len(made)} files in {target}"))


def _read(places: list[Path]) -> "Comparison | Run":
    """The comparison or the run of a folder, or a comparison of several runs."""
    from ..api import read
    from ..views.comparison import Comparison

    found = [read(place) for place in places]
    if len(found) == 1:
        return found[0]
    several = [one.runs if isinstance(one, Comparison) else (one,) for one in found]
    return Comparison.of(run for runs in several for run in runs)


def _target(out: str, places: list[Path]) -> Path:
    """The file to write; a file inside the folder of a run is refused."""
    target = Path(out)
    if any(place.resolve() in target.resolve().parents for place in places):
        raise StoreError(
            f"{target}: is inside a folder of results, whose manifest lists its files; expected "
            "another place; name one outside of it"
        )
    return target

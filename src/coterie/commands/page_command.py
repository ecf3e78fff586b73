"""The command ``coterie report``: writes the page of finished runs again, or for one site alone."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import StoreError, printable

if TYPE_CHECKING:
    from ..report.outcomes import Comparison, RunResult


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
        str | None, typer.Option(metavar="FILE", help="the file to write; default: report.html")
    ] = None,
) -> None:
    """Write the page of finished runs to one file, for everybody or for one site.

    The view for one site has its own rows and curves and no name, count or score of another site,
    so that it can be handed out.
    """
    from ..report.outcomes import RunResult
    from ..report.page import page
    from ..report.run_page import run_page
    from ..report.site_page import site_page
    from ..storage import files

    places = [files.folder_of(folder, "RUN") for folder in folders]
    target = _target(out, site, places)
    found = _read(places)
    if site is not None:
        text = site_page(found, site)
    else:
        text = run_page(found.data) if isinstance(found, RunResult) else page(found)
    files.write_text(target, text)
    print(f"page: {printable(target)}")


def _read(places: list[Path]) -> "Comparison | RunResult":
    """The comparison or the run of a folder, or a comparison of several runs."""
    from ..experiment.comparison_folder import COMPARISON
    from ..report.outcomes import Comparison, RunResult

    if len(places) == 1 and (places[0] / COMPARISON).is_file():
        return Comparison.read(places[0])
    runs = [RunResult.read(place) for place in places]
    return runs[0] if len(runs) == 1 else Comparison.of(runs)


def _target(out: str | None, site: str | None, places: list[Path]) -> Path:
    """The file to write; a file inside the folder of a run is refused."""
    safe = "" if site is None else "-" + re.sub(r"\W+", "-", site)
    target = Path(out or f"report{safe}.html")
    if target.resolve().parent in [place.resolve() for place in places]:
        raise StoreError(
            f"{target}: is inside a folder of results, whose manifest lists its files; expected "
            "another place; choose one with --out"
        )
    return target

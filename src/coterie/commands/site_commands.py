"""``coterie site``: what the administrator of one site does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..exporting.export_commands import Out, predict, show_export
from ..storage import files
from .arguments import POSITIVE, RECALIBRATE, SPECIFIC, say, warn
from .federation_commands import LOG_JSON, MONITOR

if TYPE_CHECKING:
    from ..deploy.folders import SiteFolder

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make and keep the folder of a site: its keys, its data options, its consent.",
)

Folder = Annotated[Path, typer.Argument(help="folder of the site", metavar="SITE")]
Data = Annotated[
    str | None, typer.Option(metavar="FILE", help="this site's data; else as site.toml says")
]
Target = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="column to predict; else as site.toml says")
]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask")]


@app.command()
def init(
    folder: Folder,
    invite: Annotated[
        Path, typer.Option(metavar="FILE", help="invite.toml, as the coordinator sent it")
    ],
    name: Annotated[str, typer.Option(help="name of this site in the federation")],
) -> None:
    """Make the folder of a site with new keys; only the file NAME.pub is to leave it."""
    from ..deploy.folders import SiteFolder

    made = SiteFolder.create(folder, invite, name)
    say(f"made the site '{made.name}' of the federation '{made.federation}'")
    _what_to_send(made)


@app.command()
def start(
    folder: Folder,
    data: Data = None,
    target: Target = None,
    monitor: Annotated[str | None, MONITOR] = None,
    log_json: Annotated[bool, LOG_JSON] = False,
) -> None:
    """Check this site's data, then answer the coordinator until the command is stopped."""
    _run(folder, data, target, None, monitor, log_json)


@app.command()
def serve(
    folder: Folder,
    socket: Annotated[
        Path, typer.Option(metavar="PATH", help="unix socket; its folder has mode 750 or 700")
    ],
    data: Data = None,
    target: Target = None,
    monitor: Annotated[str | None, MONITOR] = None,
    log_json: Annotated[bool, LOG_JSON] = False,
) -> None:
    """Check this site's data, then answer the ClientApp of Flower at a unix socket.

    The SuperNode runs as another user, of the group of the socket. It can pass messages on and
    nothing else: data, keys and states are read by this process alone.
    """
    _run(folder, data, target, socket, monitor, log_json)


def _run(
    folder: Path,
    data: str | None,
    target: str | None,
    socket: Path | None,
    monitor: str | None,
    log_json: bool,
) -> None:
    from ..deploy.running import holdings_of, run_site, site_facts

    opened = _site(folder)
    warn(opened.warnings())
    holdings = holdings_of(opened, data, target)
    for name, value in site_facts(opened, holdings):
        say(f"{name + ':':15}{value}")
    run_site(opened, holdings, socket, monitor, log_json)


@app.command()
def withdraw(
    folder: Folder,
    yes: Yes = False,
) -> None:
    """Leave the federation: this site answers no more, and its states are deleted."""
    from ..deploy.running import withdraw as leave

    opened = _site(folder)
    if not yes:
        typer.confirm(f"withdraw '{opened.name}' from '{opened.federation}' for good?", abort=True)
    say(*leave(opened))


@app.command()
def renew(folder: Folder) -> None:
    """Replace this site's keys; the coordinator must then revoke the old and admit the new."""
    opened = _site(folder)
    opened.renew()
    say(f"the site '{opened.name}' has new keys, which are not admitted yet")
    _what_to_send(opened)


@app.command()
def requests(folder: Folder, data: Data = None, target: Target = None) -> None:
    """Show what the coordinator asks this site's owner to approve, and what would leave."""
    from ..deploy.approval import Approvals
    from ..deploy.running import holdings_of, texts_told

    opened = _site(folder)
    waiting = Approvals(opened).waiting()
    for request in waiting:
        methods, others = ", ".join(request.methods), len(request.clients) - 1
        say(f"{request.id[:12]}: {methods}; {request.rounds} rounds of at most")
        say(f"  {request.epochs} epochs, with {others} other sites:")
        say(f"  {', '.join(request.clients)}")
        if request.sealed:
            print("  sealed: models and changes of models travel between sites alone")
        if request.folds is not None:
            print(f"  in {request.folds} folds: every row tests in one and trains in the others")
    if not waiting:
        print("no request waits")
        return
    print("texts of these columns would leave as they are (rows of each):")
    say(*(f"  {line}" for line in texts_told(holdings_of(opened, data, target))))
    say(f"approve one of them: coterie site approve {folder} ID")


@app.command()
def approve(
    folder: Folder,
    request: Annotated[str, typer.Argument(metavar="ID", help="beginning of the request's id")],
    data: Data = None,
    target: Target = None,
    yes: Yes = False,
) -> None:
    """Approve a request: its methods, sites and rounds, and the texts that 'requests' shows."""
    from ..deploy.approval import Approvals
    from ..deploy.running import holdings_of, texts_told

    opened = _site(folder)
    holdings = holdings_of(opened, data, target)
    say(*(f"texts that leave: {line}" for line in texts_told(holdings)))
    if not yes:
        typer.confirm(f"approve the request {request}?", abort=True)
    made = Approvals(opened).approve(request, holdings.unnamed_texts())
    print(f"approved {made.request.id[:12]} until {made.until[:10]}")


@app.command()
def division(
    folder: Folder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="new file")],
    data: Data = None,
    target: Target = None,
) -> None:
    """Write this site's data with the part of each row, so that you can simulate with it."""
    from ..deploy.running import holdings_of

    made = holdings_of(_site(folder), data, target).export(out)
    say(f"{made}: this site's own rows; it stays here")


@app.command()
def renew_division(
    folder: Folder,
    yes: Yes = False,
) -> None:
    """Divide this site's rows anew; what has left is remembered, and sums may have to wait."""
    from ..deploy.division import SiteDivision

    opened = _site(folder)
    if not yes:
        typer.confirm("divide the rows anew, so that test rows may train from now on?", abort=True)
    SiteDivision(opened.path, opened.name, (0.0, 0.0)).renew()
    print("the rows are divided anew when the site starts")


@app.command()
def show(folder: Folder) -> None:
    """Show this site's fingerprints, its consent, what was agreed and what left it."""
    from ..deploy.site_report import described

    opened = _site(folder)
    warn(opened.warnings())
    print(described(opened))


@app.command()
def export(
    folder: Folder,
    out: Out,
    experiment: Annotated[
        str | None, typer.Option(metavar="HASH", help="beginning of its hash; default: the newest")
    ] = None,
    specificity: Annotated[float, SPECIFIC] = 0.9,
    positive: Annotated[str | None, POSITIVE] = None,
    recalibrate: Annotated[bool, RECALIBRATE] = False,
) -> None:
    """Write this site's own final model as a folder: parameters, preprocessing, a model card."""
    from ..deploy.site_model import codes_beside, export_site
    from ..views.clinical import ClinicalChoice

    choice = ClinicalChoice.checked(specificity, positive)
    place = files.folder_of(out, "--out")
    site = _site(folder)
    made = export_site(site, place, experiment, choice, recalibrate=recalibrate)
    show_export(made, codes_beside(made))


app.command()(predict)


def _site(folder: Path) -> "SiteFolder":
    from ..deploy.folders import SiteFolder

    return SiteFolder.open(folder)


def _what_to_send(site: "SiteFolder") -> None:
    from ..deploy import keys
    from ..deploy.admission import spoken

    ca = keys.fingerprint(site.coordinator.read_bytes())
    say(
        "fingerprint of the coordinator's CA; the coordinator reads out the same by telephone,",
        f"or delete {site.path}:",
        f"  {spoken(ca)}",
        "fingerprint of this site, which you read out to the coordinator:",
        f"  {spoken(site.public_part().sha256)}",
        f"send to the coordinator: {site.public}  (everything else stays here)",
        f"then name your data and your consent in {site.path / 'site.toml'}",
    )

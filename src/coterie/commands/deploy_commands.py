"""``coterie deploy``: what the coordinator of a federation does before and between runs."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import say, warn

if TYPE_CHECKING:
    from ..deploy.documents import AdmittedSite
    from ..deploy.folders import FederationFolder

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make and keep the folder of a federation: its keys, its sites, its instructions.",
)

Folder = Annotated[Path, typer.Argument(help="folder of the federation", metavar="FED")]
SiteArgument = Annotated[str, typer.Argument(help="name of the site", metavar="NAME")]


@app.command()
def init(
    folder: Folder,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="where the sites reach the coordinator")
    ],
    transport: Annotated[str, typer.Option(help="direct or flower")] = "direct",
    name: Annotated[
        str | None, typer.Option(help="of the federation; without it, the folder's")
    ] = None,
) -> None:
    """Make the folder of a federation: a private CA, the coordinator's keys, RUNBOOK.md."""
    from ..deploy import keys
    from ..deploy.admission import spoken
    from ..deploy.folders import FederationFolder

    made = FederationFolder.create(folder, address, transport, name)
    say(
        f"made the federation '{made.name}' in {made.path}, for a coordinator at {made.address}",
        "fingerprint of its CA, which you read out to every site by telephone:",
        f"  {spoken(keys.fingerprint(made.ca.read_bytes()))}",
        f"send to every site: {made.invite}",
        f"what to do next, step by step: {made.path / 'RUNBOOK.md'}",
    )


@app.command()
def add_site(
    folder: Folder,
    pub: Annotated[Path, typer.Argument(help="the file that the site sent", metavar="NAME.pub")],
    name: Annotated[str, typer.Option(help="name of the site, as the site chose it")],
) -> None:
    """Admit a site by the public file that it sent."""
    from ..deploy.admission import spoken

    opened = _opened(folder)
    site = opened.add_site(pub, name)
    warn(opened.warnings())
    say(
        f"admitted '{site.name}'; fingerprint:",
        f"  {spoken(site.sha256)}",
        "have the site read out its own ('coterie site show') by telephone; if they differ:",
        f"  coterie deploy revoke {folder} {site.name}",
    )


@app.command()
def revoke(folder: Folder, name: SiteArgument) -> None:
    """Admit a site no longer; its keys are never admitted again."""
    site = _opened(folder).revoke(name)
    say(
        f"revoked '{site.name}'; it stays listed",
        f"it may come back with new keys: 'coterie site renew' there, then add-site {folder}",
    )


@app.command(name="list")
def list_sites(folder: Folder) -> None:
    """List the sites: names, fingerprints, since when, until when, revoked or not."""
    from ..deploy import keys
    from ..deploy.admission import spoken

    opened = _opened(folder)
    sites = opened.sites()
    warn(opened.warnings())
    ends = keys.expiry(opened.server.read_bytes())
    say(
        f"federation '{opened.name}', coordinator {opened.address}, transport {opened.transport}",
        f"coordinator's certificate: expires on {ends:%Y-%m-%d}",
        f"CA: {spoken(keys.fingerprint(opened.ca.read_bytes()))}",
        *(line for site in sites for line in _lines(site)),
        *([] if sites else ["no site is admitted yet; 'coterie deploy add-site' admits one"]),
    )


def _lines(site: "AdmittedSite") -> tuple[str, str]:
    from ..deploy import keys
    from ..deploy.admission import spoken

    ends = keys.expiry(site.certificate.encode())
    state = f"REVOKED on {site.revoked:%Y-%m-%d}" if site.revoked else "admitted"
    dates = f"added {site.added:%Y-%m-%d}, expires {ends:%Y-%m-%d}"
    return f"{site.name}: {state}, {dates}", f"  {spoken(site.sha256)}"


@app.command()
def status(folder: Folder) -> None:
    """Show which sites are online, while the coordinator runs."""
    from ..deploy.direct import DirectTransport

    with contextlib.closing(DirectTransport(_opened(folder))) as transport:
        for name, state in transport.sites().items():
            seen = "never seen" if state.seen is None else f"last seen {state.seen:.0f} s ago"
            say(f"{name}: {'online' if state.online else 'OFFLINE'}, {seen}")


@app.command()
def peers(
    folder: Folder,
    config: Annotated[Path, typer.Argument(help="TOML file of the experiment", metavar="CONFIG")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="folder; a run in it is continued")],
) -> None:
    """Run decentralised FedeRiCo among the sites: they seal all models, and keep the results."""
    from .. import api
    from ..deploy.peers import run_among_peers

    asked = api.configure(str(config), federation=str(folder))
    done = run_among_peers(asked, out, say)
    say(f"{len(done.rounds)} rounds are over; each site has its own model and score")


@app.command(name="app")
def write_simulation(
    folder: Annotated[Path, typer.Argument(help="new folder for the app", metavar="APP")],
) -> None:
    """Write the Flower app for simulations: flwr run APP; a federation's own is in FED/app."""
    from ..deploy.folders import write_app
    from ..storage.files import folder_of

    write_app(folder_of(folder, "APP"), None)
    say(f'run it: flwr run {folder} SUPERLINK --run-config \'config="..." out="..."\'')


@app.command()
def renew(folder: Folder) -> None:
    """Make a new certificate for the coordinator, from the same CA; sites need do nothing."""
    from ..deploy import keys

    opened = _opened(folder)
    opened.renew()
    ends = keys.expiry(opened.server.read_bytes())
    say(
        f"the coordinator has a new certificate, which expires on {ends:%Y-%m-%d}",
        "restart the coordinator; sites need do nothing",
    )


def _opened(folder: Path) -> "FederationFolder":
    from ..deploy.folders import FederationFolder

    return FederationFolder.open(folder)

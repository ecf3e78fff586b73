"""``coterie site``: what the administrator of one site does."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CoterieWarning, printable

if TYPE_CHECKING:
    from ..deploy.folders import SiteFolder

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make and keep the folder of a site: its keys, its data options, its consent.",
)

Folder = Annotated[Path, typer.Argument(help="folder of the site", metavar="SITE")]


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
    print(printable(f"made the site '{made.name}' of the federation '{made.federation}'"))
    _what_to_send(made)


@app.command()
def renew(folder: Folder) -> None:
    """Replace this site's keys; the coordinator must then revoke the old and admit the new."""
    from ..deploy.folders import SiteFolder

    opened = SiteFolder.open(folder)
    opened.renew()
    print(printable(f"the site '{opened.name}' has new keys, which are not admitted yet"))
    _what_to_send(opened)


@app.command()
def show(folder: Folder) -> None:
    """Show this site's fingerprints, its consent, what was agreed and what left it."""
    from ..deploy.folders import SiteFolder
    from ..deploy.site_report import described

    opened = SiteFolder.open(folder)
    for line in opened.warnings():
        warnings.warn(line, CoterieWarning, stacklevel=2)
    print(described(opened))


def _what_to_send(site: "SiteFolder") -> None:
    from ..deploy import keys
    from ..deploy.admission import spoken

    ca = keys.fingerprint(site.coordinator.read_bytes())
    for line in (
        "fingerprint of the coordinator's CA; the coordinator reads out the same by telephone,",
        f"or delete {site.path}:",
        f"  {spoken(ca)}",
        "fingerprint of this site, which you read out to the coordinator:",
        f"  {spoken(site.public_part().sha256)}",
        f"send to the coordinator: {site.public}  (everything else stays here)",
        f"then name your data and your consent in {site.path / 'site.toml'}",
    ):
        print(printable(line))

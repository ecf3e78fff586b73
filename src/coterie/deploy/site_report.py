"""What a site's administrator is shown: fingerprints, consent, what was agreed and what left."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import CoterieError, printable
from ..storage import files
from . import keys
from .admission import spoken
from .scores import ToldScores
from .site_folder import SiteFolder
from .small_files import read_plain
from .terms import Agreement

MOST_AGREEMENT = 16 * 1024 * 1024  # bytes: a schema may list many categories
MOST_LINE = 64 * 1024  # bytes of one line of the log
MOST_SHOWN = 200  # characters of what a file of an experiment says


class Left(NamedTuple):
    """How many answers of one kind left the site for one experiment."""

    answers: int = 0
    size: int = 0  # bytes
    rounds: frozenset[int] = frozenset()


def described(site: SiteFolder) -> str:
    """All of it as lines of text."""
    own, ca = read_plain(site.certificate), read_plain(site.coordinator)
    lines = [
        f"site '{site.name}' of the federation '{site.federation}'",
        f"coordinator: {site.address}, by the transport '{site.transport}'",
        f"data: {_data(site)}",
        f"consent: {_consent(site)}",
        f"test rows: {_scores(site)}",
        f"code: coterie's own, and {len(site.code)} files of [code] in site.toml",
        f"certificate: expires on {keys.expiry(own):%Y-%m-%d}",
        "fingerprint of this site, for the coordinator to compare by telephone:",
        f"  {spoken(keys.fingerprint(own))}",
        "fingerprint of the coordinator's CA, to compare with what the coordinator reads out:",
        f"  {spoken(keys.fingerprint(ca))}",
        f"box key of this site, for [partners] of the other sites: {site.public_part().box}",
        *_titled(
            "agreed with the coordinator (models of these sites may have a part in this site's, "
            "and its models in theirs):",
            agreements(site.experiments),
        ),
        *_titled("left this site:", _left_lines(site)),
    ]
    return "\n".join(map(printable, lines))


def _titled(title: str, lines: Iterator[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return [title, *found] if found else [f"{title} nothing"]


def _data(site: SiteFolder) -> str:
    if site.data.name is None:
        return "none named in site.toml; 'coterie site start' takes --data FILE"
    said = ", ".join(f"{name} = {value!r}" for name, value in site.data.options.items())
    return f"{site.data.name} ({said or 'no options'})"


def _consent(site: SiteFolder) -> str:
    given = [name for name, agreed in site.consent if agreed]
    also = f", and {', '.join(given)}" if given else ""
    return f"the messages of the method{also}"


def _scores(site: SiteFolder) -> str:
    if site.consent.scores:
        return "exact scores and losses leave, in every round"
    told = ToldScores.of(site)
    return f"{told.left} of {told.rule.most} answers about them may still leave"


def agreements(experiments: Path) -> Iterator[str]:
    """One line per experiment that the site agreed to: its hash, method, rounds and sites."""
    if experiments.is_symlink() or not experiments.is_dir():
        return
    for folder in sorted(experiments.iterdir()):
        path = folder / "agreement.json"
        if path.exists():
            try:
                yield f"{folder.name[:12]}: {_agreement(path)}"
            except (CoterieError, ValueError, KeyError, TypeError) as error:
                yield f"{folder.name[:12]}: cannot be read ({str(error)[:MOST_SHOWN]})"


def _agreement(path: Path) -> str:
    said = Agreement.from_json(read_plain(path, MOST_AGREEMENT).decode("utf-8"))
    config = json.loads(said.config)
    method, rounds = config["algorithm"]["name"], config["run"]["rounds"]
    return f"{method}, {rounds} rounds, with {', '.join(said.clients)}"[:MOST_SHOWN]


def _left_lines(site: SiteFolder) -> Iterator[str]:
    for (experiment, kind), found in left(site.sent).items():
        last = f", last in round {max(found.rounds)}" if found.rounds else ""
        when = experiment[:12] or "before an experiment"
        yield f"{when}: {kind}: {found.answers} answers, {found.size:,} bytes{last}"


def left(log: Path) -> dict[tuple[str, str], Left]:
    """What left the site, by experiment and kind of message, from the log of what left."""
    found: dict[tuple[str, str], Left] = {}
    files.refuse_links(log.parent, [log.name], depth=0)
    if not log.exists():
        return found
    with log.open("rb") as lines:
        for line in iter(lambda: lines.readline(MOST_LINE), b""):
            key, size, rounds = ("unreadable", "lines of the log"), len(line), set[int]()
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                said = json.loads(line)
                told = str(said["experiment"])[:MOST_SHOWN], str(said["kind"])[:MOST_SHOWN]
                rounds = set() if said["round"] is None else {int(said["round"])}
                key, size = told, int(said["bytes"])
            before = found.get(key, Left())
            found[key] = Left(before.answers + 1, before.size + size, before.rounds | rounds)
    return found

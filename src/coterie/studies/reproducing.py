"""Reproduces the tables of the papers: finds cards, runs what is missing, and publishes results."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api import listeners_of
from ..core.imports import Code, Given
from ..errors import ConfigError, did_you_mean
from ..runs import interrupt
from ..runs.listeners import Watch
from ..storage import files
from .card_file import PAPER, Card, read_card
from .card_text import markdown
from .outcome import StudyOutcome
from .records import CellRecord, published_records, read_records, record_for, records_text
from .study import Study, restricted
from .study_page import study_page
from .study_runs import RECORDS, missing, run_each

FOLDER = "COTERIE_CARDS"  # environment variable: where the cards are, if not beside the package
PUBLISHED = "{card}.{scale}.json"


def cards_folder() -> Path:
    """The folder of the cards: in a checkout, in an installed package, or where FOLDER says."""
    given = os.environ.get(FOLDER)
    package = Path(__file__).parents[1]
    places = (
        [Path(given)] if given else [package / "experiments", package.parents[1] / "experiments"]
    )
    for place in places:
        if any(place.glob("p*/*.toml")):
            return place
    raise ConfigError(
        f"found no cards in {' or '.join(map(str, places))}; expected folders p1 to p5; set "
        f"{FOLDER} to the folder 'experiments' of the source"
    )


def all_cards() -> tuple[dict[str, Card], list[ConfigError]]:
    """Every card by its id, in the order of papers, tables and figures; errors of wrong files."""
    found: dict[str, Card] = {}
    wrong: list[ConfigError] = []
    for path in _card_paths():
        try:
            card = read_card(path)
        except ConfigError as error:
            wrong.append(error)
            continue
        if found.setdefault(card.about.id, card) is not card:
            text = f"{path}: another card has the id {card.about.id} too; rename one"
            wrong.append(ConfigError(text))
    return found, wrong


def runnable(scale: str) -> list[str]:
    """The files of all cards that can be run at a scale; those with an error there are left out."""
    cards, _ = all_cards()
    here = [card for card in cards.values() if card.about.waits is None and scale in card.names]
    return [str(card.path) for card in here if _has_study(card, scale)]


def _has_study(card: Card, scale: str) -> bool:
    try:
        card.study(scale, code=Code.of(None, installed=True))
    except ConfigError:
        return False
    return True


def _card_paths() -> list[Path]:
    home = cards_folder()
    return [*sorted(home.glob("p*/*.toml"), key=_order), *sorted(home.glob("*.toml"))]


def _order(path: Path) -> tuple[str, str, int, str]:
    digits = "".join(c for c in path.stem.partition("_")[0] if c.isdigit())
    return path.parent.name, "a" if path.stem.startswith("t") else "b", int(digits or 0), path.stem


def card_of(name: str) -> Card:
    """A card by its id, or by the path of its file."""
    if name.endswith(".toml"):
        return read_card(Path(name))
    paper, _, item = name.lower().partition("-")
    path = cards_folder() / paper / f"{item}.toml"
    if path in _card_paths():
        card = read_card(path)
        if card.about.id.lower() == name.lower():
            return card
    cards, wrong = all_cards()
    found = {card_id.lower(): card for card_id, card in cards.items()}.get(name.lower())
    if found is None:
        files_too = "".join(f"; a wrong card file: {error}" for error in wrong)
        raise ConfigError(f"there is no card '{name}'; {did_you_mean(name, cards)}{files_too}")
    return found


@dataclass(frozen=True)
class Reproduction:
    """A card at one scale, and where its results are."""

    card: Card
    scale: str
    study: Study  # what is asked for: perhaps fewer columns, methods or seeds
    whole: Study  # the card as its file has it: what may be published
    out: Path
    published: Path | None  # a folder of published results

    @property
    def command(self) -> str:
        """The command that repeats this reproduction."""
        at = "" if self.scale == PAPER else f" --scale {self.scale}"
        return f"coterie reproduce {self.card.about.id}{at}"

    def known(self) -> dict[str, CellRecord]:
        """The records of finished runs: published ones, and those of the folder."""
        found: dict[str, CellRecord] = {}
        if self.published is not None:
            found |= read_published(self.published)
        return found | read_records(self.out / RECORDS)

    def outcome(self) -> StudyOutcome:
        """The card from what was run so far."""
        return StudyOutcome(self.study, self.known())

    def missing(self) -> int:
        """The number of runs that are missing."""
        return len(missing(self.study, self.known()))

    def run(
        self, listeners: Sequence[Watch] = (), *, keep: bool = False, wait: bool = True
    ) -> StudyOutcome:
        """Run what is missing, and write the card.

        Runs that other processes have taken are waited for, unless ``wait`` is False.
        """
        self.refuse_waiting()
        self.out.mkdir(parents=True, exist_ok=True)
        known = self.known()
        with interrupt.held(self.out, self.command):
            for _ in run_each(
                missing(self.study, known), self.out, listeners, keep=keep, wait=wait
            ):
                pass
        return self.write()

    def write(self) -> StudyOutcome:
        """Write ``card.md`` and its page, and publish if asked to; returns what was asked for."""
        outcome = self.outcome()
        self.out.mkdir(parents=True, exist_ok=True)
        files.write_text(self.out / "card.md", markdown(outcome, self.command))
        files.write_text(self.out / "card.html", study_page(outcome, self.command))
        if self.published is not None:
            self._publish()
        return outcome

    def _publish(self) -> None:
        """Add all records that the whole card uses to its file.

        Runs with other settings (``--set``) are not the card's and are not published.
        """
        if self.published is None:
            raise AssertionError("there is no folder to publish to")
        self.published.mkdir(parents=True, exist_ok=True)
        path = self.published / PUBLISHED.format(card=self.card.about.id, scale=self.scale)
        known = self.known()
        before = _records_in(path, path.stat().st_mtime_ns) if path.exists() else {}
        found = [(cell.key, record_for(cell, known)) for cell in self.whole.cells()]
        kept = {**before, **{key: record for key, record in found if record is not None}}
        if kept:
            drawn = self.whole.figure == "matrices"
            files.write_text(path, records_text(list(kept.values()), matrices=drawn))

    def refuse_waiting(self) -> None:
        """Refuse a card that cannot be run yet."""
        if self.card.about.waits:
            raise ConfigError(f"{self.card.about.id} cannot be run yet: {self.card.about.waits}")


def reproduction(
    name: str,
    scale: str = PAPER,
    *,
    out: str | Path | None = None,
    publish: str | Path | None = None,
    columns: tuple[str, ...] = (),
    methods: tuple[str, ...] = (),
    seeds: int | None = None,
    changes: Mapping[str, Any] | None = None,
    code: Given = None,
) -> Reproduction:
    """What reproduces a card at one scale; nothing is run yet."""
    card, allowed = card_of(name), Code.of(code, installed=True)
    whole = card.study(scale, code=allowed)
    changed = card.study(scale, changes, allowed) if changes else whole
    asked = restricted(changed, columns, methods, seeds)
    folder = Path(out) if out is not None else Path("runs") / f"{card.about.id}-{scale}"
    target = None if publish is None else Path(publish)
    return Reproduction(card, scale, asked, whole, folder, target)


def reproduce(
    name: str,
    scale: str = PAPER,
    *,
    out: str | Path | None = None,
    columns: tuple[str, ...] = (),
    methods: tuple[str, ...] = (),
    seeds: int | None = None,
    device: str | None = None,
    progress: Watch | None = None,
) -> StudyOutcome:
    """Run what is missing of a paper's table (``"P5-T3"``), and return it beside the paper's."""
    changes = {} if device is None else {"engine.device": device}
    one = reproduction(
        name, scale, out=out, columns=columns, methods=methods, seeds=seeds, changes=changes
    )
    return one.run(listeners_of(progress))


def default_published(given: str | Path | None = None) -> Path | None:
    """The folder of published records: the given one, or that of a checkout; None if neither is."""
    if given is not None:
        return Path(given)
    ours = cards_folder().parent / "docs" / "results" / "cards"
    return ours if ours.is_dir() else None


def read_published(folder: Path) -> dict[str, CellRecord]:
    """The published records of all cards, by key: cards may share runs."""
    found: dict[str, CellRecord] = {}
    for path in sorted(folder.glob("*.json")):
        for key, record in _records_in(path, path.stat().st_mtime_ns).items():
            if key not in found or record.matrices:  # only cards that show matrices publish them
                found[key] = record
    return found


@functools.lru_cache(maxsize=500)
def _records_in(path: Path, _changed: int) -> dict[str, CellRecord]:
    """The records of one published file; read again when the file has changed."""
    found = files.read_json(path)
    return {record.key: record for record in published_records(found, path)}

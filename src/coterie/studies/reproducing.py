"""Reproduces the tables of the papers: finds cards, runs what is missing, and publishes results."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api import listeners_of
from ..core.imports import Code, Given
from ..errors import ConfigError, did_you_mean
from ..runs.listeners import Watch
from .card_file import PAPER, Card, read_card
from .outcome import StudyOutcome
from .study import restricted
from .study_runs import StudyWork

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


def runnable(scale: str) -> list[Card]:
    """All cards that can be run at a scale; those with an error there are left out."""
    cards, _ = all_cards()
    here = [card for card in cards.values() if card.about.waits is None and scale in card.names]
    return [card for card in here if _has_study(card, scale)]


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
    cards, wrong = all_cards()
    found = {card_id.lower(): card for card_id, card in cards.items()}.get(name.lower())
    if found is None:
        files_too = "".join(f"; a wrong card file: {error}" for error in wrong)
        raise ConfigError(f"there is no card '{name}'; {did_you_mean(name, cards)}{files_too}")
    return found


def reproduction(
    name: str | Card,
    scale: str = PAPER,
    *,
    out: str | Path | None = None,
    publish: str | Path | None = None,
    columns: tuple[str, ...] = (),
    methods: tuple[str, ...] = (),
    seeds: int | None = None,
    changes: Mapping[str, Any] | None = None,
    code: Given = None,
) -> StudyWork:
    """What reproduces a card at one scale; nothing is run yet."""
    card, allowed = name if isinstance(name, Card) else card_of(name), Code.of(code, installed=True)
    whole = card.study(scale, code=allowed)
    changed = card.study(scale, changes, allowed) if changes else whole
    about = card.about
    file = PUBLISHED.format(card=about.id, scale=scale)
    return StudyWork(
        restricted(changed, columns, methods, seeds),
        whole,
        f"coterie reproduce {about.id}{'' if scale == PAPER else f' --scale {scale}'}",
        "card",
        Path(out) if out is not None else Path("runs") / f"{about.id}-{scale}",
        None if publish is None else Path(publish) / file,
        about.waits,
    )


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

"""The index of all cards: one line per card, in Markdown and as one HTML page with every table."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..storage import files
from .card_file import Card
from .outcome import FAILS, HOLDS, NOT_RUN, StudyOutcome
from .reproducing import all_cards, reproduction
from .study_page import page_of, section

PAGE, INDEX = "cards.html", "README.md"
RUNS = Path("runs")


class CardState(NamedTuple):
    """A card at one scale, with what was run of it."""

    card: Card
    scale: str
    outcome: StudyOutcome


def all_states(
    published: Path | None, out: Path = RUNS
) -> tuple[list[CardState], list[ConfigError]]:
    """Every card at every scale with what was run of it, and each different error of a card."""
    cards, wrong = all_cards()
    found = []
    for name, card in cards.items():
        for scale in card.names:
            try:
                at = out / f"{name}-{scale}"
                one = reproduction(str(card.path), scale, out=at, publish=published)
            except ConfigError as error:
                wrong.append(error)
            else:
                found.append(CardState(card, scale, one.outcome()))
    return found, list({str(error): error for error in wrong}.values())


def write_index(found: Sequence[CardState], published: Path | None, out: Path = RUNS) -> Path:
    """Write the page of all cards that were run, and the index of published ones."""
    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / PAGE, cards_page(found))
    if published is not None:
        files.write_text(published / INDEX, index_markdown(found, published))
    return out / PAGE


def index_markdown(found: Sequence[CardState], published: Path) -> str:
    """One line per card: what it is, and how each scale stands."""
    lines = [
        "# Paper cards",
        "",
        "Every table and figure of results of the five papers. A card *holds* if every claim of it",
        "that was run holds. `coterie reproduce --list --publish docs/results/cards` writes this",
        "page from the records beside it; `coterie reproduce CARD --publish docs/results/cards`",
        "adds to them.",
        "",
        "| card | what it shows | state |",
        "| --- | --- | --- |",
    ]
    for card in {one.card.about.id: one.card for one in found}.values():
        mine, about = [one for one in found if one.card is card], card.about
        says = _says(mine, published)
        lines.append(f"| {about.id} | {about.paper}: {about.title} | {says} |")
    return "\n".join(lines) + "\n"


def _says(mine: Sequence[CardState], published: Path) -> str:
    """How a card stands: each scale that was run, and why claims fail."""
    about = mine[0].card.about
    if about.waits:
        return f"waits: {about.waits}"
    said = [_state(one, published) for one in mine if one.outcome.state != NOT_RUN]
    if not any(one.scale == "paper" and one.outcome.state != NOT_RUN for one in mine):
        said.insert(0, "not run at paper scale")
    return "; ".join(said)


def _state(one: CardState, published: Path) -> str:
    page = f"{one.card.about.id}.{one.scale}.md"
    name = f"[{one.scale}]({page})" if (published / page).exists() else one.scale
    failed = [j for j in one.outcome.judged if j.state == FAILS]
    why = [f"{j.claim.text}{f' ({j.claim.cause})' if j.claim.cause else ''}" for j in failed]
    return f"{name}: {one.outcome.state}" + (f": {'; '.join(why)}" if why else "")


def cards_page(found: Sequence[CardState]) -> str:
    """One HTML page with the table and the claims of every card that was run."""
    ran = [one for one in found if one.outcome.state != NOT_RUN]
    held = sum(one.outcome.state.startswith(HOLDS) for one in ran)
    return page_of(
        [section(one.outcome, f"{one.card.about.id} ({one.scale})") for one in ran],
        title="Paper cards",
        eyebrow="coterie reproduce",
        verdict=f"All claims hold in {held} of {len(ran)} cards that were run.",
        command="coterie reproduce all --scale small",
    )

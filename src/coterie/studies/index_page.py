"""The index of all cards: one line per card in Markdown, and one HTML page with every table."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..storage import files
from .card_file import PAPER, Card
from .outcome import FAILS, HOLDS, NOT_RUN, StudyOutcome
from .reproducing import all_cards, read_published, reproduction
from .study_page import page_of, section

PAGE, INDEX = "cards.html", "README.md"
RUNS = Path("runs")
BEGIN, END = "<!-- cards: begin -->", "<!-- cards: end -->"  # around the index on a page
COUNTED = HOLD, CAUSE, NO_CAUSE, LEFT = "hold", "fail with a cause", "fail without one", NOT_RUN
INTRO = """\
A card *holds* if every claim that can be judged from the runs so far holds; it is *run* if none can
be judged yet. Cards of the first tier are reproduced first; they have pages, with the causes
of failures. `coterie reproduce --list --publish DIR` writes this part of the page."""


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
        path, text = published_index(found, published.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    return out / PAGE


def published_index(found: Sequence[CardState], published: Path) -> tuple[Path, str]:
    """The file of the published index and its text, from the published records alone.

    It is a part of the README.md beside the published folder if that file has the markers
    :data:`BEGIN` and :data:`END`, and else a README.md in the folder.
    """
    known = read_published(published)
    shown = [one._replace(outcome=StudyOutcome(one.outcome.study, known)) for one in found]
    path = published.parent / INDEX
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    if BEGIN not in page and END not in page:
        text = index_markdown(shown, published, "")
        return published / INDEX, f"# Paper cards\n\n{text}"
    text = index_markdown(shown, published, f"{published.name}/")
    return path, _with_part(page, text, path)


def _with_part(page: str, text: str, path: Path) -> str:
    """The page with the text between its markers replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(
            f"{path}: found one of the markers {BEGIN} and {END} alone, or in another order; "
            "expected both in this order, each on a line of its own; correct the file"
        )
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def index_markdown(found: Sequence[CardState], published: Path, folder: str) -> str:
    """How many claims hold, then one line per card; links lead to the cards in ``folder``."""
    cards = [
        [one for one in found if one.card is card]
        for card in {one.card.about.id: one.card for one in found}.values()
    ]
    lines = [
        *(INTRO, "", *_summary(cards), ""),
        "| card | what it shows | runs at paper scale | state |",
        "| --- | --- | ---: | --- |",
    ]
    for mine in cards:
        about = mine[0].card.about
        cells = [about.id, f"{about.paper}: {about.title}"]
        cells += [_paper_runs(mine), _says(mine, published, folder)]
        cells = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _summary(cards: Sequence[Sequence[CardState]]) -> list[str]:
    """The number of cards, and how many claims of first-tier cards hold."""
    first = [mine for mine in cards if mine[0].card.about.tier == 1]
    lines = [
        f"{len(cards)} cards, {len(first)} of them of the first tier.",
        "",
        f"| claims of first-tier cards | {' | '.join(COUNTED)} |",
        f"| --- |{' ---: |' * len(COUNTED)}",
    ]
    paper = [[one for one in mine if one.scale == PAPER] for mine in first]
    else_next = "at paper scale, else at the next scale that was run"
    for name, cards_of in (("at paper scale", paper), (else_next, first)):
        found = Counter(state for mine in cards_of for state in _claim_states(mine))
        lines.append(f"| {name} | {' | '.join(str(found[head]) for head in COUNTED)} |")
    return lines


def _claim_states(mine: Sequence[CardState]) -> Iterator[str]:
    """Each claim of a card at the first of these scales at which it was run."""
    tried = [one.outcome.judged for one in mine]
    for same in zip(*tried, strict=True):
        judged = next((one for one in same if one.state != NOT_RUN), None)
        if judged is None:
            yield LEFT
        elif judged.state == HOLDS:
            yield HOLD
        else:
            yield CAUSE if judged.claim.cause else NO_CAUSE


def _paper_runs(mine: Sequence[CardState]) -> str:
    done, wanted = next(one.outcome.counts for one in mine if one.scale == PAPER)
    return f"{done} of {wanted}"


def _says(mine: Sequence[CardState], published: Path, folder: str) -> str:
    """How a card stands: each scale that was run, and which claims fail."""
    about = mine[0].card.about
    if about.waits:
        return f"waits: {about.waits}"
    ran = [one for one in mine if one.outcome.verdict != NOT_RUN]
    if not ran:
        return NOT_RUN
    return "; ".join(_state(one, published, folder) for one in ran)


def _state(one: CardState, published: Path, folder: str) -> str:
    page, outcome = f"{one.card.about.id}.{one.scale}.md", one.outcome
    name = f"[{one.scale}]({folder}{page})" if (published / page).exists() else one.scale
    failed = [j for j in outcome.judged if j.state == FAILS]
    why = f": {'; '.join(j.claim.text for j in failed)}" if failed else ""
    return f"{outcome.verdict} at {name}{_share(one)}{why}"


def _share(one: CardState) -> str:
    """The share of runs that were done, and of claims that were judged if not all were."""
    done, wanted = one.outcome.counts
    states = [judged.state for judged in one.outcome.judged]
    judged = len(states) - states.count(NOT_RUN)
    runs = [] if one.scale == PAPER or done == wanted else [f"{done} of {wanted} runs"]
    claims = [] if judged == len(states) else [f"{judged} of {len(states)} claims judged"]
    return f" ({', '.join(runs + claims)})" if runs or claims else ""


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

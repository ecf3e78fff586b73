"""The page of a paper: what it claims, what we found, printed numbers beside ours, what is missing.

And the index of all papers, one line each. Both come from the published records alone.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from ..errors import ConfigError
from ..storage import files
from ..views import words
from ..views.figure_files import standalone
from ..views.svg import Scale, figure, tag, ticks
from .card_file import PAPER, Card
from .outcome import FAILS, JUDGED, NOT_RUN, PARTIAL, STATES, Interval, Judged, StudyOutcome
from .records import read_published, record_for
from .reproducing import all_cards, reproduction

INDEX, PICTURES = "README.md", "pictures"
BEGIN, END = "<!-- papers: begin -->", "<!-- papers: end -->"  # around the index on a page
PAPERS = ("FedFomo", "FedeRiCo", "PaFL", "WAFFLE", "FedAMP")
MOST_DRAWN = 3  # pictures of a paper
LONGEST = 110  # characters of a claim in a table
LEGEND = """\
A claim, in our words, is judged at one scale, with all its columns, all its methods and three seeds
or more, by the 95 % intervals over seeds of its comparisons; *decides* shows the one on which that
depends. With less it is *partial*; `+` or `-` says whether the means so far agree. *Ours* is our
variant of the method. [Paper cards](../cards.md) describe claims and scales."""


class CardState(NamedTuple):
    """A card at one scale, with what was run of it."""

    card: Card
    scale: str
    outcome: StudyOutcome


def all_states(
    published: Path | None, also_here: bool = False
) -> tuple[list[CardState], list[ConfigError]]:
    """Every card at every scale with the published runs, and each different error of a card.

    With ``also_here``, runs in the folders that ``coterie reproduce`` takes if it is told none.
    """
    cards, wrong = all_cards()
    known = {} if published is None else read_published(published)
    found = []
    for card in cards.values():
        for scale in card.names:
            try:
                one = reproduction(card, scale)
            except ConfigError as error:
                wrong.append(error)
            else:
                here = known | one.known() if also_here else known
                found.append(CardState(card, scale, StudyOutcome(one.whole, here)))
    return found, list({str(error): error for error in wrong}.values())


class Paper:
    """One paper, with all its cards at all scales."""

    def __init__(self, name: str, states: Sequence[CardState]) -> None:
        self.name = name
        self.states = [one for one in states if one.card.about.paper == name]

    @property
    def file(self) -> str:
        """The name of its page."""
        return f"{self.name.lower()}.md"

    @cached_property
    def main(self) -> list[tuple[CardState, Judged]]:
        """Each claim of its abstract and conclusion, at the largest scale that judges it.

        Where none does, at the largest at which a part of it was run; else at the paper's.
        """
        found = []
        for card in {one.card.about.id: one.card for one in self.states}.values():
            scales = [one for one in self.states if one.card is card]
            for same in zip(*([(s, j) for j in s.outcome.judged] for s in scales), strict=True):
                if same[0][1].claim.place:
                    ranked = [JUDGED, (PARTIAL,), (NOT_RUN,)]
                    found.append(next(x for kind in ranked for x in same if x[1].state in kind))
        return found

    @cached_property
    def inside(self) -> dict[str, tuple[int, int]]:
        """How many printed numbers are inside, of how many that were compared, by scale."""
        found: dict[str, tuple[int, int]] = {}
        for one in self.states:
            told = [entry.inside for entry in one.outcome.entries if entry.inside is not None]
            if told:
                inside, compared = found.get(one.scale, (0, 0))
                found[one.scale] = inside + sum(told), compared + len(told)
        return found

    @property
    def sentence(self) -> str:
        """What became of the claims of its abstract and conclusion."""
        if not self.main:
            return "No claim of its abstract has a card."
        counts = Counter(judged.state for _, judged in self.main)
        told = [f"{counts[state]} {state}" for state in STATES if counts[state]]
        inside, compared = self.inside.get(PAPER, (0, 0))
        numbers = f"{inside} of {compared} printed numbers that were run are inside"
        return (
            f"Of {len(self.main)} claims of its abstract and conclusion, at the largest scale that "
            f"was run: {', '.join(told)}. At the paper's scale {numbers}."
        )

    def markdown(self, pictures: Mapping[str, str]) -> str:
        """The page; ``pictures`` are its figures, by file, with what they show."""
        from ..algorithms import ALGORITHMS

        lines = [f"# {self.name}", "", "```bibtex", ALGORITHMS[self.name.lower()].bibtex, "```", ""]
        lines += [f"**{self.sentence}**", "", LEGEND, "", "## Abstract and conclusion", ""]
        lines += [*_claims(self.main), ""]
        lines += [*(f"![{text}]({PICTURES}/{file})\n" for file, text in pictures.items())]
        lines += ["## Its tables and figures", "", *self._tables(), "## Missing", ""]
        lines += [*self._missing()]
        lines += [  # settings that were tried and abandoned
            f"- {card.about.id}, scale {scale}, tried and left: {card.scales[scale].tried}"
            for card, scale, _ in self.states
            if scale in card.scales and card.scales[scale].tried
        ]
        return "\n".join(lines).rstrip() + "\n"

    def _tables(self) -> Iterator[str]:
        """One table of claims per scale, partial ones at the paper's scale alone."""
        for scale in dict.fromkeys(one.scale for one in self.states):
            at = [one for one in self.states if one.scale == scale]
            found = [(one, j) for one in at for j in one.outcome.judged if j.state != NOT_RUN]
            shown = [one for one in found if scale == PAPER or one[1].state in JUDGED]
            if found:
                inside, compared = self.inside.get(scale, (0, 0))
                told = [f"{inside} of {compared} printed numbers inside."] if compared else []
                rest = len(found) - len(shown)
                told += [f"{rest} claim{'s' * (rest > 1)} partial."] if rest else []
                yield f"### {scale}\n\n{' '.join(told)}\n"
                if shown:
                    yield from _claims(shown)
                    yield ""
                yield from (  # why claims do not hold, where that was found out
                    f"- {one.card.about.id}, {judged.claim.text}: {judged.claim.cause}\n"
                    for one, judged in shown
                    if judged.claim.cause and (judged.state == FAILS or judged.leans is False)
                )

    def _missing(self) -> Iterator[str]:
        """The runs of the paper's scale that are missing, and what they cost."""
        yield "Runs at the paper's scale; GPU hours of missing ones, by those that are there."
        yield "\n| card | what it shows | runs | missing | hours |"
        yield "| --- | --- | ---: | ---: | ---: |"
        for card, scale, outcome in self.states:
            done, wanted = outcome.counts
            if scale == PAPER and done < wanted:
                hours = words.NONE if card.about.waits else _hours(outcome)
                cells = [card.about.id, card.about.title, str(done), str(wanted - done), hours]
                yield _row(cells)
        waits = [one.card.about for one in self.states if one.card.about.waits]
        yield ""
        yield from dict.fromkeys(f"- {about.id} waits: {about.waits}" for about in waits)

    def drawn(self) -> Iterator[tuple[str, str, Markup]]:
        """The file, the description and the drawing of each picture: the paper beside ours.

        They are of the cards with most numbers that can be compared, each at its largest scale.
        """
        best: dict[str, tuple[int, CardState]] = {}
        for one in self.states:
            count = sum(entry.inside is not None for entry in one.outcome.entries)
            if count and one.card.about.id not in best:
                best[one.card.about.id] = count, one
        chosen = sorted(best.values(), key=lambda found: -found[0])[:MOST_DRAWN]
        for _, (card, scale, outcome) in chosen:
            text = f"{card.about.id} at the scale {scale}: {card.about.title}"
            yield f"{card.about.id.lower()}.svg", text, beside(outcome, text)


def _claims(found: Sequence[tuple[CardState, Judged]]) -> Iterator[str]:
    """A table of claims, each at the scale of its state."""
    yield "| claim | card | scale | columns | seeds | decides | as printed | ours |"
    yield "| --- | --- | --- | --- | ---: | --- | --- | --- |"
    for one, judged in found:
        here = [f"{len(judged.evidence)} of {judged.columns}", str(judged.seeds)]
        ours = words.NONE if judged.ours is None else _told(judged.ours)
        text = judged.claim.text
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        card = one.card.about.id
        yield _row([text, card, one.scale, *here, _interval(judged.least), _told(judged), ours])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _told(judged: Judged) -> str:
    """The state of a claim; of a partial one also where its means point."""
    if judged.state != PARTIAL:
        return judged.state
    return f"{PARTIAL} {'+' if judged.leans else '-'}"


def _interval(least: Interval | None) -> str:
    if least is None:
        return words.NONE
    if math.isinf(least.low):
        return _signed(least.mean)
    return f"{_signed(least.mean)} ({_signed(least.low)} to {_signed(least.high)})"


def _signed(value: float) -> str:
    return words.number(value, "accuracy", sign=True)


def _hours(outcome: StudyOutcome) -> str:
    """The hours of the missing runs, each as long as its method took on a GPU elsewhere."""
    took: dict[str, list[float]] = {}
    missing = []
    for cell in outcome.study.cells():
        record = record_for(cell, outcome.records)
        if record is None:
            missing.append(cell.method.label)
        elif record.environment.get("device") != "cpu":
            took.setdefault(cell.method.label, []).append(record.number("seconds"))
    everybody = [seconds for found in took.values() for seconds in found]
    if not everybody:
        return "unknown"
    usual = sum(everybody) / len(everybody)
    found = (took.get(label, [usual]) for label in missing)
    return f"{sum(sum(one) / len(one) for one in found) / 3600:.1f}"


# ---- pictures ------------------------------------------------------------------------------------

LEFT, ROW, WIDTH, HEAD = 150.0, 18.0, 640.0, 40.0


def beside(outcome: StudyOutcome, title: str) -> Markup:
    """The printed number (a ring) and ours (a disc) of every method, in one column of a table.

    The column is the one with most numbers that can be compared.
    """
    told = [entry for entry in outcome.entries if entry.inside is not None]
    column, _ = Counter(entry.column for entry in told).most_common(1)[0]
    shown = [(e, e.printed.mean) for e in told if e.column == column and e.printed is not None]
    values = [value for entry, printed in shown for value in (entry.ours.mean, printed)]
    marks = ticks(min(values), max(values))
    x = Scale(marks[0], marks[-1], LEFT, WIDTH - 20)
    foot = HEAD + ROW * len(shown) + 4
    drawn = [tag("text", f"{title}; {column}", x=0, y=14, class_="label")]
    drawn.append(tag("text", "ring: the paper, disc: ours", x=0, y=30, class_="tick"))
    for mark in marks:
        drawn.append(tag("line", x1=x(mark), x2=x(mark), y1=HEAD, y2=foot, class_="grid"))
        drawn.append(tag("text", f"{mark:g}", x=x(mark), y=foot + 14, class_="tick middle"))
    for at, (entry, printed) in enumerate(shown):
        y, ours, paper = HEAD + ROW * (at + 0.6), x(entry.ours.mean), x(printed)
        colour = "var(--good)" if entry.inside else "var(--bad)"
        drawn.append(tag("text", words.label(entry.method), x=0, y=y + 4, class_="label"))
        drawn.append(tag("line", x1=ours, x2=paper, y1=y, y2=y, stroke=colour, stroke_width=2))
        drawn.append(tag("circle", cx=paper, cy=y, r=5, fill="var(--card)", stroke=colour))
        drawn.append(tag("circle", cx=ours, cy=y, r=3.5, fill=colour))
    return figure(WIDTH, foot + 20, title, *drawn)


# ---- files ---------------------------------------------------------------------------------------


def papers_of(states: Sequence[CardState]) -> list[Paper]:
    """The papers that have a card, in the order of their numbers."""
    found = [Paper(name, states) for name in PAPERS]
    return [paper for paper in found if paper.states]


def page_of(name: str, published: Path | None) -> str | None:
    """The page of a paper by its name in any case; None if there is no such paper."""
    named = {paper.lower(): paper for paper in PAPERS}
    if name.lower() not in named:
        return None
    paper = Paper(named[name.lower()], all_states(published)[0])
    return paper.markdown({file: text for file, text, _ in paper.drawn()})


def pages(states: Sequence[CardState], published: Path) -> dict[Path, str]:
    """Every file that is written beside the folder of records: the index, pages and pictures."""
    home, found = published.parent, dict[Path, str]()
    papers = papers_of(states)
    for paper in papers:
        drawn = list(paper.drawn())
        found |= {home / PICTURES / file: standalone(picture) for file, _, picture in drawn}
        found[home / paper.file] = paper.markdown({file: text for file, text, _ in drawn})
    path = home / INDEX
    page = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    found[path] = _with_part(page, index(papers), path)
    return found


def index(papers: Sequence[Paper]) -> str:
    """One line per paper: the claims of its abstract and conclusion, and the numbers inside."""
    lines = [
        f"| paper | claims | {' | '.join(STATES)} | numbers inside, at the paper's scale |",
        f"| --- |{' ---: |' * (len(STATES) + 2)}",
    ]
    for paper in papers:
        counts = Counter(judged.state for _, judged in paper.main)
        inside, compared = paper.inside.get(PAPER, (0, 0))
        cells = [f"[{paper.name}]({paper.file})", str(len(paper.main))]
        cells += [str(counts[state]) for state in STATES]
        lines.append(_row([*cells, f"{inside} of {compared}"]))
    return "\n".join(lines) + "\n"


def write_pages(states: Sequence[CardState], published: Path) -> None:
    """Write the index, and the page and the pictures of every paper."""
    for path, text in pages(states, published.resolve()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)


def _with_part(page: str, text: str, path: Path) -> str:
    """The page with the text between its markers replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(
            f"{path}: found {BEGIN} and {END} alone, not at all, or in another order; "
            "expected both in this order, each on a line of its own; correct the file"
        )
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"

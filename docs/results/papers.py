"""Writes the page of each paper, its pictures, and the index of papers, from the published records.

    python docs/results/papers.py            # all files beside docs/results/cards
    python docs/results/papers.py FOLDER     # beside another folder of published records

A page says what the paper claims, what we found, printed numbers beside ours, and what is missing.
The index is put between two markers of README.md.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from coterie.algorithms import ALGORITHMS
from coterie.errors import ConfigError
from coterie.storage import files
from coterie.studies.card_file import PAPER
from coterie.studies.outcome import (
    FAILS,
    JUDGED,
    NOT_RUN,
    PARTIAL,
    STATES,
    Interval,
    Judged,
    StudyOutcome,
)
from coterie.studies.records import record_for
from coterie.studies.reproducing import CardState, Paper, all_states, papers_of
from coterie.views import words
from coterie.views.figure_files import standalone
from coterie.views.svg import Scale, figure, tag, ticks

INDEX, PICTURES = "README.md", "pictures"
BEGIN, END = "<!-- papers: begin -->", "<!-- papers: end -->"  # around the index on a page
MOST_DRAWN = 3  # pictures of a paper
LONGEST = 110  # characters of a claim in a table
LEGEND = """\
A claim, in our words, is judged at one scale, with all its columns, all its methods and three seeds
or more, by the 95 % intervals over seeds of its comparisons; *decides* shows the one on which that
depends. With less it is *partial*; `+` or `-` says whether the means so far agree. *Ours* is our
variant of the method. [Paper cards](../cards.md) describe claims and scales."""


def markdown(paper: Paper, pictures: Mapping[str, str]) -> str:
    """The page; ``pictures`` are its figures, by file, with what they show."""
    lines = [f"# {paper.name}", "", f"{ALGORITHMS[paper.name.lower()].paper}.", ""]
    lines += [f"**{paper.sentence}**", "", LEGEND, "", "## Abstract and conclusion", ""]
    lines += [*_claims(paper.main), ""]
    lines += [*(f"![{text}]({PICTURES}/{file})\n" for file, text in pictures.items())]
    lines += ["## Its tables and figures", "", *_tables(paper), "## Missing", ""]
    lines += [*_missing(paper), *_tried(paper), ""]
    return "\n".join(lines).rstrip() + "\n"


def _tables(paper: Paper) -> Iterator[str]:
    """One table of claims per scale, partial ones at the paper's scale alone."""
    for scale in dict.fromkeys(one.scale for one in paper.states):
        at = [one for one in paper.states if one.scale == scale]
        found = [(one, j) for one in at for j in one.outcome.judged if j.state != NOT_RUN]
        shown = [one for one in found if scale == PAPER or one[1].state in JUDGED]
        if found:
            inside, compared = paper.inside.get(scale, (0, 0))
            told = [f"{inside} of {compared} printed numbers inside."] if compared else []
            rest = len(found) - len(shown)
            told += [f"{rest} claim{'s' * (rest > 1)} partial."] if rest else []
            yield f"### {scale}\n\n{' '.join(told)}\n"
            if shown:
                yield from _claims(shown)
                yield ""
            yield from _causes(shown)


def _missing(paper: Paper) -> Iterator[str]:
    """The runs of the paper's scale that are missing, and what they cost."""
    yield "Runs at the paper's scale; GPU hours of missing ones, by those that are there."
    yield "\n| card | what it shows | runs | missing | hours |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for card, scale, outcome in paper.states:
        done, wanted = outcome.counts
        if scale == PAPER and done < wanted:
            hours = words.NONE if card.about.waits else _hours(outcome)
            cells = [card.about.id, card.about.title, str(done), str(wanted - done), hours]
            yield _row(cells)
    waits = [one.card.about for one in paper.states if one.card.about.waits]
    yield ""
    yield from dict.fromkeys(f"- {about.id} waits: {about.waits}" for about in waits)


def _tried(paper: Paper) -> Iterator[str]:
    """Settings that were tried and abandoned."""
    for card, scale, _ in paper.states:
        if scale in card.scales and (tried := card.scales[scale].tried):
            yield f"- {card.about.id}, scale {scale}, tried and left: {tried}"


def drawn(paper: Paper) -> Iterator[tuple[str, str, Markup]]:
    """The file, the description and the drawing of each picture: the paper beside ours.

    They are of the cards with most numbers that can be compared, each at its largest scale.
    """
    best: dict[str, tuple[int, CardState]] = {}
    for one in paper.states:
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


def _causes(found: Sequence[tuple[CardState, Judged]]) -> Iterator[str]:
    """Why claims do not hold, where that was found out."""
    for one, judged in found:
        if judged.claim.cause and (judged.state == FAILS or judged.leans is False):
            yield f"- {one.card.about.id}, {judged.claim.text}: {judged.claim.cause}\n"


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
    shown = [entry for entry in told if entry.column == column and entry.printed is not None]
    values = [v for e in shown if e.printed for v in (e.ours.mean, e.printed.mean)]
    marks = ticks(min(values), max(values))
    x = Scale(marks[0], marks[-1], LEFT, WIDTH - 20)
    foot = HEAD + ROW * len(shown) + 4
    drawn = [tag("text", f"{title}; {column}", x=0, y=14, class_="label")]
    drawn.append(tag("text", "ring: the paper, disc: ours", x=0, y=30, class_="tick"))
    for mark in marks:
        drawn.append(tag("line", x1=x(mark), x2=x(mark), y1=HEAD, y2=foot, class_="grid"))
        drawn.append(tag("text", f"{mark:g}", x=x(mark), y=foot + 14, class_="tick middle"))
    for at, entry in enumerate(shown):
        if entry.printed is None:
            continue
        y, ours, paper = HEAD + ROW * (at + 0.6), x(entry.ours.mean), x(entry.printed.mean)
        colour = "var(--good)" if entry.inside else "var(--bad)"
        drawn.append(tag("text", words.label(entry.method), x=0, y=y + 4, class_="label"))
        drawn.append(tag("line", x1=ours, x2=paper, y1=y, y2=y, stroke=colour, stroke_width=2))
        drawn.append(tag("circle", cx=paper, cy=y, r=5, fill="var(--card)", stroke=colour))
        drawn.append(tag("circle", cx=ours, cy=y, r=3.5, fill=colour))
    return figure(WIDTH, foot + 20, title, *drawn)


# ---- files ---------------------------------------------------------------------------------------


def pages(states: Sequence[CardState], published: Path) -> dict[Path, str]:
    """Every file that is written beside the folder of records: the index, pages and pictures."""
    home, found = published.parent, dict[Path, str]()
    papers = papers_of(states)
    for paper in papers:
        pictures = list(drawn(paper))
        found |= {home / PICTURES / file: standalone(picture) for file, _, picture in pictures}
        found[home / f"{paper.name.lower()}.md"] = markdown(
            paper, {file: text for file, text, _ in pictures}
        )
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
        cells = [f"[{paper.name}]({paper.name.lower()}.md)", str(len(paper.main))]
        cells += [str(counts[state]) for state in STATES]
        lines.append(_row([*cells, f"{inside} of {compared}"]))
    return "\n".join(lines) + "\n"


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


def write(published: Path) -> None:
    """Write all files; a wrong card is refused, since a page without it would say nothing of it."""
    found, wrong = all_states(published)
    if wrong:
        raise ConfigError("; ".join(map(str, wrong)))
    for path, text in pages(found, published.resolve()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "cards")

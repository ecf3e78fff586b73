"""The commands ``coterie reproduce``, ``sweep`` and ``tune``: studies of several comparisons."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..commands.arguments import CODE, JSON, configured, settings
from ..errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from .outcome import StudyOutcome
    from .study_runs import StudyWork

ALL = "all"


Methods = Annotated[str | None, typer.Option(help="only these, separated by commas")]
Columns = Annotated[list[str] | None, typer.Option(help="only this column; may be repeated")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N")]


def reproduce(
    cards: Annotated[
        list[str] | None,
        typer.Argument(
            help="ids of cards (P5-T3), files of cards, or 'all'; a paper (fedfomo) with --show",
            metavar="CARD|PAPER...",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="paper, tuned, small, digits, or another scale of the card")
    ] = "paper",
    listed: Annotated[bool, typer.Option("--list", help="show all cards and their state")] = False,
    methods: Methods = None,
    columns: Columns = None,
    seeds: Annotated[int | None, typer.Option(help="how many seeds", min=1)] = None,
    device: Device = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="folder; default: runs/CARD-SCALE")
    ] = None,
    publish: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="also read and write published results in this folder"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="keep the folders of all runs")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="run nothing: show the card from what was run")
    ] = False,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="any field, as in train.lr=0.1"),
    ] = None,
) -> None:
    """Run a table of a paper, as far as it is missing, and print it beside the paper's numbers.

    Finished runs are never repeated, and one that was killed is continued. The card says which
    numbers are inside the paper's deviation or two points, and which claims hold.
    """
    from ..commands import console
    from .paper_page import page_of
    from .reproducing import default_published, reproduction, runnable

    if listed or not cards:
        _list(None if publish is None else Path(publish))
        return
    page = page_of(cards[0], default_published(publish)) if show else None
    if page is not None:
        console.show(page)
        return
    changes = settings(given or [])
    if device is not None:
        changes["engine.device"] = device
    every = cards == [ALL]
    names = runnable(scale) if every else cards
    if out is not None and len(names) > 1:
        raise ConfigError("--out: found several cards; expected one, or leave --out out")
    ones = [
        reproduction(
            name,
            scale,
            out=out,
            publish=publish,
            columns=tuple(columns or ()),
            methods=_names(methods),
            seeds=seeds,
            changes=changes,
        )
        for name in names
    ]
    for one in ones if show else ():
        _show(one, one.write())
    lacking = {} if show else _run_all(ones, keep=keep, go_on=every)
    if every:
        _list(None if publish is None else Path(publish))
    if lacking:
        reasons = "; ".join(f"{card}: {error}" for card, error in lacking.items())
        raise DataError(f"{len(lacking)} of {len(names)} cards were not run: {reasons}")


@configured
def sweep(
    config: str | None,
    given: dict[str, Any],
    number: Annotated[
        str | None, typer.Option(help="the field of summary.json that is shown; default: the mean")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Run every combination of the values that a config lists: one table, one page.

    ``epsilon = {sweep = [0, 0.1]}`` in a method's table makes variants of the method; in another
    table it makes a column. Finished runs are never repeated.
    """
    from ..commands.console import show_json
    from ..commands.live import progress_on_stderr
    from .sweeping import default_folder, sweep_of

    found = sweep_of(config, number, **given)
    found = replace(found, out=found.out or default_folder(found))
    rounds = max(column.config.run.rounds for column in found.study.columns)
    with progress_on_stderr(found.missing(), rounds) as watch:
        outcome = found.run([watch], keep=True)
    if as_json:
        show_json(outcome.rows())
        return
    _show(found, outcome)


def tune(
    source: Annotated[
        str,
        typer.Argument(
            help="TOML file of a config or a card, or the id of a card (P5-T3)",
            metavar="CONFIG|CARD",
        ),
    ],
    scale: Annotated[str, typer.Option(help="scale of a card: paper, small, digits")] = "paper",
    trials: Annotated[
        int | None, typer.Option(help="trials of every method [tune.trials]", min=1)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="seeds of every trial [tune.seeds]", min=1)
    ] = None,
    methods: Methods = None,
    columns: Columns = None,
    device: Device = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="folder; default: runs/NAME-tune")
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="any field, as in tune.train.lr=[0.01,0.1]"
        ),
    ] = None,
    code: Annotated[list[str] | None, CODE] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Search hyper-parameters on validation data, with equally many trials for every method.

    The table [tune] of the file, or --set, says what is searched. A search that was killed is
    continued; finished trials are never repeated. The best values are written as TOML.
    """
    from ..commands.console import show, show_json
    from ..commands.live import progress_on_stderr
    from .tuning import TOML, tuning_of

    told = {"tune.trials": trials, "tune.seeds": seeds, "engine.device": device}
    changes = settings(given or []) | {f: value for f, value in told.items() if value is not None}
    found = tuning_of(
        source, scale, changes, methods=_names(methods), columns=tuple(columns or ()), code=code
    )
    found = found if out is None else replace(found, out=Path(out))
    with progress_on_stderr(found.expected(), found.rounds) as watch:
        tuned = found.run([watch])
    if as_json:
        show_json(tuned.to_dict())
        return
    show(tuned)
    show(f"\nfolder: {tuned.out}\nvalues: {tuned.out and tuned.out / TOML}")


def _names(methods: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (methods or "").split(",") if name.strip())


def _run_all(ones: "Sequence[StudyWork]", *, keep: bool, go_on: bool) -> "dict[str, DataError]":
    """Run and show cards; with ``go_on``, the errors of those whose dataset is missing here.

    Runs that other processes have taken are waited for only after those of all cards were begun.
    """
    lacking = dict[str, DataError]()
    for wait in (False, True):
        later = []
        for one in ones:
            try:
                outcome = _run(one, keep, wait)
            except DataError as error:
                if not go_on:
                    raise
                lacking[one.study.name] = error
                continue
            if one.missing():
                later.append(one)
            else:
                _show(one, outcome)
        ones = later
    return lacking


def _run(one: "StudyWork", keep: bool, wait: bool) -> "StudyOutcome":
    from ..commands.live import progress_on_stderr

    rounds = max(column.config.run.rounds for column in one.study.columns)
    with progress_on_stderr(one.missing(), rounds) as watch:
        return one.run([watch], keep=keep, wait=wait)


def _show(one: "StudyWork", outcome: "StudyOutcome") -> None:
    from ..commands.console import show
    from .card_text import markdown

    show(markdown(outcome, one.command))
    place = one.out and str(one.out / one.name)
    show(f"table: {place}.md\npage:  {place}.html")


def _list(published: Path | None) -> None:
    """Print every card with its state, and every paper; with a folder, write the papers' pages.

    A wrong card file is one line below all cards, and an error at the end.
    """
    from ..commands.console import show
    from .paper_page import all_states, papers_of, write_pages
    from .reproducing import default_published

    found, wrong = all_states(default_published(published), published is None)
    for card, scale, outcome in found:
        about = card.about
        state = f"waits: {about.waits}" if about.waits else outcome.state
        show(f"{about.id:14} {scale:8} {state:40} {about.title}")
    for paper in papers_of(found):
        show(f"{paper.name}: {paper.sentence}")
    for error in wrong:
        show(f"wrong card: {printable(error)}")
    if published is not None and not wrong:
        write_pages(found, published)
        show(f"pages: {published.resolve().parent}")
    if wrong:
        count = f"{len(wrong)} error{'s' * (len(wrong) > 1)}"
        kept = "" if published is None else "; the published pages were left as they are"
        raise ConfigError(f"found {count} in card files, listed above; correct each file{kept}")

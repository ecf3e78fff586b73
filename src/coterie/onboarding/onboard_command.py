"""``coterie onboard``: a client that was not in the federation joins a finished run."""

import contextlib
from typing import Annotated, Any

import typer

from ..commands.arguments import CODE, CODES, JSON, STRICT, configured
from ..errors import ConfigError


def onboard(
    run: Annotated[str, typer.Argument(help="folder of a finished run", metavar="RUN")],
    data: Annotated[
        str, typer.Option(metavar="FILE", help="labelled samples, as a config can name them")
    ],
    name: Annotated[str | None, typer.Option(help="the newcomer's name; else the file's")] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="new folder for the better model"),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="numbers of labelled samples to try beside all of them"),
    ] = None,
    draws: Annotated[int | None, typer.Option(help="random draws of each number", min=1)] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="passes of local training after joining; else one round's, if it helps", min=0
        ),
    ] = None,
    codes: Annotated[str | None, CODES] = None,
    strict: Annotated[bool, STRICT] = False,
    as_json: Annotated[bool, JSON] = False,
    code: Annotated[list[str] | None, CODE] = None,
) -> None:
    """Join a finished run with your own labelled samples: with whom, how good, from how many."""
    from ..commands.console import show, show_json
    from ..commands.live import progress_on_stderr
    from ..exporting.export_commands import show_export
    from .newcomer import DRAWS, SIZES
    from .onboarded import onboard as join

    with progress_on_stderr(1, 1):
        found = join(
            run,
            data,
            name=name,
            sizes=SIZES if samples is None else _numbers(samples),
            draws=DRAWS if draws is None else draws,
            epochs=epochs,
            codes=codes,
            strict=strict,
            out=out,
            code=code,
        )
    if as_json:
        show_json(found.to_dict())
        return
    show(found)
    if found.path is not None:
        print()
        show_export(found.path)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--samples: found '{text[:60]}'; expected numbers, as in 5,20") from None


@configured
def leave_out(
    config: str | None,
    given: dict[str, Any],
    site: Annotated[
        str | None, typer.Option(metavar="NAME", help="leave this site out; default: each in turn")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Leave each site out: how good is a model of the others there, against training alone?"""
    from ..api import configure
    from ..commands.console import show, show_json
    from ..runs.assemble import assemble
    from .left_out import leave_out as left_out

    with contextlib.closing(assemble(configure(config, **given))) as assembly:
        found = left_out(assembly, site)
    if as_json:
        show_json(found.to_dict())
        return
    show(found)

"""``coterie new``, ``list`` and ``show``: files to start from, and the names a config can use."""

import shlex
from typing import Annotated

import typer

from .arguments import JSON


def new(
    name: Annotated[
        str, typer.Argument(help="name of the new files, with or without a folder", metavar="NAME")
    ],
) -> None:
    """Write NAME.toml, a commented config, and NAME.csv, a small table that shows the layout.

    The name heart gives a real table: heart disease at four hospitals.
    """
    from .catalog import write_example

    config, table = write_example(name)
    at = shlex.quote(str(config))
    print(f"wrote {config} and {table}\n\nNext:")
    print(f"  coterie doctor {at}     # check the data before training")
    print(f"  coterie compare {at}    # is joining worth it?")
    print(f"Then put your own table in the place of {table}, and its columns into {config}.")


def list_names(
    what: Annotated[
        str,
        typer.Argument(
            help="methods, datasets, partitions, models, adaptations, engines or metrics"
        ),
    ],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List the names that a config can use."""
    from .catalog import listed, listing
    from .console import show_json

    if as_json:
        show_json(listed(what))
    else:
        print(listing(what))


def show(
    names: Annotated[
        list[str], typer.Argument(help="a name, or a kind and a name", metavar="[KIND] NAME")
    ],
) -> None:
    """Explain a name that can be listed: what it does, its fields, its paper."""
    from .catalog import explanation

    print(explanation(names))

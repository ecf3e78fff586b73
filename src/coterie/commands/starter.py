"""``coterie new``: writes a commented config and a small table to start from.

The table shows the layout that coterie reads. Its numbers are made up: in three sites ``score``
raises the risk of the outcome, in the other three it lowers it, so that there are collaborators to
be found.
"""

import csv
import io
import random
import re
from datetime import date, timedelta
from importlib.resources import files as resources
from pathlib import Path

from ..errors import StoreError
from ..storage import files

RAISES, LOWERS = ("north", "lakeside", "county"), ("hilltop", "east", "harbour")  # the sites
PATIENTS = 30  # per site
VISITS = 2  # rows per patient
COLUMNS = ("site", "patient", "admitted", "sex", "age", "pressure", "score", "readmitted")
FIRST_DAY = date(2024, 1, 1)
MISSING = 0.1  # share of missing cells in ``score``


def write_example(name: str) -> tuple[Path, Path]:
    """Write ``NAME.toml`` and ``NAME.csv``; refuses a path that exists. Returns both paths."""
    config, table = _paths(name)
    template = resources(__package__).joinpath("templates", "federation.toml")
    text = template.read_text(encoding="utf-8").replace("@NAME@", config.stem)
    with files.writing(config):
        config.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(table, example_table())
    files.write_text(config, text)
    return config, table


def _paths(name: str) -> tuple[Path, Path]:
    """The paths of both files; refuses names that are no plain file name, and paths in use."""
    place = files.expanded(name.removesuffix(".toml"))
    if not re.fullmatch(r"\w[\w-]*", place.name):
        raise StoreError(
            f"NAME: found '{name}'; expected letters, digits, '-' and '_', as in my-federation, "
            "after an optional folder"
        )
    paths = tuple(place.with_name(place.name + suffix) for suffix in (".toml", ".csv"))
    for path in paths:
        if path.exists() or path.is_symlink():
            raise StoreError(f"{path}: exists already; nothing was written; choose another name")
    return paths[0], paths[1]


def example_table() -> str:
    """The text of the example: the same in every call."""
    draw, out = random.Random(0), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for site in (*RAISES, *LOWERS):
        effect = 1.5 if site in RAISES else -1.5
        for number in range(1, PATIENTS + 1):
            patient = f"{site[:2].upper()}{number:03}"
            sex, age = draw.choice(("female", "male")), draw.randint(20, 90)
            day = FIRST_DAY + timedelta(days=draw.randrange(330))
            for _ in range(VISITS):
                score, pressure = round(draw.gauss(50, 10), 1), round(draw.gauss(125, 15), 1)
                risk = effect * (score - 50) / 10 + (pressure - 125) / 15 + draw.gauss(0, 0.5)
                cell = "" if draw.random() < MISSING else score
                outcome = "yes" if risk > 0.2 else "no"
                writer.writerow((site, patient, day, sex, age, pressure, cell, outcome))
                day += timedelta(days=draw.randint(5, 30))
    return out.getvalue()

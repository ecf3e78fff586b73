"""Heart disease at four hospitals: the files of ``coterie/data/heart`` as one table.

Origin, licence and investigators, and what is changed here: ``coterie/data/heart/README.md``.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

from ..federation import Dataset
from .tables import read_table

FOLDER = Path(__file__).parent.parent / "heart"
HOSPITALS = {
    "cleveland": "Cleveland",
    "hungarian": "Budapest",
    "switzerland": "Zurich",
    "va": "Long Beach",
}
MISSING = "?"


class Column(NamedTuple):
    """A column of the original files: its name here, and the names of its categories, if any."""

    name: str
    categories: Mapping[int, str] = MappingProxyType({})
    zero_is_missing: bool = False

    def cell(self, written: str) -> str:
        """The cell of the table for a cell of the original file."""
        if written == MISSING or (self.zero_is_missing and float(written) == 0):
            return ""
        return self.categories[int(float(written))] if self.categories else f"{float(written):g}"


NO_YES = {0: "no", 1: "yes"}
COLUMNS = (
    Column("age"),
    Column("sex", {0: "female", 1: "male"}),
    Column("chest_pain", {1: "typical", 2: "atypical", 3: "non-anginal", 4: "asymptomatic"}),
    Column("resting_pressure", zero_is_missing=True),  # mm Hg
    Column("cholesterol", zero_is_missing=True),  # mg/dl
    Column("high_fasting_sugar", NO_YES),  # above 120 mg/dl
    Column("resting_ecg", {0: "normal", 1: "ST-T abnormality", 2: "hypertrophy"}),
    Column("maximum_heart_rate"),
    Column("exercise_angina", NO_YES),
    Column("st_depression"),  # by exercise, relative to rest
    Column("st_slope", {1: "up", 2: "flat", 3: "down"}),
    Column("vessels"),  # major vessels (0-3) coloured by fluoroscopy
    Column("thallium", {3: "normal", 6: "fixed defect", 7: "reversible defect"}),
    Column("disease", {0: "no", 1: "yes", 2: "yes", 3: "yes", 4: "yes"}),
)


def heart_table() -> str:
    """The table as CSV text, one row per patient."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("hospital", *(column.name for column in COLUMNS)))
    writer.writerows(_patients())
    return out.getvalue()


def _patients() -> Iterator[list[str]]:
    for file, hospital in HOSPITALS.items():
        with (FOLDER / f"processed.{file}.data").open(encoding="ascii", newline="") as lines:
            for row in csv.reader(lines):
                cells = zip(COLUMNS, row, strict=True)
                yield [hospital, *(column.cell(written) for column, written in cells)]


def heart_config() -> str:
    """The config for the table, as TOML; ``@NAME@.csv`` stands for the table's file."""
    return (FOLDER / "heart.toml").read_text(encoding="utf-8")


def heart() -> Dataset:
    """920 heart patients of four hospitals, with missing values: is an artery narrowed?

    Investigators: Andras Janosi, M.D. (Hungarian Institute of Cardiology, Budapest); William
    Steinbrunn, M.D. (University Hospital, Zurich); Matthias Pfisterer, M.D. (University Hospital,
    Basel); Robert Detrano, M.D., Ph.D. (V.A. Medical Center, Long Beach, and Cleveland Clinic
    Foundation). UCI Machine Learning Repository, 1988, CC BY 4.0.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "heart.csv"
        path.write_text(heart_table(), encoding="utf-8")
        return read_table(path, client="hospital", target="disease")

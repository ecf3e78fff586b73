"""Heart disease at four hospitals: the table and the config of the folder ``coterie/data/heart``.

Origin, licence and investigators, and what was changed: ``coterie/data/heart/README.md``.
"""

from pathlib import Path

from ..federation import Dataset
from .tables import read_table

FOLDER = Path(__file__).parent.parent / "heart"


def heart_table() -> str:
    """The table as CSV text, one row per patient."""
    return (FOLDER / "heart.csv").read_text(encoding="utf-8")


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
    return read_table(FOLDER / "heart.csv", client="hospital", target="disease")

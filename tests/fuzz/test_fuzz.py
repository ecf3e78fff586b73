"""A bounded number of hostile inputs of every kind; ``make fuzz`` tries for an hour."""

import warnings

import pytest

from fuzz.attacks import ATTACKS
from fuzz.harness import Finding, attempt

TRIES = {
    "configs": 60,
    "tables": 30,
    "arrays": 40,
    "folders": 40,
    "commands": 2,
    "round_answers": 8,
    "setup_answers": 8,
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_hostile_input_is_accepted_or_refused_in_one_message(kind, tmp_path):
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a strange but valid input may warn
        for seed in range(TRIES.get(kind, 100)):
            refused += attempt(ATTACKS[kind], seed, tmp_path / str(seed)).refused
    assert refused or kind in ("uploads", "commands", "round_answers")


def test_the_harness_finds_what_it_looks_for(tmp_path):
    """A traceback, a write beside the folder and a changed canary are findings."""

    def broken(random, inside):
        return [][1]

    def spilling(random, inside):
        (inside.parent / "elsewhere").write_text("x")

    def destroying(random, inside):
        (inside.parent / "canary" / "precious").write_text("x")

    for number, attack in enumerate((broken, spilling, destroying)):
        with pytest.raises(Finding):
            attempt(attack, 0, tmp_path / str(number))

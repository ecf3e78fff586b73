"""The examples in docstrings give what they print."""

import doctest
import importlib
import pkgutil

import pytest

import coterie

ROOMS = ("adapt", "algorithms", "core", "data", "runs", "views")
MODULES = [
    found.name
    for room in ROOMS
    for found in pkgutil.walk_packages([f"{coterie.__path__[0]}/{room}"], f"coterie.{room}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert not doctest.testmod(importlib.import_module(name)).failed

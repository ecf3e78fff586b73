"""The generated pages are as the code has them."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import coterie
from coterie.runs.config.schema import Config

DOCS = Path(__file__).parents[1] / "docs"
_spec = spec_from_file_location("reference", DOCS / "reference.py")
reference = module_from_spec(_spec)
_spec.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_generated_page_is_up_to_date(name):
    page = (DOCS / name).read_text("utf-8")
    assert reference.STARTS[name] in page
    assert reference.refreshed(name, page) == page, "run python docs/reference.py"
    assert " object at 0x" not in page


def test_every_field_of_a_config_has_a_meaning():
    page = reference.config_page()
    for name in Config.model_fields:
        section = page.partition(f"### [{name}]\n")[2].partition("### ")[0]
        for field in Config.table(name).model_fields.keys() - {*reference.SEEN}:
            (item,) = (line for line in section.splitlines() if line.startswith(f"- `{field}` ("))
            assert item.partition("): ")[2], f"{name}.{field} has no meaning"


def test_every_public_name_is_on_the_api_page():
    page = reference.api_page()
    for name in coterie.__all__:
        assert f"\n- `{name}(" in page or f"\n- `{name}`:" in page
    assert "`of_method()`" in page  # of Comparison: members are listed

"""Folders of another format, and values of another kind than a run writes, are refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.errors import StoreError
from coterie.runs import kinds
from coterie.runs.run_folder import FORMAT
from coterie.runs.summary import FIELDS, checked, score_field
from coterie.storage import files
from coterie.views.page import run_page
from hostile import TINY, unfinished

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """A finished run and a comparison; copies of them are changed."""
    place = tmp_path_factory.mktemp("made")
    coterie.run(TINY, method="fedamp", set={"run.metric": "f1"}, out=str(place / "run"))
    coterie.compare(TINY, methods=["fedavg"], rounds=1, out=str(place / "comparison"))
    unfinished(place / "begun")
    return place


@pytest.fixture
def made(made_once, tmp_path):
    return Path(shutil.copytree(made_once, tmp_path / "made"))


def edit(path, **changes):
    """Change fields of a JSON file as a run writes it."""
    files.write_json(path, {**json.loads(path.read_text()), **changes})


def shown(place):
    """Everything that people see of a run."""
    result = coterie.read(place)
    return repr(result), run_page(result)


# ---- formats -------------------------------------------------------------------------------------


def test_new_folders_have_the_format_in_their_first_file(made):
    for first in (made / "run" / "config.json", made / "comparison" / "compare.json"):
        assert json.loads(first.read_text())["format"] == FORMAT


SAYS = r"'format' is .*; expected 1, the format that this version of coterie reads"


@pytest.mark.parametrize("number", [FORMAT + 1, 0, "1", -1, 1.0, True, None, [1]])
def test_folders_of_another_format_are_refused(made, number):
    for place, first, looks in (
        ("run", "config.json", (coterie.verify, coterie.read, coterie.resume)),
        ("comparison", "compare.json", (coterie.verify, coterie.read, coterie.resume)),
        ("begun", "config.json", (coterie.resume,)),
    ):
        edit(made / place / first, format=number)
        for look in looks:
            with pytest.raises(StoreError, match=SAYS):
                look(made / place)


def test_a_folder_without_a_format_is_refused(made):
    path = made / "run" / "config.json"
    files.write_json(path, {k: v for k, v in json.loads(path.read_text()).items() if k != "format"})
    with pytest.raises(StoreError, match=SAYS):
        coterie.read(made / "run")


# ---- the manifest --------------------------------------------------------------------------------

SAME_VALUE = {
    "no last newline": lambda text: text.rstrip("\n"),
    "a newline more": lambda text: text + "\n",
    "spaces": lambda text: text.replace("  ", " ", 1),
    "one line": lambda text: json.dumps(json.loads(text)),
    "another order": lambda text: files.to_json(_turned(json.loads(text)), indent=2) + "\n",
    "escapes": lambda text: text.replace("sha256", "\\u0073ha256"),
}


def _turned(value):
    if not isinstance(value, dict):
        return value
    return {name: _turned(value[name]) for name in reversed(value)}


@pytest.mark.parametrize("how", SAME_VALUE)
@pytest.mark.parametrize("place", ["run", "comparison"])
def test_a_manifest_of_the_same_value_in_other_bytes_is_seen(made, place, how):
    path = made / place / files.MANIFEST
    before = path.read_text()
    path.write_text(SAME_VALUE[how](before))
    assert json.loads(path.read_text()) == json.loads(before)
    (sentence,) = coterie.verify(made / place)[str(made / place)]
    assert "byte for byte" in sentence
    path.write_text(before)
    assert not any(coterie.verify(made / place).values())


# ---- values --------------------------------------------------------------------------------------

STRANGE = ["x", "inf", None, True, -1, 10**400, 1e400, [[]], {"a": "b"}]


def shows_or_refuses(place):
    """Whether a run was refused; anything else than a refusal and a table is an error."""
    try:
        shown(place)
    except StoreError:
        return True
    return False


@pytest.mark.parametrize("general", FIELDS)
def test_a_value_of_another_kind_in_the_summary_is_refused(made, general):
    path = made / "run" / "summary.json"
    whole = json.loads(path.read_text())
    name = score_field(general, "f1")
    assert name in whole
    refused = []
    for value in STRANGE:
        path.write_text(json.dumps({**whole, name: value}))
        if shows_or_refuses(made / "run"):
            refused.append(value)
    assert len(refused) >= len(STRANGE) - 3
    path.write_text(json.dumps({**whole, name: {"calls": [1]}}))
    with pytest.raises(StoreError, match=rf"summary\.json: '{name}' is .*; expected"):
        coterie.read(made / "run")


LINE = ("round", "clients", "seconds", "bytes_up", "rejected", "test", "in_group_weight")


@pytest.mark.parametrize("name", [*LINE, "off_diagonal"])
def test_a_value_of_another_kind_in_a_round_is_refused(made, name):
    path = made / "run" / "rounds.jsonl"
    first, *rest = path.read_text().splitlines()
    assert name in json.loads(first)
    for value in STRANGE:
        changed = json.dumps({**json.loads(first), name: value})
        path.write_text("\n".join([changed, *rest, ""]))
        shows_or_refuses(made / "run")
    path.write_text("\n".join([json.dumps({**json.loads(first), name: {"a": 1}}), *rest, ""]))
    with pytest.raises(StoreError, match=f"'{name}' is .*; expected"):
        coterie.read(made / "run")


def test_an_infinite_number_of_a_round_is_read_as_one(made):
    """Distillation may diverge: its losses are then written as texts."""
    path = made / "run" / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["distillation"] = [0.5, "inf"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = coterie.read(made / "run")
    assert history.lines[0]["distillation"] == [0.5, np.inf]


@pytest.mark.parametrize("text", [7, [7], "coterie", {"a": 1}])
def test_a_command_that_is_no_list_of_texts_is_refused(made, text):
    edit(made / "run" / "environment.json", argv=text)
    assert shows_or_refuses(made / "run")


ARRAYS = {
    "fewer clients": ("collaboration.npz", "A", lambda A: A[:, :-1, :-1]),
    "not square": ("collaboration.npz", "A", lambda A: A[:, :, :-1]),
    "one matrix": ("collaboration.npz", "A", lambda A: A[0]),
    "texts for weights": ("collaboration.npz", "A", lambda A: A.astype(str)),
    "fractions of rounds": ("collaboration.npz", "rounds", lambda r: r + 0.5),
    "groups of fewer": ("collaboration.npz", "groups", lambda g: g[:-1]),
    "answers of fewer": ("predictions.npz", "sizes", lambda s: np.append(s[:-2], s[-2:].sum())),
    "negative sizes": ("predictions.npz", "sizes", lambda s: [-1, s[:2].sum() + 1, *s[2:]]),
    "complex answers": ("predictions.npz", "values", lambda v: v + 1j),
    "a column of answers": ("predictions.npz", "values", lambda v: v[:, None]),
}


@pytest.mark.parametrize("harm", ARRAYS)
def test_arrays_that_do_not_fit_the_clients_are_refused(made, harm):
    name, key, change = ARRAYS[harm]
    path = made / "run" / name
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays[key] = change(arrays[key])
    np.savez(path, **arrays)
    with pytest.raises(StoreError, match=re.escape(name)):
        coterie.read(made / "run")


def test_a_sparse_matrix_whose_columns_do_not_exist_is_refused(made):
    """scipy would write outside its memory when such a matrix is made dense."""
    path = made / "run" / "collaboration.npz"
    with np.load(path) as stored:
        arrays = {name: part for name, part in stored.items() if name != "A"}
    rows = len(arrays["rounds"]) * len(arrays["clients"])
    arrays |= {"data": np.ones(1), "indices": np.array([10**6]), "indptr": np.ones(rows + 1, int)}
    arrays["indptr"][0] = 0
    np.savez(path, **arrays)
    with pytest.raises(StoreError, match=r"collaboration\.npz"):
        coterie.read(made / "run")


def test_json_that_is_nested_too_deep_is_refused(made):
    nested = "[" * 600 + "]" * 600
    (made / "run" / "environment.json").write_text(f'{{"a": {nested}}}')
    with pytest.raises(StoreError, match="nested more than 50 deep"):
        coterie.read(made / "run")
    assert files.from_json("[" * 40 + "]" * 40) is not None


# ---- the table of fields -------------------------------------------------------------------------


def test_the_table_of_fields_is_what_a_run_writes(made):
    coterie.run(TINY, method="fedavg", rounds=1, out=str(made / "new"))
    written = json.loads((made / "new" / "summary.json").read_text())
    assert {score_field(name, "accuracy") for name in FIELDS} == written.keys()
    assert checked(written) == written
    assert {*FIELDS.values()} <= kinds.KINDS.keys()


def test_the_docs_have_the_table_of_fields():
    text = (DOCS / "folders.md").read_text("utf-8")
    told = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    assert told == [(name.replace("{score}", "…"), kind) for name, kind in FIELDS.items()]

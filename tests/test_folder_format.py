"""Folders of earlier versions are read; those of newer ones and values of another kind are not."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.errors import StoreError
from coterie.runs import kinds
from coterie.runs.run_folder import FORMAT
from coterie.runs.summary import FIELDS, checked, score_field
from coterie.storage import files
from coterie.views.page import page, run_page
from hostile import TINY, unfinished

OLD = Path(__file__).parent / "folders" / "b075f68.zip"
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def old_once(tmp_path_factory):
    """A run and a comparison as commit b075f68 wrote them, before folders had a format."""
    place = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(OLD) as archive:
        archive.extractall(place)
    return place


@pytest.fixture
def old(old_once, tmp_path):
    return Path(shutil.copytree(old_once, tmp_path / "old"))


def edit(path, **changes):
    """Change fields of a JSON file as a run writes it."""
    files.write_json(path, {**json.loads(path.read_text()), **changes})


def shown(place):
    """Everything that people see of a run."""
    result = coterie.read(place)
    return repr(result), result._repr_html_(), run_page(result)


# ---- formats -------------------------------------------------------------------------------------


def test_a_run_of_before_is_verified_read_and_shown(old):
    assert coterie.verify(old / "run") == {str(old / "run"): []}
    text, html, whole = shown(old / "run")
    digest = json.loads((old / "run" / "summary.json").read_text())["digest"]
    assert text.startswith("FedAMP: 3 rounds, 8 clients, seed 0")
    assert all(digest[:16] in each for each in (text, html, whole))
    assert coterie.resume(old / "run").summary["digest"] == digest


def test_a_comparison_of_before_is_verified_read_and_shown(old):
    place = old / "comparison"
    assert not any(coterie.verify(place).values())
    found = coterie.read(place)
    assert found.methods == ("local", "fedavg", "fedamp")
    assert "For these 8 sites and the models of this run" in found.verdict
    assert found.verdict in repr(found)
    assert "Is joining worth it?" in page(found)


def test_a_summary_that_lacks_later_fields_is_completed(old):
    """The first folders had neither merge_val nor each client's best round."""
    place = old / "run" / "summary.json"
    later = {name for name, field in FIELDS.items() if field.before is not ...}
    kept = {k: v for k, v in json.loads(place.read_text()).items() if k not in later}
    files.write_json(place, kept)
    assert "true: trained on validation data too" in shown(old / "run")[0]


def test_new_folders_have_the_format_in_their_first_file(tmp_path):
    coterie.run(TINY, method="fedavg", rounds=1, out=str(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["format"] == FORMAT
    coterie.compare(TINY, methods=["fedavg"], rounds=1, out=str(tmp_path / "both"))
    assert json.loads((tmp_path / "both" / "compare.json").read_text())["format"] == FORMAT
    again = coterie.run(tmp_path / "run" / "config.json", out=str(tmp_path / "again"))
    first = coterie.read(tmp_path / "run")
    assert again.summary["digest"] == first.summary["digest"]


NEWER = r"has format 2, which a newer version of coterie wrote; expected at most 1; install"


def test_a_run_of_a_newer_format_is_refused(old, tmp_path):
    place = old / "run"
    edit(place / "config.json", format=FORMAT + 1)
    for look in (coterie.verify, coterie.read, coterie.resume):
        with pytest.raises(StoreError, match=NEWER):
            look(place)
    unfinished(tmp_path / "begun")
    edit(tmp_path / "begun" / "config.json", format=FORMAT + 1)
    with pytest.raises(StoreError, match=NEWER):
        coterie.resume(tmp_path / "begun")


def test_a_comparison_of_a_newer_format_is_refused(old):
    place = old / "comparison"
    edit(place / "compare.json", format=FORMAT + 1)
    for look in (coterie.verify, coterie.read, coterie.resume):
        with pytest.raises(StoreError, match=NEWER):
            look(place)


@pytest.mark.parametrize("number", ["1", -1, 1.0, True, None, [1]])
def test_a_format_that_is_no_count_is_refused(old, number):
    edit(old / "run" / "config.json", format=number)
    with pytest.raises(StoreError, match=r"'format' is .*; expected the number of a format"):
        coterie.read(old / "run")


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
def test_a_manifest_of_the_same_value_in_other_bytes_is_seen(old, place, how):
    path = old / place / files.MANIFEST
    before = path.read_text()
    path.write_text(SAME_VALUE[how](before))
    assert json.loads(path.read_text()) == json.loads(before)
    (sentence,) = coterie.verify(old / place)[str(old / place)]
    assert "byte for byte" in sentence or "in its order" in sentence
    path.write_text(before)
    assert not any(coterie.verify(old / place).values())


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
def test_a_value_of_another_kind_in_the_summary_is_refused(old, general):
    path = old / "run" / "summary.json"
    whole = json.loads(path.read_text())
    name = score_field(general, "rmse")
    assert name in whole or FIELDS[general].before is not ...  # younger than the stored folder
    refused = []
    for value in STRANGE:
        path.write_text(json.dumps({**whole, name: value}))
        if shows_or_refuses(old / "run"):
            refused.append(value)
    assert len(refused) >= len(STRANGE) - 3
    path.write_text(json.dumps({**whole, name: {"calls": [1]}}))
    with pytest.raises(StoreError, match=rf"summary\.json: '{name}' is .*; expected"):
        coterie.read(old / "run")


def test_a_string_where_a_number_belongs_says_what_was_expected(old):
    """The finding of the fuzz harness: repr met a TypeError."""
    edit(old / "run" / "summary.json", clients="x")
    with pytest.raises(StoreError, match=r"summary\.json: 'clients' is 'x'; expected a count"):
        coterie.read(old / "run")


@pytest.mark.parametrize(
    "name", ["round", "clients", "seconds", "bytes_up", "test", "in_group_weight", "off_diagonal"]
)
def test_a_value_of_another_kind_in_a_round_is_refused(old, name):
    path = old / "run" / "rounds.jsonl"
    first, *rest = path.read_text().splitlines()
    assert name in json.loads(first)
    for value in STRANGE:
        changed = json.dumps({**json.loads(first), name: value})
        path.write_text("\n".join([changed, *rest, ""]))
        shows_or_refuses(old / "run")
    path.write_text("\n".join([json.dumps({**json.loads(first), name: {"a": 1}}), *rest, ""]))
    with pytest.raises(StoreError, match=f"'{name}' is .*; expected"):
        coterie.read(old / "run")


def test_an_infinite_number_of_a_round_is_read_as_one(old):
    """Distillation may diverge: its losses are then written as texts."""
    path = old / "run" / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["distillation"] = [0.5, "inf"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = coterie.read(old / "run")
    assert history.lines[0]["distillation"] == [0.5, np.inf]


@pytest.mark.parametrize("text", [7, [7], "coterie", {"a": 1}])
def test_a_command_that_is_no_list_of_texts_is_refused(old, text):
    edit(old / "run" / "environment.json", argv=text)
    assert shows_or_refuses(old / "run")


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
def test_arrays_that_do_not_fit_the_clients_are_refused(old, harm):
    name, key, change = ARRAYS[harm]
    path = old / "run" / name
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays[key] = change(arrays[key])
    np.savez(path, **arrays)
    with pytest.raises(StoreError, match=re.escape(name)):
        coterie.read(old / "run")


def test_a_sparse_matrix_whose_columns_do_not_exist_is_refused(old):
    """scipy would write outside its memory when such a matrix is made dense."""
    path = old / "run" / "collaboration.npz"
    with np.load(path) as stored:
        arrays = {name: part for name, part in stored.items() if name != "A"}
    rows = len(arrays["rounds"]) * len(arrays["clients"])
    arrays |= {"data": np.ones(1), "indices": np.array([10**6]), "indptr": np.ones(rows + 1, int)}
    arrays["indptr"][0] = 0
    np.savez(path, **arrays)
    with pytest.raises(StoreError, match=r"collaboration\.npz"):
        coterie.read(old / "run")


def test_json_that_is_nested_too_deep_is_refused(old):
    nested = "[" * 600 + "]" * 600
    (old / "run" / "environment.json").write_text(f'{{"a": {nested}}}')
    with pytest.raises(StoreError, match="nested more than 50 deep"):
        coterie.read(old / "run")
    assert files.from_json("[" * 40 + "]" * 40) is not None


# ---- the table of fields -------------------------------------------------------------------------


def test_the_table_of_fields_is_what_a_run_writes(old):
    coterie.run(TINY, method="fedavg", rounds=1, out=str(old / "new"))
    written = json.loads((old / "new" / "summary.json").read_text())
    assert {score_field(name, "accuracy") for name in FIELDS} == written.keys()
    assert checked(written) == written
    assert {field.kind for field in FIELDS.values()} <= kinds.KINDS.keys()


def test_the_docs_have_the_table_of_fields():
    text = (DOCS / "folders.md").read_text("utf-8")
    told = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    expected = [
        (name.replace("{score}", "…"), field.kind, field.meaning) for name, field in FIELDS.items()
    ]
    assert told == expected

"""Users' own tables: what is made of good ones, and the one clear message for each bad one."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.data import PARTITIONS, federate, load
from coterie.data.federation import Dataset
from coterie.data.standard import standardised
from coterie.errors import ConfigError, DataError

NATURAL = PARTITIONS["natural"]()

GOOD = """site,age,sex,dose,outcome
north,50,f,1.5,ill
north,61,m,,well
north,43,f,2.5,ill
north,70,m,0.5,well
south,55,f,1.0,ill
south,38,,3.5,well
south,47,m,2.0,ill
south,66,f,1.0,well
west,52,m,0.0,ill
west,59,f,1.5,well
west,41,m,2.5,ill
west,49,f,4.0,well
"""


def write(tmp_path: Path, content: str | bytes, name: str = "sites.csv") -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(tmp_path: Path, content: str | bytes = GOOD, **options) -> Dataset:
    options = {"client": "site", "target": "outcome", **options}
    return load(write(tmp_path, content), **options)


# Good tables


def test_a_table_needs_a_client_and_a_target(tmp_path):
    data = read(tmp_path)
    assert data.owner_names == ("north", "south", "west")
    assert data.owners.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.class_names == ("ill", "well")
    assert data.y.tolist() == [0, 1] * 6
    assert data.feature_names == (
        "age", "sex = (missing)", "sex = f", "sex = m", "dose", "dose is missing",
    )  # fmt: skip
    assert data.numeric.tolist() == [True, False, False, False, True, False]
    assert data.x[5, :4].tolist() == [38, 1, 0, 0]
    assert data.x[1, 4].isnan()
    assert data.x[1, 5] == 1


def test_a_table_becomes_a_federation_of_finite_numbers(tmp_path):
    made = federate(read(tmp_path), NATURAL)
    inputs = made.dataset.x * made.dataset.scale + made.dataset.shift
    assert inputs.isfinite().all()
    rows = torch.cat(made.train)
    assert abs(float(inputs[rows, 0].mean())) < 1e-5
    assert abs(float(inputs[rows, 0].std(correction=0)) - 1) < 1e-5
    assert float(inputs[1, 4]) == pytest.approx(0, abs=1e-6)  # missing: the training mean


def test_only_training_rows_shape_the_scaling(tmp_path):
    made = federate(read(tmp_path), NATURAL)
    held = torch.cat([*made.val, *made.test])
    loud = read(tmp_path)
    loud.x[held, 0] = 1e6
    again = federate(loud, NATURAL)
    assert torch.equal(made.dataset.scale, again.dataset.scale)
    assert torch.equal(made.dataset.shift, again.dataset.shift)
    loud.x[made.train[0][0], 0] = 1e6
    assert not torch.equal(made.dataset.scale, federate(loud, NATURAL).dataset.scale)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), st.integers(0, 2**32))
def test_standardised_training_data_has_mean_zero_and_deviation_one_or_zero(values, seed):
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    y = torch.from_numpy(np.random.default_rng(seed).normal(5, 3, len(values)).astype(np.float32))
    data = Dataset("t", x, y, 0, numeric=torch.tensor([True]))
    made = standardised(data, (torch.arange(len(values)),))
    inputs = made.x.double() * made.scale + made.shift
    spread = float(x.double().std(correction=0))
    assert abs(float(inputs.mean())) < 1e-2
    if spread > 1e-3 * (1 + float(x.abs().max())):
        assert float(inputs.std(correction=0)) == pytest.approx(1, abs=1e-2)
    back = made.y * made.target_scale + made.target_shift
    assert torch.allclose(back, y, atol=1e-3)


def test_a_split_column_is_obeyed(tmp_path):
    parts = ["train", "val", "Test", "train"] * 3
    lines = GOOD.splitlines()
    content = "\n".join(
        [lines[0] + ",part", *(f"{a},{b}" for a, b in zip(lines[1:], parts, strict=True))]
    )
    data = read(tmp_path, content, split="part")
    made = federate(data, NATURAL)
    assert [part.tolist() for part in made.train] == [[0, 3], [4, 7], [8, 11]]
    assert [part.tolist() for part in made.val] == [[1], [5], [9]]
    assert [part.tolist() for part in made.test] == [[2], [6], [10]]
    assert "part" not in "".join(data.feature_names)


@pytest.mark.parametrize(
    ("targets", "task", "classes"),
    [
        ([0, 1] * 6, "auto", 2),
        ([0.5 * i for i in range(12)], "auto", 0),
        (list(range(12)), "auto", 12),
        (list(range(12)), "regression", 0),
        ([0.5, 1.5] * 6, "classification", 2),
        (["a", "b", "c"] * 4, "auto", 3),
        (["true", "false"] * 6, "auto", 2),
    ],
)
def test_the_task_is_judged_by_the_target_and_can_be_set(tmp_path, targets, task, classes):
    rows = "\n".join(f"s{i % 2},{i},{t}" for i, t in enumerate(targets))
    data = read(tmp_path, f"site,x,outcome\n{rows}\n", task=task)
    assert data.classes == classes


def test_many_whole_numbers_are_a_quantity(tmp_path):
    rows = "\n".join(f"s{i % 2},{i},{i}" for i in range(25))
    assert read(tmp_path, f"site,x,outcome\n{rows}\n").regression


def test_parquet_and_a_folder_of_files_give_the_same_as_csv(tmp_path):
    data = read(tmp_path)
    table = {
        "site": ["north"] * 4 + ["south"] * 4 + ["west"] * 4,
        "age": [50, 61, 43, 70, 55, 38, 47, 66, 52, 59, 41, 49],
        "sex": ["f", "m", "f", "m", "f", None, "m", "f", "m", "f", "m", "f"],
        "dose": [1.5, None, 2.5, 0.5, 1.0, 3.5, 2.0, 1.0, 0.0, 1.5, 2.5, 4.0],
        "outcome": ["ill", "well"] * 6,
    }  # fmt: skip
    whole = pa.table(table)
    whole = whole.set_column(2, "sex", whole["sex"].dictionary_encode())
    pq.write_table(whole, tmp_path / "sites.parquet")
    (tmp_path / "folder").mkdir()
    for i, site in enumerate(("north", "south", "west")):
        part = whole.slice(4 * i, 4).drop_columns("site")
        if site == "south":
            part = part.select(["outcome", "dose", "age", "sex"])
        pq.write_table(part, tmp_path / "folder" / f"{site}.parquet")
    lines = GOOD.splitlines()
    west = "\n".join(line.split(",", 1)[1] for line in (lines[0], *lines[9:]))
    (tmp_path / "folder" / "west.parquet").unlink()
    (tmp_path / "folder" / "west.csv").write_text(west)
    from_parquet = load(str(tmp_path / "sites.parquet"), client="site", target="outcome")
    from_folder = load(str(tmp_path / "folder"), target="outcome")
    for other in (from_parquet, from_folder):
        assert torch.equal(other.x.nan_to_num(-1), data.x.nan_to_num(-1))
        assert torch.equal(other.y, data.y)
        assert torch.equal(other.owners, data.owners)
        assert other.owner_names == data.owner_names
        assert other.feature_names == data.feature_names


def test_options_for_other_dialects(tmp_path):
    data = read(
        tmp_path,
        GOOD.replace(",", ";").replace("north", "nörth").encode("latin-1"),
        delimiter=";",
        encoding="latin-1",
    )
    assert data.owner_names[0] == "nörth"
    assert torch.equal(data.x.nan_to_num(-1), read(tmp_path).x.nan_to_num(-1))
    numbered = GOOD.replace("north", "01").replace("south", "02").replace("west", "03")
    marked = read(tmp_path, b"\xef\xbb\xbf" + numbered.encode())
    assert marked.owner_names == ("01", "02", "03")  # text, in spite of the byte order mark
    tsv = load(write(tmp_path, GOOD.replace(",", "\t"), "a.tsv"), client="site", target="outcome")
    assert torch.equal(tsv.y, data.y)


def test_columns_can_be_dropped_or_taken_as_categories(tmp_path):
    data = read(tmp_path, drop=["dose", "sex"], categories=["age"])
    assert len(data.feature_names) == 12
    assert not data.numeric.any()


def test_relisting_the_clients_changes_no_clients_data(tmp_path):
    lines = GOOD.splitlines()
    moved = "\n".join([lines[0], *lines[9:], *lines[1:9]])
    one, other = (federate(read(tmp_path, content), NATURAL) for content in (GOOD, moved))
    for i, name in enumerate(one.clients):
        j = other.clients.index(name)
        for split in ("train", "val", "test"):
            a = one.dataset.x[getattr(one, split)[i]]
            b = other.dataset.x[getattr(other, split)[j]]
            assert torch.allclose(a, b)


def test_a_table_without_clients_can_be_partitioned(tmp_path):
    data = load(write(tmp_path, GOOD), target="outcome", drop=["site"])
    assert len(federate(data, PARTITIONS["iid"](clients=3))) == 3
    with pytest.raises(DataError, match=r"data\.client"):
        federate(data, NATURAL)


# Bad tables: (content, options, message)

BAD = {
    "missing target column": (
        GOOD,
        {"target": "result"},
        r"no column 'result' \(data.target\); it has: site",
    ),
    "missing client column": (GOOD, {"client": "clinic"}, r"no column 'clinic' \(data.client\)"),
    "missing split column": (GOOD, {"split": "part"}, r"no column 'part' \(data.split\)"),
    "no target named": (GOOD, {"target": None}, "name the column to predict; sites.csv has: site"),
    "text in a number column": (
        GOOD.replace("43", "old"),
        {},
        "sites.csv line 4: found 'old' in column 'age'",
    ),
    "one class": (GOOD.replace("well", "ill"), {}, "every row has 'ill'"),
    "three rows": ("\n".join(GOOD.splitlines()[:4]), {}, "found 3 rows; at least 10"),
    "header only": (GOOD.splitlines()[0] + "\n", {}, "no rows"),
    "duplicate clients": (
        GOOD.replace("north,61", "North ,61"),
        {},
        "duplicate client names 'north' and 'North'",
    ),
    "empty file": ("", {}, "the file is empty"),
    "blank file": ("\n\n", {}, "found one column"),
    "wrong encoding": (GOOD.replace("north", "nörth").encode("latin-1"), {}, "not utf-8 text"),
    "utf-16": (GOOD.encode("utf-16"), {}, "not utf-8 text"),
    "unknown encoding": (GOOD, {"encoding": "utf-99"}, "not utf-99 text"),
    "wrong delimiter": (GOOD.replace(",", ";"), {}, "set data.delimiter = ';'"),
    "wrong delimiter set": (GOOD, {"delimiter": ";"}, "set data.delimiter = ','"),
    "two columns alike": (GOOD.replace("age", "dose"), {}, "two columns are called 'dose'"),
    "ragged line": (GOOD + "west,1\n", {}, "Expected 5 columns, got 2"),
    "missing target cell": (
        GOOD.replace("50,f,1.5,ill", "50,f,1.5,"),
        {},
        "line 2: column 'outcome'.* is empty",
    ),
    "missing client cell": (
        GOOD.replace("west,52", ",52"),
        {},
        "line 10: column 'site'.* is empty",
    ),
    "text target for a regression": (
        GOOD,
        {"task": "regression"},
        "is text; a regression needs numbers",
    ),
    "unknown task": (GOOD, {"task": "regresion"}, "found 'regresion'; expected 'auto' or"),
    "unknown split word": (GOOD, {"split": "sex"}, "expected train, val or test|is empty"),
    "nothing to predict from": (GOOD, {"drop": ["age", "sex", "dose"]}, "no columns are left"),
    "unknown column to drop": (GOOD, {"drop": ["agee"]}, "data.drop: .* no column 'agee'"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_a_bad_table_gets_one_clear_message(tmp_path, case):
    content, options, message = BAD[case]
    with pytest.raises((DataError, ConfigError), match=message) as caught:
        read(tmp_path, content, **options)
    assert "\n" not in str(caught.value)


def test_identifiers_and_empty_columns_are_refused(tmp_path):
    rows = [f"s{i % 3},p{i},,{'ab'[i % 2]}" for i in range(120)]
    content = "site,patient,note,outcome\n" + "\n".join(rows)
    with pytest.raises(DataError, match=r"'patient' holds 120 different texts.*data.drop"):
        read(tmp_path, content)
    with pytest.raises(DataError, match="'note' is empty in every row"):
        read(tmp_path, content, drop=["patient"])


def test_decimal_commas_are_recognised(tmp_path):
    rows = "\n".join(f"s{i % 2};{i},25;{'ab'[i % 2]}" for i in range(120))
    with pytest.raises(DataError, match="decimal point"):
        read(tmp_path, f"site;dose;outcome\n{rows}\n", delimiter=";")


def test_a_parquet_date_is_refused_with_a_way_out(tmp_path):
    table = pa.table({"day": pa.array([0] * 12, pa.date32()), "x": range(12), "y": ["a", "b"] * 6})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"data\.drop = \['day'\]"):
        load(str(tmp_path / "a.parquet"), target="y")
    assert len(load(str(tmp_path / "a.parquet"), target="y", drop=["day"]).y) == 12


def test_infinite_numbers_are_refused(tmp_path):
    pq.write_table(
        pa.table({"x": [1.0] * 11 + [np.inf], "y": ["a", "b"] * 6}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"a\.parquet row 12: column 'x' holds inf"):
        load(str(tmp_path / "a.parquet"), target="y")


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a parquet file"):
        load(write(tmp_path, "nothing", "a.parquet"), target="y")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": "x,y\n1,u\n", "b.csv": "x,z\n1,u\n"}, "b.csv: column 'y' is missing here"),
        ({"a.csv": "x,y\n1,u\n", "b.csv": "x,y,z\n1,u,2\n"}, "b.csv: column 'z' is only here"),
        (
            {"a.csv": "x,y\n" + "1,u\n" * 9, "b.csv": "x,y\n1,u\ntwo,v\n"},
            "b.csv line 3: found 'two'",
        ),
        ({"a.csv": "x,y\n" + "1,u\n" * 9, "A.csv": "x,y\n1,u\n2,v\n"}, "duplicate client names"),
        ({"a.csv": ""}, "a.csv: the file is empty"),
    ],
)
def test_files_of_a_folder_must_agree(tmp_path, files, message):
    for name, content in files.items():
        write(tmp_path, content, name)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path), target="y")


@pytest.mark.parametrize("cell", ["1e30", "1e39", "1e400", "-1e39"])
def test_a_number_that_float32_cannot_hold_is_refused_by_its_line(tmp_path, cell):
    bad = GOOD.replace("north,61,", f"north,{cell},")
    if cell == "1e30":  # huge and finite: doctor reports it
        assert read(tmp_path, bad).x.isnan().sum() == read(tmp_path).x.isnan().sum()
        return
    with pytest.raises(DataError, match=r"line 3: column 'age' holds .*at most 3e38"):
        read(tmp_path, bad)


def test_many_columns_are_read_quickly_or_refused(tmp_path):
    names = ",".join(f"c{i}" for i in range(200_000))
    content = f"site,outcome,{names}\n" + "\n".join(["a,ill," + "1," * 199_999 + "1"] * 2)
    with pytest.raises(DataError, match="200,002 columns; expected at most"):
        read(tmp_path, content)


def test_some_categories_of_training_rows_are_hidden_and_none_of_others(tmp_path):
    """Hidden is what an unknown category is: zero in all features of the column."""
    kinds = np.random.default_rng(0).choice(["x", "y"], 2000)
    lines = ["who,n,kind,label", *(f"{i % 2},{i},{k},{'ab'[i % 2]}" for i, k in enumerate(kinds))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    made = federate(load(str(tmp_path / "t.csv"), client="who", target="label"), NATURAL)
    hot = made.dataset.x[:, 1:].sum(1)
    for train in made.train:
        assert 0.02 < float((hot[train] == 0).float().mean()) < 0.08
    assert bool((hot[torch.cat([*made.val, *made.test])] == 1).all())
    assert bool((made.source.x[:, 1:].sum(1) == 1).all())

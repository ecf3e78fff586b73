"""One protocol for every method: what is trained on, what chooses, what judges."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import coterie
from coterie.data import PARTITIONS, federate, load
from coterie.data.federation import Dataset, Federation
from coterie.data.partition import take_latest, take_share
from coterie.data.standard import add_up, standardised, sums_of
from coterie.diagnosis.findings import duplicates, shared_units
from coterie.errors import ConfigError, DataError, StoreError
from coterie.runs.config.schema import Config
from coterie.views.page import page
from coterie.views.table import MERGED
from support import METHODS, last, task

NATURAL = PARTITIONS["natural"]()
SMALL = {
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "linear"},
    "engine": {"name": "vmap"},
    "run": {"rounds": 2},
}


# Validation data chooses; nobody trains on it


def test_by_default_nobody_trains_on_validation_data():
    assert Config().train.merge_val is False
    found = coterie.compare(SMALL, methods=["local", "fedfomo", "fedavg"])
    for run in found.runs:
        assert run.summary["merge_val"] is False
        assert run.summary["accuracy_best_by_validation"] is not None
        assert run.summary["clients_without_validation"] == []
    assert MERGED not in repr(found)


def test_merged_validation_data_chooses_nothing_and_every_table_says_so(tmp_path):
    config = {**SMALL, "train": {"merge_val": True}}
    out = tmp_path / "out"
    found = coterie.compare(config, methods=["local", "fedfomo"], out=str(out))
    for run in found.runs:  # FedFomo does not merge, and is treated like the others
        assert run.summary["merge_val"] is True
        assert run.summary["accuracy_best_by_validation"] is None
        assert run.summary["round_best_by_validation"] is None
        assert "trained on validation data too" in repr(run)
    read = coterie.read(out)
    for shown in (repr(found), page(found), found._repr_html_(), repr(read), page(read)):
        assert MERGED in shown
    assert json.loads((out / "comparison.json").read_text())["notes"] == [MERGED]
    assert all(np.isnan(row.best_by_validation.mean) for row in read.rows)
    local = found.of_method("local")[0]
    assert np.isnan(local.val).all()  # what was trained on validates nothing
    assert np.isfinite(local.test).all()


def lacking(tmp_path, *, empty):
    """A table of three sites; the last has no validation rows."""
    rng = np.random.default_rng(0)
    lines = ["site,part,a,b,y"]
    for site in ("north", "south", "west"):
        for part, size in (("train", 12), ("val", 8), ("test", 8)):
            for i in range(0 if site == empty and part == "val" else size):
                a, b = rng.normal(i % 2, 1), rng.normal()
                lines.append(f"{site},{part},{a:.4f},{b:.4f},{'ny'[i % 2]}")
    path = tmp_path / "sites.csv"
    path.write_text("\n".join(lines) + "\n")
    return {"name": str(path), "client": "site", "target": "y", "split": "part"}


def test_borrowed_validation_data_chooses_nothing_and_is_named(tmp_path):
    config = {"data": lacking(tmp_path, empty="west"), "model": {"name": "linear"}}
    found = coterie.compare(config, methods=["fedfomo"], rounds=3, engine="vmap")
    for run in found.runs:
        history = run
        assert run.summary["clients_without_validation"] == ["west"]
        assert np.isnan(history.val[:, 2]).all()
        assert np.isnan(history.val_loss[:, 2]).all()
        assert np.isfinite(history.val[:, :2]).all()
        best = int(history.val[:, :2].mean(1).argmax())
        assert run.summary["round_best_by_validation"] == history.rounds[best]
    assert "chosen without west: no validation data" in repr(found)


@pytest.mark.parametrize("merge", [False, True])
def test_scores_on_validation_data_exist_where_nobody_trained_on_it(merge):
    algorithm = METHODS["fedavg"]()
    found = last(algorithm, task(algorithm, merge=merge), rounds=1).evaluation
    assert np.isnan(found.val).all() == np.isnan(found.val_loss).all() == merge


# Units


def visits(units=10, sites=("north", "south"), rows=4, number="{site}{unit}"):
    """A table of patients with several visits each."""
    rng = np.random.default_rng(1)
    lines = ["site,patient,day,age,dose,outcome"]
    for site in sites:
        for visit in range(rows):
            for unit in range(units):
                who = number.format(site=site, unit=unit)
                day = f"2026-{1 + visit:02d}-{1 + unit:02d}"
                ill = "ny"[(unit + visit) % 2]
                lines.append(f"{site},{who},{day},{rng.normal():.3f},{rng.normal():.3f},{ill}")
    return "\n".join(lines) + "\n"


def table(tmp_path, content=None, **options):
    path = tmp_path / "visits.csv"
    path.write_text(visits() if content is None else content)
    return load(str(path), **{"client": "site", "target": "outcome", "drop": [], **options})


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_one_unit_never_cross_splits(tmp_path, seed):
    data = table(tmp_path, unit="patient", drop=["day"])
    assert data.units.dtype == torch.int64
    assert data.feature_names == ("age", "dose")  # the unit is no feature
    made = federate(data, NATURAL, seed=seed)
    assert torch.equal(made.units, data.units)
    for parts in zip(made.train, made.val, made.test, strict=True):
        held = [set(data.units[part].tolist()) for part in parts]
        assert all(held)
        assert sum(map(len, held)) == len(set().union(*held)) == 10
    assert [len(part) for part in made.test] == [8, 8]  # two of ten patients, four visits each


def test_without_units_splits_are_as_they_were(tmp_path):
    data = table(tmp_path, drop=["day", "patient"])
    assert data.units is None
    single = Dataset("s", data.x, data.y, data.classes, units=torch.arange(len(data.y)))
    mine = torch.arange(30)
    plain, by_unit = (take_share(d, mine, 0.3, 0, "test") for d in (data, single))
    assert torch.equal(plain, by_unit)


def test_the_same_number_at_two_sites_is_two_units_and_is_reported(tmp_path):
    data = table(tmp_path, visits(number="p{unit}"), unit="patient", drop=["day"])
    made = federate(data, NATURAL)
    assert len(data.units.unique()) == 20
    assert sorted(shared_units(made)) == [f"p{i}" for i in range(10)]
    assert shared_units(federate(table(tmp_path, unit="patient", drop=["day"]), NATURAL)) == []
    path = tmp_path / "visits.csv"
    path.write_text(visits(number="p{unit}"))
    told = {"name": str(path), "client": "site", "target": "outcome", "unit": "patient"}
    found = coterie.doctor({"data": told | {"drop": ["day"]}, "model": {"name": "linear"}})
    assert any("10 units are named at more than one client" in text for text in found.warnings)
    assert ("training units", "6 per client") in found.facts


def test_a_partition_that_divides_a_unit_is_refused(tmp_path):
    data = table(tmp_path, unit="patient", drop=["day"])
    with pytest.raises(DataError, match=r"gives rows of unit '\w+' .* to client\d and to client\d"):
        federate(data, PARTITIONS["iid"](clients=3))


def test_a_split_column_that_divides_a_unit_is_refused(tmp_path):
    lines = visits().splitlines()
    parts = ["part", *(["train"] * 79), "test"]
    content = "\n".join(f"{a},{b}" for a, b in zip(lines, parts, strict=True)) + "\n"
    with pytest.raises(DataError, match=r"line 81: unit 'south9' .* is in two parts"):
        table(tmp_path, content, unit="patient", split="part", drop=["day"])


# Times


@pytest.mark.parametrize("form", ["iso", "moments", "numbers"])
def test_splits_follow_each_other_in_time(tmp_path, form):
    content = visits(rows=5)
    if form == "moments":
        content = content.replace("-01,", "-01T08:30,").replace("-02,", "-02T23:59:59,")
    if form == "numbers":
        content = re.sub(r"2026-(\d+)-(\d+)", r"2026\1.\2", content)
    data = table(tmp_path, content, time="day", drop=["patient"])
    assert data.feature_names == ("age", "dose")
    made = federate(data, NATURAL)
    for parts in zip(made.train, made.val, made.test, strict=True):
        train, val, test = (data.times[part] for part in parts)
        assert train.max() < val.min()
        assert val.max() < test.min()
    assert [len(part) for part in made.test] == [10, 10]
    assert [len(part) for part in made.val] == [8, 8]
    again = federate(data, NATURAL, seed=7)  # nothing is drawn
    assert again.fingerprint == made.fingerprint


def test_samples_of_one_time_stay_together():
    times = torch.tensor([1.0, 1, 1, 2, 2, 3, 3, 3, 3, 3])
    data = Dataset("t", torch.zeros(10, 1), torch.zeros(10), 0, times=times)
    mine = torch.arange(10)
    assert take_latest(data, mine, 0.2).sum() == 5
    assert take_latest(data, mine, 0.7).sum() == 7
    assert take_latest(data, mine, 0.0).sum() == 0
    assert take_latest(data, mine[:3], 0.5).sum() == 0  # all of one time
    with_units = Dataset(
        "t", data.x, data.y, 0, times=times, units=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    )
    assert take_latest(with_units, mine, 0.4).tolist() == [False] * 3 + [True] * 2 + (
        [False] * 3 + [True] * 2
    )  # whole units, by their first time


def test_dates_of_a_parquet_file_are_times(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    days = pa.array(range(12), pa.date32())
    whole = pa.table({"day": days, "x": [float(i) for i in range(12)], "y": ["a", "b"] * 6})
    for kind in (pa.date32(), pa.timestamp("ns")):
        moved = whole.set_column(0, "day", whole.column("day").cast(kind))
        pq.write_table(moved, tmp_path / "a.parquet")
        data = load(str(tmp_path / "a.parquet"), target="y", time="day")
        assert data.times.diff().tolist() == [86400.0] * 11
        assert data.feature_names == ("x",)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            ("2026-04-10", "10/04/2026"),
            {"unit": "patient"},
            r"line 41: found '10/04/2026' in column 'day'",
        ),
        (("2026-04-10", ""), {"unit": "patient"}, r"column 'day' \(data\.time\) is empty"),
        (
            ("2026-04-10", "2026-04-10T10:00+01:00"),
            {"unit": "patient"},
            "with and without a time zone",
        ),
        (("", ""), {"time": "date", "unit": "patient"}, "has no column 'date'"),
        (("", ""), {"split": "patient"}, "both divide a client's rows"),
        (("", ""), {"time": "patient", "unit": "patient"}, r"is data\.unit already"),
    ],
)
def test_a_wrong_time_gets_one_clear_message(tmp_path, change, options, message):
    content = visits().replace(*change) if change[0] else visits()
    with pytest.raises((DataError, ConfigError), match=message):
        table(tmp_path, content, **{"time": "day", **options})


# Duplicates


def test_doctor_counts_samples_that_occur_twice():
    x, y = torch.arange(12.0)[:, None].repeat(1, 2), torch.zeros(12, dtype=torch.int64)
    first, second = torch.arange(6).split(2), torch.arange(6, 12).split(2)
    splits = zip(first, second, strict=True)
    made = Federation(Dataset("d", x, y, 2), "made up", ("a", "b"), *splits)
    assert duplicates(made) == ({}, 0, ())
    x[7] = x[6].clone()  # inside one split: nothing to report
    assert duplicates(made) == ({}, 0, ())
    x[4] = x[0].clone()  # test and train of a
    assert duplicates(made) == ({"a": 1}, 0, ())
    x[10] = x[2].clone()  # test of b, validation of a
    assert duplicates(made) == ({"a": 1}, 1, ("a", "b"))
    y[2] = 1  # another target is another sample
    assert duplicates(made) == ({"a": 1}, 0, ())
    other = replace(made, relabel=torch.tensor([[0, 1], [1, 0]]))
    assert duplicates(other) == ({"a": 1}, 1, ("a", "b"))  # as their clients read them


def test_doctor_says_so(tmp_path):
    lines = visits().splitlines()
    content = "\n".join([*lines, *(line.replace("south", "north") for line in lines[-40:])]) + "\n"
    path = tmp_path / "visits.csv"
    path.write_text(content)
    told = {"name": str(path), "client": "site", "target": "outcome", "drop": ["day", "patient"]}
    found = coterie.doctor({"data": told, "model": {"name": "linear"}})
    assert any("40 samples are held by more than one client" in text for text in found.warnings)
    assert ("duplicates", "0 across splits, 40 across clients") in found.facts


# Sums that clients can compute alone


def test_standardisation_is_of_sums_in_client_order():
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(5, 3, (60, 4)).astype(np.float32))
    x[rng.random((60, 4)) < 0.1] = torch.nan
    y = torch.from_numpy(rng.normal(100, 30, 60).astype(np.float32))
    data = Dataset("d", x, y, 0, numeric=torch.tensor([True] * 4))
    clients = (torch.arange(0, 10), torch.arange(20, 45), torch.arange(45, 50))
    made = standardised(data, clients)
    mean = add_up([sums_of(x[mine]) for mine in clients])
    apart = (x.double() - torch.from_numpy(mean)).square()
    spread = np.sqrt(add_up([sums_of(apart[mine]) for mine in clients]))
    assert made.scale.tolist() == torch.from_numpy(1 / spread).float().tolist()
    assert made.shift.tolist() == torch.from_numpy(-mean / spread).float().tolist()
    rows = torch.cat(clients)
    assert mean == pytest.approx(x[rows].double().nanmean(0).numpy(), rel=1e-12)
    assert made.target_scale == pytest.approx(float(y[rows].double().std(correction=0)), rel=1e-12)
    moved = x.clone()
    moved[10:20] = 99.0  # nobody's
    assert torch.equal(standardised(Dataset("d", moved, y, 0, numeric=data.numeric), clients).scale,
                       made.scale)  # fmt: skip


# Errors are in the target's unit


def priced(tmp_path, factor, offset):
    rng = np.random.default_rng(0)
    lines = ["site,a,b,price"]
    for i in range(90):
        a, b = rng.normal(), rng.normal()
        price = offset + factor * (2 * a - b + rng.normal(0, 0.3))
        lines.append(f"s{i % 3},{a:.5f},{b:.5f},{price:.6f}")
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(lines) + "\n")
    data = {"name": str(path), "client": "site", "target": "price", "task": "regression"}
    config = {"data": data, "model": {"name": "linear"}}
    return coterie.run(config, method="fedavg", rounds=3, engine="vmap")


def test_errors_are_in_the_unit_of_the_target(tmp_path):
    euros, cents = priced(tmp_path, 10.0, 500.0), priced(tmp_path, 1000.0, 50_000.0)
    assert euros.summary["metric"] == "rmse"
    assert cents.summary["score_last"] == pytest.approx(100 * euros.summary["score_last"], rel=1e-3)
    for name, factor in (("test", 100), ("val", 100), ("test_loss", 1e4), ("val_loss", 1e4)):
        one, other = getattr(euros, name), getattr(cents, name)
        assert other == pytest.approx(factor * one, rel=1e-3)
    half = euros.test**2 / 2
    assert euros.test_loss == pytest.approx(half, rel=1e-5)
    assert 3 < euros.summary["score_last"] < 30  # deviations of the noise and of the prices


# Data that changes under a run


def site_table(path, change=None):
    lines = visits(units=6, sites=("north", "south", "west")).splitlines()
    if change is not None:
        lines = change(lines)
    path.write_text("\n".join(lines) + "\n")


def swap_labels(lines):
    return [
        line[:-1] + ("y" if line.endswith("n") else "n") if line.startswith("north,") else line
        for line in lines
    ]


def edit_a_cell(lines):
    at = next(i for i, line in enumerate(lines) if line.startswith("west"))
    cells = lines[at].split(",")
    cells[3] = "0.123"
    return [*lines[:at], ",".join(cells), *lines[at + 1 :]]


def remove_rows(lines):
    return [line for line in lines if not line.startswith("south,south5")]


def rename_a_site(lines):
    return [line.replace("west,", "east,", 1) for line in lines]


CHANGES = {
    swap_labels: "other data: north)",
    edit_a_cell: "other data: west)",
    remove_rows: "other data: south)",
    rename_a_site: "clients are gone: west; clients are new: east)",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_data_that_changed_is_not_gone_on_with(change, tmp_path):
    path = tmp_path / "sites.csv"
    site_table(path)
    data = {"name": str(path), "client": "site", "target": "outcome", "drop": ["day", "patient"]}
    config = {"data": data, "model": {"name": "linear"}, "run": {"rounds": 4}}
    begun = _begun(config, tmp_path)
    site_table(path, change)
    before = {p.name: p.read_bytes() for p in begun.rglob("*") if p.is_file()}
    with pytest.raises(StoreError) as refused:
        coterie.resume(begun)
    assert CHANGES[change] in str(refused.value)
    assert {p.name: p.read_bytes() for p in begun.rglob("*") if p.is_file()} == before
    site_table(path)
    assert coterie.resume(begun).summary["rounds"] == 4


def _begun(config, tmp_path):
    """A run that was stopped after two rounds."""

    class StoppedError(Exception):
        pass

    def watch(step):
        if step.done == 2:
            raise StoppedError

    out = tmp_path / "run"
    with pytest.raises(StoppedError):
        coterie.run(config, method="fedfomo", engine="vmap", out=str(out), progress=watch)
    return out


def test_a_comparison_is_not_continued_on_other_data(tmp_path):
    path, out = tmp_path / "sites.csv", str(tmp_path / "out")
    site_table(path)
    data = {"name": str(path), "client": "site", "target": "outcome", "drop": ["day", "patient"]}
    config = {"data": data, "model": {"name": "linear"}, "run": {"rounds": 2}}
    coterie.compare(config, methods=["local"], engine="vmap", out=out)
    site_table(path, edit_a_cell)
    with pytest.raises(StoreError, match="other data: west"):
        coterie.compare(config, methods=["local", "fedavg"], engine="vmap", out=out)
    site_table(path)
    found = coterie.compare(config, methods=["local", "fedavg"], engine="vmap", out=out)
    assert found.methods == ("local", "fedavg")


def test_a_run_without_its_partition_is_not_continued(tmp_path):
    begun = _begun(SMALL | {"run": {"rounds": 4}}, tmp_path)
    (begun / "partition.json").unlink()
    with pytest.raises(StoreError, match=r"has no partition\.json"):
        coterie.resume(begun)


def test_the_partition_is_written_and_verified(tmp_path):
    out = tmp_path / "run"
    made = coterie.run(SMALL, method="fedavg", out=str(out))
    told = json.loads((out / "partition.json").read_text())
    assert told["fingerprint"] == made.summary["partition_fingerprint"]
    assert [c["name"] for c in told["clients"]] == list(made.roster.clients)
    assert "partition.json" in json.loads((out / "MANIFEST.json").read_text())["files"]
    assert coterie.verify(out) == {str(out): []}
    (out / "partition.json").write_text(json.dumps({**told, "note": "another"}))
    assert coterie.verify(out) == {str(out): ["partition.json has changed since it was finished"]}

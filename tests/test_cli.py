"""The commands as a user meets them: what they print, where, what they refuse, what they leave."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

import coterie
from coterie import cli
from coterie.adapt import ADAPTATIONS
from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.data.datasets import DATASETS
from coterie.data.partition import PARTITIONS
from coterie.networks.registry import MODELS

QUICK = ["--rounds", "2", "--engine", "vmap", "--clients", "4", "--methods", "fedavg,fedfomo"]


SAME = {"rounds": 2, "engine": "vmap", "clients": 4, "methods": ["fedavg", "fedfomo"]}


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty folder to work in."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def python(code: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


# ---- quick to start, and the names one can use ---------------------------------------------------

HEAVY = ("torch", "numpy", "sklearn", "scipy", "pydantic", "pandas", "pyarrow")


def loaded_by(code: str) -> list[str]:
    return python(f"import sys\n{code}\nprint(*[m for m in {HEAVY} if m in sys.modules])").split()


def test_help_imports_nothing_heavy():
    calls = "from coterie import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    hidden = "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()):\n    "
    assert loaded_by(hidden + calls.replace("\n", "\n    ")) == []
    assert loaded_by("import coterie") == []
    assert "torch" in loaded_by("import coterie; coterie.run")  # the check can fail


def help_texts(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """The help of a command and of all commands below it, by name."""
    context = click.Context(command, info_name=name)
    yield name, command.get_help(context)
    for below, one in getattr(command, "commands", {}).items():
        yield from help_texts(one, f"{name} {below}")


def test_help_tells_what_arguments_are_once_and_shows_no_escaped_bracket():
    texts = dict(help_texts(typer.main.get_command(cli.app), "coterie"))
    assert max(text.count("rguments:\n") for text in texts.values()) == 1
    assert {"coterie", "coterie compare", "coterie deploy init"} < set(texts)
    assert "[default: direct]" in texts["coterie deploy init"]
    assert "NAME  name of the new files" in texts["coterie new"]
    assert [name for name, text in texts.items() if "\\" in text] == []


def test_public_names_are_exactly_all_of_them():
    homes = [name for names in coterie._HOMES.values() for name in names]
    assert sorted(homes) == sorted(coterie.__all__)
    assert all(getattr(coterie, name) is not None for name in coterie.__all__)
    assert set(coterie.__all__) <= set(dir(coterie))
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = coterie.rum


def test_version(command):
    assert command("--version") == (0, f"coterie {coterie.__version__}\n", "")


# ---- comparing and running -----------------------------------------------------------------------


def test_compare_ends_with_table_verdict_folder_and_page(command, work):
    columns = "variance_best_tenth, variance_worst_tenth"
    code, out, err = command("compare", *QUICK, "--out", "mine", "--columns", columns)
    assert code == 0
    for name in ("Local", "FedAvg", "FedFomo", "in group", "bytes per client", "worse off"):
        assert name in out
    assert re.search(r"VarB +VarW\n", out)
    assert re.search(r"\nFor these \d+ sites .*\.\n", out)
    assert out.endswith("folder: mine\npage:   mine/report.html\n")
    assert "local, seed 0: 2 rounds, mean" in err
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out + err)
    assert (work / "mine" / "report.html").stat().st_size > 1000
    for method in ("local", "fedavg", "fedfomo"):
        assert (work / "mine" / method / "seed-0" / "MANIFEST.json").exists()
    listed = json.loads((work / "mine" / "comparison.json").read_text())
    assert [row["method"] for row in listed["methods"]] == ["local", "fedavg", "fedfomo"]
    assert [path.name for path in work.iterdir()] == ["mine"]


def test_a_column_that_there_is_not_is_refused_before_training(command, work):
    code, out, err = command("compare", *QUICK, "--out", "mine", "--columns", "variance,varB")
    assert (code, out) == (2, "")
    assert "no column is called 'varB'" in err
    assert list(work.iterdir()) == []


def test_the_same_comparison_again_reads_what_is_there(command):
    first = command("compare", *QUICK, "--out", "mine")
    again = command("compare", *QUICK, "--out", "mine")
    assert again[1] == first[1]
    assert again[2].count("finished before, read again") == 3
    code, out, err = command("compare", *QUICK, "--lr", "0.123", "--out", "mine")
    assert (code, out) == (2, "")
    assert "holds a finished run" in err


@pytest.mark.parametrize("deal", ["fixed", "anew"])
def test_seeds_have_the_same_clients_unless_each_divides_the_data(command, work, deal):
    asked = ("--seeds", "3,1", "--set", f"run.deal={deal}", "--out", "mine")
    command("compare", *QUICK, "--methods", "local", *asked)
    read = [json.loads((work / f"mine/local/seed-{s}/summary.json").read_text()) for s in (3, 1)]
    same = read[0]["partition_fingerprint"] == read[1]["partition_fingerprint"]
    assert same == (deal == "fixed")


def test_a_run_writes_its_page_and_lists_it(command, work):
    options = ["--rounds", "2", "--engine", "loop", "--method", "fedamp", "--clients", "4"]
    code, out, _ = command("run", *options, "--out", "mine")
    place = work / "mine" / "report.html"
    assert code == 0
    assert f"page: {Path('mine') / 'report.html'}\n" in out
    text = place.read_text()
    assert "FedAMP" in text
    assert "report.html" in json.loads((work / "mine" / "MANIFEST.json").read_text())["files"]
    assert command("verify", "mine")[0] == 0
    place.write_text(text.replace("FedAMP", "FedArm"))
    code, out, _ = command("verify", "mine")
    assert code == 1
    assert "report.html has changed" in out


def test_the_folder_of_a_run_has_a_name_of_its_own(command, work):
    code, out, _ = command("run", "--rounds", "1", "--engine", "loop", "--method", "fedavg_ft")
    assert code == 0
    (folder,) = (work / "runs").iterdir()
    assert re.fullmatch(r"digits-[0-9a-f]{8}", folder.name)
    assert str(folder.relative_to(work)) in out
    assert json.loads((folder / "summary.json").read_text())["method"] == "fedavg_ft"


def test_a_runs_own_config_gives_the_same_models_again(command, work):
    command("compare", *QUICK, "--participation", "0.5", "--out", "mine")
    config = work / "mine/fedfomo/seed-0/config.json"
    assert command("run", config, "--out", "again")[0] == 0
    assert command("run", config, "--seed", "1", "--out", "other")[0] == 0
    paths = ("mine/fedfomo/seed-0", "again", "other")
    found = [json.loads((work / p / "summary.json").read_text())["digest"] for p in paths]
    assert found[0] == found[1] != found[2]


def test_options_and_set_reach_the_config(command, work):
    options = ["--epochs", "2", "--batch", "8", "--lr", "0.02", "--set", "train.momentum=0.5"]
    fields = ["--set", "algorithm.sigma=3.0", "--set", "model.hidden=[6]"]
    command("run", "--rounds", "1", "--method", "fedamp", *options, *fields, "--out", "mine")
    found = json.loads((work / "mine/config.json").read_text())
    train = found["train"]
    assert (train["epochs"], train["batch"], train["lr"], train["momentum"]) == (2, 8, 0.02, 0.5)
    assert found["algorithm"]["fedamp"]["sigma"] == 3.0
    assert found["model"]["hidden"] == [6]
    assert found["resolved"]["engine"] == found["engine"]["name"] != "auto"


def test_from_python_nothing_is_written_and_results_are_the_same(command, work):
    result = coterie.compare(**SAME)
    assert list(work.iterdir()) == []
    command("compare", *QUICK, "--out", "mine")
    for run in result.runs:
        found = json.loads((work / "mine" / run.method / "seed-0/summary.json").read_text())
        assert run.summary["digest"] == found["digest"]
    assert "<table" in result._repr_html_()
    with pytest.raises(coterie.ConfigError, match="no option 'round'; did you mean 'rounds'"):
        coterie.compare(round=2)


# ---- explaining ----------------------------------------------------------------------------------

KINDS = {
    "methods": [*ALGORITHMS, *ALIASES],
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "models": MODELS,
    "adaptations": ADAPTATIONS,
}


@pytest.mark.parametrize("kind", KINDS)
def test_list_has_every_name_and_show_explains_it(command, kind):
    code, out, _ = command("list", kind)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == list(KINDS[kind])
    assert all(len(line.split()) > 1 for line in lines)
    for name in KINDS[kind]:
        assert command("show", name)[0] == 0
        assert command("show", kind.removesuffix("s"), name)[1].startswith(f"{name}: ")


def test_show_tells_what_fields_mean_and_whom_to_cite(command):
    _, out, _ = command("show", "fedfomo")
    assert re.search(r"downloads \(a whole number from 0 to 1e9; default \d+\)\n +\w+", out)
    assert re.search(r"@inproceedings{\w+,\n(.|\n)+author={Zhang, Michael", out)
    assert re.search(r"paper\n +Ghosh", command("show", "ifca")[1])


# ---- refusing ------------------------------------------------------------------------------------

REFUSED = [
    (["--clients", "0"], "partition.clients: found 0"),
    (["--clients", "5000"], "found 5000, but digits has only 1,797 samples"),
    (["--lr", "-1"], "train.lr: found -1.0"),
    (["--lr", "fast"], "Invalid value for '--lr'"),
    (["--seeds", "x"], "run.seeds: found 'x'; expected a number, or 0,1,2"),
    (["--data", "sites.csv"], "sites.csv"),
    (["--data", "sine", "--model", "lenet5"], "needs images"),
    (["--model", "no.such:Net"], "cannot be imported"),
    (["--device", "cuda:99"], "torch sees"),
    (["--set", "algorithm.epsilon"], "expected FIELD=VALUE"),
    (["--set", "train.lr=[1"], "is no TOML value"),
    (["--set", "train.lrr=1"], "train.lrr: [train] has no such field; did you mean 'lr'?"),
    (["--set", "run.metric=rmse"], "run.metric: 'rmse' does not fit digits"),
    (["--data", "sine", "--partition", "concept_shift"], "sine"),
    (["--data", "sine", "--clients", "3"], "comes with its own clients"),
    (["--set", "data.test=0"], "no client has any test data"),
    (["none.toml"], "none.toml: no such file"),
    (["--colour", "red"], "--colour"),
]


@pytest.mark.parametrize("name", ["compare", "run", "doctor"])
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(r[0]) for r in REFUSED])
def test_the_impossible_is_refused_before_anything_is_written(
    command, work, name, options, message
):
    code, out, err = command(name, *options)
    assert code == 2
    assert out == ""
    assert message in re.sub(r"[\s│]+", " ", err)
    assert "Traceback" not in err
    assert list(work.iterdir()) == []


def test_a_refused_folder_is_left_as_it_is(command, work):
    (work / "mine").write_text("a file of mine")
    code, _, err = command("compare", *QUICK, "--out", "mine")
    assert code == 2
    assert "mine" in err
    assert (work / "mine").read_text() == "a file of mine"


def test_an_interrupt_is_no_traceback(command, monkeypatch):
    def stop(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.api.compare_config", stop)
    code, _, err = command("compare")
    assert code == 130
    assert "interrupted" in err


def test_the_package_says_that_it_is_typed():
    assert (Path(coterie.__file__).parent / "py.typed").exists()

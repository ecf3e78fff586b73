"""Attacks through names, configs and values: none runs code, crashes or controls a terminal."""

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.core import imports
from coterie.engines import auto
from coterie.engines.settings import MOST_THREADS
from coterie.errors import ConfigError, CoterieError, CoterieWarning, StoreError, printable
from coterie.runs import environment
from coterie.storage import cache
from hostile import TINY, rewritten, unfinished

CANARY = "import pathlib\npathlib.Path({canary!r}).touch()\n"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NASTY = "\x1b]0;owned\x07\x1b[2J\u202eward\x9b31m\r\n7"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty folder to work in; what is imported is as before afterwards."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        if name.startswith("evil"):
            del sys.modules[name]


@pytest.fixture
def command(command):
    """Run a command; its exit code and all it printed."""

    def call(*words):
        code, out, err = command(*words)
        assert "Traceback" not in err
        return code, out + err

    return call


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An unfinished run of FedAvg; copies of it are attacked."""
    return unfinished(tmp_path_factory.mktemp("made") / "run", "fedavg")


@pytest.fixture
def canary(tmp_path):
    """A file that is there once an attack has worked."""
    return tmp_path / "canary"


def module(folder, canary, name="evil", text=""):
    """A module that leaves the canary as soon as it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(CANARY.format(canary=str(canary)) + text)
    return f"{name}:Net"


NET = """
from torch import nn
class Net(nn.Linear):
    def __init__(self, shape: tuple[int, ...], classes: int):
        super().__init__(shape[0] * shape[1] * shape[2], classes)
    def forward(self, x):
        return super().forward(x.flatten(1))
"""


# ---- names of code -------------------------------------------------------------------------------

CALLS = [
    {"name": "subprocess:getoutput", "cmd": "touch {canary}"},
    {"name": "os:system", "command": "touch {canary}"},
    {"name": "pathlib:Path", "args": "x"},
    {"name": "builtins:exec", "source": "open('{canary}', 'w')"},
    {"name": "evil.__main__:Net"},
    {"name": "..evil:Net"},
    {"name": "evil:Net.forward"},
]


@pytest.mark.parametrize("table", ["model", "algorithm"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call["name"])
def test_no_config_calls_what_is_no_network_and_no_method(command, canary, work, table, call):
    text = {key: value.format(canary=canary) for key, value in call.items()}
    (work / "x.json").write_text(json.dumps({**TINY, table: text}))
    lines = [f"{key} = {json.dumps(value)}" for key, value in text.items()]
    (work / "x.toml").write_text(f"[{table}]\n" + "\n".join(lines))
    for name in ("run", "compare", "doctor"):
        for config in ("x.json", "x.toml"):
            code, said = command(name, config)
            assert code == 2
            assert f"{table}.name" in said
    assert not canary.exists()


@pytest.mark.parametrize("call", CALLS[:2], ids=lambda call: call["name"])
def test_no_folder_of_results_calls_anything(command, canary, tmp_path, call):
    table = {key: value.format(canary=canary) for key, value in call.items()}
    run = unfinished(tmp_path / "run")
    rewritten(run / "config.json", model=table)
    compared = tmp_path / "compared"
    compared.mkdir()
    (compared / "compare.json").write_text(json.dumps({"format": 1, **TINY, "model": table}))
    for folder in (run, compared):
        for code in ((), ("--code", "installed")):
            assert command("resume", folder, *code)[0] == 2
    assert not canary.exists()


@pytest.mark.parametrize("table", ["model", "algorithm"])
def test_modules_in_a_folder_of_results_are_not_imported(
    command, canary, tmp_path, monkeypatch, table
):
    """Not even from inside the folder, where Python would find them first."""
    run = unfinished(tmp_path / "run")
    name = module(run, canary)
    rewritten(run / "config.json", **{table: {"name": name}})
    monkeypatch.chdir(run)
    sys.path.insert(0, "")
    code, said = command("resume", ".")
    assert code == 2
    assert "is not run, because whoever wrote the folder chose it" in said
    assert "--code DIR" in said
    assert command("run", "config.json", "--out", "../again")[0] == 2
    with pytest.raises(ConfigError, match="is not run"):
        coterie.resume(run)
    assert not canary.exists()


def test_nothing_beside_a_config_or_in_the_current_directory_is_imported(command, canary, work):
    name = module(work, canary)
    (work / "x.toml").write_text(f'[model]\nname = "{name}"\n')
    sys.path.insert(0, "")
    for command_ in ("run", "compare", "doctor"):
        code, said = command(command_, "x.toml")
        assert code == 2
        assert "the current directory is not searched" in said
    assert not canary.exists()


def test_what_is_in_an_allowed_folder_is_not_called_unless_it_is_a_network(canary, tmp_path):
    """A function, and a class of something else."""
    text = "import pathlib\ndef make(): pathlib.Path({0!r}).touch()\nclass Net: __init__ = make\n"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "evil_calls.py").write_text(text.format(str(canary)))
    for name in ("evil_calls:make", "evil_calls:Net"):
        for table in ("model", "algorithm"):
            with pytest.raises(ConfigError, match="expected a class that extends"):
                coterie.load({table: {"name": name}}, code=tmp_path / "code")
    assert not canary.exists()


def test_installed_packages_are_for_those_who_ask(command, canary, tmp_path, monkeypatch):
    """A config that the user wrote may name one; a folder of results only where it is allowed."""
    installed = tmp_path / "site-packages"
    name = module(installed, canary, text=NET)
    monkeypatch.setattr(imports.site, "getsitepackages", lambda: [str(installed)])
    sys.path.append(str(installed))
    run = unfinished(tmp_path / "run", "fedavg")
    rewritten(run / "config.json", model={"name": name})
    assert command("resume", run)[0] == 2
    assert command("run", run / "config.json", "--out", tmp_path / "again")[0] == 2
    assert not canary.exists()
    coterie.load({**TINY, "model": {"name": name}})
    assert canary.exists()
    with pytest.raises(StoreError, match="another config"):  # which is the next thing to be checked
        coterie.resume(run, code="installed")


def test_a_run_with_code_of_its_own_is_continued_where_the_code_is_named(canary, tmp_path):
    code = tmp_path / "code"
    name = module(code, canary, name="evil_own", text=NET)
    options = {"model": name, "code": [code]}
    whole = coterie.run(TINY, method="fedavg", **options)
    run = unfinished(tmp_path / "run", "fedavg", **options)
    with pytest.raises(ConfigError, match="is not run"):
        coterie.resume(run)
    assert coterie.resume(run, code=code).summary["digest"] == whole.summary["digest"]


@pytest.mark.parametrize("package", [False, True])
def test_a_module_of_the_same_name_that_python_finds_first_is_refused(canary, tmp_path, package):
    """Also one that adds to a package without an ``__init__``."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    name = "evil_twice.net:Net" if package else "evil_twice:Net"
    for folder, text in ((right, NET), (wrong, CANARY.format(canary=str(canary)))):
        place = folder / "evil_twice" if package else folder
        place.mkdir(parents=True)
        (place / ("net.py" if package else "evil_twice.py")).write_text(text)
    sys.path.insert(0, str(wrong))
    with pytest.raises(ConfigError, match="another one has its name"):
        coterie.load({"model": {"name": name}}, code=right)
    assert not canary.exists()


def test_a_config_cannot_allow_itself_anything(command, canary, work):
    name = module(work, canary)
    for line in (f'code = ["{work}"]', f'_code = ["{work}"]', f'[code]\nfolders = ["{work}"]'):
        (work / "x.toml").write_text(f'{line}\n[model]\nname = "{name}"\n')
        assert command("doctor", "x.toml")[0] == 2
    assert command("doctor", "x.toml", "--set", f'run.code="{work}"')[0] == 2
    assert command("doctor", "--code", "no-such-folder")[0] == 2
    assert not canary.exists()


def test_reading_and_verifying_import_nothing(canary, tmp_path):
    coterie.compare(TINY, methods=["fedavg"], rounds=1, out=str(tmp_path / "out"))
    for cell in (tmp_path / "out").glob("*/seed-0"):
        rewritten(cell / "config.json", model={"name": module(cell, canary)})
    coterie.verify(tmp_path / "out")
    coterie.read(tmp_path / "out")
    assert not canary.exists()


def test_run_as_a_module_python_does_not_search_the_current_directory(canary, work):
    for name in ("typer", "torch", "rich", "tomllib"):
        module(work, canary, name)
    arguments = [sys.executable, "-m", "coterie", "--version"]
    path = os.pathsep.join(
        [str(Path(coterie.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        arguments, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path.strip(":")}
    )
    assert done.stdout.startswith("coterie "), done.stderr
    assert not canary.exists()


# ---- values that end in a message ----------------------------------------------------------------

DEEP = 100_000
VALUES = [
    (["--set", "engine.threads=100000"], f"less than or equal to {MOST_THREADS}"),
    (["--device", "cuda:99999999999"], "expected cpu, cuda or cuda:N"),
    (["--device", "cuda:٣"], "expected cpu, cuda or cuda:N"),
    (["--set", "train.lr=2020-01-01"], "train.lr: found '2020-01-01'"),
    (["--set", "algorithm.fedfomo.epsilon=[07:32:00]"], "epsilon: found ['07:32:00']"),
    (["--set", "train.lr=" + "[" * DEEP], "is no TOML value"),
    (["--set", "train." + "a." * DEEP + "a=1"], "nested too deeply"),
    (["--out", ""], "run.out: found ''"),
    (["--out", "   "], "it is empty"),
    (["--out", "x" * 300], "File name too long"),
    (["--out", "x/" * 3000], "File name too long"),
    (["--out", "a\0b"], "control characters"),
    (["--set", 'run.out="a\\u0000b"'], "control characters"),
    (["--out", "a\x1b[2Jb"], "control characters"),
    (["--seeds", ""], "run.seeds"),
    (["--data", "mnist", "--set", 'data.path="~nobody-of-this-name/x"'], "no home folder"),
    (["x" * 300], "cannot be read"),
    (["a\0b"], "cannot be read"),
]


@pytest.mark.parametrize(("options", "message"), VALUES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_value_that_cannot_be_ends_in_one_message(command, work, name, options, message):
    code, said = command(name, *options)
    assert code == 2
    assert message in re.sub(r"\s+", " ", said)
    assert len(said) < 2000
    assert not CONTROL.search(said)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.toml", "[train]\nlr = " + "[" * DEEP),
        ("x.toml", "a = " + "{a=" * DEEP),
        ("x.toml", "[" + ".".join("a" * 3000) + "]\nx = 1"),
        ("x.json", "[" * DEEP),
        ("x.json", '{"train":' * DEEP),
        ("x.json", "[1]"),
        ("x.json", "7"),
    ],
    ids=range(7),
)
def test_a_deeply_nested_or_odd_config_ends_in_one_message(command, work, name, text):
    (work / name).write_text(text)
    code, said = command("doctor", name)
    assert code == 2
    assert len(said) < 2000


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "", "no-such-folder"])
def test_a_folder_that_cannot_be_ends_in_one_message(command, work, path):
    for name in ("resume", "verify"):
        assert command(name, path)[0] == 2
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("environment.json", {"threads": 100_000}),
        ("environment.json", {"resumed": 7}),
        ("environment.json", {"argv": 7}),
        ("environment.json", {"argv": [7]}),
        ("config.json", {"resolved": {"engine": "vmap", "chunk": "x"}}),
        ("config.json", {"resolved": {"engine": "../x"}}),
        ("config.json", {"resolved": {"engine": "loop", "threads": 100_000}}),
        ("config.json", {"resolved": {}}),
        ("config.json", {"resolved": []}),
        ("config.json", {"asked": 3}),
        ("config.json", {"hash": None}),
        ("config.json", {"run": []}),
    ],
    ids=range(12),
)
def test_an_unfinished_run_with_odd_facts_is_not_continued(command, made, tmp_path, file, changes):
    run = Path(shutil.copytree(made, tmp_path / "run"))
    if "threads" in changes:
        config = json.loads((run / "config.json").read_text())
        config["resolved"].pop("threads", None)
        rewritten(run / "config.json", resolved=config["resolved"])
    rewritten(run / file, **changes)
    code, said = command("resume", run)
    assert code == 2, said


def test_an_unreadable_file_is_said_to_be_unreadable(command, tmp_path, monkeypatch):
    coterie.run(TINY, method="fedavg", rounds=1, out=str(tmp_path / "run"))
    usual = Path.open

    def refuse(self, *arguments, **options):
        if self.name == "clients.csv":
            raise PermissionError(13, "Permission denied", str(self))
        return usual(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    code, said = command("verify", tmp_path / "run")
    assert code == 2
    assert "clients.csv: cannot be read (Permission denied)" in said


# ---- where nothing is as on a desk ---------------------------------------------------------------


def test_a_user_without_home_and_name_has_a_cache_of_this_process(monkeypatch):
    def nobody(_):
        raise KeyError("uid not found")

    for name in ("HOME", "COTERIE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    folder = cache.folder()
    assert folder == cache.folder()
    assert folder.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="no home folder"):
        coterie.run({"data": {"name": "mnist", "path": "~/x"}})
    coterie.run(TINY, method="fedavg", rounds=1, engine="auto")


def test_git_is_never_run(canary, work, tmp_path, monkeypatch):
    """Neither for the repository of the current directory nor for our own."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "git"
    fake.write_text(f"#!/bin/sh\ntouch '{canary}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    (work / ".git").mkdir()
    (work / ".git" / "HEAD").write_text("0" * 40)
    assert environment.environment()["git_commit"] != "0" * 40
    assert not canary.exists()


@pytest.mark.parametrize("form", ["detached", "branch", "packed", "worktree"])
def test_the_commit_of_a_checkout_is_read_from_its_files(tmp_path, form):
    home, git, commit = tmp_path / "src" / "coterie", tmp_path / ".git", "0123456789" * 4
    home.mkdir(parents=True)
    if form == "worktree":
        git.write_text("gitdir: real/.git/worktrees/x\n")
        git = tmp_path / "real" / ".git" / "worktrees" / "x"
    git.mkdir(parents=True)
    (git / "HEAD").write_text(f"{commit}\n" if form == "detached" else "ref: refs/heads/h/x\n")
    shared = git
    if form == "worktree":
        (git / "commondir").write_text("../..\n")
        shared = tmp_path / "real" / ".git"
    if form == "packed":
        (git / "packed-refs").write_text(
            f"# pack-refs\n{'f' * 40} refs/heads/y\n{commit} refs/heads/h/x\n"
        )
    else:
        (shared / "refs" / "heads" / "h").mkdir(parents=True)
        (shared / "refs" / "heads" / "h" / "x").write_text(commit + "\n")
    assert environment.commit(home) == commit
    assert environment.commit(tmp_path / "lib" / "coterie") is None
    for head in ("ref: ../../secret", "ref: refs/../../secret", "x" * 40, "", "\0"):
        (git / "HEAD").write_text(head)
        assert environment.commit(home) is None


@pytest.mark.parametrize("text", ["", "[" * DEEP, "\xff", "null", " " * (2 << 20) + '{"a": 1}'])
def test_a_file_of_measurements_that_is_not_ours_is_ignored(text):
    auto.cache_file().parent.mkdir(parents=True, exist_ok=True)
    auto.cache_file().write_text(text, encoding="latin-1")
    assert auto._read() == {}


# ---- what reaches a terminal ---------------------------------------------------------------------


def table_of_sites(path, names):
    """A CSV of four sites with 20 rows each, but the last, which has one."""
    rows = []
    for i, name in enumerate(names):
        quoted = '"' + name.replace('"', '""') + '"'
        for j in range(1 if i == len(names) - 1 else 20):
            rows.append(f"{quoted},{j % 7},{(i + j) % 5},{j % 2}")
    path.write_text("\n".join(["site,a,b,label", *rows, ""]), encoding="utf-8", newline="")


def test_control_codes_in_names_reach_no_terminal(command, work):
    names = [f"{NASTY}{i}" for i in range(4)]
    table_of_sites(work / "sites.csv", names)
    options = ["--data", "sites.csv", "--set", "data.client=site", "--set", "data.target=label"]
    options += ["--rounds", "1", "--engine", "loop"]
    said = [command("doctor", *options)]
    said += [command("compare", *options, "--methods", "fedavg", "--out", "out")]
    said += [command("verify", "out"), command("resume", "out")]
    assert [code for code, _ in said] == [0, 0, 0, 0]
    assert not any(CONTROL.search(text) for _, text in said)
    assert any("\\x1b" in text for _, text in said)
    found = coterie.read(work / "out")
    assert not CONTROL.search(repr(found) + found.verdict + repr(found.runs[0]))
    assert set(found.runs[0].roster.clients) == set(names)  # nothing is lost in the files


def test_control_codes_in_configs_and_folders_reach_no_terminal(command, work):
    nasty = json.dumps(NASTY)
    for place in ("model.name", "algorithm.name", "data.name", "train.optimizer", "run.metric"):
        code, said = command("run", "--set", f"{place}={nasty}")
        assert code == 2
        assert not CONTROL.search(said)
    (work / "\x1b[2J").mkdir()
    for name in ("resume", "verify", "run"):
        code, said = command(name, "\x1b[2J")
        assert code == 2
        assert not CONTROL.search(said)


@pytest.mark.parametrize("kind", [CoterieError, CoterieWarning, ConfigError])
def test_messages_of_ours_are_printable_from_python_too(kind):
    assert not CONTROL.search(str(kind(NASTY)))
    assert printable("a\nb") == "a\\nb"
    assert printable("Zürich – 東京 🏥") == "Zürich – 東京 🏥"
    assert np.all([printable(chr(i)) != chr(i) for i in (*range(32), *range(127, 160))])

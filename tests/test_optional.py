"""Without ``coterie.compiled`` everything else works (test_architecture: who imports it)."""

import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import coterie
from coterie.engines import vmap

ROOT = Path(coterie.__file__).parents[2]
SOURCE, TESTS = ROOT / "src" / "coterie", ROOT / "tests"
OWN = re.compile(r"^\s*(?:from|import) coterie\.compiled\b", re.MULTILINE)

HIDDEN = """
import sys

asked = []

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("coterie.compiled"):
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name="coterie.compiled")

sys.meta_path.insert(0, Hidden())
"""


def python(code: str, *arguments: str) -> str:
    """What a new interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


RUN = """
import coterie
config = {"partition": {"name": "iid", "clients": 3}, "model": {"name": "linear"},
          "engine": {"name": "loop"}, "run": {"rounds": 2}}
coterie.run(config, method="fedavg")
print(len(asked))
config["engine"] = {"name": "vmap", "trace": True}
run = coterie.run(config, method="fedavg")
(call,) = [c for c in run.summary["ran"]["calls"] if c["stage"] == "FedAvg.local"]
print(call["way"], "|", call["why"])
print(run.summary["digest"])
config["engine"]["trace"] = False
print(coterie.run(config, method="fedavg").summary["digest"])
auto = coterie.run({**config, "engine": {"name": "auto"}}, method="fedavg")
print(auto.config["resolved"]["engine"])
print(dict(coterie.doctor(config).facts)["C++ compiler"])
"""


def test_without_the_compiler_vmap_runs_uncompiled_and_says_why():
    needed, *lines = python(HIDDEN + RUN).splitlines()
    assert needed == "0"  # a loop never asks for it
    assert lines[0] == f"as written | {vmap.MISSING}"
    assert lines[1] == lines[2]
    assert lines[3] in ("loop", "vmap")
    assert lines[4].startswith("none")


def test_a_traced_run_is_not_continued_without_the_compiler(monkeypatch):
    from coterie.algorithms.local import Local
    from support import task

    monkeypatch.setattr(vmap, "tracing", lambda: None)
    before = {"1": "compiled", "2": "as written"}
    with pytest.raises(coterie.EngineError, match=r"were compiled when.*start a new run"):
        vmap.VmapBackend(*task(Local())[:2], before=before)
    vmap.VmapBackend(*task(Local())[:2], before={"2": "as written"})


def test_a_fault_inside_the_compiler_is_not_taken_for_its_absence(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'torch.gone'", name="torch.gone")

    monkeypatch.setattr(vmap.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match=r"torch\.gone"):
        vmap.tracing()


def own_tests(folder: Path) -> list[Path]:
    """Test files of the compiler itself: those that import it, or another one of them."""
    text = {path: path.read_text() for path in folder.rglob("*.py")}
    own = {path for path in text if OWN.search(text[path])}
    helped = "|".join(path.stem for path in own) or "nothing"
    asking = re.compile(rf"^(?:from|import) (?:{helped})\b", re.MULTILINE)
    return [path for path in text if path in own or asking.search(text[path])]


@pytest.mark.compiled
def test_the_compilers_own_tests_are_told_by_their_imports():
    assert {path.name for path in own_tests(TESTS)} >= {"test_trace.py", "test_gpu.py"}
    assert PathFinder.find_spec("coterie.compiled", [str(SOURCE)]) is not None


@pytest.mark.slow
def test_everything_else_passes_with_the_folder_deleted(tmp_path):
    for name in ("src", "tests", "docs", "experiments", "bench"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path / path.name)
    shutil.rmtree(tmp_path / "src" / "coterie" / "compiled")
    for path in own_tests(tmp_path / "tests"):
        path.unlink()
    chosen = "not slow and not gpu and not shared and not compiled"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", chosen],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]

"""A real federation on loopback: coordinator, sites and operator are processes that are killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

import coterie
from coterie.deploy.local_federation import free_port
from coterie.runs.config.loading import merge
from coterie.storage import files
from sites import FAST, NAMES, exported, simulated, site_folders, write_tables

ROUNDS = 3
ASKED = merge(FAST, {"algorithm.name": "scaffold", "train.epochs": 50, "train.batch": 4})


class Processes:
    """The processes of a federation; each can be killed and started again."""

    def __init__(self, home, data):
        self.home, self.port = home, free_port()
        self.sites = site_folders(home, data, address=f"localhost:{self.port}")
        self.running = {}

    def start(self, name, *command):
        log = (self.home / f"{name}.log").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.running[name] = subprocess.Popen(
            [sys.executable, "-P", "-m", "coterie", *map(str, command)],
            stdout=log,
            stderr=log,
            env=environment,
        )
        log.close()

    def start_part(self, name):
        if name == "coordinator":
            self.start(name, "coordinator", self.home / "fed")
        else:
            self.start(name, "site", "start", self.home / name)

    def kill(self, name):
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def log(self, name):
        return (self.home / f"{name}.log").read_text(errors="replace")

    def close(self):
        for process in self.running.values():
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    home = tmp_path_factory.mktemp("processes")
    made = Processes(home, write_tables(home / "data"))
    for name in ("coordinator", *NAMES):
        made.start_part(name)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(parts):
    """The digest of the simulation."""
    wait_for(lambda: online(parts), parts)
    return simulated(exported(parts.sites, parts.home / "divided"), ASKED).summary["digest"]


def config_of(parts):
    path = parts.home / "asked.toml"
    path.write_text(
        '[model]\nname = "mlp"\nhidden = [6]\n[train]\nlr = 0.1\nepochs = 50\nbatch = 4\n'
        '[algorithm]\nname = "scaffold"\n[run]\nrounds = 3\n'
    )
    return path


def rounds_done(out):
    lines = out / "rounds.jsonl"
    return lines.read_text().count("\n") if lines.exists() else 0


def wait_for(condition, parts, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, parts.log("operator")
        time.sleep(0.05)


def digest_of(parts, out):
    wait_for(lambda: parts.running["operator"].poll() is not None, parts)
    assert parts.running["operator"].returncode == 0, parts.log("operator")
    return files.read_json(out / "summary.json")["digest"]


def online(parts):
    status = [sys.executable, "-P", "-m", "coterie", "deploy", "status", str(parts.home / "fed")]
    said = subprocess.run(status, capture_output=True, text=True).stdout
    return said.count(": online") == len(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("round", range(ROUNDS))
@pytest.mark.parametrize("victim", ["birch", "coordinator", "operator"])
def test_a_part_that_is_killed_in_any_round_comes_back_and_the_digest_is_the_simulators(
    parts, whole, victim, round
):
    out = parts.home / f"{victim}-{round}"
    asked = ("--federation", parts.home / "fed", "--out", out)
    parts.start("operator", "run", config_of(parts), *asked)
    begun = (out / "config.json").exists if round == 0 else lambda: rounds_done(out) >= round
    wait_for(begun, parts)
    parts.kill(victim)
    killed = time.monotonic()
    if victim == "operator":
        parts.start("operator", "resume", out)
    else:
        parts.start_part(victim)
    assert digest_of(parts, out) == whole
    print(f"\n{victim} in round {round}: ended {time.monotonic() - killed:.1f} s after the kill")
    lines = [line for line in (out / "rounds.jsonl").read_text().splitlines() if '"lost"' in line]
    assert not lines
    assert not any(coterie.verify(out).values())

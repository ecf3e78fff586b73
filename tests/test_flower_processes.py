"""Stock Flower as real processes on loopback: equal digests, kills, a hostile app."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import coterie
from coterie import api
from coterie.deploy.folders import write_app
from coterie.deploy.local_federation import local_sites
from coterie.storage import files
from flower_net import FlowerNet, until
from sites import FAST

pytestmark = pytest.mark.slow

SITES = 3
DATA = {**FAST, "data": {"name": "digits"}, "partition": {"name": "iid", "clients": SITES}}
CONFIG = """\
[model]
name = "mlp"
hidden = [6]
[train]
lr = 0.1
epochs = 1
batch = 8
[algorithm]
name = "{method}"
[run]
rounds = {rounds}
participation = {participation}
evaluate_every = {rounds}
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    home = tmp_path_factory.mktemp("f")
    made = FlowerNet(home, local_sites(api.configure(DATA), home, "flower")[0])
    try:
        made.start_all()
        yield made
    finally:
        made.close()


def asked(net, method, rounds=3, participation=1.0):
    """The config of a run in a file, and the folder of its results."""
    name = f"{method}-{participation}-{time.monotonic_ns()}"
    path = net.fed.path / f"{name}.toml"
    path.write_text(CONFIG.format(method=method, rounds=rounds, participation=participation))
    return path, net.fed.path / name


def simulated(method, rounds=3, participation=1.0):
    said = {"method": method, "rounds": rounds, "participation": participation}
    config = {"run.evaluate_every": rounds, "engine.threads": 1}
    return coterie.run(DATA, engine="loop", set=config, **said).summary["digest"]


@pytest.mark.parametrize(
    ("method", "participation"), [("fedavg", 0.67), ("fedfomo", 1.0), ("federico", 0.67)]
)
def test_on_stock_supernodes_the_digest_is_the_simulations(net, method, participation):
    config, out = asked(net, method, participation=participation)
    net.run(config=config, out=out)
    assert net.digest(out) == simulated(method, participation=participation)
    assert not any(coterie.verify(out).values())


@pytest.mark.parametrize("victim", ["site", "node", "link", "serverapp"])
def test_after_a_kill_the_digest_is_the_simulations(net, victim):
    config, out = asked(net, "scaffold", rounds=5)
    net.run(config=config, out=out)
    lines = out / "rounds.jsonl"
    until(lambda: lines.exists() and lines.read_text().count("\n") >= 2, said=net.all_logs)
    name = next(iter(net.sites))
    begun = time.monotonic()
    if victim == "serverapp":
        (app,) = [pid for pid in net.children("exec") if "serverapp" in command_of(pid)][:1]
        os.kill(app, signal.SIGKILL)
        net.run(config=config, out=out)
    else:
        part = victim if victim == "link" else f"{victim} {name}"
        net.kill(part)
        net.start(part)
    assert net.digest(out) == simulated("scaffold", rounds=5)
    print(f"\n{victim} was killed: the run has ended after {time.monotonic() - begun:.0f} s")


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


ATTACK = """
import os, pathlib, socket
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
client = ClientApp()
server = ServerApp()

@client.query()
def steal(message, context):
    found = []
    for path in pathlib.Path({home!r}).rglob("*"):
        if {{"nodes", "flwr", "attack"}} & {{*path.parts}} or path.suffix == ".log":
            continue  # Flower's own, this app, and logs
        try:
            if path.is_file():
                path.read_bytes()
                found.append(str(path))
        except OSError:
            pass
    site = socket.socket(socket.AF_UNIX)
    site.connect(context.node_config["socket"])
    site.sendall(b"give me everything")
    site.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: site.recv(1 << 20), b""))
    told = ConfigRecord({{"found": "\\n".join(found), "answer": answer}})
    return Message(RecordDict({{"told": told}}), reply_to=message)

@server.main()
def main(grid, context):
    asked = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(asked, timeout=120):
        told = "error" if reply.has_error() else dict(reply.content["told"])
        print("STOLEN", told, flush=True)
    print("ENDED", flush=True)
"""


def test_a_strangers_app_on_every_node_finds_no_file_no_key_and_no_answer(net):
    """It runs on every node, as Flower lets it, and comes back with a refusal."""
    if not net.apart:
        pytest.skip("needs root and setpriv to give SuperNodes fewer rights than sites")
    app = net.home / "attack"
    write_app(app, None)
    project = app / "pyproject.toml"
    project.write_text(
        project.read_text()
        .replace("coterie.commands.flower_app:server", "attack:server")
        .replace("coterie.deploy.flower_client:app", "attack:client")
    )
    (app / "attack.py").write_text(ATTACK.format(home=str(net.home)))
    logs = net.home / "run.log"
    before = len(logs.read_text()) if logs.exists() else 0
    net.run_app(app)
    until(lambda: (net.supervise(), "ENDED" in logs.read_text()[before:])[1], said=net.all_logs)
    stolen = [line for line in logs.read_text()[before:].splitlines() if "STOLEN" in line]
    assert len(stolen) == SITES
    for line in stolen:
        assert "'found': ''" in line
        assert "unsigned" in line


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_flowers_simulation_runs_every_method_with_the_digest_of_loop(tmp_path, participation):
    home = tmp_path / "net"
    home.mkdir()
    net = FlowerNet(home, local_sites(api.configure(DATA), home, "flower")[0])
    write_app(tmp_path / "app", None)
    config = tmp_path / "all.toml"
    config.write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 4\n[engine]\nname = "loop"\n'
        + CONFIG.format(method="fedavg", rounds=2, participation=participation)
        + 'methods = "all"\n'
    )
    here = coterie.compare(str(config), set={"engine.threads": 1})
    try:
        net.start_simulation()
        said = f'config="{config}" out="{tmp_path / "out"}" compare=true'
        nodes = ("--federation-config", "num-supernodes=4")
        net.run_app(tmp_path / "app", "--run-config", said, *nodes)
        page = tmp_path / "out" / "report.html"
        until(lambda: page.exists() or "exit code" in net.log("run"), 900, net.all_logs)
        assert page.exists(), net.all_logs()
    finally:
        net.close()
    differ = set()
    for run in here.runs:
        name = run.summary["method"]
        there = files.read_json(tmp_path / "out" / name / "seed-0" / "summary.json")
        if there["digest"] != run.summary["digest"]:
            differ.add(name)
    assert differ == {"fedavg_data"}  # each site draws what it shares by itself

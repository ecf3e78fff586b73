"""Stock Flower as real processes on loopback: equal digests, kills, a hostile app."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import coterie
from coterie import api
from coterie.deploy.folders import write_app
from coterie.deploy.local_federation import free_port, local_sites
from coterie.storage import files
from flower_net import BIN, FlowerNet, until
from sites import FAST
from support import METHODS
from test_service import blocks, table

pytestmark = pytest.mark.slow

SITES = 3
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
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


@pytest.mark.parametrize("round", range(4))
@pytest.mark.parametrize("victim", ["site", "node", "link", "exec", "serverapp", "run"])
def test_after_a_kill_in_any_round_the_digest_is_the_simulations(net, victim, round):
    """``run`` is ``flwr run``, which only shows lines; ``exec`` starts ServerApps."""
    config, out = asked(net, "scaffold", rounds=4)
    net.run(config=config, out=out)
    lines = out / "rounds.jsonl"
    begun = (out / "config.json").exists
    done = begun if round == 0 else lambda: begun() and lines.read_text().count("\n") >= round
    until(done, said=net.all_logs)
    name = next(iter(net.sites))
    killed = time.monotonic()
    if victim in ("serverapp", "exec"):  # it ends after a round without its SuperExec
        (app,) = [pid for pid in net.children("exec") if "serverapp" in command_of(pid)][:1]
        if victim == "exec":
            net.kill("exec")
            net.start("exec")
            until(lambda: not Path(f"/proc/{app}").exists(), said=net.all_logs)
        else:
            os.kill(app, signal.SIGKILL)
        net.run(config=config, out=out)
    else:
        part = f"{victim} {name}" if victim in ("site", "node") else victim
        net.kill(part)
        if victim != "run":
            net.start(part)
    assert net.digest(out) == simulated("scaffold", rounds=4)
    print(f"\n{victim} in round {round}: ended {time.monotonic() - killed:.0f} s after the kill")


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
        + f"methods = {sorted({*METHODS} - {'fedavg_data'})}\n"
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
    for run in here.runs:
        name = run.summary["method"]
        there = files.read_json(tmp_path / "out" / name / "seed-0" / "summary.json")
        assert there["digest"] == run.summary["digest"], name


def test_the_instructions_lead_through_flower_to_the_page(tmp_path, monkeypatch):
    """Word by word, as three hospitals; users, services and nginx alone are left out."""
    hospitals, running, port = ("ash", "birch", "cedar"), [], free_port()
    for name in ("etc", "flower", "run", "flwr"):
        (tmp_path / name).mkdir(mode=0o750)
    places = {
        "/var/lib/coterie/link.db": tmp_path / "link.db",
        "/var/lib/coterie/SITE": tmp_path / "SITE",
        "/etc/coterie": tmp_path / "etc",
        "/var/lib/flower/supernode": tmp_path / "flower" / "SITE",
        "/run/coterie/site": tmp_path / "run" / "SITE",
        "supernode.pub": tmp_path / "flower" / "SITE.pub",
        "/opt/coterie/bin/": "",
        "127.0.0.1:9092": f"localhost:{port}",
        "--port 9092": f"--port {port}",
        'RUN"': f'{tmp_path}/RUN"',
        "THEIR.csv": "SITE.csv",
    }
    paths = f"{BIN}:{os.environ['PATH']}"
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(tmp_path / "flwr"), "PATH": paths}

    def typed(line, site="", ends=True, **words):
        for word, value in (places | {"SITE": site} | words).items():
            line = line.replace(word, str(value))
        command = shlex.split(line)
        if command[0] == "coterie":
            command = [sys.executable, "-P", "-m", *command]
        if command[0] == "flower-supernode":
            command += ["--port", str(free_port())]  # there are three on this machine
        log = tmp_path / f"{len(running)}.log"
        if not ends:
            with log.open("wb") as file:
                running.append(
                    subprocess.Popen(
                        command,
                        cwd=tmp_path,
                        env=environment,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                )
            return log
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            input="y\n",
            timeout=300,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    fed = tmp_path / "fed"
    typed(f"coterie deploy init {fed} --address localhost:{port} --transport flower")
    book = (fed / "RUNBOOK.md").read_text()
    at = {}
    for where, lines in blocks(book):
        at.setdefault(where.removeprefix("at the "), []).extend(lines)
    add_site, verify = at["coordinator"]
    register, _, run, compare = at["SuperLink"]
    init, doctor, serve, requests, approve, show, export, predict = at["site"]
    (link,) = re.findall(r"^```toml\n(\[superlink\.local\].*?)^```", book, re.M | re.S)
    (tmp_path / "flwr" / "config.toml").write_text(
        link.replace("127.0.0.1:9092", f"localhost:{port}")
    )
    for unit in ("superlink", "superexec"):
        text = (fed / "service" / f"coterie-{unit}.service").read_text()
        typed(re.findall(r"^ExecStart=(.*)$", text, re.M)[0], ends=False)
        time.sleep(5)
    try:
        shutil.copy(fed / "invite.toml", tmp_path)
        for seed, site in enumerate(hospitals):
            table(tmp_path / f"{site}.csv", seed)
            typed(init, site)
            own = tmp_path / site / "site.toml"
            named = f'[data]\nname = "{tmp_path}/{site}.csv"\ntarget = "outcome"\n'
            own.write_text(own.read_text().replace("[data]\n", named))
            shutil.copy(tmp_path / site / f"{site}.pub", tmp_path)
            shutil.copy(tmp_path / site / "coordinator.pem", tmp_path / "etc")
            typed(add_site, site)
            key = tmp_path / "flower" / site
            typed(f'ssh-keygen -q -t ecdsa -b 384 -N "" -f {key}')
            typed(register, site)
            typed(doctor, site)
            typed(serve, site, ends=False)
            until((tmp_path / "run" / site).is_socket, 60)
            typed(at["SuperNode"][0], site, ends=False)
        config = fed / "example.toml"
        config.write_text(config.read_text().replace("rounds = 20", "rounds = 2"))
        assert "waits for the owner" in typed(run)
        for site in hospitals:
            name = typed(requests, site).split()[0].rstrip(":")
            typed(approve, site, REQUEST=name)
        typed(run)
        assert (tmp_path / "RUN" / "report.html").is_file()
        typed(verify)
        for site in hospitals:
            assert "local" in typed(show, site)
            typed(export, site, MODEL=tmp_path / f"model-{site}")
        assert "compare=true" in compare
        assert "predict" in predict
    finally:
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

"""What keeps a federation running: memory, health, metrics, logs, services, instructions."""

import configparser
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from coterie.deploy.folders import FederationFolder
from coterie.deploy.site_folder import SiteFolder
from coterie.errors import ConfigError
from coterie.storage import files
from loopback import free_port, until
from test_deploy_commands import asked, known

ADDRESS = "coordinator.example.org:8443"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


class Program:
    """A long-running command of coterie."""

    def __init__(self, log: Path, *command: object) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "coterie", *map(str, command)],
                stdout=file,
                stderr=file,
            )

    def megabytes(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024

    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0


def got(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answers(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def fed(tmp_path):
    return FederationFolder.create(tmp_path / "fed", f"127.0.0.1:{free_port()}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_coordinator_is_small_and_says_that_it_is_well(fed, tmp_path):
    site = SiteFolder.create(tmp_path / "a", fed.invite, "a")
    fed.add_site(site.public, "a")
    port = free_port()
    command = ("coordinator", fed.path, "--monitor", port, "--log-json")
    running = Program(tmp_path / "log", *command)
    try:
        until(lambda: answers(port) and fed.socket.exists(), 60)
        assert got(port, "/healthz") == (200, "ok\n")
        status, metrics = got(port, "/metrics")
        assert status == 200
        assert 'coterie_site_online{site="a"} 0.0' in metrics
        assert 'coterie_connections{who="strangers"} 0.0' in metrics
        assert "process_resident_memory_bytes" in metrics
        assert got(port, "/run.sock")[0] == 404
        assert running.megabytes() <= 80
    finally:
        running.end()
    lines = [json.loads(line) for line in running.said().splitlines()]
    assert {"time", "level", "logger", "message"} == {*lines[0]}
    assert any("sites can dial" in line["message"] for line in lines)


def test_a_monitor_is_on_loopback_unless_it_is_told_otherwise(fed, tmp_path, monkeypatch):
    from coterie.deploy import service

    found = []
    monkeypatch.setattr(
        service, "ThreadingHTTPServer", lambda where, _: found.append(where) or 1 / 0
    )
    for text in ("9464", "0.0.0.0:9464"):
        with (
            pytest.raises(ZeroDivisionError),
            service.monitored(text, service.Ending(), lambda: iter(())),
        ):
            pass
    assert found == [("127.0.0.1", 9464), ("0.0.0.0", 9464)]
    with (
        pytest.raises(ConfigError, match="expected HOST:PORT"),
        service.monitored("nothing", service.Ending(), lambda: iter(())),
    ):
        pass


def test_a_program_that_hangs_is_not_healthy(monkeypatch):
    from coterie.deploy import service

    port, stop = free_port(), service.Ending()
    with service.monitored(str(port), stop, lambda: iter(())):
        assert got(port, "/healthz")[0] == 200
        stop.looked -= 2 * service.HANGS
        assert got(port, "/healthz") == (503, "hangs\n")
        stop.is_set()
        assert got(port, "/healthz")[0] == 200


# ---- services ------------------------------------------------------------------------------------


@pytest.fixture(params=["direct", "flower"])
def services(request, tmp_path):
    """The service files of a coordinator and of a site, for one transport."""
    fed = FederationFolder.create(tmp_path / "fed", ADDRESS, request.param)
    site = SiteFolder.create(tmp_path / "a", fed.invite, "a")
    return [*(fed.path / "service").iterdir(), *(site.path / "service").iterdir()]


def refuse_unknown(command: list[str]) -> None:
    """Refuse a command, or an option of it, that is not there."""
    name = Path(command[0]).name
    if name == "coterie":
        wanted = asked(shlex.join(["coterie", *command[1:]]))
        assert wanted
        assert wanted <= known()
        return
    assert name in ("flower-superlink", "flower-superexec", "flower-supernode")
    program = shutil.which(name, path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("flwr is not installed")
    told = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    for option in command[1:]:
        if option.startswith("--"):
            assert re.search(rf"{option.partition('=')[0]}\b", told), option


def test_nothing_in_a_service_file_is_left_to_fill_in(services):
    for path in services:
        text = path.read_text()
        assert not re.search(r"\$[a-z{]", text), path


def test_units_start_commands_that_exist_and_take_the_rights_that_nobody_needs(services):
    units = [path for path in services if path.suffix == ".service"]
    assert units
    for path in units:
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str
        unit.read_string(path.read_text())
        service = unit["Service"]
        refuse_unknown(shlex.split(service["ExecStart"]))
        assert service["Restart"] == "always"
        assert service["NoNewPrivileges"] == "true"
        assert service["User"] != "root"


def test_a_site_and_its_supernode_are_two_users_with_one_group(tmp_path):
    fed = FederationFolder.create(tmp_path / "fed", ADDRESS, "flower")
    site = SiteFolder.create(tmp_path / "a", fed.invite, "a").path / "service"
    units = []
    for name in ("coterie-site", "coterie-supernode"):
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str
        unit.read_string((site / f"{name}.service").read_text())
        units.append(unit["Service"])
    assert units[0]["User"] != units[1]["User"]
    assert units[0]["Group"] == units[1]["Group"]
    assert units[1]["InaccessiblePaths"] == str(tmp_path / "a")
    yaml = pytest.importorskip("yaml")
    both = yaml.safe_load((site / "compose.yaml").read_text())["services"]
    assert both["site"]["user"].split(":")[0] != both["supernode"]["user"].split(":")[0]
    assert both["site"]["user"].split(":")[1] == both["supernode"]["user"].split(":")[1]
    assert both["site"]["network_mode"] == "none"
    shared = {v.split(":")[0] for v in both["site"]["volumes"]} & {
        v.split(":")[0] for v in both["supernode"]["volumes"]
    }
    assert shared == {"socket"}


def test_flowers_control_interface_is_reached_from_its_own_machine_alone(tmp_path):
    """Whoever reaches it is the operator: the ServerApp that it starts reads the operator's key."""
    made = FederationFolder.create(tmp_path / "f", "fed.example.org:8443", "flower")
    link = (made.path / "service" / "coterie-superlink.service").read_text()
    assert re.findall(r"--host (\S+)", link) == ["127.0.0.1"]
    nginx = (made.path / "service" / "nginx.conf").read_text()
    assert re.findall(r"location (\S+)", nginx) == ["/v1/fleet/", "/"]
    assert re.search(r"location / \{\s*return 40\d;", nginx)


def test_compose_files_and_kubernetes_examples_start_commands_that_exist(services):
    yaml = pytest.importorskip("yaml")
    found = 0
    for path in services:
        if path.name == "compose.yaml":
            for service in yaml.safe_load(path.read_text())["services"].values():
                refuse_unknown(list(map(str, service["command"])))
                assert service["cap_drop"] == ["ALL"]
                found += 1
        if path.name == "kubernetes.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                if document["kind"] != "Deployment":
                    continue
                pod = document["spec"]["template"]["spec"]
                mounted = {volume["name"] for volume in pod["volumes"]}
                for container in pod["containers"]:
                    refuse_unknown(list(map(str, container["command"])))
                    assert {mount["name"] for mount in container["volumeMounts"]} <= mounted
                    assert not container["securityContext"]["allowPrivilegeEscalation"]
                    found += 1
    assert found


def test_containerfiles_install_extras_that_exist(services):
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    made = [path for path in services if path.name == "Containerfile"]
    assert made
    for path in made:
        text = path.read_text().replace("\\\n", " ")
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        words = {line.split()[0] for line in lines}
        assert words <= {"FROM", "RUN", "ENV", "USER", "CMD"}
        (named,) = re.findall(r"'coterie\[([a-z,]+)\]==", text)
        assert {*named.split(",")} <= {*extras}
        refuse_unknown(json.loads(lines[-1].removeprefix("CMD ")))
        assert lines[-2].startswith("USER ")


# ---- the instructions, walked --------------------------------------------------------------------


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """The commands of the instructions in their order, with where they are typed."""
    found = re.findall(r"^```sh ([a-zA-Z ]+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(where, body.strip().splitlines()) for where, body in found]


def table(path: Path, seed: int) -> None:
    draws = np.random.default_rng(seed)
    a, b = draws.normal(size=(2, 120))
    outcome = np.where(a + 0.3 * b > 0, "yes", "no")
    rows = [f"{x:.3f},{y:.3f},{o}" for x, y, o in zip(a, b, outcome, strict=True)]
    path.write_text("\n".join(["a,b,outcome", *rows]) + "\n")


@pytest.mark.slow
def test_the_instructions_lead_from_the_first_folder_to_the_page(tmp_path):
    """Word by word, as three hospitals and a coordinator; only the services are left out."""
    hospitals, running = ("ash", "birch", "cedar"), []

    def typed(line: str, site: str = "", cwd: Path = tmp_path, **words: object) -> str:
        text = line.replace("/var/lib/coterie/SITE", str(tmp_path / site)).replace("SITE", site)
        for word, value in words.items():
            text = text.replace(word, str(value))
        command = shlex.split(text.replace("THEIR.csv", f"{site}.csv"))
        assert command[0] == "coterie"
        whole = [sys.executable, "-P", "-m", *command]
        if command[1:2] == ["coordinator"] or command[1:3] == ["site", "start"]:
            running.append(Program(tmp_path / f"{site}.log", *command[1:]))
            return ""
        done = subprocess.run(whole, cwd=cwd, capture_output=True, text=True, input="y\n")
        assert done.returncode == 0, (text, done.stderr)
        return done.stdout

    typed(f"coterie deploy init {tmp_path}/fed --address localhost:{free_port()}")
    commands = blocks((tmp_path / "fed" / "RUNBOOK.md").read_text())
    here = [line for where, lines in commands if where == "at the coordinator" for line in lines]
    there = [line for where, lines in commands if where == "at the site" for line in lines]
    shutil.copy(tmp_path / "fed" / "invite.toml", tmp_path)
    for seed, site in enumerate(hospitals):
        table(tmp_path / f"{site}.csv", seed)
        typed(there.pop(0) if site == hospitals[-1] else there[0], site)  # site init
        said = tmp_path / site / "site.toml"
        text = said.read_text().replace(
            "[data]\n", f'[data]\nname = "{tmp_path}/{site}.csv"\ntarget = "outcome"\n'
        )
        said.write_text(text)
        shutil.copy(tmp_path / site / f"{site}.pub", tmp_path)
        typed(here[0], site)  # add-site
    doctor, start, *rest = there
    assert here[1].startswith("coterie coordinator")
    typed(here[1])
    for site in hospitals:
        typed(doctor, site)
        typed(start, site)
    try:
        config = tmp_path / "fed" / "example.toml"
        config.write_text(config.read_text().replace("rounds = 20", "rounds = 2"))
        _, _, run, compare, verify = here
        status = f"coterie deploy status {tmp_path}/fed"
        until(lambda: typed(status).count(": online") == len(hospitals), 120)
        first = subprocess.run(
            [sys.executable, "-P", "-m", *shlex.split(run)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert first.returncode == 2  # nobody has approved it
        assert "Traceback" not in first.stderr
        requests, approve, show, export, predict = rest
        for site in hospitals:
            name = typed(requests, site).split()[0].rstrip(":")
            typed(approve, site, REQUEST=name)
        typed(run)
        assert (tmp_path / "RUN" / "report.html").is_file()
        typed(verify)
        for site in hospitals:
            assert "local" in typed(show, site)
            typed(export, site, MODEL=tmp_path / f"model-{site}")
            (tmp_path / "NEW.csv").write_text("a,b\n0.5,0.1\n")
            answers = tmp_path / f"answers-{site}"
            typed(predict, site, MODEL=tmp_path / f"model-{site}", ANSWERS=answers)
            assert answers.with_suffix(".csv").read_text().count("\n") == 2
        assert compare.startswith("coterie compare")
    finally:
        for each in reversed(running):
            each.end()
    assert files.read_json(tmp_path / "RUN" / "summary.json")["rounds"] == 2

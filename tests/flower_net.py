"""Stock Flower on loopback: SuperLink, SuperExec, a SuperNode and a resident site for each site."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coterie.deploy.folders import FederationFolder
from coterie.deploy.local_federation import free_port
from coterie.deploy.site_folder import SiteFolder
from coterie.storage import files

BIN = Path(sys.executable).parent
PATIENCE = 300.0
OWNER = 54321  # of the folders of sites and coordinator, as far as nodes are concerned:
# Python may lie where only root can go, so nodes are root without any of root's privileges.
POWERLESS = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")


class FlowerNet:
    """The processes of a federation whose folders are in ``home``; each can be killed, started."""

    def __init__(self, home: Path, sites: list[SiteFolder], bin_folder: Path = BIN) -> None:
        self.home, self.bin = home, bin_folder
        self.apart = os.getuid() == 0 and shutil.which("setpriv") is not None
        self.sites = {site.name: site for site in sites}
        self.fed = FederationFolder.open(home / "fed")
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("sockets", "flwr", "nodes"):
            (home / name).mkdir(mode=0o750)
        for folder in (self.fed.path, *(site.path for site in sites)) if self.apart else ():
            for path in (folder, *folder.rglob("*")):
                os.chown(path, OWNER, OWNER)
        link = f'address = "{self.fed.address}"\nroot-certificates = "{self.fed.ca}"\n'
        (home / "flwr" / "config.toml").write_text(f"[superlink.local]\n{link}")

    @property
    def environment(self) -> dict[str, str]:
        quiet = {
            "FLWR_HOME": str(self.home / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
        }
        return {**os.environ, **quiet}

    # ---- processes -------------------------------------------------------------------------------

    def command(self, part: str) -> list[str | Path]:
        """The command of a part: link, exec, site NAME, node NAME."""
        fed, (kind, _, name) = self.fed, part.partition(" ")
        if kind == "link":
            host, _, port = fed.address.partition(":")
            return [
                *("flower-superlink", "--host", host, "--port", port, "--isolation", "process"),
                *("--ssl-ca-certfile", fed.ca, "--ssl-certfile", fed.server),
                *("--ssl-keyfile", fed.server_key, "--enable-supernode-auth"),
                *("--database", fed.path / "link.db"),
                *("--superexec-auth-secret-file", fed.path / "superexec.key"),
                "--disable-runtime-dependency-installation",
            ]
        if kind == "exec":
            return [
                *("flower-superexec", "--runtime-api-address", fed.address),
                *("--root-certificates", fed.ca),
                *("--superexec-auth-secret-file", fed.path / "superexec.key"),
            ]
        socket = self.home / "sockets" / name
        if kind == "site":
            folder = self.sites[name].path
            return [
                sys.executable,
                "-P",
                "-m",
                "coterie",
                "site",
                "serve",
                folder,
                "--socket",
                socket,
            ]
        return [
            *("flower-supernode", "--superlink", fed.address),
            *("--root-certificates", self.home / "nodes" / "ca.pem"),
            *("--auth-supernode-private-key", self.home / "nodes" / name),
            *("--port", str(free_port()), "--node-config", f'socket="{socket}"'),
        ]

    def start(self, *parts: str) -> None:
        for part in parts:
            self._popen(part, self.command(part))

    def _popen(self, part: str, command: list[str | Path]) -> None:
        apart = self.apart and part.startswith("node ")
        command = [*(POWERLESS if apart else ()), *command]
        flwr = {"FLWR_HOME": str(self.home / "nodes")} if apart else {}
        with (self.home / f"{part.replace(' ', '-')}.log").open("ab") as log:
            self.running[part] = subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=log,
                env=self.environment | flwr,
                start_new_session=True,
            )

    def start_simulation(self) -> None:
        """Start a link that simulates nodes, without TLS and in memory."""
        host, port = "127.0.0.1", str(free_port())
        link = f'[superlink.local]\naddress = "{host}:{port}"\ninsecure = true\n'
        (self.home / "flwr" / "config.toml").write_text(link)
        command = ["flower-superlink", "--insecure", "--simulation", "--host", host, "--port", port]
        self._popen("link", command)
        until(lambda: "running on" in self.log("link"), 60, self.all_logs)

    def start_all(self, resident: bool = True) -> None:
        """Start everything, and register a key for each node; without ``resident``, no sites."""
        self.start("link")
        until(lambda: "running on" in self.log("link"), 60, lambda: self.log("link"))
        self.start("exec")
        (self.home / "nodes" / "ca.pem").write_bytes(self.fed.ca.read_bytes())
        for name in self.sites:
            key = self.home / "nodes" / name
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key], check=True
            )
            self.flwr("supernode", "register", f"{key}.pub", "local", "--name", name)
            self.start(*([f"site {name}"] if resident else ()), f"node {name}")
        for name in self.sites:
            until((self.home / "sockets" / name).is_socket, 60, self.all_logs)

    def kill(self, part: str) -> None:
        """Kill a process alone; what it has started ends with it or is left, as after a crash."""
        process = self.running.pop(part)
        process.kill()
        process.wait()

    def supervise(self) -> None:
        """Start again what has ended, as systemd would."""
        for part, process in [*self.running.items()]:
            if part != "run" and process.poll() is not None:
                self.start(part)

    def log(self, part: str) -> str:
        return (self.home / f"{part.replace(' ', '-')}.log").read_text(errors="replace").lower()

    def close(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()

    # ---- runs ------------------------------------------------------------------------------------

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.bin / "flwr", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, **settings: object) -> None:
        """Start a run of coterie's app with these settings."""
        said = " ".join(f"{name}={json.dumps(str(v))}" for name, v in settings.items())
        said = said.replace('"True"', "true")
        self.run_app(self.fed.app, "--run-config", said)

    def run_app(self, app: Path, *options: str) -> None:
        """Start a run of an app, whose lines go to the log ``run``."""
        if "run" in self.running:
            self.kill("run")  # it only shows lines
        self._popen("run", ["flwr", "run", app, "local", "--stream", *options])

    def children(self, part: str) -> list[int]:
        """The processes that a part has started, and theirs."""
        found, todo = [], [self.running[part].pid]
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                todo += (own := list(map(int, text.split())))
                found += own
        return found

    def digest(self, out: Path) -> str:
        """The digest of a run when it has ended; processes that ended meanwhile are started."""
        until(lambda: (self.supervise(), (out / "summary.json").exists())[1], said=self.all_logs)
        return str(files.read_json(out / "summary.json")["digest"])

    def all_logs(self) -> str:
        return "".join(f"== {path}\n{path.read_text()[-1500:]}" for path in self.home.glob("*.log"))


def until(
    true: Callable[[], object], seconds: float = PATIENCE, said: Callable[[], str] = lambda: ""
) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it never came true\n{said()[-3000:]}"
        time.sleep(0.2)

"""What a real federation costs beyond training: bytes and seconds a round, on loopback.

    python bench/federation.py [--transport direct|flower|simulation] [--sites 3] [--rounds 10]

``direct``: a coordinator and a process for each site. ``flower``: SuperLink, SuperExec, and for
each site a SuperNode and a process; TLS and node keys. ``simulation``: Flower's own, whose sites
are threads of the ServerApp. With ``--together`` the sites of ``direct`` are threads too.
Compares the bytes of all messages with the ledger of the run, and the seconds of a round with those
that the slowest site computed; of sites that are threads, which take turns, with those of all.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie import api
from coterie.deploy import site_socket
from coterie.deploy.direct import DirectTransport, serve
from coterie.deploy.folders import FederationFolder, write_app
from coterie.deploy.handler import SiteHandler
from coterie.deploy.local_federation import local_sites, running
from coterie.deploy.running import holdings_of
from coterie.deploy.site_folder import SiteFolder
from coterie.engines.codec import read_head
from coterie.errors import EngineError

BENCH = Path(__file__).resolve().parent


class Counting:
    """A transport that counts the bytes of a round's messages and the sites' own seconds."""

    def __init__(self, inner: Any, together: bool) -> None:
        self._inner, self._all = inner, sum if together else max
        self.bytes, self.work = 0, dict[int, float]()

    def ask(self, requests: Mapping[str, bytes], round: int) -> Mapping[str, bytes | str]:
        """The answers of the sites."""
        answers = self._inner.ask(requests, round)
        if round >= 0:
            whole = [answer for answer in answers.values() if isinstance(answer, bytes)]
            self.bytes += sum(map(len, requests.values())) + sum(map(len, whole))
            took = [read_head(answer).get("seconds", 0.0) for answer in whole]
            self.work[round] = self.work.get(round, 0.0) + self._all([0.0, *took])
        return answers

    def sites(self):
        """The sites of the federation."""
        return self._inner.sites()

    def close(self) -> None:
        """Release the transport."""
        self._inner.close()


def measured(inner: Any, asked: Mapping[str, Any]) -> dict[str, float]:
    """One run: bytes beyond the ledger, seconds a round beyond the work."""
    transport = Counting(inner, asked["together"])
    tables = {
        "model": {"name": "mlp", "hidden": [asked["hidden"]]},
        "algorithm": {"name": asked["method"]},
    }
    rounds, said = asked["rounds"], {"run.evaluate_every": asked["rounds"]}
    config = api.configure(tables, federation=asked["federation"], rounds=rounds, set=said)
    done = api.run_config(config, transport=transport)
    lines = done.lines[1:-1]  # the first round reads data, the last one is evaluated
    beyond = [line["seconds"] - transport.work[line["round"]] for line in lines]
    ledger = sum(done.summary[name] for name in ("bytes_up", "bytes_down", "bytes_serve"))
    return {
        "ledger MB": ledger / 1e6,
        "messages over ledger %": 100 * (transport.bytes / ledger - 1),
        "seconds beyond work, median": statistics.median(beyond),
        "seconds beyond work, largest": max(beyond),
    }


# ---- the parts -----------------------------------------------------------------------------------


@contextlib.contextmanager
def threads(works: list[Any]) -> Iterator[None]:
    """Run each function in a thread; they get an event that ends them."""
    stop = threading.Event()
    started = [threading.Thread(target=work, args=(stop,)) for work in works]
    for each in started:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in started:
            each.join()


TURN = threading.Lock()  # sites of one process answer one at a time


class Taking:
    """What answers for a site among others of this process."""

    def __init__(self, site: SiteFolder) -> None:
        self._handler = SiteHandler(site, holdings_of(site))

    def answer(self, data: bytes) -> bytes:
        """The answer, when it is this site's turn."""
        with TURN:
            return self._handler.answer(data)

    def largest(self) -> int:
        """Bytes of the largest message that may arrive now."""
        return self._handler.largest()


@contextlib.contextmanager
def direct(home: Path, sites: list[SiteFolder], together: bool) -> Iterator[None]:
    """A coordinator, and the sites as processes or as threads of this one."""
    if not together:
        with running(home, sites):
            yield
        return
    command = [sys.executable, "-P", "-m", "coterie", "coordinator", str(home / "fed")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with threads([lambda stop, at=at: serve(at, Taking(at), stop) for at in sites]):
            yield
    finally:
        process.terminate()
        process.wait()


APP = """\
import json, sys
from pathlib import Path
from flwr.serverapp import ServerApp
from coterie.deploy.flower import GridTransport
from coterie.deploy.folders import FederationFolder

server = ServerApp()

@server.main()
def main(grid, context):
    sys.path.insert(0, {bench!r})
    from federation import measured
    asked = json.loads({asked!r})
    folder = FederationFolder.open(Path(asked["federation"]))
    for method in asked["methods"]:
        found = measured(GridTransport(grid, folder, {sockets!r}), {{**asked, "method": method}})
        with open({out!r}, "a") as file:
            file.write(json.dumps([method, found]) + "\\n")
"""


def on_flower(home: Path, sites: list[SiteFolder], asked: dict[str, Any], simulated: bool) -> None:
    """Measure in a ServerApp: on SuperNodes, or on Flower's simulated ones."""
    sys.path.insert(0, str(BENCH.parent / "tests"))
    from flower_net import FlowerNet, until

    net, out = FlowerNet(home, sites), home / "measured"
    write_app(home / "bench", None)
    project = home / "bench" / "pyproject.toml"
    project.write_text(project.read_text().replace("coterie.commands.flower_app:", "bench:"))
    names = {
        site.name: home / "sockets" / (str(at) if simulated else site.name)
        for at, site in enumerate(sites)
    }
    fields = {"bench": str(BENCH), "asked": json.dumps(asked), "out": str(out)}
    sockets = str(home / "sockets") if simulated else ""
    (home / "bench" / "bench.py").write_text(APP.format(**fields, sockets=sockets))
    works = [
        lambda stop, at=at: site_socket.serve(at, names[at.name], Taking(at), stop) for at in sites
    ]
    with threads(works):
        try:
            net.start_simulation() if simulated else net.start_all(resident=False)
            nodes = ["--federation-config", f"num-supernodes={len(sites)}"] if simulated else []
            net.run_app(home / "bench", *nodes)
            until(
                lambda: out.exists() and out.read_text().count("\n") == len(asked["methods"]), 3600
            )
        finally:
            net.close()
    for line in out.read_text().splitlines():
        show(asked, *json.loads(line))


def show(asked: Mapping[str, Any], method: str, found: Mapping[str, float]) -> None:
    """Print one run's numbers."""
    told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    print(f"{asked['transport']}, {asked['sites']} sites, {method}: {told}", flush=True)


def main() -> None:
    """Measure every method that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="direct", choices=["direct", "flower", "simulation"])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["fedavg", "fedfomo"]
    )
    parser.add_argument("--together", action="store_true")
    asked = vars(parser.parse_args())
    asked["together"] |= asked["transport"] != "direct"
    config = api.configure(clients=asked["sites"], set={"partition.groups": 2})
    kind = "direct" if asked["transport"] == "direct" else "flower"
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
        home = Path(folder)
        sites, _ = local_sites(config, home, kind)
        asked["federation"] = str(home / "fed")
        if kind == "flower":
            on_flower(home, sites, asked, asked["transport"] == "simulation")
            return
        with direct(home, sites, asked["together"]):
            until_online(FederationFolder.open(home / "fed"))
            for method in asked["methods"]:
                transport = DirectTransport(FederationFolder.open(home / "fed"))
                show(asked, method, measured(transport, {**asked, "method": method}))


def until_online(fed: FederationFolder) -> None:
    """Wait until the coordinator answers and all sites are online."""
    while True:
        with contextlib.suppress(EngineError), contextlib.closing(DirectTransport(fed)) as found:
            if all(state.online for state in found.sites().values()):
                return
        time.sleep(0.2)


if __name__ == "__main__":
    main()

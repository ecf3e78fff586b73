"""What a real federation costs beyond training: bytes and seconds a round, on loopback.

    python bench/federation.py [--transport direct] [--sites 3] [--hidden 4000] [--rounds 10]

Starts a coordinator and sites as processes, as `coterie federate --local` does, and runs a method.
Compares the bytes of all messages with the ledger of the run, and the seconds of a round with those
that the slowest site computed.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from coterie.deploy.joining import federated

from coterie.deploy.folders import FederationFolder
from coterie.deploy.local_federation import make_folders, running
from coterie.deploy.transports import end_of
from coterie.engines.codec import read_head
from coterie.runs.assemble import assemble
from coterie.runs.config.loading import load
from short import executed


class Counting:
    """A transport that counts the bytes of a round's messages and the sites' own seconds."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.bytes, self.work = 0, {}

    def ask(self, requests: Mapping[str, bytes], round: int) -> Mapping[str, bytes | str]:
        """The answers of the sites."""
        answers = self._inner.ask(requests, round)
        if round >= 0:
            whole = [answer for answer in answers.values() if isinstance(answer, bytes)]
            self.bytes += sum(map(len, requests.values())) + sum(map(len, whole))
            took = [read_head(answer).get("seconds", 0.0) for answer in whole]
            self.work[round] = self.work.get(round, 0.0) + max(took, default=0.0)
        return answers

    def sites(self):
        """The sites of the federation."""
        return self._inner.sites()

    def close(self) -> None:
        """Release the transport."""
        self._inner.close()


def measured(fed: FederationFolder, method: str, hidden: int, rounds: int) -> dict[str, float]:
    """One run: its model's bytes, bytes beyond the ledger, seconds a round beyond the work."""
    asked = load(
        {"model": {"name": "mlp", "hidden": [hidden]}, "algorithm": {"name": method}},
        {"run.federation": str(fed.path), "run.rounds": rounds, "run.evaluate_every": rounds},
    )
    transport = Counting(end_of(fed.transport, "connect")(fed))
    setting = federated(asked, transport, fed.transport)
    done = executed(setting)
    setting.close()
    lines = done.lines[1:-1]  # the first round reads data, the last one is evaluated
    beyond = [line["seconds"] - transport.work[line["round"]] for line in lines]
    ledger = sum(done.summary[name] for name in ("bytes_up", "bytes_down", "bytes_serve"))
    return {
        "ledger MB": ledger / 1e6,
        "messages over ledger %": 100 * (transport.bytes / ledger - 1),
        "seconds beyond work, median": statistics.median(beyond),
        "seconds beyond work, largest": max(beyond),
    }


def main() -> None:
    """Measure every method that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="direct")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--methods", default="fedavg,fedfomo")
    asked = parser.parse_args()
    config = load(overrides={"partition.clients": asked.sites, "partition.groups": 2})
    federation = assemble(config).federations[0]
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as home:
        sites = make_folders(Path(home), federation, asked.transport)
        with running(Path(home), sites) as fed:
            for method in asked.methods.split(","):
                found = measured(fed, method, asked.hidden, asked.rounds)
                told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                print(f"{asked.transport}, {asked.sites} sites, {method}: {told}", flush=True)


if __name__ == "__main__":
    main()

"""One site among peers as a process of its own: SITE_FOLDER ROSTER WORK_FOLDER ROUNDS."""

import sys
from pathlib import Path

import torch

from coterie.algorithms.federico import FedeRiCo
from coterie.deploy.peers.peer import PeerPlan, PeerSite
from coterie.deploy.peers.sealing import PeerIdentity, PeerKeys
from coterie.deploy.peers.talk import HttpLink, PeerFolder
from coterie.deploy.peers.work import OwnPart
from coterie.deploy.site_folder import SiteFolder
from coterie.engines.codec import vocabulary
from coterie.runs.stored import client_digest
from coterie.training.guard import Guard
from towns import EXPERIMENT, NAMES, SPREAD, simulation

METHOD = FedeRiCo(downloads=2, **SPREAD)


def plan(rounds: int) -> PeerPlan:
    return PeerPlan(EXPERIMENT, rounds, nudge=1.0, patience=120.0)


def main(site: str, roster: str, work: str, rounds: str) -> None:
    torch.set_num_threads(1)
    folder = SiteFolder.open(Path(site))
    number, on = NAMES.index(folder.name), simulation(METHOD)
    part = OwnPart(on.problem, on.shards.of(number), METHOD, number, Guard())
    peer = PeerSite(
        part,
        plan(int(rounds)),
        PeerIdentity(folder.name, folder.box_key(), PeerKeys.read(Path(roster))),
        HttpLink.dial(folder, lambda line: print(line, file=sys.stderr)),
        PeerFolder(Path(work), EXPERIMENT, vocabulary(METHOD)),
        lambda line: print(line, file=sys.stderr),
    )
    print(client_digest(peer.run().mixture))


if __name__ == "__main__":
    main(*sys.argv[1:])

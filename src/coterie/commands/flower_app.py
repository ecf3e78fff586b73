"""coterie as an ordinary Flower app: its ServerApp, which runs an experiment.

The ClientApp is in :mod:`coterie.deploy.flower_client`. Both use public names of Flower alone.
"""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from .. import api
from ..deploy.flower import GridTransport
from ..deploy.folders import FederationFolder
from ..deploy.handler import SiteHandler
from ..deploy.local_federation import local_sites
from ..deploy.running import holdings_of
from ..deploy.site_socket import serve
from ..runs import run_folder
from ..runs.config.schema import Config
from ..runs.resume import unfinished_run

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of a config, or continue it, by the settings of the app.

    config: TOML file of the experiment
    out: folder of the results; a run that was begun there is continued
    compare: whether to compare the methods of the config with Local, as ``coterie compare`` does
    federation: folder of the federation; without one, the sites are simulated from ``[data]``
    """
    said = context.run_config
    out, federation = Path(str(said["out"])), str(said["federation"])
    with contextlib.ExitStack() as scope:
        config = api.configure(str(said["config"]), out=out, federation=federation or None)
        sockets = ""
        if not federation:
            config, sockets = scope.enter_context(simulated(config))
        folder = FederationFolder.open(Path(str(config.run.federation)))
        transport = GridTransport(grid, folder, sockets)
        found: object
        if said["compare"]:
            found = api.compare_config(config, transport=transport)
        elif unfinished_run(out) is not None or run_folder.is_finished(out):
            found = api.resume(out, transport=transport)
        else:
            found = api.run_config(config, transport=transport)
        print(found)


@contextlib.contextmanager
def simulated(config: Config) -> Iterator[tuple[Config, str]]:
    """The config of a federation of simulated sites, and the folder of their sockets.

    Every client of the config's partition is a site with a folder of its own. All of them answer in
    threads of this process, one at a time.
    """
    with tempfile.TemporaryDirectory(prefix="coterie-") as home, contextlib.ExitStack() as scope:
        sites, asked = local_sites(config, Path(home), "flower")
        stop, turn = threading.Event(), threading.Lock()
        for at, folder in enumerate(sites):
            handler = SiteHandler(folder, holdings_of(folder))
            work = threading.Thread(
                target=serve, args=(folder, Path(home) / str(at), handler, stop, turn)
            )
            work.start()
            scope.callback(work.join)
        scope.callback(stop.set)
        yield asked, home

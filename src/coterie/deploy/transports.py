"""The transports of a federation by name, and how an experiment reaches its sites by one."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from ..engines.remote import Transport
from ..errors import ConfigError
from ..runs.config.schema import Config
from .federated import Federated, federated
from .folders import FederationFolder
from .protocol import Signed


class TransportEntry(NamedTuple):
    """Where the three ends of a transport are: ``module:function``, imported when it is used."""

    connect: str  # (FederationFolder) -> Transport: the operator's end
    coordinate: str  # (FederationFolder, threading.Event) -> None: the coordinator
    serve: str  # (SiteFolder, handler, threading.Event) -> None: a site's agent
    extra: str  # of coterie, which brings the packages it needs


TRANSPORTS = {
    "direct": TransportEntry(
        "direct_transport:DirectTransport",
        "mailbox_server:coordinate",
        "direct_agent:serve",
        "direct",
    ),
    "flower": TransportEntry(
        "direct_transport:DirectTransport",
        "flower_coordinator:coordinate",
        "flower_agent:serve",
        "flower",
    ),
}


def end_of(transport: str, end: str) -> Any:
    """One end of a transport; says which extra to install if its packages are missing."""
    entry = TRANSPORTS[transport]
    module, _, name = getattr(entry, end).partition(":")
    try:
        found = importlib.import_module(f".{module}", __package__)
    except ImportError as error:
        raise ConfigError(
            f"transport '{transport}': {error}; expected the packages of its extra; install them "
            f"with: pip install 'coterie[{entry.extra}]'"
        ) from error
    return getattr(found, name)


def federation_of(config: Config) -> Federated:
    """The sites of the federation that a config names; its coordinator has to run."""
    folder = FederationFolder.open(Path(str(config.run.federation)))
    transport: Transport = end_of(folder.transport, "connect")(folder)
    try:
        signed = Signed(transport, folder.operator_key(), folder.name)
        return federated(config, signed, folder.transport, folder.name)
    except BaseException:
        transport.close()
        raise

"""Joins the sites of a federation to an experiment: who they are, what they hold, what fits."""

import warnings

from .. import __version__
from ..data.data_schema import Schema, client_order, merged
from ..engines.remote import Transport
from ..errors import ConfigError, CoterieWarning, EngineError
from ..runs import environment
from ..runs.assemble import factory_of, settled
from ..runs.config.schema import SITES, Config, PartitionTable
from .asking import ask_all
from .federated import Federated
from .protocol import Introduction, Nothing, setup_message


def federated(config: Config, transport: Transport, transport_name: str) -> Federated:
    """Ask the sites of a federation who they are, and resolve the config with what they say."""
    _refuse_data(config)
    clients = client_order(transport.sites())
    if not clients:
        raise EngineError("the federation has no sites; admit them with 'coterie deploy add-site'")
    asked = setup_message("who", Nothing())
    introduced = ask_all(transport, clients, asked, Introduction)
    for name, said in introduced.items():
        if said.name != name:
            raise EngineError(f"site '{name}' calls itself '{said.name}'; mend its site.toml")
        if said.versions.get("source") != environment.fingerprint():
            warnings.warn(
                f"site '{name}' runs coterie {said.versions.get('coterie', '?')[:20]} with other "
                f"code than this coordinator ({__version__}): results may differ, or messages may "
                "be refused; install the same version everywhere",
                CoterieWarning,
                stacklevel=2,
            )
    schema = merged({name: Schema.from_json(said.schema) for name, said in introduced.items()})
    run = config.run.model_copy(update={"checkpoint_every": config.run.checkpoint_every or 1})
    asked_for = {"run": run, "partition": PartitionTable(name="natural")}
    config = settled(config.model_copy(update=asked_for), schema.example())
    factory = factory_of(config, schema.example())
    return Federated(config, transport, transport_name, clients, schema, factory)


def _refuse_data(config: Config) -> None:
    """Refuse a config that names data or a partition, or that spreads runs over a cluster."""
    data, partition = config.data, config.partition
    if data.name != SITES or data.options or data.aux or data.federated:
        raise ConfigError(
            "data: the sites of a federation read their own data, as their site.toml says, and the "
            "coordinator has none; expected at most val, test and scale in [data]"
        )
    if config.run.spread is not None:
        raise ConfigError(
            f"run.spread: found '{config.run.spread}'; the runs of a federation are executed one "
            "after another, at its sites; leave it out"
        )
    plain = PartitionTable(name=partition.name, options=partition.options)
    if partition.name not in ("auto", "natural") or partition != plain:
        raise ConfigError(
            f"partition.name: found '{partition.name}'; the sites of a federation are its clients; "
            "leave [partition] out"
        )

"""The options of the commands and of :func:`coterie.run`, one row per option.

The flags of the command line and the keywords of :func:`coterie.api.configure` come from these
rows. This module imports nothing heavy, so that ``coterie --help`` is quick; the help of an option
whose values are names says which ``coterie list`` prints them.
"""

from typing import NamedTuple


class Option(NamedTuple):
    """One option: a short name for a field of the config."""

    name: str
    field: str  # table and field, separated by a dot
    type: type  # as the command line reads it
    help: str


OPTIONS = {
    option.name: option
    for option in (
        Option("data", "data.name", str, "dataset ('coterie list datasets'), or a file of data"),
        Option(
            "partition",
            "partition.name",
            str,
            "how the data is divided among clients ('coterie list partitions')",
        ),
        Option("clients", "partition.clients", int, "number of clients"),
        Option("model", "model.name", str, "network ('coterie list models')"),
        Option("method", "algorithm.name", str, "the one method of a run ('coterie list methods')"),
        Option("methods", "run.methods", str, "the methods of a comparison, separated by commas"),
        Option("rounds", "run.rounds", int, "communication rounds"),
        Option(
            "participation",
            "run.participation",
            float,
            "share of clients that take part in a round",
        ),
        Option("seed", "run.seed", int, "seed that all randomness is derived from"),
        Option("seeds", "run.seeds", str, "how many seeds, or a list as in 0,1,2"),
        Option("folds", "run.folds", int, "parts of all samples that test in turn (5)"),
        Option("epochs", "train.epochs", int, "passes over a client's data in a round"),
        Option("batch", "train.batch", int, "samples per step"),
        Option("lr", "train.lr", float, "learning rate"),
        Option("loss", "train.loss", str, "loss of one's own, package.module:Class"),
        Option("metric", "run.metric", str, "what is scored ('coterie list metrics')"),
        Option("engine", "engine.name", str, "how clients are computed ('coterie list engines')"),
        Option("device", "engine.device", str, "cpu, cuda or cuda:N"),
        Option(
            "adapt",
            "adapt.name",
            str,
            "how each client adapts its finished model ('coterie list adaptations')",
        ),
        Option(
            "dp_noise", "privacy.noise", float, "noise multiplier of differential privacy (1.0)"
        ),
        Option("dp_clip", "privacy.clip", float, "largest gradient of a sample (1.0)"),
        Option("dp_delta", "privacy.delta", float, "δ at which ε is told (1e-5)"),
        Option("dp_epsilon", "privacy.epsilon", float, "in place of the noise: the largest ε"),
        Option("out", "run.out", str, "folder for the results"),
        Option(
            "federation",
            "run.federation",
            str,
            "folder of a federation ('coterie deploy init'): its sites are the clients",
        ),
        Option("collect", "run.collect", bool, "fetch the final models from the sites"),
    )
}

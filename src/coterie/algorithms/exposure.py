"""What each method exposes of a site, for ``coterie doctor`` and docs/who-sees-what.md: a row each.

"As FedAvg" means: the server sees each site's model (or its change) and the number of its samples
in every round; a site sees the common model. A method of one's own has no row here; the paragraph
"Travels:" of its module's docstring takes its place.
"""

import inspect
from typing import NamedTuple


class Exposure(NamedTuple):
    """Who sees what in a federation; ``**`` marks what matters most, as in Markdown."""

    server: str  # what the server sees of a site
    site: str  # what a site sees, of the others too
    stays: str = "–"  # what stays at the site
    note: str = ""


EXPOSURES: dict[str, Exposure] = {
    "local": Exposure(
        "nothing but scores", "nothing", "the model", "the reference of every verdict"
    ),
    "fedavg": Exposure("its model, its sample count", "the average", "–", "the baseline"),
    "fedavg_ft": Exposure("as FedAvg", "as FedAvg", "the fine-tuned model"),
    "fedavg_data": Exposure(
        "as FedAvg; **raw samples**",
        "as FedAvg; **raw samples of the others**",
        "–",
        "for simulations alone: real sites refuse it",
    ),
    "fedprox": Exposure("as FedAvg", "as FedAvg"),
    "fedprox_ft": Exposure("as FedAvg", "as FedAvg", "the fine-tuned model"),
    "scaffold": Exposure(
        "the change of its model and of its control variate",
        "the common model and control",
        "its control variate (the server can add up its changes)",
    ),
    "waffle": Exposure(
        "the changes of its model and of its control variate, for every requester",
        "one model and control per requester",
        "its control variate (as above)",
        "the server compares sites: it knows who is alike",
    ),
    "waffle_stable": Exposure("as WAFFLE", "as WAFFLE", "as WAFFLE", "as WAFFLE"),
    "erosion": Exposure(
        "an update per requester, its sample count",
        "one model per requester",
        "–",
        "the server compares sites",
    ),
    "apfl": Exposure("as FedAvg", "as FedAvg", "the personal model v and α"),
    "fedala": Exposure("as FedAvg", "as FedAvg", "its model and the weights of the global one"),
    "qfedavg": Exposure("as FedAvg, and its loss at the common model", "as FedAvg"),
    "term": Exposure("as FedAvg, and its loss at the common model", "as FedAvg"),
    "pafl": Exposure(
        "as FedAvg; with EWC and `aggregate` its Fisher diagonal; with distillation two "
        "losses; with `checkpoint` one",
        "as FedAvg; with EWC possibly a Fisher diagonal",
    ),
    "pafl_kd": Exposure("as FedAvg, and from half-time two losses", "as FedAvg"),
    "pafl_kd_bounded": Exposure("as FedAvg, and from half-time two losses", "as FedAvg"),
    "pafl_ewc": Exposure(
        "as FedAvg; with `aggregate` its Fisher diagonal",
        "as FedAvg; possibly a Fisher diagonal",
        "with `client_train` the Fisher diagonal",
    ),
    "fedfomo": Exposure(
        "its model, and its ranking of the others",
        "**up to M raw models of other sites a round**",
        "affinities and weights (`shown` only with consent)",
        "weights come from validation data; a model that a site offers is judged by its "
        "effect there",
    ),
    "fedfomo_ma": Exposure(
        "its model, and its shares of the others",
        "averages **from which every site's model can be computed**",
        "–",
        "hides nobody's model",
    ),
    "federico": Exposure(
        "through a coordinator: every model, every weighted change, the ranking of the others",
        "**raw models of other sites, and other sites' changes of its own model**",
        "its weights (`shown` only with consent), tracked losses",
        "whoever chooses a model that others train sees their gradient on it: use `[privacy]`. "
        "[Among peers](peers.md) the operator sees none of it",
    ),
    "fedamp": Exposure(
        "its model", "its own mixture of all models", "–", "the server compares sites"
    ),
    "heurfedamp": Exposure(
        "its model", "its own mixture of all models", "–", "the server compares sites"
    ),
    "pfedgraph": Exposure(
        "its model, its sample count",
        "its own mixture of all models, and the direction of its collaborators' models",
        "its model after the last training",
        "the server compares sites",
    ),
    "cobo": Exposure(
        "its model, and its gradients at two models halfway to other sites' models",
        "a weighted sum of all models, and **the model of two other sites each round**, as it can "
        "be computed from the model halfway",
        "–",
        "the server compares sites",
    ),
    "lgfedavg": Exposure(
        "the upper layers, its sample count",
        "the averaged upper layers",
        "the lower layers",
    ),
    "fedper": Exposure("the base, its sample count", "the averaged base", "the head"),
    "fedrep": Exposure("the base, its sample count", "the averaged base", "the head"),
    "fedbabu": Exposure("the body, its sample count", "the averaged body", "the fine-tuned model"),
    "fedpac": Exposure(
        "its body and its head, its sample count; **the share of each class in its data, and the "
        "mean of each class's features**",
        "the averaged body, its own mixture of all heads, the means of all sites together",
        "–",
        "refused unless every site consents (`class_features`); the server compares sites",
    ),
    "feddbe": Exposure(
        "as FedAvg; **the mean of its features**, once",
        "as FedAvg, and the mean of all sites' features",
        "the shift of its features",
        "refused unless every site consents (`feature_mean`)",
    ),
    "fedrod": Exposure("as FedAvg", "as FedAvg", "the personal head"),
    "ditto": Exposure("as FedAvg", "as FedAvg", "the personal model"),
    "pfedme": Exposure("as FedAvg", "as FedAvg", "the personal model"),
    "perfedavg": Exposure("as FedAvg", "as FedAvg", "the adapted model"),
    "fedem": Exposure(
        "M models, its sample count",
        "M averages",
        "its weights of the components (`shown` only with consent)",
    ),
    "mocha": Exposure(
        "its model",
        "a combination of the others' models, and one number",
        "–",
        "the server compares sites",
    ),
    "circle": Exposure(
        "its model, the mean of its changes of the common model, two numbers about their noise",
        "its circle's model, and everybody's average; in a circle of two the other's model can be "
        "computed",
        "the model it trains alone, its shares of the three models it predicts with",
        "the server compares and divides sites",
    ),
    "cfl": Exposure(
        "the change of its model, its sample count",
        "its cluster's model",
        "–",
        "the server compares and divides sites",
    ),
    "cfl_mean": Exposure(
        "the change of its model, its sample count",
        "its cluster's model",
        "–",
        "the server compares and divides sites",
    ),
    "fedcollab": Exposure(
        "as the method inside; before training **a discriminator for each other site**, or the "
        "change of its model",
        "as the method inside; before training its own discriminators",
        "–",
        "refused unless every site consents (`discriminators`); the server divides sites",
    ),
    "ifca": Exposure(
        "a model, its choice among k, its sample count",
        "k models",
        "the losses behind its choice",
        "the choice says who is alike",
    ),
}


ANY_METHOD = (  # label, and what leaves a site of a federation whatever its method
    "any",
    "after its owner's approval: names, kinds and texts of columns; numbers of training, "
    "validation and test rows; of each numeric column the number, sum and sum of squares of its "
    "training values, from 20 on; keyed hashes; scores, losses, gains over Local",
)


def leaves(name: str, kind: type) -> str:
    """What leaves a site under a method, in one line; ``kind`` is the class of the method."""
    row = EXPOSURES.get(name.partition("@")[0])  # a variant exposes what its method does
    if row is None:
        return _travels(kind)
    return f"the server sees: {row.server}; a site sees: {row.site}".replace("**", "")


def _travels(kind: type) -> str:
    """The paragraph "Travels:" of the docstring of a method's module or class."""
    for owner in (kind, inspect.getmodule(kind)):
        for paragraph in (inspect.getdoc(owner) or "").split("\n\n"):
            if paragraph.startswith("Travels:"):
                return " ".join(paragraph.removeprefix("Travels:").split())
    return "not told: the docstring of its module has no paragraph 'Travels:'"


def table() -> str:
    """The rows as the Markdown table of docs/who-sees-what.md."""
    lines = [
        "| method | the server sees of a site | a site sees | stays at the site | note |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in EXPOSURES.items():
        lines.append(f"| `{name}` | {' | '.join(row)} |".replace("|  |", "| |"))
    return "\n".join(lines)

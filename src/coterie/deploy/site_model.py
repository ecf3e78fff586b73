"""A site's own final model, from the folder of an experiment that it took part in."""

import contextlib
import csv
import math
from pathlib import Path

import numpy as np

from ..core.algorithm import Mixture
from ..data.standard import Preprocessing
from ..engines.site import ANSWERS, MODEL
from ..errors import ConfigError, CoterieError, StoreError
from ..exporting.calibration import validation_answers
from ..exporting.model_card import ModelFacts, NetworkFacts, network_factory
from ..exporting.writing import Trained, judged_client, notes_on_training, without, write_export
from ..runs.run import JudgedRows
from ..runs.stored import read_outcomes
from ..storage import files
from ..storage.archives import read_npz
from ..views.clinical import ClinicalChoice, scarce_class
from ..views.reliance import unknown_parts
from .federated import scaled_example
from .handler import AGREEMENT, allowed_code
from .holdings import Holdings
from .site_folder import SiteFolder
from .terms import Agreement, Experiment, experiment_of


def export_site(
    site: SiteFolder,
    out: Path,
    experiment: str | None = None,
    choice: ClinicalChoice | None = None,
    *,
    recalibrate: bool = False,
) -> Path:
    """Write the site's final model of one experiment into a new folder, and return its path.

    ``experiment`` is the beginning of the experiment's hash; by default the one that finished last.
    """
    folder = finished_experiment(site, experiment)
    made = write_export(trained_site(site, folder, choice, recalibrate=recalibrate), out)
    _write_codes(site, codes_beside(made))
    return made


def codes_beside(model: Path) -> Path:
    """The file of a site's own texts, if they left under other names; beside the model."""
    return model.with_name(f"{model.name}-codes.csv")


def _write_codes(site: SiteFolder, path: Path) -> None:
    if site.data.name is None:
        return
    with contextlib.suppress(CoterieError):  # the data may be gone since
        codes = Holdings(site, site.data.name, site.data.options).codes
        rows = [(name, *pair) for name, known in codes.items() for pair in sorted(known.items())]
        if rows:
            with (
                files.whole(path) as temporary,
                temporary.open("w", newline="", encoding="utf-8") as f,
            ):
                csv.writer(f).writerows([("column", "code", "means"), *rows])


def finished_experiment(site: SiteFolder, prefix: str | None) -> Path:
    """The folder of the experiment whose hash begins so, or of the one that finished last."""
    folders = site.experiments.iterdir() if site.experiments.is_dir() else ()
    found = [folder for folder in folders if (folder / MODEL).is_file()]
    if not found:
        raise StoreError(
            f"{site.path}: no experiment has finished here, so there is no model to export; wait "
            "for the coordinator's last round ('coterie site show' lists what was agreed)"
        )
    if prefix is None:
        return max(found, key=lambda folder: (folder / MODEL).stat().st_mtime_ns)
    fits = [folder for folder in found if folder.name.startswith(prefix)]
    if len(fits) != 1:
        names = ", ".join(sorted(folder.name[:12] for folder in found))
        raise ConfigError(
            f"--experiment: {len(fits)} finished experiments begin with '{prefix}'; expected one; "
            f"there are {names}"
        )
    return fits[0]


def trained_site(
    site: SiteFolder,
    folder: Path,
    choice: ClinicalChoice | None = None,
    *,
    recalibrate: bool = False,
) -> Trained:
    """The site's final model of one experiment, with what the site knows of it."""
    files.refuse_links(folder.parent, [folder.name])
    agreement = Agreement.from_json((folder / AGREEMENT).read_text(encoding="utf-8"))
    if agreement.hash != folder.name:
        raise StoreError(f"{folder / AGREEMENT}: has changed since it was agreed to")
    most = site.limits.message_mib * 2**20
    made = experiment_of(agreement, allowed_code(site), most_bytes=most)
    config, model = made.config, made.problem.model
    scaled = scaled_example(agreement.schema, agreement.moments, config.data.scale)
    example = agreement.schema.example()
    network = NetworkFacts(
        config.model.name,
        dict(config.model.options),
        tuple(example.x.shape[1:]),
        example.classes,
        config.train.precision,
    )
    plain = network_factory(network, agreement.schema, config.code)
    ready = Preprocessing.of(agreement.schema, scaled)
    found = without(config.changes, model, _predictor(folder / MODEL, model.whole), plain)
    outcomes, _ = read_outcomes(folder / ANSWERS)
    (answers,) = outcomes.clients()
    target, rows, held = agreement.schema.target, None, None
    if site.data.name is not None:
        holdings = Holdings(site, site.data.name, site.data.options)
        rows = holdings.judged(made)
        if target.classes and not made.merged:
            with contextlib.suppress(CoterieError):  # the data may have changed since
                fold = config.fold(config.run.seed)
                own = holdings.federation(agreement.schema, config.data.scale, fold=fold)
                held = validation_answers(*found, ready, own, 0)
    if rows is None or rows.codes is None or len(rows.codes) != len(answers.targets):
        rows = JudgedRows(target.classes, target.name)
    metric = config.run.metric
    choice = scarce_class(rows.classes, [answers.targets], choice or ClinicalChoice())
    judged = judged_client(metric, answers, rows, choice, held, recalibrate=recalibrate)
    facts = _facts(site, folder, made)
    plain_model, predictor = found
    return Trained(facts, network, ready, plain_model, predictor, judged)


def _facts(site: SiteFolder, folder: Path, made: Experiment) -> ModelFacts:
    config, agreement = made.config, made.agreement
    counts = agreement.counts[agreement.clients.index(site.name)]
    others = [name for name in agreement.clients if name != site.name]
    return ModelFacts(
        client=site.name,
        method=config.method().label,
        rounds=config.run.rounds,
        seed=config.run.seed,
        run=agreement.hash,
        data=None,
        train=counts.train,
        val=counts.val,
        test=counts.test,
        metric=config.run.metric,
        score=_score(folder / ANSWERS),
        collaborators=() if made.algorithm.traits.alone else unknown_parts(others),
        notes=notes_on_training(made.merged, config.run.folds),
    )


def _score(path: Path) -> float | None:
    try:
        score = float(np.asarray(read_npz(path)["score"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: holds no answers of a finished run ({error})") from error
    return score if math.isfinite(score) else None


def _predictor(path: Path, size: int) -> Mixture:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        found = Mixture(tensors["weights"], tensors["models"])
        if found.weights.dim() != 1 or found.models.shape != (len(found.weights), size):
            raise ValueError(f"its models have shape {list(found.models.shape)}")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read as this site's model ({error})") from error
    return found

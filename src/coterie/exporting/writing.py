"""Writes one client's trained model as a folder that works without the run, and without coterie.

    model.safetensors     the parameters of every model of the mixture, and the mixture's weights
    preprocessing.json    how samples become inputs: columns, levels, means, classes
    config.json           the network, and what is known of the model
    model.onnx            if asked for: the same from encoded samples to answers
    README.md             the model card, with the lines that load it in plain PyTorch
    MANIFEST.json         sha256 and size of each file; written last

A client of a simulation and a site of a federation export the same way.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import __version__
from ..core.algorithm import Mixture, client_digest
from ..core.answers import Answers
from ..core.flat import FlatModel, build
from ..core.imports import Code, Given
from ..data.standard import Preprocessing
from ..errors import ConfigError, StoreError, did_you_mean
from ..networks.changes import Changes, merged
from ..runs import run_folder
from ..runs.comparison_folder import COMPARE
from ..runs.config.loading import load
from ..runs.run import JudgedRows, Run
from ..storage import files
from ..views.clinical import (
    SPECIFICITY,
    ClinicalChoice,
    rows_of,
    scarce_outcome,
    site_clinical,
)
from ..views.reliance import collaborators
from .calibration import (
    cooled,
    federation_of,
    recalibrated,
    validation_answers,
)
from .exported_model import ExportedModel
from .model_card import (
    CARD,
    CONFIG,
    MODEL,
    PREPROCESSING,
    WEIGHTS,
    ExportConfig,
    JudgedClient,
    ModelFacts,
    NetworkFacts,
    card,
    network_factory,
    shapes_of,
)

ONNX = "model.onnx"


class Trained(NamedTuple):
    """One client's model and everything that belongs to it."""

    facts: ModelFacts
    network: NetworkFacts
    preprocessing: Preprocessing
    model: FlatModel
    predictor: Mixture  # weights [r], models [r, P]
    judged: JudgedClient = JudgedClient()


def export(
    run: str | Path,
    client: str,
    out: str | Path,
    *,
    specificity: float = SPECIFICITY,
    positive: str | None = None,
    recalibrate: bool = False,
    onnx: bool = False,
    code: Given = None,
) -> Path:
    """Write the model of one client of a finished run into a new folder, and return its path.

    The card gives the sensitivity at ``specificity`` for the outcome ``positive``, which is a
    class; by default the second of two classes. ``recalibrate`` sets the temperature of the
    probabilities by the client's validation samples.
    ``onnx`` also writes ``model.onnx``, from encoded samples to answers.
    A network of one's own is imported only from the folders ``code``, or from installed packages if
    ``code`` is ``"installed"``: the run's folder may come from somebody else.
    """
    path, allowed = files.folder_of(run, "RUN"), Code.of(code, installed=False)
    choice = ClinicalChoice.checked(specificity, positive)
    made = trained_client(path, client, allowed, choice, recalibrate=recalibrate)
    return write_export(made, files.folder_of(out, "--out"), onnx=onnx)


def write_export(trained: Trained, out: Path, *, onnx: bool = False) -> Path:
    """Write a model into a folder, which must be new or empty; the manifest is written last."""
    from safetensors.torch import save_file

    refuse_filled(out)
    predictor = _used(trained)
    tensors = {WEIGHTS: predictor.weights.clone()}
    for number, w in enumerate(predictor.models):
        state = trained.model.state_dict(w)
        tensors |= {f"{number}/{name}": value for name, value in state.items()}
    again = trained.judged.recalibration
    config = ExportConfig(
        *(trained.network, trained.facts, client_digest(predictor), __version__),
        1.0 if again is None else again.temperature,
    )
    with files.writing(out):
        out.mkdir(parents=True, exist_ok=True)
    if onnx:
        made = ExportedModel(config, trained.preprocessing, trained.model, predictor)
        made.write_onnx(out / ONNX)
    with files.whole(out / MODEL) as temporary:
        save_file(tensors, temporary)
    files.write_text(out / PREPROCESSING, trained.preprocessing.to_json() + "\n")
    files.write_text(out / CONFIG, config.to_json())
    count = len(predictor.weights)
    files.write_text(out / CARD, card(config, trained.preprocessing, count, trained.judged))
    files.seal(out, sorted(found.name for found in out.iterdir()))
    return out


def refuse_filled(out: Path) -> Path:
    """The path of a folder for a model; refuses one that exists and is not empty."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise StoreError(
            f"{out}: exists and is not empty; expected a new folder; nothing was overwritten; "
            "choose another one with --out, or delete it first"
        )
    return out


def _used(trained: Trained) -> Mixture:
    """The predictor without models of weight zero; refuses one that cannot predict."""
    weights, models = trained.predictor
    used = weights != 0
    if not bool(used.any()):
        raise StoreError(
            f"client '{trained.facts.client}' has no model: the method {trained.facts.method} "
            "serves other clients only; export one of those"
        )
    if not bool(models[used].isfinite().all() and weights.isfinite().all()):
        raise StoreError(
            f"the model of '{trained.facts.client}' diverged: its parameters are not finite; train "
            "again with a smaller train.lr"
        )
    return Mixture(weights[used], models[used])


# ---- one client of a finished run ----------------------------------------------------------------


def trained_client(
    path: Path,
    client: str,
    code: Code,
    choice: ClinicalChoice | None = None,
    *,
    recalibrate: bool = False,
) -> Trained:
    """The model of one client, from the folder of a finished run."""
    run = verified_run(path)
    clients = run.roster.clients
    if client not in clients:
        raise ConfigError(
            f"--client: no client is called '{client}'; {did_you_mean(client, clients)}"
        )
    at = clients.index(client)
    predictor, preprocessing = run.predictor(at), run_folder.read_preprocessing(path)
    network = network_facts(run.config, preprocessing)
    changes, plain = Changes.of(run.config), network_factory(network, preprocessing.schema, code)
    changed = _model(network, plain, changes, predictor, run.seed)
    model, predictor = without(changes, changed, predictor, plain)
    said, rows, judged = run.outcomes, run.roster.rows, JudgedClient()
    if said is not None and rows is not None and preprocessing.schema.target.classes:
        held, federation = None, None
        with contextlib.suppress(ConfigError):  # its data was given by a program, and is gone
            config = load(path / run_folder.CONFIG, code=code)
            federation = federation_of(config, run.seed, run.roster.fingerprint)
        if federation is not None and not run.merge_val:
            held = validation_answers(model, predictor, preprocessing, federation, at)
        own = list(said.clients())[at]
        mine = rows_of(rows, said.sizes, at)
        choice = scarce_outcome([run], choice)
        judged = judged_client(run.metric, own, mine, choice, held, recalibrate=recalibrate)
    elif recalibrate:
        recalibrated(None, None)
    facts = facts_of_run(
        run,
        client=client,
        data=run.roster.fingerprint,
        train=int(run.roster.n_train[at]),
        val=int(run.roster.n_val[at]),
        test=int(run.roster.n_test[at]),
        score=float(run.last[at]),
        collaborators=collaborators(run, at),
        notes=_notes(path, run, at),
    )
    return Trained(facts, network, preprocessing, model, predictor, judged)


def judged_client(
    metric: str,
    own: Answers,
    rows: JudgedRows,
    choice: ClinicalChoice | None,
    held: Answers | None,
    *,
    recalibrate: bool,
) -> JudgedClient:
    """The numbers of a client's answers, with a threshold and a temperature by validation data."""
    before = site_clinical(metric, own, rows, choice, held)
    if not recalibrate:
        return JudgedClient(before)
    again = recalibrated(held, own)
    assert held is not None
    own, held = (cooled(part, again.temperature) for part in (own, held))
    return JudgedClient(site_clinical(metric, own, rows, choice, held), again, before)


def facts_of_run(run: Run, score: float, **facts: Any) -> ModelFacts:
    """The facts of a model that came out of this run; a score of NaN is none."""
    return ModelFacts(
        method=run.method,
        rounds=len(run.lines),
        seed=run.seed,
        run=str(run.summary["digest"]),
        metric=run.metric,
        score=score if math.isfinite(score) else None,
        **facts,
    )


def verified_run(path: Path) -> Run:
    """Read one finished run; refuses a comparison, and a folder that is not as it was written."""
    if (path / COMPARE).is_file():
        raise ConfigError(
            f"{path}: is a comparison of several runs; expected one run; name its folder, as in "
            f"{path / 'fedfomo' / 'seed-0'}"
        )
    run, wrong = run_folder.read(path), run_folder.verify(path)
    if wrong:
        raise StoreError(f"{path}: is not as it was written ({'; '.join(wrong)}); nothing was used")
    return run


def network_facts(tables: Mapping[str, Any], preprocessing: Preprocessing) -> NetworkFacts:
    """The network of a run's config, for samples of its schema."""
    example, model = preprocessing.schema.example(), dict(tables["model"])
    name = model.pop("name")
    for change in ("weights", "lora"):  # an export holds the changed network's values
        model.pop(change, None)
    precision = tables["train"]["precision"]
    return NetworkFacts(name, model, tuple(example.x.shape[1:]), example.classes, precision)


def _model(
    facts: NetworkFacts,
    plain: Callable[[], nn.Module],
    changes: Changes,
    predictor: Mixture,
    seed: int,
) -> FlatModel:
    """The network as a function of a vector; built only if the vector is of its size."""
    shapes = shapes_of(facts, replace(changes, weights=None).made(plain))
    size, whole = predictor.models.shape[1], FlatModel(shapes).whole
    if whole != size:
        raise StoreError(
            f"the run's models have {size:,} parameters; expected {whole:,}, those of the network "
            f"'{facts.name}' of its config; check the folder with 'coterie verify'"
        )
    return FlatModel(build(changes.made(plain), seed, "start").to(facts.dtype))


def without(
    changes: Changes, model: FlatModel, predictor: Mixture, plain: Callable[[], nn.Module]
) -> tuple[FlatModel, Mixture]:
    """The same predictor as models of the plain network: adapters merged, frozen parts filled in.

    Whoever loads an export needs nothing of a config's changes.
    """
    if changes == Changes():
        return model, predictor
    module = build(plain, "plain").to(predictor.models.dtype)
    found, rows = FlatModel(module), []
    for w in predictor.models:
        module.load_state_dict(merged(model.module, model.state_dict(w)))
        rows.append(found.flatten(module))
    return found, Mixture(predictor.weights, torch.stack(rows))


def _notes(path: Path, run: Run, at: int) -> tuple[str, ...]:
    """What a reader has to know of the client's data."""
    stored = files.read_json(path / run_folder.PARTITION)["clients"][at]
    lacks = run.roster.weak.get(run.roster.clients[at])
    found = {
        "The run simulated clients that name the classes differently: the classes here are this "
        "client's own names, not those of the source.": stored.get("permutation"),
        "The test score is on another client's data, as the run asked for (foreign targets).": (
            stored.get("judged_on")
        ),
        f"The client lacks data to be judged: {lacks}.": lacks,
    }
    trained = notes_on_training(run.merge_val, run.config["run"].get("folds"))
    return (*(note for note, holds in found.items() if holds), *trained)


def notes_on_training(merged: bool, folds: int | None) -> tuple[str, ...]:
    """What a reader has to know of how a model was trained."""
    found = {
        "Validation data was trained on as well.": merged,
        f"This is one of the models of {folds} folds: the rows that test here trained the others, "
        "and an answer of their comparison is about the mean of all.": folds,
    }
    return tuple(note for note, holds in found.items() if holds)

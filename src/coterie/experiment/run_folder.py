"""A folder a run: everything needed to read it, draw it, repeat it and trust it.

    config.json           what was run, resolved; written before the first round
    partition.json        who holds which samples, with hashes; written before the first round
    environment.json      where it was run: versions, device, threads, command
    rounds.jsonl          a line a round
    clients.csv           a line a client and evaluated round
    collaboration.npz     A [R, K, K], for methods that have one
    models.safetensors    every client's predictor; identical models are stored once
    predictions.npz       what they answered to every test sample: the verdict is made of it
    summary.json          the numbers of the table
    MANIFEST.json         sha256 and size of each file; written last, so a run without it is
                          unfinished

While a run goes on, its matrices wait in ``collaboration.parts/``, a file a round, and
``checkpoint/`` holds where to go on from, so that a killed run can be continued
(:meth:`RunFolder.reopen`).
"""

import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..core.algorithm import Mixture
from ..core.calls import Form
from ..data.manifest import changes
from ..errors import StoreError
from ..results.alarms import raise_alarms
from ..results.history import History, Line, Log, summarise
from ..storage import faults, files, lock
from . import artifacts, checkpoint, source

if TYPE_CHECKING:
    from ..data.federation import Federation
    from ..training.rounds import Record

CONFIG, ENVIRONMENT, SUMMARY = "config.json", "environment.json", "summary.json"
ROUNDS, CLIENTS, MODELS = "rounds.jsonl", "clients.csv", "models.safetensors"
RAN = "ran"  # in the environment: how each form of a call was done
MATRICES, PARTS = "collaboration.npz", "collaboration.parts"
PARTITION = "partition.json"  # written first: alone it is no run, and may be written again
PREDICTIONS = "predictions.npz"
NAMES = (
    *(CONFIG, ENVIRONMENT, ROUNDS, CLIENTS, MATRICES, PARTS, MODELS, SUMMARY, files.MANIFEST),
    *(PARTITION, PREDICTIONS, checkpoint.FOLDER),
)
LISTED = (CONFIG, ENVIRONMENT, ROUNDS, CLIENTS, MODELS, SUMMARY)  # every manifest lists them
_PART = re.compile(r"\d{8}\.npz")
_CUT_SHORT = re.compile(  # writes that a kill has cut short
    rf"\.({'|'.join(map(re.escape, NAMES))})\.\d+\.tmp|\.states-\w+\.tmp"
)

digest = artifacts.digest


@dataclass(frozen=True, eq=False)
class RunData:
    """One finished run, in memory or read from its folder."""

    history: History
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    path: Path | None = None
    held: Mixture | None = None  # the predictors; None where they wait in the folder

    def mixture(self) -> Mixture:
        """Every client's predictor: ``weights [K, r]``, ``models [K, r, P]``."""
        if self.held is not None:
            return self.held
        if self.path is None:
            raise StoreError("this run kept no models; expected a folder or models in memory")
        return artifacts.read_models(self.path / MODELS)


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Where this process runs: what may change a result's last bits, and how it was started."""
    packages = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")
    device = torch.device(device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "coterie": __version__,
        "source": source.fingerprint(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in packages},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git_commit": source.commit(),
        "argv": list(sys.argv),
    }


def collect(
    log: Log,
    mixture: Mixture,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    references: Mapping[str, History] | None = None,
) -> RunData:
    """A finished run in memory; ``references`` are the histories of ``local`` and ``fedavg``.

    They must be of the same clients: a client is compared with itself.
    """
    history, known = log.history(), references or {}
    for name, other in known.items():
        if other.roster.fingerprint != history.roster.fingerprint:
            raise StoreError(
                f"{history.method} and {name} ran on different data (partition "
                f"{history.roster.fingerprint} and {other.roster.fingerprint}); expected the same "
                "clients; run both with the same seed and partition"
            )
    summary = summarise(history, digest(mixture), known.get("local"))
    summary["ran"] = _ran_summary(config, environment)
    summary["alarms"] = [alarm._asdict() for alarm in raise_alarms(history, known)]
    return RunData(history, config, environment, files.plain(summary), held=mixture)


def ran(forms: Iterable[Form]) -> dict[str, dict[str, str]]:
    """How each form of a call was done, by the form's id."""
    return {form.id: {"stage": form.stage, "way": form.way, "why": form.why} for form in forms}


def _ran_summary(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """What really ran: the engine, and how many forms of each stage were done in which way."""
    chosen = config.get("resolved", {})
    forms = [(f["stage"], f["way"], f["why"]) for f in environment.get(RAN, {}).values()]
    counted = sorted(Counter(forms).items())
    names = ("engine", "chunk", "compiler", "kernels")
    return {
        **{name: chosen.get(name) for name in names},
        "calls": [
            {"stage": stage, "way": way, "why": why or None, "forms": count}
            for (stage, way, why), count in counted
        ],
    }


class RunFolder:
    """The folder of one run while it is being written."""

    def __init__(
        self, path: Path, log: Log, config: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> None:
        self.path, self.log = path, log
        self.config, self.environment = config, environment
        self._unsafe: list[Path] = []  # parts that a power cut could still take
        self._safe: checkpoint.Listing = {}  # those it could not

    @classmethod
    def create(
        cls,
        path: Path,
        log: Log,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        partition: Mapping[str, Any] | None = None,
    ) -> "RunFolder":
        """Start a new folder; one that holds a run, finished or not, is left as it is.

        ``partition`` is the manifest of the federation; a made-up log has none. It is there before
        the config is: a run that can be continued can be compared with its data.
        """
        refuse_used(path)
        with files.writing(path):
            path.mkdir(parents=True, exist_ok=True)
        if partition is not None:
            files.write_text(path / PARTITION, files.to_json(dict(partition)) + "\n")
        files.write_json(path / CONFIG, dict(config))
        files.write_json(path / ENVIRONMENT, dict(environment))
        files.write_text(path / ROUNDS, "")
        files.write_text(path / CLIENTS, ",".join(artifacts.COLUMNS) + "\n")
        return cls(path, log, config, environment)

    @classmethod
    def reopen(cls, path: Path, log: Log, rounds: int) -> "RunFolder":
        """Continue an unfinished run after ``rounds`` rounds; what came later is dropped.

        Of a run without a whole round only the config has to be there.
        """
        lines = artifacts.read_rounds(path / ROUNDS)[:rounds] if rounds else []
        if len(lines) < rounds:
            raise StoreError(
                f"{path / ROUNDS}: found {len(lines)} whole rounds; expected {rounds}; resume from "
                "an earlier checkpoint"
            )
        scores = artifacts.read_clients(path / CLIENTS)[0] if rounds else []
        log.lines, safe = lines, {}
        log.evaluated = [(index, found) for index, found in scores if index < rounds]
        log.matrices = []
        for part in sorted((path / PARTS).glob("*.npz")):
            if not _PART.fullmatch(part.name):
                continue
            if int(part.stem) < rounds:
                log.matrices += artifacts.read_matrices(part)[0]
                safe[f"{PARTS}/{part.name}"] = files.describe(part)
            else:
                part.unlink()
        _refuse_gaps(path, log)
        files.write_text(path / ROUNDS, "".join(files.to_json(line) + "\n" for line in lines))
        with files.whole(path / CLIENTS) as temporary:
            temporary.write_text(",".join(artifacts.COLUMNS) + "\n", encoding="utf-8")
            for index, found in log.evaluated:
                artifacts.append_clients(temporary, artifacts.client_rows(index, found, log.roster))
        files.remove(path, _CUT_SHORT)
        known = (path / ENVIRONMENT).is_file()
        where = files.read_json(path / ENVIRONMENT) if known else {}
        folder = cls(path, log, files.read_json(path / CONFIG), where)
        folder._safe = safe
        return folder

    def note_resumed(
        self, rounds: int, where: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> None:
        """Write down that the run was continued, and what was then not as before."""
        note = {"after_rounds": rounds, "changed": dict(changed)}
        before = self.environment or where
        self.environment = {**before, "resumed": [*before.get("resumed", []), note]}
        files.write_json(self.path / ENVIRONMENT, dict(self.environment))

    def note_ran(self, forms: Iterable[Form]) -> None:
        """Write down how calls were done that came for the first time.

        Before the round they came in: a round that is in the logs is not done again.
        """
        before = self.environment.get(RAN, {})
        known = {**ran(forms), **before}  # a resumed run knows only part of the reasons
        if known.keys() != before.keys():
            self.environment = {**self.environment, RAN: known}
            files.write_json(self.path / ENVIRONMENT, dict(self.environment))

    def append(self, record: "Record") -> Line:
        """Write down one round."""
        line = self.log.append(record)
        with files.writing(self.path):
            with (self.path / ROUNDS).open("a", encoding="utf-8", newline="\n") as file:
                file.write(files.to_json(line) + "\n")
            faults.at("log.line")
            if record.evaluation is not None:
                rows = artifacts.client_rows(*self.log.evaluated[-1], self.log.roster)
                artifacts.append_clients(self.path / CLIENTS, rows)
            if record.collaboration is not None:
                (self.path / PARTS).mkdir(exist_ok=True)
                part = self.path / PARTS / f"{record.index:08d}.npz"
                artifacts.write_matrices(part, self.log.matrices[-1:], self.log.roster)
                self._unsafe.append(part)
        return line

    def sync(self) -> checkpoint.Listing:
        """Flush what has grown and say what is there; a checkpoint may then call it safe."""
        grown = (self.path / ROUNDS, self.path / CLIENTS)
        with files.writing(self.path):
            for path in (*grown, *self._unsafe):
                files.flush_to_disk(path)
            if self._unsafe:
                files.flush_to_disk(self.path / PARTS)
        self._safe |= {f"{PARTS}/{path.name}": files.describe(path) for path in self._unsafe}
        self._unsafe = []
        return {**{path.name: files.describe(path) for path in grown}, **self._safe}

    def finish(self, mixture: Mixture, references: Mapping[str, History] | None = None) -> RunData:
        """Write matrices, models, summary and, last, the manifest: the run is then finished."""
        log, path = self.log, self.path
        data = collect(log, mixture, self.config, self.environment, references)
        self.sync()
        if log.matrices:
            with files.whole(path / MATRICES) as temporary:
                artifacts.write_matrices(temporary, log.matrices, log.roster)
        with files.whole(path / MODELS) as temporary:
            artifacts.write_models(temporary, mixture)
        if log.outcomes is not None:
            with files.whole(path / PREDICTIONS) as temporary:
                artifacts.write_outcomes(temporary, log.outcomes)
        faults.at("finish.models")
        files.write_json(path / SUMMARY, data.summary)
        faults.at("finish.summary")
        files.write_json(path / files.MANIFEST, {"files": files.list_files(path)})
        faults.at("finish.manifest")
        tidy(path)
        return replace(data, path=path, held=None)


def _refuse_gaps(path: Path, log: Log) -> None:
    """Refuse to continue from logs that lack what their own lines say they have."""
    wrong = _gaps(log.lines, {CLIENTS: log.evaluated, PARTS: log.matrices}, len(log.lines))
    if wrong:
        raise StoreError(f"{path}{os.sep}{wrong[0]}; resume from an earlier checkpoint")


def _gaps(
    lines: Sequence[Line], kept: Mapping[str, Sequence[tuple[int, Any]]], rounds: object
) -> list[str]:
    """Where rounds are missing, come twice or are out of order, a sentence a file."""
    there = [line.get("round") for line in lines]
    wrong = []
    if len(there) != rounds or there != list(range(len(there))):
        wrong.append(
            f"{ROUNDS}: found rounds {_some(there)}; expected {rounds} from 0 on, in order"
        )
    for name, mark in zip(kept, ("test", "off_diagonal"), strict=True):
        promised = [line.get("round") for line in lines if mark in line]
        found = [index for index, _ in kept[name]]
        if found != promised:
            expected = f"{_some(promised)}, as {ROUNDS} says"
            wrong.append(f"{name}: found rounds {_some(found)}; expected {expected}")
    return wrong


def _some(rounds: Sequence[Any], most: int = 20) -> str:
    """The first of many rounds."""
    return f"{list(rounds[:most])}{' …' * (len(rounds) > most)}"


def untidy(path: Path) -> bool:
    """Whether a finished run's folder still holds what only an unfinished one needs."""
    refuse_links(path)
    return any((path / name).exists() for name in (PARTS, checkpoint.FOLDER, lock.NAME))


def refuse_other_data(path: Path, federation: "Federation") -> None:
    """Refuse to go on with, or beside, a run whose clients' data was another."""
    if not (path / PARTITION).is_file():
        raise StoreError(
            f"{path}: has no {PARTITION}, so that its data cannot be compared with what is here; "
            "it was begun by an earlier version; choose another folder with --out or delete it"
        )
    changed = changes(files.read_json(path / PARTITION), federation)
    if changed:
        raise StoreError(
            f"{path}: the data is not what this run began with ({'; '.join(changed)}); expected "
            f"partition {federation.fingerprint} to be that of {PARTITION}; nothing was changed; "
            "restore the data, or choose another folder with --out"
        )


def tidy(path: Path) -> None:
    """Remove what only an unfinished run needs."""
    files.remove(path / PARTS, _PART)
    checkpoint.clear(path)


def refuse_links(path: Path) -> None:
    """Refuse a folder in which a name of ours is a link or something else than a file or folder."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    ours = [n for n in names if n in NAMES or n == lock.NAME or _CUT_SHORT.fullmatch(n)]
    files.refuse_links(path, ours)


def refuse_used(path: Path) -> None:
    """Refuse a folder that holds a run already, and say what can be done about it."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: is a file; expected a folder, new or empty; choose one by --out")
    refuse_links(path)
    used = [name for name in NAMES if name != PARTITION and (path / name).exists()]
    if not used:
        return
    found, advice = f"an unfinished run ({', '.join(used)})", f"run 'coterie resume {path}', "
    if finished(path):
        found, advice = "a finished run", ""
    raise StoreError(
        f"{path}: holds {found}; expected a folder without one; nothing was overwritten; {advice}"
        "choose another folder with --out or delete this one first"
    )


def finished(path: Path) -> bool:
    """Whether the folder holds a run that came to its end."""
    return (path / files.MANIFEST).is_file() and (path / SUMMARY).is_file()


def read(path: Path) -> RunData:
    """A finished run from its folder."""
    if not finished(path):
        raise StoreError(
            f"{path}: holds no finished run (no {files.MANIFEST}); expected a folder written by "
            "'coterie run'; finish it with 'coterie resume' or run it again"
        )
    refuse_links(path)
    try:
        return _read(path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path}: is not as a run writes it ({type(error).__name__}: {error}); expected a "
            "folder of 'coterie run'; check it with 'coterie verify'"
        ) from error


def _read(path: Path) -> RunData:
    summary = files.read_json(path / SUMMARY)
    scores, roster = artifacts.read_clients(path / CLIENTS)
    facts = {"fingerprint": summary["partition_fingerprint"], "weak": summary["weak_clients"]}
    log = Log(summary["method"], summary["seed"], summary["metric"], replace(roster, **facts))
    log.swaps = summary["in_group_weight_of"] != "A"
    log.merge_val = summary.get("merge_val", True)  # as runs did before they said so
    log.lines, log.evaluated = artifacts.read_rounds(path / ROUNDS), scores
    if (path / MATRICES).exists():
        log.matrices, truth = artifacts.read_matrices(path / MATRICES)
        log.roster = replace(log.roster, **truth)
    if (path / PREDICTIONS).exists():
        log.outcomes = artifacts.read_outcomes(path / PREDICTIONS)
    config, where = files.read_json(path / CONFIG), files.read_json(path / ENVIRONMENT)
    if not all(isinstance(part, dict) for part in (config, where, config.get("run", {}))):
        raise TypeError(f"expected tables in {CONFIG} and {ENVIRONMENT}")
    return RunData(log.history(), config, where, summary, path)


def verify(path: Path) -> list[str]:
    """What is wrong with a finished run's folder, a sentence each; empty when all is as written."""
    refuse_links(path)
    wrong = files.faults(path)
    if wrong:
        return wrong
    listed = files.read_json(path / files.MANIFEST)["files"]
    there = {name for name in NAMES if (path / name).is_file()} - {files.MANIFEST}
    wrong = [
        f"{name} is not in {files.MANIFEST}" for name in sorted(there.union(LISTED) - {*listed})
    ]
    if wrong:
        return wrong
    data = read(path)
    history = data.history
    kept = {
        CLIENTS: [(int(index), None) for index in history.rounds],
        MATRICES: [(index, None) for index in history.matrix_rounds],
    }
    asked = data.config.get("run", {}).get("rounds", len(history.lines))
    wrong = _gaps(history.lines, kept, asked)
    if artifacts.stored_digest(path / MODELS) != data.summary.get("digest"):
        wrong.append(f"{MODELS} does not give the digest in {SUMMARY}")
    return wrong

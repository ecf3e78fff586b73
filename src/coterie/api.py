"""The Python interface: :func:`run` one method, :func:`compare` several, :func:`resume` either.

    import coterie
    result = coterie.compare(methods=["fedavg", "fedfomo"], rounds=10)
    print(result)            # the table
    print(result.verdict)    # whether joining is worth it

Both take a config (a path, tables or a Config; without one, the built-in default) and the options
of the command line by the same names; ``set={"train.momentum": 0.9}`` sets any other field. Without
``out`` nothing is written to disk. A run that is written to disk survives a kill at any instant.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from .core.imports import GIVEN, Code, Given
from .engines.remote import Transport
from .errors import ConfigError, StoreError, did_you_mean
from .runs import comparison_folder, interrupt, run_folder
from .runs.assemble import assemble
from .runs.comparison_folder import COMPARE
from .runs.config.loading import canonical, load
from .runs.config.options import OPTIONS
from .runs.config.schema import Config
from .runs.execute import check, execute, references_beside, train_cell
from .runs.listeners import Watch
from .runs.plan import Plan
from .runs.resume import unfinished_run
from .runs.run import LOCAL, Run
from .runs.setting import Setting
from .storage import faults, files, lock
from .views.comparison import Comparison
from .views.judgement import site_gains
from .views.page import page

Source = Config | Mapping[str, Any] | str | Path | None


class Options(TypedDict, total=False):
    """The options of the command line as keyword arguments; an option that is None is ignored."""

    data: Any  # a name, a file, or the data itself (docs/own_parts.md)
    partition: str | None
    clients: int | None
    model: Any  # a name, an nn.Module, or a function or class that makes one
    method: str | None
    methods: Sequence[str] | str | None
    rounds: int | None
    participation: float | None
    seed: int | None
    seeds: int | Sequence[int] | None
    folds: int | None
    epochs: int | None
    batch: int | None
    lr: float | None
    loss: Any  # a class of OwnLoss by its name, or a function of outputs and targets
    metric: Any  # a name, an OwnMetric, or a function that gives a value per sample
    engine: str | None
    device: str | None
    adapt: str | None
    out: str | Path | None
    federation: str | Path | None
    collect: bool | None
    set: Mapping[str, Any] | None  # any other field by its dotted name
    code: Given  # folders from which code that the config names may be imported


def configure(source: Source = None, **options: Unpack[Options]) -> Config:
    """The config of a source, with the options applied to it."""
    options, objects = _named(options)
    changes, given = changes_of(options), options.get("code")
    if isinstance(source, Config):
        code = source.code if given is None else Code.of(given, installed=True)
        code = replace(code, objects={**code.objects, **objects})
        return load(canonical(source), changes, code) if changes or given else source
    installed = not str(source).endswith(".json")  # a run writes such files
    return load(source, changes, replace(Code.of(given, installed=installed), objects=objects))


def _named(options: Options) -> tuple[Options, dict[str, Any]]:
    """The options with a name in place of each object, and the objects by these names."""
    model, data = options.get("model"), options.get("data")
    named, objects = options.copy(), dict[str, Any]()
    for option in ("loss", "metric"):
        given = options.get(option)
        if given is not None and not isinstance(given, str):
            kind = given if hasattr(given, "__name__") else type(given)
            name = f"{GIVEN}:{kind.__name__}"
            named[option], objects[name] = name, given
    if model is not None and not isinstance(model, str):
        from .networks.registry import given_name

        named["model"] = f"{GIVEN}:{given_name(model)}"
        objects[named["model"]] = model
    if data is not None and not isinstance(data, str):
        from .data.given import dataset_of, digest

        found = dataset_of(data)
        named["data"] = f"{GIVEN}:data_{digest(found)}"
        objects[named["data"]] = found
    return named, objects


def changes_of(options: Options) -> dict[str, Any]:
    """The fields that the options set, by their dotted names."""
    changes = dict(options.get("set") or {})
    for name, value in options.items():
        if name in ("set", "code"):
            continue
        if name not in OPTIONS:
            known = did_you_mean(name, [*OPTIONS, "set", "code"])
            raise ConfigError(f"there is no option '{name}'; {known}")
        if value is not None:
            changes[OPTIONS[name].field] = value
    if "run.folds" in changes:  # in place of a config's list of seeds
        changes.setdefault("run.seeds", 1)
    return changes


def run(source: Source = None, *, progress: Watch | None = None, **options: Unpack[Options]) -> Run:
    """Run one method with one seed; with ``out``, write its folder and page (``report.html``)."""
    return run_config(configure(source, **options), listeners_of(progress))


def run_config(
    config: Config, listeners: Sequence[Watch] = (), transport: Transport | None = None
) -> Run:
    """Run the method of a config; ``transport`` reaches the sites of its federation."""
    plan = Plan.single(config, _folder(config))
    (cell,) = plan.cells
    with contextlib.closing(_setting(cell.config, transport)) as setting:
        if cell.out is not None:
            comparison_folder.refuse_used(cell.out)
            run_folder.refuse_used(cell.out)
        with _held(cell.out):
            return train_cell(setting, cell, listeners)


def compare(
    source: Source = None, *, progress: Watch | None = None, **options: Unpack[Options]
) -> Comparison:
    """Run several methods with every seed on the same clients, and compare them with Local.

    Local is always one of the methods. A run that is already finished in the folder, with the same
    config and version, is read instead; a run that was interrupted is continued.
    """
    return compare_config(configure(source, **options), listeners_of(progress))


def compare_config(
    config: Config, listeners: Sequence[Watch] = (), transport: Transport | None = None
) -> Comparison:
    """Run all methods and seeds of a config; ``transport`` reaches the sites of its federation."""
    out = _folder(config)
    with contextlib.closing(_setting(config, transport)) as setting:
        if out is not None:
            comparison_folder.refuse_run(out)
        plan = Plan.comparison(setting.config, out)
        check(setting, plan.cells)
        with _held(out):
            if out is not None:
                comparison_folder.unseal(out)
                comparison_folder.write_asked(out, canonical(config))
            here = contextlib.nullcontext(setting)
            ran = execute(plan, lambda _: here, listeners)
            made = {cell.name: run for cell, run in ran}
            runs = [made[cell.name] for cell in plan.cells]
            gains = setting.gains(plan.cells)
            if ":" in runs[0].metric:  # others may read the folder without the metric's code
                tested = list(dict.fromkeys(run.method for run in runs))
                gains = site_gains(Comparison.of(runs), tested, LOCAL)
            comparison = Comparison.of(runs, out, gains)
            faults.at("compare.report")
            if out is not None:
                write_comparison(comparison, out)
                faults.at("compare.manifest")
                comparison_folder.seal(out, [run.path for run in runs if run.path is not None])
    return comparison


def write_comparison(comparison: Comparison, out: Path) -> None:
    """Write ``comparison.json`` and ``report.html``, and the gains that sites computed."""
    comparison_folder.write_gains(out, comparison.site_gains)
    files.write_json(out / comparison_folder.COMPARISON, comparison.to_dict())
    files.write_text(out / comparison_folder.REPORT, page(comparison))


def read(path: str | Path) -> Run | Comparison:
    """Read the finished run or the comparison of a folder."""
    path = files.folder_of(path, "RUN")
    if not any((path / name).is_file() for name in (COMPARE, comparison_folder.COMPARISON)):
        return Run.read(path)
    run_folder.refuse_other_format(path / COMPARE)
    places = [path / name for name in comparison_folder.run_names(path)]
    return Comparison.of(map(Run.read, places), path, comparison_folder.read_gains(path))


def resume(
    path: str | Path,
    *,
    progress: Watch | None = None,
    code: Given = None,
    transport: Transport | None = None,
) -> Run | Comparison:
    """Continue an interrupted run or comparison; a finished one is read.

    The folder may come from somebody else, so code that its config names is imported only from the
    folders ``code``, or from installed packages if ``code`` is ``"installed"``.
    """
    path, allowed = files.folder_of(path, "RUN"), Code.of(code, installed=False)
    if (path / COMPARE).is_file():
        return compare_config(_asked(path, allowed), listeners_of(progress), transport)
    if run_folder.is_finished(path):
        if run_folder.untidy(path):
            with lock.held(path):
                run_folder.tidy(path)
        return Run.read(path)
    if unfinished_run(path) is None:
        raise StoreError(
            f"{path}: holds no run to continue; expected a folder of 'coterie run' or 'coterie "
            "compare'; a run that was stopped before it began has nothing to lose: start it again"
        )
    with _held(path):
        unfinished = unfinished_run(path)
        if unfinished is None:  # another process has finished it meanwhile
            return Run.read(path)
        (cell,) = Plan.single(load(unfinished.tables, {"run.out": str(path)}, allowed), path).cells
        with contextlib.closing(_setting(cell.config, transport)) as setting:
            beside = references_beside(path)
            return train_cell(setting, cell, listeners_of(progress), beside, unfinished)


def expected(path: str | Path, code: Given = None) -> tuple[int, int]:
    """The number of runs in a folder that :func:`resume` completes, and of rounds in each."""
    path, allowed = files.folder_of(path, "RUN"), Code.of(code, installed=False)
    if (path / COMPARE).is_file():
        config = _asked(path, allowed)
        return len(config.methods()) * len(config.seeds), config.run.rounds
    found = unfinished_run(path)
    return 1, 1 if found is None else load(found.tables, code=allowed).run.rounds


def _asked(path: Path, code: Code) -> Config:
    """The config of a comparison, from its folder."""
    return load(comparison_folder.read_asked(path), {"run.out": str(path)}, code)


def verify(path: str | Path) -> dict[str, list[str]]:
    """The faults of each run of a folder, by path; an empty list if all is as written.

    No config is loaded for this, and so no code that a config names is imported.
    """
    path = files.folder_of(path, "RUN")
    if run_folder.is_finished(path):
        return {str(path): run_folder.verify(path)}
    report = comparison_folder.verify(path)
    if not report:
        raise StoreError(
            f"{path}: holds no finished run; expected a folder of 'coterie run' or 'coterie "
            "compare'; finish an interrupted one with 'coterie resume'"
        )
    return report


@contextlib.contextmanager
def _held(out: Path | None) -> Iterator[None]:
    """Hold the lock of a folder, and delay signals until the current round is over."""
    locked = contextlib.nullcontext() if out is None else lock.held(out)
    with locked, interrupt.held(out):
        yield


def listeners_of(progress: Watch | None) -> tuple[Watch, ...]:
    """The listeners of a run that a caller may watch."""
    return () if progress is None else (progress,)


def _setting(config: Config, transport: Transport | None) -> Setting:
    """The clients of a config: of a simulation, or the sites of a federation."""
    if config.run.federation is None:
        return assemble(config)
    from .deploy.federated import federation_of

    return federation_of(config, transport)


def _folder(config: Config) -> Path | None:
    return None if config.run.out is None else files.folder_of(config.run.out, "run.out")

"""The output of the commands: progress on stderr, results on stdout; plain text if piped."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import printable, printable_lines
from ..experiment.comparison_folder import REPORT
from ..experiment.config.loading import config_hash
from ..experiment.config.schema import Config
from ..experiment.runner import Progress as Step
from ..experiment.runner import Watch
from ..report.outcomes import Comparison, RunResult
from ..storage import files


def default_out(config: Config) -> Config:
    """The config with an output folder; if it names none, one that is derived from its hash."""
    if config.run.out is not None:
        return config
    data = Path(config.data.name).stem
    out = str(Path("runs") / f"{data}-{config_hash(config)[:8]}")
    return config.model_copy(update={"run": config.run.model_copy(update={"out": out})})


@contextlib.contextmanager
def progress_on_stderr(runs: int, rounds: int) -> Iterator[Watch]:
    """A progress bar over all runs and rounds; if stderr is no terminal, one line per run."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rounds"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=runs * rounds)
        yield lambda step: _advance(bar, task, step)


def _advance(bar: Progress, task: object, step: Step) -> None:
    bar.update(task, advance=step.more, description=f"{step.method}, seed {step.seed}")  # type: ignore[arg-type]
    for line in map(printable, _lines(step)):
        bar.console.print(line, highlight=False, markup=False)


def _plain_line(step: Step) -> None:
    for line in map(printable, _lines(step)):
        print(line, file=sys.stderr, flush=True)


def _lines(step: Step) -> list[str]:
    """Lines to print: rejected clients, slow calls, rounds found on disk, the end of a run."""
    run = f"{step.method}, seed {step.seed}"
    lines = [
        f"{run}: round {step.done} left out client {client!r} ({reason})"
        for client, reason in step.rejected
    ]
    lines += [f"{run}: {what}" for what in step.slow]
    if step.done == step.rounds:
        lines.append(_finished(step))
    elif step.more > 1:
        lines.append(f"{run}: continues after {step.done} rounds")
    return lines


def _finished(step: Step) -> str:
    what = "finished before, read again" if step.reused else f"{step.rounds} rounds"
    score = "" if step.score is None else f", mean {step.score:.4g}"
    return f"{step.method}, seed {step.seed}: {what}{score}"


def show_comparison(comparison: Comparison) -> None:
    """Print the table, the verdict, and the paths of the folder and the page."""
    from ..report.table import notes, table, to_rich, to_text

    console = Console()
    if console.is_terminal:
        console.print(to_rich(table(comparison)))
    else:
        show(to_text(table(comparison)) + "\n")
    for note in notes(comparison):
        show(f"{note}\n")
    show(comparison.verdict)
    if comparison.path is not None:
        show(f"\nfolder: {comparison.path}\npage:   {comparison.path / REPORT}")


def comparison_value(comparison: Comparison) -> dict[str, Any]:
    """The comparison for JSON: ``comparison.json``, and where its folder and its page are."""
    at = comparison.path
    places = {"folder": at and str(at), "page": at and str(at / REPORT)}
    return {**comparison.to_dict(), **places}


def show_json(value: object) -> None:
    """Print one JSON value; all characters beyond ASCII are escaped, control codes among them."""
    print(json.dumps(files.plain(value), indent=2, allow_nan=False))


def show_run(result: RunResult) -> None:
    """Print the numbers of one run, and the path of its page."""
    show(result)
    if result.path is not None and (result.path / REPORT).is_file():
        show(f"\npage: {result.path / REPORT}")


def show(text: object) -> None:
    """Print lines, without control codes that names in data, configs or folders may contain."""
    print(printable_lines(text))

"""The commands of ``coterie``. Results go to stdout, progress and errors to stderr.

Heavy modules are imported only by the command that needs them, so that ``coterie --help`` is quick.
"""

import sys
import warnings
from typing import Annotated, Any

import typer
import typer.core

from . import __version__
from .advising import advise_command
from .attacking import attack_command
from .commands import (
    deploy_commands,
    federation_commands,
    page_command,
    site_commands,
    start_commands,
)
from .commands.arguments import CODE, COLUMNS, JSON, MLFLOW, TENSORBOARD, WANDB, configured
from .errors import (
    CoterieError,
    CoterieWarning,
    StoppedError,
    printable,
    printable_lines,
)
from .exporting import export_commands
from .onboarding import onboard_command
from .studies import study_commands

# Where rich is installed, typer escapes "[default: 3]" for rich's markup, even in help that rich
# does not print (rich_markup_mode=None): the backslash would be shown.
typer.core.HAS_RICH = False


def _keep_help(self: Any, made: Any = typer.core.TyperArgument.__init__, **given: Any) -> None:
    """Make an argument; click 8.5 would erase the help that typer 0.20, which Flower pins, sets."""
    made(self, **given)
    self.help = given.get("help")


setattr(typer.core.TyperArgument, "__init__", _keep_help)  # noqa: B010
# Both list a command's arguments: click 8.5 would do so a second time.
setattr(typer.core.TyperCommand, "format_arguments", lambda *_: None)  # noqa: B010

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(deploy_commands.app, name="deploy")
app.add_typer(site_commands.app, name="site")
app.command()(start_commands.new)
app.command(name="list")(start_commands.list_names)
app.command()(start_commands.show)
app.command()(federation_commands.coordinator)
app.command()(federation_commands.federate)
app.command()(export_commands.export)
app.command()(export_commands.predict)
app.command()(onboard_command.onboard)
app.command()(onboard_command.leave_out)
app.command()(advise_command.advise)
app.command()(attack_command.attack)
app.command()(page_command.report)
app.command()(study_commands.reproduce)
app.command()(study_commands.sweep)
app.command()(study_commands.tune)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error of coterie gives one message and exit code 2.

    A run that a signal stopped ends with 128 plus the signal's number, as is usual in shells.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", CoterieWarning)
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            app(args=arguments, prog_name="coterie")
    except StoppedError as stopped:
        print(f"coterie: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    except CoterieError as error:
        print(f"coterie: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"coterie: warning: {printable_lines(message)}", file=sys.stderr)


def _version(asked: bool) -> None:
    if asked:
        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Personalised federated learning in which every client finds its right collaborators."""


@app.command()
@configured
def compare(
    config: str | None,
    given: dict[str, Any],
    tensorboard: Annotated[str | None, TENSORBOARD] = None,
    wandb: Annotated[str | None, WANDB] = None,
    mlflow: Annotated[str | None, MLFLOW] = None,
    as_json: Annotated[bool, JSON] = False,
    columns: Annotated[str, COLUMNS] = "",
    contrast: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="also: method A against B, trained again (5 seeds)"),
    ] = None,
    like_these: Annotated[
        bool, typer.Option("--like-these", help="also: what the sites say of sites like these")
    ] = False,
) -> None:
    """Compare several methods with training alone, on the same clients: is joining worth it?"""
    from . import api
    from .commands.console import comparison_value, show_comparison, show_json
    from .commands.live import watching
    from .runs.config.loading import default_out
    from .views.judgement import checked_contrast
    from .views.table import checked_columns

    further = checked_columns(name.strip() for name in columns.split(",") if name.strip())
    asked = default_out(api.configure(config, **given))
    pair = contrast and checked_contrast(contrast, [m.label for m in asked.methods()])
    trackers = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    with watching(asked, len(asked.methods()) * len(asked.seeds), **trackers) as watch:
        found = api.compare_config(asked, [watch])
    if as_json:
        show_json(comparison_value(found, pair or None, like_these))
    else:
        show_comparison(found, further, pair or None, like_these)


@app.command()
@configured
def run(
    config: str | None,
    given: dict[str, Any],
    tensorboard: Annotated[str | None, TENSORBOARD] = None,
    wandb: Annotated[str | None, WANDB] = None,
    mlflow: Annotated[str | None, MLFLOW] = None,
) -> None:
    """Run one method with one seed, and write its folder with a page (report.html)."""
    from . import api
    from .commands.live import watching
    from .runs.config.loading import default_out

    asked = default_out(api.configure(config, **given))
    trackers = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    with watching(asked, 1, **trackers) as watch:
        found = api.run_config(asked, [watch])
    print(found)


@app.command()
def resume(
    folder: Annotated[str, typer.Argument(help="folder of a run or a comparison", metavar="RUN")],
    code: Annotated[list[str] | None, CODE] = None,
) -> None:
    """Continue a run or a comparison that was stopped or killed; the result is the same.

    The folder may come from somebody else: code that it names is run only from the folders given by
    --code, or from installed packages with --code installed.
    """
    from . import api
    from .commands.console import show_comparison
    from .commands.live import progress_on_stderr
    from .views.comparison import Comparison

    runs, rounds = api.expected(folder, code)
    with progress_on_stderr(runs, rounds) as watch:
        found = api.resume(folder, progress=watch, code=code)
    if isinstance(found, Comparison):
        show_comparison(found)
    else:
        print(found)


@app.command()
def verify(
    folder: Annotated[str, typer.Argument(help="folder of a run or a comparison", metavar="RUN")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Check that the files of a run are as they were written and its models give the digest."""
    from . import api
    from .commands.console import show, show_json

    report = api.verify(folder)
    if as_json:
        show_json({"ok": not any(report.values()), "folders": report})
    else:
        for place, wrong in report.items():
            for line in (f"{place}: {'NOT ' if wrong else ''}as it was written", *wrong):
                show(printable(line))
    if any(report.values()):
        raise typer.Exit(1)


@app.command()
@configured
def doctor(
    config: str | None, given: dict[str, Any], as_json: Annotated[bool, JSON] = False
) -> None:
    """Check a config and its data before training: sites, columns, exposure, memory, time."""
    from .commands.console import show, show_json
    from .commands.live import progress_on_stderr
    from .diagnosis.doctor import doctor as diagnose

    with progress_on_stderr(1, 1):
        found = diagnose(config, **given)
    if as_json:
        show_json(found.to_dict())
    else:
        show(found)

"""``coterie export`` and ``coterie predict``: the model that somebody takes home."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..commands.arguments import CODE, CODES, POSITIVE, RECALIBRATE, SPECIFIC, STRICT
from ..errors import printable

Out = Annotated[str, typer.Option(metavar="DIR", help="new folder for the model")]


def export(
    run: Annotated[str, typer.Argument(help="folder of a finished run", metavar="RUN")],
    client: Annotated[str, typer.Option(help="whose model")],
    out: Out,
    specificity: Annotated[float, SPECIFIC] = 0.9,
    positive: Annotated[str | None, POSITIVE] = None,
    recalibrate: Annotated[bool, RECALIBRATE] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="also write model.onnx")] = False,
    code: Annotated[list[str] | None, CODE] = None,
) -> None:
    """Write one client's model as a folder: parameters, preprocessing, a model card."""
    from .writing import export as write

    show_export(
        write(
            *(run, client, out),
            specificity=specificity,
            positive=positive,
            recalibrate=recalibrate,
            onnx=onnx,
            code=code,
        )
    )


def predict(
    folder: Annotated[str, typer.Argument(help="folder of an exported model", metavar="EXPORT")],
    data: Annotated[str, typer.Argument(help="new samples: csv, tsv, parquet or npz")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the answers here, not to stdout")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="copy this column to the answers")
    ] = None,
    codes: Annotated[str | None, CODES] = None,
    strict: Annotated[bool, STRICT] = False,
    delimiter: Annotated[str | None, typer.Option(help="what separates cells of a CSV")] = None,
    encoding: Annotated[str, typer.Option(help="text encoding of a CSV")] = "utf-8",
    code: Annotated[list[str] | None, CODE] = None,
) -> None:
    """Predict new samples with an exported model; with known outcomes, also score it on them."""
    from .exported_model import load_export

    model = load_export(folder, code=code)
    answers = model.predict(
        data, keep=keep or (), codes=codes, strict=strict, delimiter=delimiter, encoding=encoding
    )
    for note in answers.notes:
        print(printable(f"coterie: {note}"), file=sys.stderr)
    if out is None:
        print(answers.to_csv(), end="")
        return
    answers.write(out)
    print(printable(f"{len(answers)} answers: {out}"))


def show_export(folder: Path, codes: Path | None = None) -> None:
    """Print where a model was written, and how to use it; ``codes`` is a file, if there is one."""
    print(printable(f"model: {folder}"))
    print(printable(f"card:  {folder / 'README.md'}"))
    own = codes is not None and codes.is_file()
    print(printable(f"use:   coterie predict {folder} FILE{f' --codes {codes}' if own else ''}"))

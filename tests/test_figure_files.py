"""Figures as files of their own, tables in two formats, and one colour per method."""

import itertools
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.commands import page_command
from coterie.errors import ConfigError, StoreError
from coterie.runs.run import Log
from coterie.runs.run_folder import RunFolder
from coterie.views import figure_files, words
from coterie.views.comparison import Comparison
from coterie.views.figure_files import page_figures, standalone
from coterie.views.figures import scatters
from coterie.views.page import page
from coterie.views.svg import colour, figure, palette, tag
from coterie.views.table import (
    FORMATS,
    Heading,
    Line,
    Table,
    methods_table,
    to_latex,
    to_markdown,
)
from synthetic import CLIENTS, grouped, predictors, record, run_of, scores

METHODS = ("local", "fedavg", "fedfomo")
PAPERS = {"light": "#fdfcfa", "dark": "#15181b"}


@pytest.fixture(scope="module")
def comparison():
    return Comparison.of([run_of(method, seed, 4) for seed in (0, 1) for method in METHODS])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folders of two runs."""
    place = tmp_path_factory.mktemp("runs")
    for method in ("local", "fedfomo"):
        log = Log(method, 0, "accuracy", run_of(method).roster)
        folder = RunFolder.create(place / method, log, {}, {})
        for index, row in enumerate(scores(method, 0, 3)):
            folder.append(record(index, row, grouped(0.9) if method == "fedfomo" else None))
        folder.finish(predictors())
    return [str(place / method) for method in ("local", "fedfomo")]


# ---- colours -------------------------------------------------------------------------------------


def shade(method: str, mode: str) -> str:
    return palette(mode)[colour(method).removeprefix("var(").removesuffix(")")]


def linear(hexed: str) -> list[float]:
    parts = (int(hexed[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def contrast(one: str, other: str) -> float:
    """The ratio of luminances, as the accessibility guidelines (WCAG) define it."""
    weights = (0.2126, 0.7152, 0.0722)
    bright = sorted(sum(map(math.prod, zip(weights, linear(c), strict=True))) for c in (one, other))
    return (bright[1] + 0.05) / (bright[0] + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_names_in_a_methods_colour_can_be_read(mode):
    assert min(contrast(PAPERS[mode], ink) for ink in palette(mode).values()) >= 4.5


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_method_has_a_colour_of_its_own(mode):
    names = [name for name in (*ALGORITHMS, *ALIASES) if name != "local"]
    inks = {name: linear(shade(name, mode)) for name in names}
    apart = min(math.dist(inks[a], inks[b]) for a, b in itertools.combinations(names, 2))
    assert apart > 0.02
    assert colour("local") == "var(--alone)"


def test_a_method_has_its_colour_on_every_page(comparison):
    assert colour("my.package:Method") == colour("my.package:Method")
    fewer = Comparison.of([run for run in comparison.runs if run.method != "fedavg"])
    for shown in (comparison, fewer):
        named = re.search(r'fill="([^"]*)">FedFomo</text>', page(shown))
        assert named[1] == colour("fedfomo")


def test_a_page_defines_the_colours_that_it_uses(comparison):
    text = page(comparison)
    used, defined = set(re.findall(r"var\((--\w+)\)", text)), set(re.findall(r"(--\w+):", text))
    assert used <= defined


# ---- figures -------------------------------------------------------------------------------------


def test_a_file_has_its_style_as_attributes():
    dots = [
        tag("circle", cx=1, cy=1, r=1, class_=kind, fill=colour("fedavg"))
        for kind in ("dot", "dot worse")
    ]
    text = tag("text", "a < b", class_="name small", x=1, y=1)
    root = ElementTree.fromstring(standalone(figure(30, 20, "Title", *dots, text)))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert (root.get("width"), root.get("height")) == ("46", "36")
    plain, worse = (e for e in root.iter() if e.tag.endswith("circle"))
    assert plain.get("fill") == shade("fedavg", "light")
    assert plain.get("fill-opacity") == ".72"
    assert worse.get("fill") == "#ffffff"  # a rule of two classes is stronger than one
    (label,) = (e for e in root.iter() if e.tag.endswith("text"))
    assert (label.text, label.get("font-size"), label.get("font-weight")) == ("a < b", "12", "600")


def test_the_files_of_a_comparison_stand_alone(comparison):
    made = page_figures(comparison)
    assert {
        "learning-curves",
        "gains-fedfomo",
        "matrix-fedfomo",
        "helpers-fedfomo",
        "gain-against-alone-fedavg",
    } <= made.keys()
    for drawn in made.values():
        text = standalone(drawn)
        ElementTree.fromstring(text)
        assert not re.search(r"var\(|class=|data-site", text)
    run = page_figures(comparison.of_method("fedfomo")[0])
    assert run.keys() == {"learning-curves", "helpers-fedfomo", "matrix-fedfomo"}


def test_names_of_files_are_plain_and_differ(comparison, monkeypatch):

    drawn = figure(10, 10, "t")
    named = [("calibration ../../A b", drawn), ("calibration a, B", drawn)]
    named += [("Hôpital Łódź", drawn), ("?", drawn)]
    monkeypatch.setattr(figure_files, "_named", lambda *_: iter(named))
    assert list(page_figures(comparison)) == [
        *("calibration-a-b", "calibration-a-b-2", "hôpital-łódź", "figure")
    ]


# ---- the scatter of gains ------------------------------------------------------------------------


def test_a_dot_is_below_the_line_if_its_client_loses(comparison):
    first, *_ = scatters(comparison, "fedavg")
    assert first.method == "FedAvg"
    root = ElementTree.fromstring(first.drawn)
    zero = next(float(e.get("y1")) for e in root if e.get("class") == "zero")
    kinds = [e for e in root if (e.get("class") or "").startswith("dot")]
    dots = {int(e.get("data-site")): e for kind in kinds for e in kind}
    losses = {int(e.get("data-site")) for e in kinds[1]}
    gains, alone = comparison.site_gain("fedavg"), comparison.site_scores("local")
    assert dots.keys() == set(range(CLIENTS))
    for i, dot in dots.items():
        assert (float(dot.get("cy")) > zero) == (gains[i] < 0) == (i in losses)
    across = [float(dots[i].get("cx")) for i in alone.argsort()]
    assert across == sorted(across)
    assert f"{(gains < 0).sum()} of {CLIENTS}" in first.counts


# ---- tables --------------------------------------------------------------------------------------


ODD = Table(
    (Heading("method", ""), Heading("mean %", "")),
    (
        Line(("a|b_c&<i>", "71.0 ± 0.2"), best=True, local=False, alarm=False),
        Line(("Local", "−3.0"), best=False, local=True, alarm=False),
        Line(("$x^2$\\", words.NONE), best=False, local=False, alarm=False),
    ),
)


def test_markdown_keeps_the_cells_and_escapes_texts(comparison):
    shown = methods_table(comparison)
    lines = to_markdown(shown).splitlines()
    assert len(lines) == 2 + len(METHODS)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(shown.columns) + 1}
    made = to_markdown(ODD)
    assert r"| **a\|b\_c\&\<i\>** | **71.0 ± 0.2** |" in made
    assert "| Local | −3.0 |" in made


def test_latex_escapes_texts():
    made = to_latex(ODD)
    assert r"\textbf{a|b\_c\&<i>} & \textbf{71.0 $\pm$ 0.2} \\" in made
    assert r"\$x\textasciicircum{}2\$\textbackslash{} & -- \\" in made
    assert "mean \\% \\\\" in made
    assert made.count("\\begin") == made.count("\\end") == 1


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_writes_figures_and_tables(stored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page_command.report(stored, table="latex", out="table.tex")
    assert (tmp_path / "table.tex").read_text().startswith("% needs")
    for name, function in FORMATS.items():
        capsys.readouterr()
        page_command.report(stored, table=name)
        assert capsys.readouterr().out == function(
            methods_table(page_command._read([*map(Path, stored)]))
        )
    page_command.report(stored, figures="figures")
    made = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert "gains-fedfomo.svg" in made
    assert f"figures: {len(made)} files in figures" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "table.tex"]


def test_what_the_command_cannot_write_is_refused(stored, tmp_path):
    with pytest.raises(ConfigError, match="--table: found one run; expected a comparison"):
        page_command.report(stored[1:], table="latex")
    with pytest.raises(ConfigError, match="--table, --figures: found several; give one"):
        page_command.report(stored, table="latex", figures=str(tmp_path))
    with pytest.raises(ConfigError, match=r"--specificity: found 1\.5"):
        page_command.report(stored, specificity=1.5)
    with pytest.raises(StoreError, match="inside a folder of results"):
        page_command.report(stored, figures=f"{stored[0]}/figures")

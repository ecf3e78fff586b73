"""Draws the figures of the documentation and writes their captions into its pages.

coterie compare experiments/methods/digits.toml --seeds 1 --seed 0 --engine vmap --out runs/methods
coterie run experiments/methods/sine.toml --out runs/sine
python docs/figures.py runs/methods runs/sine

A page of a method ends with a section "At work", which is rewritten from the run's own numbers; on
sine.md only the figure and the line that says how it was made are. Pages of methods that the
comparison lacks stay as they are: the page of a new method needs no more than
`--methods local,fedavg,NAME` and runs/methods alone.
"""

import math
import re
import sys
from importlib import resources
from pathlib import Path

import numpy as np
from markupsafe import Markup

import coterie
from coterie.algorithms import ALGORITHMS
from coterie.api import configure
from coterie.runs import assemble
from coterie.runs.config.loading import WRITTEN
from coterie.runs.run import LOCAL, Run, dense
from coterie.views import words
from coterie.views.comparison import Comparison
from coterie.views.figures import WIDTH, learning_curves
from coterie.views.helping import heatmap
from coterie.views.svg import Scale, figure, polyline, style, tag

DOCS = Path(__file__).parent
HEADING = "## At work"
BESIDE = ("fedavg", LOCAL)  # what every method's curve is drawn against
MAP, GAP, TOP, EDGE = 232.0, 28.0, 34.0, 12.0
COLOURS = (
    "--paper:#fff;--card:#fff;--ink:#1c1f23;--soft:#5c636b;--faint:#e4e2dd;--alone:#6d737a;"
    "--accent:#0072b2;--c1:#0068a8;--c2:#b2560d;--c3:#00795a;--c4:#a33f7c;--c5:#5b52b3;"
    f"--c6:#946200;--c7:#2b7389;{style('light')}"
)


# ---- drawings ------------------------------------------------------------------------------


def sheet(width: float, height: float, title: str, *parts: Markup) -> str:
    """A file of its own: the report's strokes with a background and light colours.

    Titles of single cells are left out: a picture inside a page cannot show them.
    """
    rules = resources.files("coterie.views").joinpath("templates/report.css").read_text("utf-8")
    strokes = [line for line in rules.splitlines() if re.match(r"svg (\.|text)", line)]
    style = "\n".join([f"svg{{{COLOURS};font-family:system-ui,sans-serif}}", *strokes])
    ground = tag("rect", width=width, height=height, fill="#fff")
    drawn = str(figure(width, height, title, tag("style", Markup(style)), ground, *parts))
    drawn = re.sub(r"<(rect|circle)([^>]*)>(<title>[^<]*</title>)?</\1>", r"<\1\2/>", drawn)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    return drawn.replace("<svg ", f"<svg {size} ", 1) + "\n"


def placed(part: Markup, x: float, y: float, head: str = "", width: float = 0.0) -> Markup:
    """A drawing of the report at a place in a sheet, with words above it."""
    inner = re.search(r'viewBox="0 0 (\S+) (\S+)"', part)
    assert inner is not None
    scale = width / float(inner[1]) if width else 1.0
    size = f'width="{scale * float(inner[1]):g}" height="{scale * float(inner[2]):g}"'
    at = f'<svg x="{x:g}" y="{y:g}" {size} overflow="visible" '
    moved = Markup(str(part).replace("<svg ", at, 1))
    return moved if not head else tag("text", head, x=x + 10, y=y - 6, class_="tick") + moved


def swaps(history: Run) -> bool:
    """Whether models change hands: then A Aᵀ tells who works with whom, and A does not."""
    return ALGORITHMS[history.method]().traits.models_change_hands


def maps(history: Run, left: float) -> list[Markup]:
    """A, and A Aᵀ where models change hands."""
    A = history.weights
    if A is None:
        return []
    shown = [("A: who draws on whom", A)]
    if swaps(history):
        shown.append(("A·Aᵀ: who draws on the same models", A @ A.T))
    return [
        placed(
            heatmap(matrix, history.roster.groups, head),
            *(left + i * (MAP + GAP), TOP, head, MAP),
        )
        for i, (head, matrix) in enumerate(shown)
    ]


def at_work(comparison: Comparison, method: str) -> str:
    """One method's curve beside Local's and FedAvg's, and its matrix where it has one."""
    names = dict.fromkeys((method, *BESIDE))
    runs = [run for name in names for run in comparison.of_method(name)]
    history = comparison.of_method(method)[0]
    drawn = maps(history, EDGE + WIDTH + GAP)
    width = 2 * EDGE + WIDTH + len(drawn) * (MAP + GAP)
    curves = placed(learning_curves(Comparison.of(runs)), EDGE, 4)
    return sheet(width, 328, f"{words.label(method)} at work on digits", curves, *drawn)


def sine(result: Run) -> str:
    """Every client's line over the sine curve, and who shares models with whom."""
    given = {name: table for name, table in result.config.items() if name not in WRITTEN}
    config = configure(given)
    federation = assemble.assemble(config).federations[result.seed]
    x, y = federation.dataset.x[:, 0].numpy(), federation.dataset.y.numpy()
    mixture = result.mixture()
    lines = (mixture.weights[..., None] * mixture.models).sum(1).numpy()  # [K, 2]
    A = result.weights
    assert A is not None
    leaders = list(dict.fromkeys(A.argmax(1).tolist()))
    across, up = Scale(0, 2 * math.pi, 34, WIDTH - 8), Scale(-1.5, 1.5, 292, 12)
    content = [
        *(
            tag("line", x1=34.0, x2=WIDTH - 8, y1=up(v), y2=up(v), class_="grid")
            for v in (-1, 0, 1)
        ),
        *(tag("text", f"{v:g}", x=28.0, y=up(v) + 4, class_="tick end") for v in (-1, 0, 1)),
        *(
            tag("text", text, x=across(v), y=312.0, class_="tick middle")
            for text, v in (("0", 0), ("π", math.pi), ("2π", 2 * math.pi))
        ),
    ]
    curve = [(across(v), up(math.sin(v))) for v in np.linspace(0, 2 * math.pi, 90)]
    content.append(polyline(curve, stroke="var(--alone)", stroke_dasharray="3 4"))
    for i in range(len(lines)):
        own = np.concatenate([s[i].numpy() for s in (federation.train, federation.val)])
        ink = f"var(--c{leaders.index(int(A[i].argmax())) % 7 + 1})"
        dots = [tag("circle", cx=across(x[s]), cy=up(y[s]), r=2.2) for s in own]
        content.append(tag("g", *dots, fill=ink, fill_opacity=0.5))
        ends = [i * 2 * math.pi / len(lines), (i + 1) * 2 * math.pi / len(lines)]
        fit = [(across(v), up(lines[i][0] * v + lines[i][1])) for v in ends]
        content.append(polyline(fit, class_="line", stroke=ink))
    left = figure(WIDTH, 320, "Lines fitted to intervals of a sine curve", *content)
    drawn = [placed(left, EDGE, 4), *maps(result, EDGE + WIDTH + GAP)]
    width = 2 * EDGE + WIDTH + 2 * (MAP + GAP)
    return sheet(width, 328, "FedeRiCo on twelve intervals of a sine curve", *drawn)


# ---- words ---------------------------------------------------------------------------------


def last_round(comparison: Comparison, method: str) -> str:
    """The mean test score at the end."""
    return f"{np.nanmean(comparison.of_method(method)[0].last):.1f} %"


def section(comparison: Comparison, method: str) -> str:
    """The end of a method's page: the figure, what it shows and how it was made."""
    run, name = comparison.of_method(method)[0], words.label(method)
    told = f"{name} ends at {last_round(comparison, method)}."
    alt = f"Mean test accuracy of {name} over rounds"
    A = run.weights
    if A is not None:
        told += " " + about_matrix(run, A)
        alt += ", and its collaboration matrix"
    return (
        f"{HEADING}\n\n![{alt}](figures/{method}.svg)\n\n"
        f"{told} Commit {commit(run)}, seed {run.seed}: [how](README.md#the-figures).\n"
    )


def about_matrix(history: Run, A: np.ndarray) -> str:
    """What the matrix shows, in numbers."""
    off = A * (1 - np.eye(len(A)))
    kept = zip(history.matrix_rounds, history.matrices, strict=True)
    at = [r for r, packed in kept if (dense(packed) == A).all()]
    final = at[-1] == history.lines[-1]["round"]
    which = "" if final else ", the last with weight on others"
    told = (
        f"Right: the weights of round {at[-1] + 1}{which}: on average "
        f"{100 * off.sum(1).mean():.2g} % of a client's weight is on others, "
        f"{100 * inside(A, history):.0f} % of it inside its group."
    )
    if swaps(history):
        told += (
            f" Models change hands: in A·Aᵀ (who uses the same models) it is "
            f"{100 * inside(A @ A.T, history):.0f} %."
        )
    return told


def inside(A: np.ndarray, history: Run) -> float:
    """The share of off-diagonal weight inside the true groups."""
    groups = history.roster.groups
    assert groups is not None
    off = A * (1 - np.eye(len(A)))
    return float(off[groups[:, None] == groups].sum() / off.sum())


def command(run: Run) -> str:
    """How the run was started."""
    return " ".join(["coterie", *run.environment["argv"][1:]])


def commit(run: Run) -> str:
    """The commit the run was made at, in short."""
    return str(run.environment["git_commit"])[:7]


def draw_methods(methods: Path) -> None:
    """Draw the figure and write the section of every method of a comparison."""
    comparison = coterie.read(methods)
    (DOCS / "methods/figures").mkdir(exist_ok=True)
    compared = {row.method for row in comparison.rows}
    for method in ALGORITHMS.keys() & compared:
        (DOCS / f"methods/figures/{method}.svg").write_text(at_work(comparison, method), "utf-8")
        page = DOCS / f"methods/{method}.md"
        told = page.read_text("utf-8").partition(HEADING)[0].rstrip()
        page.write_text(f"{told}\n\n{section(comparison, method)}", "utf-8")


def draw_sine(toy: Path) -> None:
    """Draw the figure of sine.md and say how it was made."""
    result = Run.read(toy)
    (DOCS / "sine.svg").write_text(sine(result), "utf-8")
    made = f"`{command(result)}` at commit {commit(result)}, seed {result.seed}"
    page = DOCS / "sine.md"
    told = re.sub(r"^`coterie run .*?, seed \d+", made, page.read_text("utf-8"), flags=re.MULTILINE)
    page.write_text(told, "utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    draw_methods(Path(sys.argv[1]))
    if len(sys.argv) == 3:
        draw_sine(Path(sys.argv[2]))

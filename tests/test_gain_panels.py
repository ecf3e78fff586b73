"""The panels of gains: dots and intervals stand where the numbers say, on honest scales."""

import math
import re

import numpy as np
import pytest

from coterie.views import figures
from coterie.views.comparison import Comparison
from coterie.views.figures import GainRow
from coterie.views.svg import Scale
from synthetic import roster, run_of


def panel_of(rows):
    return str(figures.draw(rows, "accuracy", "panel", "red"))


def scale_of(drawn):
    """The scale of a panel, from two of its marks."""
    marks = re.findall(r'<text x="([\d.]+)" [^>]*class="tick middle">([^<]*)<', drawn)
    found = [(float(text.replace("\N{MINUS SIGN}", "-")), float(x)) for x, text in marks]
    return Scale(found[0][0], found[-1][0], found[0][1], found[-1][1])


def rows(*gains, half=2.0, size=100):
    return [
        GainRow(i, f"site-{i}", size, g, g - half, g + half, "unclear") for i, g in enumerate(gains)
    ]


def test_dots_and_intervals_stand_where_the_gains_are():
    drawn = panel_of(rows(-4.0, 0.0, 6.0))
    x = scale_of(drawn)
    dots = [float(place) for place in re.findall(r'cx="([\d.]+)"', drawn)]
    arms = re.findall(r'x1="([\d.]+)" x2="([\d.]+)" [^>]*class="arm', drawn)
    for gain, dot, (low, high) in zip((-4.0, 0.0, 6.0), dots, arms, strict=True):
        assert dot == pytest.approx(x(gain), abs=0.05)
        assert float(low) == pytest.approx(x(gain - 2), abs=0.05)
        assert float(high) == pytest.approx(x(gain + 2), abs=0.05)
    assert drawn.count('class="dot worse"') == 1
    assert "site-0: \N{MINUS SIGN}4.0 (\N{MINUS SIGN}6.0 to \N{MINUS SIGN}2.0), unclear" in drawn


def test_one_terrible_method_does_not_squash_the_others():
    who, alone = roster(3), np.full((1, 3), 80.0)
    runs = [
        run_of("local", who=who, test=alone),
        run_of("fedavg", who=who, test=alone - 70),
        run_of("fedfomo", who=who, test=alone + np.array([1.0, 2.0, 3.0])),
    ]
    bad, good = (str(one.drawn) for one in figures.panels(Comparison.of(runs), "local"))
    places = [float(place) for place in re.findall(r'cx="([\d.]+)"', good)]
    assert max(places) - min(places) > figures.PLOT / 10
    assert scale_of(bad).low <= -70
    assert scale_of(good).low > -20


def test_the_interval_of_a_tiny_site_does_not_squash_the_others():
    some = [*rows(1.0, 2.0, 3.0), GainRow(3, "tiny", 4, 30.0, -70.0, 95.0, "unclear")]
    drawn = panel_of(some)
    x = scale_of(drawn)
    assert x.high < 60
    assert x(30.0) == pytest.approx(max(map(float, re.findall(r'cx="([\d.]+)"', drawn))), abs=0.05)


@pytest.mark.parametrize("gain", [math.nan, math.inf, -math.inf, 1e300, 0.0])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_panels_of_diverged_runs_stay_inside_their_frame(gain, count):
    strange = GainRow(0, "strange", 0, gain, -math.inf, math.inf, "worse")
    drawn = panel_of([strange, *rows(*range(1, count))])
    assert not re.search(r"nan|inf", re.sub(r"<title>.*?</title>", "", drawn))
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', drawn)[1])
    assert all(0 <= float(x) <= width for x in re.findall(r'(?:cx|x1|x2|x)="([-\d.]+)"', drawn))


def test_sites_are_ordered_by_size_and_show_it():
    some = [row._replace(size=size) for row, size in zip(rows(1.0, 1.0), (12000, 40), strict=True)]
    drawn = panel_of(some)
    assert "12\N{NARROW NO-BREAK SPACE}000" in drawn
    radii = [float(r) for r in re.findall(r' r="([\d.]+)"', drawn)]
    assert radii[0] > radii[1]
    who = roster(3)
    who.n_train[:] = [5, 50, 20]
    runs = [run_of(m, who=who, test=np.full((1, 3), 50.0)) for m in ("local", "fedavg")]
    (panel,) = figures.panels(Comparison.of(runs), "local")
    assert re.findall(r'data-site="(\d)"', str(panel.drawn)) == ["1", "2", "0"]


def test_a_panel_of_very_many_sites_draws_some_and_says_so():
    sites = 2 * figures.MOST_ROWS + 100
    who, alone = roster(sites), np.full((1, sites), 50.0)
    runs = [run_of("local", who=who, test=alone), run_of("fedavg", who=who, test=alone + 20)]
    (panel,) = figures.panels(Comparison.of(runs), "fedavg")
    assert str(panel.drawn).count("<circle") == -(-sites // 3)
    assert panel.counts == f"shown: {sites} better, 0 worse; one of 3 sites is drawn"

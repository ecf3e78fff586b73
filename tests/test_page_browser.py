"""The pages in a real browser: no error, every control by keyboard, nothing overlaps."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.runs.run import JudgedRows
from coterie.views.comparison import Comparison
from coterie.views.page import page
from coterie.views.site_page import site_page
from synthetic import comparison_of, roster, run_of, scores

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get")

SEVEN = ("North General", "Lakeside", "County", "Hilltop", "Southgate", "Riverside", "Harbour")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def tab(browser) -> Iterator[Page]:
    """A page in which no error may occur; it is 800 pixels wide."""
    found, problems = browser.new_page(viewport={"width": 800, "height": 900}), []
    found.on("console", lambda message: problems.append(message.text))
    found.on("pageerror", lambda error: problems.append(str(error)))
    yield found
    found.close()
    assert problems == []


def show(tab: Page, path: Path, fragment: str = "") -> None:
    tab.goto("about:blank")
    tab.goto(path.as_uri() + fragment)


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "seven.html"
    made = comparison_of(("local", "fedavg", "fedfomo"), clients=7, names=SEVEN)
    path.write_text(page(made))
    return path


def expect_answers(tab: Page, names: Sequence[str]) -> None:
    """The answers that are seen are those to these sites; a page may need a moment."""
    shown = tab.locator(".answers li").filter(visible=True)
    expect(shown).to_have_text([re.compile(f"^{re.escape(name)}: ") for name in names])


def test_a_site_is_chosen_by_keyboard_and_kept_in_the_fragment(tab, seven):
    show(tab, seven)
    expect_answers(tab, SEVEN)
    tab.locator("#site").focus()
    for name in SEVEN[:2]:
        tab.keyboard.press("ArrowDown")
        expect_answers(tab, [name])
    assert tab.url.endswith("#site=Lakeside")
    assert tab.locator("tr.mine th").first.text_content() == "Lakeside"
    show(tab, seven, "#site=North%20General")
    expect_answers(tab, ["North General"])
    show(tab, seven, "#site=%3Cb%3Enobody")
    expect_answers(tab, SEVEN)


def test_without_a_script_every_answer_is_there(browser, seven):
    with browser.new_context(java_script_enabled=False) as context:
        tab = context.new_page()
        show(tab, seven, "#site=County")
        expect_answers(tab, SEVEN)
        assert not tab.locator("#site").is_visible()


def test_the_slider_and_play_show_rounds_by_keyboard(tab, seven):
    show(tab, seven)
    image, said = tab.locator(".help[open] image"), tab.locator(".rounds output")
    average = image.get_attribute("href")
    tab.locator(".rounds input").focus()
    tab.keyboard.press("ArrowRight")
    assert said.text_content() == "round 1"
    first = image.get_attribute("href")
    tab.keyboard.press("End")
    assert said.text_content() == "round 20"
    assert len({average, first, image.get_attribute("href")}) == 3
    tab.keyboard.press("Home")
    assert image.get_attribute("href") == average
    tab.keyboard.press("Tab")
    button = tab.locator("button:focus")
    assert button.text_content() == "Play"
    tab.keyboard.press(" ")
    assert (button.text_content(), button.get_attribute("aria-pressed")) == ("Stop", "true")
    tab.keyboard.press(" ")
    assert button.text_content() == "Play"


def test_a_cell_a_row_and_a_node_are_linked_by_focus_and_by_pointer(tab, seven):
    show(tab, seven)
    card = tab.locator(".help[open]")
    card.locator(".matrix svg").focus()
    tab.keyboard.press("ArrowRight")
    order = json.loads(card.get_attribute("data-order"))
    said = card.locator(".readout")
    assert said.text_content().startswith(f"{SEVEN[order[1]]} helps {SEVEN[order[0]]}: ")
    near = {one.get_attribute("data-site") for one in card.locator(".near").all()}
    assert near == {str(order[0])}
    assert card.locator(".link.lit").count() > 0
    card.locator(f'.node[data-site="{order[3]}"]').hover()
    assert said.text_content().startswith(f"{SEVEN[order[3]]} is helped on average by ")


def test_a_sites_tables_fit_on_a_narrow_screen(tab, tmp_path):
    """All of their columns are seen without scrolling."""
    path = tmp_path / "site.html"
    path.write_text(
        site_page(comparison_of(("local", "fedavg_ft", "fedfomo"), clients=7), "site-0")
    )
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.goto(path.as_uri())
    for label in ("Results by method", "Weights on peers"):
        table = tab.get_by_role("region", name=label)
        assert table.locator("th, td").count() > 6
        assert table.evaluate("one => one.scrollWidth - one.clientWidth") == 0, label


def test_the_golden_path_of_one_site(tab, tmp_path):
    """Choose, read, keep the link, print, on a narrow screen, open every part by keyboard."""
    names = ("Hôpital Saint-Éloi de Montpellier", *SEVEN[1:])
    path = tmp_path / "comparison.html"
    path.write_text(page(comparison_of(("local", "fedavg", "fedfomo"), clients=7, names=names)))
    tab.set_viewport_size({"width": 380, "height": 800})
    show(tab, path)
    tab.get_by_label("Your site", exact=True).select_option(names[0])
    expect_answers(tab, [names[0]])
    link = tab.url
    tab.goto("about:blank")
    tab.goto(link)
    expect_answers(tab, [names[0]])
    for part in tab.locator("summary").all():
        was = part.evaluate("one => one.parentElement.open")
        part.focus()
        tab.keyboard.press("Enter")
        assert part.evaluate("one => one.parentElement.open") != was
    tab.emulate_media(media="print")
    assert not tab.locator("#choose").is_visible()
    cut = "list => list.filter(e => e.scrollHeight > e.clientHeight + 1 && e.clientHeight).length"
    assert tab.locator(".tall").evaluate_all(cut) == 0
    tab.set_viewport_size({"width": 720, "height": 1000})  # an A4 page within its margins
    wide = "list => list.filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert tab.locator(".scroll").evaluate_all(wide) == 0
    assert len(tab.pdf()) > 10_000


MATRICES = ("fedfomo", "fedamp", "heurfedamp")
# Texts of one figure that overlap, figures that do, and texts outside the window.
COLLISIONS = """(() => {
  const found = [], boxes = (list) => [...list].map((one) => [one, one.getBoundingClientRect()]);
  const cross = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  const check = (list) => {
    for (let i = 0; i < list.length; i += 1) for (let j = 0; j < i; j += 1)
      if (list[i][1].width && list[j][1].width && cross(list[i][1], list[j][1]))
        found.push([j, i].map((k) => list[k][0].textContent.slice(0, 30)).join(" | "));
  };
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  document.querySelectorAll("svg").forEach((one) => {
    const texts = boxes(one.querySelectorAll("text"));
    check(texts);
    for (const [text, box] of texts) if (box.left < 0 || box.right > innerWidth)
      found.push(`outside: ${text.textContent}`);
  });
  check(boxes(document.querySelectorAll("main > section, main > div > section, header")));
  check(boxes(document.querySelectorAll(".plots figure")));
  check(boxes(document.querySelectorAll(".panels figure, .maps figure, .rounds > *")));
  if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the window");
  return found.slice(0, 10);
})()"""


def probable(run):
    """The run with probabilities of an outcome, for calibration curves."""
    said = run.outcomes
    p = np.random.default_rng(0).random(len(said.targets)).astype(np.float32)
    known = said._replace(targets=(p > 0.4).astype(int), probabilities=np.stack([1 - p, p], 1))
    return replace(run, outcomes=known)


def crowd(methods, clients):
    """A comparison of many methods and clients with long names."""
    rows = JudgedRows(("no", "yes"), "died", "sex", ("f", "m"), np.arange(40 * clients) % 2)
    names = tuple(f"Saint Somebody Clinic {i}" for i in range(clients))
    who = roster(clients, names=names, rows=rows)
    names = list(dict.fromkeys(("local", *MATRICES, "fedavg", *ALGORITHMS, *ALIASES)))[:methods]
    runs = []
    for i, method in enumerate(names):
        like = method if method in MATRICES or method == "local" else "fedavg"
        test = scores(like, i, 6, clients)
        runs.append(probable(run_of(method, who=who, test=test, rounds=6, samples=40)))
    assert len(runs) == methods
    return Comparison.of(runs)


@pytest.mark.parametrize(("methods", "clients"), [(6, 7), (30, 7), (4, 24), (6, 100), (30, 100)])
def test_nothing_overlaps_at_any_width(tab, tmp_path, methods, clients):
    path = tmp_path / "crowd.html"
    text = page(crowd(methods, clients))
    path.write_text(text)
    assert len(text.encode()) < (5_000_000 if methods == 30 else 1_000_000)
    for width in (380, 800, 1600):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme="dark" if width == 800 else "light")
        show(tab, path)
        assert tab.evaluate(COLLISIONS) == [], width

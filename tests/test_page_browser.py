"""The pages in a real browser: no error, every control by keyboard, nothing overlaps."""

import pytest

from browser import CHROMIUM, Browser
from coterie.report.page import page
from synthetic import comparison_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

SEVEN = ("North General", "Lakeside", "County", "Hilltop", "Southgate", "Riverside", "Harbour")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "seven.html"
    made = comparison_of(("local", "fedavg", "fedfomo"), clients=7, names=SEVEN)
    path.write_text(page(made))
    return path


ANSWERED = (
    "[...document.querySelectorAll('.answers li')].filter((li) => li.offsetParent)"
    ".map((li) => li.textContent.split(':')[0])"
)


def test_a_site_is_chosen_by_keyboard_and_kept_in_the_fragment(browser, seven):
    browser.scripts(True)
    browser.size(800)
    browser.open(seven)
    browser.until(ANSWERED, list(SEVEN))
    browser.value("document.getElementById('site').focus()")
    browser.press("ArrowDown")
    browser.until(ANSWERED, ["North General"])
    browser.press("ArrowDown")
    browser.until(ANSWERED, ["Lakeside"])
    assert browser.value("location.hash") == "#site=Lakeside"
    assert browser.value("document.querySelectorAll('tr.mine th')[0].textContent") == "Lakeside"
    browser.open(seven, "#site=North%20General")
    browser.until(ANSWERED, ["North General"])
    browser.open(seven, "#site=%3Cb%3Enobody")
    browser.until(ANSWERED, list(SEVEN))
    assert browser.problems == []


def test_without_a_script_every_answer_is_there(browser, seven):
    browser.scripts(False)
    browser.open(seven, "#site=County")
    browser.scripts(True)  # for our own questions; the page is loaded
    browser.until(ANSWERED, list(SEVEN))
    assert browser.value("document.getElementById('site').offsetParent") is None


def test_the_slider_and_play_show_rounds_by_keyboard(browser, seven):
    browser.size(800)
    browser.open(seven)
    picture = "document.querySelector('.help[open] image').getAttribute('href')"
    average = browser.value(picture)
    browser.value("document.querySelector('.rounds input').focus()")
    browser.press("ArrowRight")
    assert browser.value("document.querySelector('.rounds output').textContent") == "round 1"
    first = browser.value(picture)
    browser.press("End")
    assert browser.value("document.querySelector('.rounds output').textContent") == "round 20"
    assert len({average, first, browser.value(picture)}) == 3
    assert browser.value("document.querySelector('.help[open] .link').style.opacity") != ""
    browser.press("Home")
    assert browser.value(picture) == average
    browser.press("Tab")
    assert browser.value("document.activeElement.textContent") == "Play"
    browser.press(" ")
    assert browser.value("document.activeElement.textContent") == "Stop"
    assert browser.value("document.activeElement.getAttribute('aria-pressed')") == "true"
    browser.press(" ")
    assert browser.value("document.activeElement.textContent") == "Play"
    assert browser.problems == []


def test_a_cell_a_row_and_a_node_are_linked_by_focus_and_by_pointer(browser, seven):
    browser.size(800)
    browser.open(seven)
    said = "document.querySelector('.help[open] .readout').textContent"
    browser.value("document.querySelector('.help[open] .matrix svg').focus()")
    browser.press("ArrowRight")
    order = browser.value("JSON.parse(document.querySelector('.help[open]').dataset.order)")
    first, second = SEVEN[order[0]], SEVEN[order[1]]
    assert browser.value(said).startswith(f"{second} helps {first}: ")
    near = "[...document.querySelectorAll('.help[open] .near')].map((e) => e.dataset.site)"
    assert set(browser.value(near)) == {str(order[0])}
    assert browser.value("document.querySelectorAll('.help[open] .link.lit').length") > 0
    box = browser.value(
        "document.querySelector('.help[open] .graph').scrollIntoView();"
        f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector("
        f"'.help[open] .node[data-site=\"{order[3]}\"]').getBoundingClientRect())"
    )
    browser.point(*box)
    assert browser.value(said).startswith(f"{SEVEN[order[3]]} is helped on average by ")
    assert browser.problems == []

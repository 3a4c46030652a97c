"""The built pages, looked at in a browser: `make book site-test`.

Skipped where there is no built book or no Chromium; with CI set that is a failure.
"""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parent.parent
HTML = Path(os.environ.get("BOOK_HTML", ROOT / "_build" / "html"))
NOT_PAGES = {"index.html"}  # only forwards to the opening page
PAGES = sorted(
    path.relative_to(HTML).as_posix()
    for path in HTML.rglob("*.html")
    if not path.relative_to(HTML).parts[0].startswith("_") and path.name not in NOT_PAGES
)
CHAPTERS = [page for page in PAGES if page.startswith("chapters/")]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DESKTOP, PHONE = (1300, 900), (390, 844)  # width and height in pixels

# Elements that reach beyond the right edge of the window, unless something around them scrolls.
CUT_OFF = """() => {
  const scrolls = element => {
    for (let e = element; e && !e.matches('article, body'); e = e.parentElement)
      if (['auto', 'scroll'].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  return [...document.querySelectorAll('article *')]
    .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e))
    .filter(e => !e.closest('mjx-assistive-mml, .headerlink, .copybtn, button'))
    .map(e => `<${e.tagName.toLowerCase()} class="${e.className}"> ${e.textContent.trim().slice(0, 60)}`);
}"""


def absent(what):
    """Skip at home, fail in CI."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)


@pytest.fixture(scope="session")
def site():
    """Address of a server of the built pages, on this machine only."""
    if not PAGES:
        absent(f"no built book in {HTML}: run make book first")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser():
    """The system's Chromium."""
    named = os.environ.get("CHROMIUM")
    program = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not program:
        absent("no Chromium or Chrome found: install one, or set CHROMIUM to its path")
    from playwright.sync_api import sync_playwright

    # Chromium refuses its sandbox to root, which is what containers run as.
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def context(browser):
    """A function that gives the browser context of a mode and a window; pages of one context share its cache."""

    @functools.cache
    def context(mode, width, height):
        made = browser.new_context(viewport={"width": width, "height": height}, color_scheme=mode)
        made.add_init_script(f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}')")
        return made

    return context


@pytest.fixture
def visit(context, site):
    """A function that opens a page and waits until its formulas are set; `.problems` collects what went wrong."""
    pages = []

    def visit(path, mode="light", window=DESKTOP):
        page = context(mode, *window).new_page()
        pages.append(page)
        page.problems = []
        note = page.problems.append
        page.on("console", lambda message: note(f"console: {message.text}") if message.type == "error" else None)
        page.on("pageerror", lambda error: note(f"script: {error}"))
        page.on("response", lambda answer: note(f"{answer.status}: {answer.url}") if answer.status >= 400 else None)
        page.on(
            "request", lambda r: None if r.url.startswith((site, "data:", "blob:")) else note(f"elsewhere: {r.url}")
        )
        page.goto(site + path, wait_until="load")
        page.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")
        return page

    yield visit
    for page in pages:
        page.close()


@functools.cache
def soup(page):
    return BeautifulSoup((HTML / page).read_text(encoding="utf-8"), "html.parser")


def test_the_book_is_built(site):
    assert "intro.html" in PAGES
    assert CHAPTERS
    assert (HTML / "index.html").exists()


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
def test_page_loads_cleanly_and_from_here_only(visit, path):
    page = visit(path)
    page.wait_for_load_state("networkidle")
    assert page.problems == []


@pytest.mark.parametrize("path", PAGES)
def test_formulas_are_rendered(visit, path):
    page = visit(path)
    written = page.locator("article .math").count()
    assert page.locator("article .math:has(mjx-container)").count() == written
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert "$$" not in page.locator("main").inner_text()


@pytest.mark.parametrize("path", [page for page in PAGES if page != "search.html"])
def test_one_search_box(visit, path):
    page = visit(path)
    shown = page.locator(".search-button-field:visible, input[type=search]:visible")
    assert shown.count() == 1
    shown.click()
    assert page.locator("input[type=search]:visible").count() == 1


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_fits_a_phone(visit, path, mode):
    page = visit(path, mode, PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert page.evaluate(CUT_OFF) == []


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_accessible(visit, path, mode):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(path, mode)
    # Formulas and coloured code are MathJax's and the theme's; their thousands of elements take most of the time.
    page.evaluate("document.querySelectorAll('mjx-container').forEach(formula => formula.replaceChildren())")
    code = {"exclude": [["mjx-container"], ["pre"]]}
    found = Axe().run(page, code, {"resultTypes": ["violations"]}).response["violations"]
    serious = [
        f"{violation['id']}: {node['html'][:120]} {node.get('failureSummary', '')}"
        for violation in found
        if violation["impact"] in {"serious", "critical"}
        for node in violation["nodes"]
    ]
    assert not serious, "\n".join(serious)


@pytest.mark.parametrize("path", CHAPTERS)
def test_figures_stay_readable_in_dark_mode(visit, path):
    page = visit(path, "dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    behind = page.evaluate(
        "[...document.querySelectorAll('article .cell_output img')].map(e => getComputedStyle(e).backgroundColor)"
    )
    assert set(behind) <= {"rgb(255, 255, 255)"}


@pytest.mark.parametrize("path", CHAPTERS)
def test_solutions_open(visit, path):
    page = visit(path)
    solutions = page.locator("div.solution")
    assert solutions.count() > 0
    for number in range(solutions.count()):
        solution = solutions.nth(number)
        body = solution.locator(".section, [id^=solution-content]").first
        assert not body.is_visible()
        solution.locator("button.toggle-button").click()
        body.wait_for(state="visible")


def test_search_finds_fan_in(visit):
    page = visit("search.html?q=fan-in")
    first = page.locator("#search-results li a").first
    first.wait_for()
    first.click()
    assert "fan-in" in page.locator("article").inner_text().lower()
    assert page.problems == []


def test_a_link_into_a_folded_solution_unfolds_it(visit):
    anchor = next(line["id"] for path in CHAPTERS for line in soup(path).select(".solution .il-check"))
    path = next(path for path in CHAPTERS if soup(path).find(id=anchor))
    page = visit(f"{path}#{anchor}")
    page.locator(f"#{anchor}").wait_for(state="visible")
    assert page.problems == []


# --- in the files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
def test_links_and_anchors_resolve(site, path):
    broken = []
    for tag, attribute in [("a", "href"), ("img", "src"), ("script", "src"), ("link", "href")]:
        for element in soup(path).find_all(tag, attrs={attribute: True}):
            target = urlsplit(element[attribute])
            if target.scheme or target.netloc:
                continue
            file = ((HTML / path).parent / unquote(target.path)).resolve() if target.path else HTML / path
            if file.is_dir():
                file = file / "index.html"
            if not file.exists():
                broken.append(element[attribute])
            elif target.fragment and file.suffix == ".html":
                other = soup(file.relative_to(HTML.resolve() if target.path else HTML).as_posix())
                if not other.find(id=unquote(target.fragment)):
                    broken.append(element[attribute])
    assert broken == []


@pytest.mark.parametrize("path", PAGES)
def test_pictures_have_alternative_text(site, path):
    for image in soup(path).select("article img"):
        assert image.get("alt", "").strip(), image


@pytest.mark.parametrize("path", CHAPTERS)
def test_every_figure_has_caption_number_and_description(site, path):
    for image in soup(path).select(".cell_output img"):
        figure = image.find_parent("figure")
        assert figure is not None, "a cell shows a figure without mystnb metadata"
        assert figure.find("span", class_="caption-number")
        assert len(image["alt"].split()) >= 8


@pytest.mark.parametrize("path", CHAPTERS)
def test_checks_are_shown_and_pass(site, path):
    assert soup(path).select(".il-check.il-pass")
    assert soup(path).select(".il-check.il-fail") == []


# --- pages that write themselves --------------------------------------------------------------------------------------


def test_every_check_of_the_chapters_is_on_the_page_of_claims_and_nothing_else(site):
    checks = [
        (f"{path}#{line['id']}", line.select_one(".il-label").get_text(), "il-pass" in line["class"])
        for path in CHAPTERS
        for line in soup(path).select(".il-check")
    ]
    rows = [row for row in soup("claims.html").select("table.claims tbody tr") if row.a]
    listed = [(row.a["href"], row.a.get_text(), "✓" in row.td.get_text()) for row in rows]
    assert listed == checks
    for path in ("intro.html", "claims.html"):
        assert f"{len(checks):,} claims, all checked" in soup(path).select_one("article").get_text()


def test_the_words_of_every_check_are_taken_apart(site):
    assert soup("claims.html").select("table.claims td[colspan]:not(:first-child)") == []


def test_the_package_s_functions_lead_to_their_chapters(site):
    from initlib import __all__ as names
    from initlib.schemes import SCHEMES

    links = {link["href"].split("#")[0] for link in soup("api.html").select("article a[href^='chapters/']")}
    assert links <= set(CHAPTERS)
    assert len(links) > 5
    entries = {
        entry["id"].rsplit(".")[-1] for entry in soup("api.html").select("article [id^='initlib.'], [id^=module-]")
    }
    sections = {section["id"].removeprefix("initlib-") for section in soup("api.html").select("section")}
    assert set(names) <= entries | sections
    assert len(soup("schemes.html").select("tr[id]")) == len(SCHEMES)


@pytest.mark.parametrize("path", [page for page in PAGES if page != "search.html"])
def test_other_sites_get_a_title_and_a_description(site, path):
    tags = {tag.get("property") or tag.get("name"): tag["content"] for tag in soup(path).select("head meta[content]")}
    assert tags["og:title"] == soup(path).h1.find(string=True, recursive=False)
    assert 25 <= len(tags["description"]) <= 250
    assert tags["og:description"] == tags["description"]
    assert len(soup(path).select("meta[name=description]")) == 1


def test_no_two_pages_have_the_same_description(site):
    texts = [tag["content"] for path in PAGES for tag in soup(path).select("meta[name=description]")]
    assert len(set(texts)) == len(texts) >= len(PAGES) - 1

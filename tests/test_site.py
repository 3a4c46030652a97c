"""The built pages, looked at in a browser: `make book site-test`.

Skipped where there is no built book or no Chromium; with CI set that is a failure.
"""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import nbformat
import pdf
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parent.parent
HTML = Path(os.environ.get("BOOK_HTML", ROOT / "_build" / "html"))
NOT_PAGES = {"index.html"}  # only forwards to the opening page
FILES = {
    path.relative_to(HTML).as_posix()
    for path in HTML.rglob("*.html")
    if not path.relative_to(HTML).parts[0].startswith("_") and path.name not in NOT_PAGES
}
PAGES = sorted(FILES, key=lambda page: (not page.startswith("chapters/"), page))
CHAPTERS = [page for page in PAGES if page.startswith("chapters/")]
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

# On paper nothing scrolls: what reaches beyond its own box is lost.
CUT_OFF_ON_PAPER = """() => [...document.querySelectorAll('article *')]
  .filter(e => e.checkVisibility() && !e.closest('mjx-container, .headerlink, svg'))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1
    || (e.clientWidth && getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1))
  .map(e => `<${e.tagName.toLowerCase()} class="${e.className}"> ${e.textContent.trim().slice(0, 60)}`)"""


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
    if not pdf.chromium():
        absent("no Chromium or Chrome found: install one, or set CHROMIUM to its path")
    expect.set_options(timeout=30_000)  # milliseconds, as for all else that the browser waits for
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**pdf.options())
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def visit(browser, site):
    """A function that opens a page and waits until its formulas are set; `.problems` collects what went wrong."""

    @functools.cache
    def context(mode, width, height):  # pages of one context share its cache
        made = browser.new_context(viewport={"width": width, "height": height}, color_scheme=mode)
        made.add_init_script(f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}')")
        return made

    def visit(path, mode="light", window=DESKTOP):
        page = context(mode, *window).new_page()
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

    return visit


@pytest.fixture(scope="session")
def seen(visit):
    """`visit`, for tests that leave a page as it is but for what they unfold: one visit serves all tests of a path."""
    opened = {}

    def seen(path, mode="light", window=DESKTOP):
        if any(other != path for other, *_ in opened):
            for page in opened.values():
                page.close()
            opened.clear()
        key = path, mode, window
        if key not in opened or opened[key].is_closed():
            opened[key] = visit(*key)
        return opened[key]

    return seen


@pytest.fixture
def fresh(visit):
    """`visit`, for tests that go on from there; their pages are closed behind them."""
    opened = []

    def fresh(*arguments):
        opened.append(visit(*arguments))
        return opened[-1]

    yield fresh
    for page in opened:
        page.close()


@pytest.fixture
def without_scripts(browser, site):
    """A page of a browser that runs no JavaScript, and the site's address."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
    yield context.new_page(), site
    context.close()


def each(paths):
    """A test for each path; all tests of a path come one after another, in one process."""
    marked = [pytest.param(path, marks=pytest.mark.xdist_group(path)) for path in paths]
    return pytest.mark.parametrize("path", marked, scope="module")


@functools.cache
def soup(page):
    return BeautifulSoup((HTML / page).read_text(encoding="utf-8"), "html.parser")


@functools.cache
def anchors(file):
    return {element["id"] for element in soup(file.relative_to(HTML.resolve()).as_posix()).find_all(id=True)}


@functools.cache
def book():
    """The pages in the order of the table of contents."""

    def pages(entry):
        yield entry["file"] + ".html"
        for section in entry.get("sections", []):
            yield from pages(section)

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    entries = [{"file": toc["root"]}, *(entry for part in toc["parts"] for entry in part["chapters"])]
    return [page for entry in entries for page in pages(entry)]


def test_the_book_is_built(site):
    assert set(book()) == FILES - {"search.html"}
    assert CHAPTERS
    assert (HTML / "index.html").exists()


# --- in the browser: every page ---------------------------------------------------------------------------------------

UNFOLD = "document.querySelectorAll('.toggle-hidden button.toggle-button').forEach(button => button.click())"


@each(PAGES)
def test_page_loads_cleanly_and_from_here_only(seen, path):
    page = seen(path)
    page.wait_for_load_state("networkidle")
    assert page.problems == []


@each(PAGES)
def test_formulas_are_rendered(seen, path):
    page = seen(path)
    written = page.locator("article .math").count()
    assert page.locator("article .math:has(mjx-container)").count() == written
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert "$$" not in page.locator("main").inner_text()


@each([page for page in PAGES if page != "search.html"])
def test_one_search_box(seen, path):
    page = seen(path)
    shown = page.locator(".search-button-field:visible, input[type=search]:visible")
    expect(shown).to_have_count(1)
    shown.click()
    expect(page.locator("input[type=search]:visible")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("input[type=search]:visible")).to_have_count(0)


@each(CHAPTERS)
def test_solutions_open(seen, path):
    page = seen(path)
    solutions = page.locator("div.solution")
    assert solutions.count() > 0
    for number in range(solutions.count()):
        solution = solutions.nth(number)
        body = solution.locator(".section, [id^=solution-content]").first
        assert not body.is_visible()
        solution.locator("button.toggle-button").click()
        body.wait_for(state="visible")


@pytest.mark.parametrize("mode", ["light", "dark"])
@each(PAGES)
def test_fits_a_phone(seen, path, mode):
    page = seen(path, "light", PHONE)
    page.evaluate(f"document.documentElement.dataset.theme = '{mode}'")
    page.evaluate(UNFOLD)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert page.evaluate(CUT_OFF) == []


# What stands behind a picture at its upper left corner, from 0 (black) to 1 (white), and the room around it.
GROUND = """picture => {
  const canvas = document.createElement('canvas').getContext('2d');
  canvas.fillStyle = getComputedStyle(document.body).backgroundColor;
  canvas.fillRect(0, 0, 1, 1);
  const page = canvas.getImageData(0, 0, 1, 1).data[0] / 255;
  canvas.fillStyle = getComputedStyle(picture).backgroundColor;
  canvas.fillRect(0, 0, 1, 1);
  canvas.drawImage(picture, 0, 0, 1, 1, 0, 0, 1, 1);
  const ground = canvas.getImageData(0, 0, 1, 1).data[0] / 255;
  return {page, ground, room: parseFloat(getComputedStyle(picture).paddingLeft)};
}"""


@each(CHAPTERS)
def test_figures_stay_readable_in_dark_mode(seen, path):
    """They are drawn in dark ink: in dark mode they lie on a light sheet with a margin."""
    page = seen(path, "dark")
    figures = page.locator("article figure img")
    assert figures.count() > 0
    for number in range(figures.count()):
        found = figures.nth(number).evaluate(GROUND)
        assert found["page"] < 0.2
        assert found["ground"] > 0.9
        assert found["room"] >= 4


@pytest.mark.parametrize("mode", ["light", "dark"])
@each(PAGES)
def test_accessible(seen, path, mode):
    """The last test of a visit: it takes away what would cost axe most of its time, and closes the page."""
    page = seen(path, mode)
    page.evaluate(UNFOLD)
    # Formulas and coloured code are MathJax's and the theme's; rows of a long table are alike.
    page.evaluate("document.querySelectorAll('mjx-container').forEach(formula => formula.replaceChildren())")
    page.evaluate("document.querySelectorAll('tbody tr:nth-child(n + 12)').forEach(row => row.remove())")
    code = {"exclude": [["mjx-container"], ["pre"]]}
    found = Axe().run(page, code, {"resultTypes": ["violations"]}).response["violations"]
    serious = [
        f"{violation['id']}: {node['html'][:120]} {node.get('failureSummary', '')}"
        for violation in found
        if violation["impact"] in {"serious", "critical"}
        for node in violation["nodes"]
    ]
    page.close()
    assert not serious, "\n".join(serious)


# --- in the browser: what a reader does -------------------------------------------------------------------------------


@pytest.mark.parametrize(("button", "pages"), [("right-next", book()), ("left-prev", book()[::-1])], ids=["on", "back"])
def test_a_walk_through_the_book_passes_every_page_in_order(without_scripts, button, pages):
    page, site = without_scripts
    page.goto(site + pages[0])
    passed = [page.url.removeprefix(site)]
    while len(passed) <= len(pages) and (link := page.locator(f"a.{button}")).count():
        page.goto(urljoin(page.url, link.get_attribute("href")), wait_until="domcontentloaded")
        passed.append(page.url.removeprefix(site))
    assert passed == pages


def results(page):
    """The links that a search found: they come one by one."""
    expect(page.locator("#search-results .search-summary")).to_contain_text("Search finished")
    page.wait_for_load_state("networkidle")
    return page.locator("#search-results li a")


def test_search_finds_fan_in(fresh):
    page = fresh("search.html?q=fan-in")
    results(page).first.click()
    page.wait_for_url(lambda address: "search.html" not in address)
    expect(page.locator("article")).to_contain_text("fan-in", ignore_case=True)
    assert page.problems == []


@pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_search_dialog_finds_fan_in(fresh, window):
    page = fresh("notation.html", "light", window)
    if window == DESKTOP:
        page.keyboard.press("Control+k")
    else:
        page.locator("button.search-button:visible").click()
    page.locator("input[type=search]:visible").fill("fan-in")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=fan-in*")
    assert any("/chapters/" in link.evaluate("link => link.href") for link in results(page).all())
    assert page.evaluate("document.documentElement.scrollWidth") <= window[0]
    assert page.problems == []


def test_the_download_button_gives_the_notebook(fresh):
    page = fresh(CHAPTERS[0])
    page.locator(".dropdown-download-buttons > button").click()
    with page.expect_download() as download:
        page.locator(".btn-download-source-button").click()
    source = (ROOT / CHAPTERS[0]).with_suffix(".ipynb")
    assert download.value.suggested_filename == source.name
    assert Path(download.value.path()).read_bytes() == source.read_bytes()


def test_code_is_copied(fresh):
    page = fresh(CHAPTERS[0])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    cell = page.locator("div.cell_input").first
    cell.hover()
    cell.locator("button.copybtn").click()
    page.locator("button.copybtn.success").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").strip() == cell.locator("pre").inner_text().strip()


def test_the_keyboard_is_enough(fresh):
    page = fresh(CHAPTERS[0])
    focused = page.locator(":focus")
    outline = "e => parseFloat(getComputedStyle(e).outlineWidth) || getComputedStyle(e).boxShadow !== 'none'"
    page.keyboard.press("Tab")
    expect(focused).to_have_text("Skip to main content")
    expect(focused).to_be_in_viewport(ratio=1)
    page.keyboard.press("Enter")
    page.wait_for_url("**#main-content")
    page.keyboard.press("Tab")
    expect(page.locator("main :focus")).to_have_count(1)
    for _ in range(12):  # buttons above the article, then links and code in it
        assert focused.evaluate(outline), focused.evaluate("e => e.outerHTML")
        page.keyboard.press("Tab")
    solution = page.locator("div.solution").first
    solution.locator("button.toggle-button").focus()
    page.keyboard.press("Enter")
    solution.locator("[id^=solution-content]").first.wait_for(state="visible")


def test_without_javascript_everything_is_there(without_scripts):
    page, site = without_scripts
    page.goto(site + CHAPTERS[0])
    for part in ("article h1", "nav.bd-links", "div.cell_input pre", "article img", ".il-check"):
        assert page.locator(part).first.is_visible(), part
    for solution in page.locator("div.solution").all():
        assert solution.locator("[id^=solution-content]").first.is_visible()
    assert page.locator("article .math").first.inner_text().strip()
    ground, ink = (
        page.locator("article p").first.evaluate(f"e => getComputedStyle({of}).{colour}")
        for of, colour in (("document.body", "backgroundColor"), ("e", "color"))
    )
    assert ground != ink


def test_a_link_into_a_folded_solution_unfolds_it(fresh):
    anchor = next(line["id"] for path in CHAPTERS for line in soup(path).select(".solution .il-check"))
    path = next(path for path in CHAPTERS if soup(path).find(id=anchor))
    page = fresh(f"{path}#{anchor}")
    page.locator(f"#{anchor}").wait_for(state="visible")
    assert page.problems == []


# --- on paper ---------------------------------------------------------------------------------------------------------

PAPER = 680, 960  # the text of an A4 page, in the browser's pixels of 1/96 inch


@pytest.mark.parametrize("mode", ["light", "dark"])
@each([page for page in PAGES if page != "search.html"])
def test_prints_on_white_paper_with_nothing_cut(fresh, path, mode):
    page = fresh(path, mode, PAPER)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate(CUT_OFF_ON_PAPER) == []
    for part in [".bd-sidebar", ".bd-header-article", "#jb-print-docs-body", ".prev-next-footer", "button", "summary"]:
        assert page.locator(part).filter(visible=True).count() == 0, part
    assert page.locator("article h1").is_visible()
    for solution in page.locator("div.solution").all():
        assert solution.locator("[id^=solution-content]").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == mode


def test_a_page_becomes_a_pdf(site, tmp_path):
    """As `make pdf` makes one of the whole book."""
    target = tmp_path / "page.pdf"
    subprocess.run([sys.executable, ROOT / "tools" / "pdf.py", HTML / CHAPTERS[0], target], check=True)
    printed = target.read_bytes()
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") > 5
    assert b"/Outlines" in printed


# --- in the files -----------------------------------------------------------------------------------------------------


@each(PAGES)
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
            fragment = unquote(target.fragment) if file.suffix == ".html" else ""
            if not file.exists() or (fragment and fragment not in anchors(file.resolve())):
                broken.append(element[attribute])
    assert broken == []


@each(CHAPTERS)
def test_the_download_is_the_notebook_itself(site, path):
    link = soup(path).select_one("a.btn-download-source-button")["href"]
    loaded = nbformat.read((HTML / path).parent / link, 4)
    nbformat.validate(loaded)
    source = nbformat.read((ROOT / path).with_suffix(".ipynb"), 4)
    assert [(cell.id, cell.cell_type, cell.source) for cell in loaded.cells] == [
        (cell.id, cell.cell_type, cell.source) for cell in source.cells
    ]


@each(PAGES)
def test_buttons_of_the_repository_are_there_if_it_has_an_address(site, path):
    """Without one they would lead nowhere. Where they lead to is tested in test_build.py."""
    buttons = soup(path).select(".btn-source-edit-button, .btn-source-repository-button, .btn-launch")
    assert bool(buttons) <= bool(os.environ.get("BOOK_REPOSITORY_URL"))


@each(PAGES)
def test_pictures_have_alternative_text(site, path):
    for image in soup(path).select("article img"):
        assert image.get("alt", "").strip(), image


@each(CHAPTERS)
def test_every_figure_has_caption_number_and_description(site, path):
    for image in soup(path).select(".cell_output img"):
        figure = image.find_parent("figure")
        assert figure is not None, "a cell shows a figure without mystnb metadata"
        assert figure.find("span", class_="caption-number")
        assert len(image["alt"].split()) >= 8


@each(CHAPTERS)
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


@each([page for page in PAGES if page != "search.html"])
def test_other_sites_get_a_title_and_a_description(site, path):
    tags = {tag.get("property") or tag.get("name"): tag["content"] for tag in soup(path).select("head meta[content]")}
    assert tags["og:title"] == soup(path).h1.find(string=True, recursive=False)
    assert 25 <= len(tags["description"]) <= 250
    assert tags["og:description"] == tags["description"]
    assert len(soup(path).select("meta[name=description]")) == 1


def test_no_two_pages_have_the_same_description(site):
    texts = [tag["content"] for path in PAGES for tag in soup(path).select("meta[name=description]")]
    assert len(set(texts)) == len(texts) >= len(PAGES) - 1

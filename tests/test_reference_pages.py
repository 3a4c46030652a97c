"""The pages that write themselves: every claim, the scheme card, the package, and what others show of a page."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import book_api
import book_claims
import book_descriptions
import book_nodes
import book_schemes
import nbformat
import numpy as np
import pytest
from book_claims import parse
from bs4 import BeautifulSoup
from docutils import nodes
from docutils.utils import new_document
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from scipy import stats

from initlib import checks, schemes
from initlib.layers import LayerMoments

ROOT = Path(__file__).resolve().parent.parent


# --- the words of a check, taken apart --------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    """What checks show, instead of showing it."""
    outcomes = []
    monkeypatch.setattr(checks, "display", outcomes.append)

    def said(function, *arguments, **options):
        """The claim that the page would list for one call."""
        try:
            function("a claim", *arguments, **options)
        except checks.CheckFailed:
            assert not outcomes[-1].passed
        ((_, claim),) = read(outcomes[-1]._repr_html_())
        return claim

    return said


def read(*html):
    """Pairs of a line's anchor and its claim, from the outputs of a page."""
    document = new_document("page")
    section = nodes.section("", nodes.title("", "A heading"), ids=["taken"])
    section += [nodes.raw("", text, format="html") for text in html]
    document += section
    claims = book_claims.read_claims(document)
    lines = BeautifulSoup(section.astext(), "html.parser").find_all(class_="il-check")
    assert [line["id"] for line in lines] == [claim.anchor for claim in claims]
    return [(claim.anchor, claim) for claim in claims]


def numbers(claim):
    return claim.predicted, claim.measured, claim.off, claim.allowed


NETWORKS = 2.0 + 0.01 * np.array([-1.0, 0.0, 1.0] * 10)


def test_a_mean_over_networks(said):
    claim = said(checks.check, NETWORKS, 2.0)
    assert claim.passed
    assert claim.statistical
    assert numbers(claim) == ("2", "2 ± 0.002", "0.0 s.e.", f"{stats.t.isf(checks.ALPHA / 2, 29):.1f}")
    claim = said(checks.check, np.stack([NETWORKS, NETWORKS], 1), [2.0, 2.001], margin=0.01)
    assert claim.passed
    assert numbers(claim)[:3] == ("2.001", "2 ± 0.002", "0.7 s.e. (worst of 2)")
    assert claim.allowed == f"{stats.t.isf(checks.ALPHA / 4, 29):.1f} + 0.01"


def test_a_deterministic_result(said):
    assert numbers(said(checks.check_close, 1.00000001, 1.0)) == ("1", "1", "1e-08", "1e-06")
    assert numbers(said(checks.check_close, [1.0, -2.1], [1.0, -2.0], rtol=0.1)) == (
        *("-2", "-2.1", "0.1 (worst of 2)", "0.2"),
    )


def test_equality(said):
    assert numbers(said(checks.check_exact, 3, 3)) == ("3", "3", "0", "0")
    assert not said(checks.check_exact, 3, 3).statistical
    assert numbers(said(checks.check_exact, [True, False], [True, False])) == ("2 entries", "2 entries", "0", "0")


def test_an_inequality(said):
    low = NETWORKS - 1
    claim = said(checks.check_less, low, 2.0)
    assert claim.predicted == "below 2"
    assert claim.measured == "1"
    assert re.fullmatch(r"\S+ s\.e\. below", claim.off)
    assert claim.allowed == "at least 3.4"
    assert numbers(said(checks.check_less, [1.0, 1.0], 2.0)) == ("below 2", "1", "", "")
    pair = said(checks.check_less, np.stack([low, low], 1), np.stack([NETWORKS, NETWORKS], 1))
    assert pair.off.endswith("(closest of 2)")


FAILURES = {
    "far off": (checks.check, (NETWORKS, 3.0), {}),
    "too coarse": (checks.check, (100 * NETWORKS - 198, 2.0), {}),
    "not finite": (checks.check, (np.append(NETWORKS, math.inf), 2.0), {}),
    "not close": (checks.check_close, (1.0, 2.0), {}),
    "nan": (checks.check_close, (math.nan, 2.0), {}),
    "unequal": (checks.check_exact, ([1, 2], [1, 3]), {}),
    "not less": (checks.check_less, (NETWORKS, 1.0), {}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_check_is_not_listed_as_passed(said, name):
    function, arguments, options = FAILURES[name]
    claim = said(function, *arguments, **options)
    assert not claim.passed
    assert claim.predicted == ""
    assert claim.measured  # all words of the check, with the reason
    assert book_claims.summary({"page": [claim]}) == "1 claims, 1 of them failed"


def test_every_function_that_checks_is_tried_here():
    tried = {function.__name__ for function, _, _ in FAILURES.values()}
    assert tried == {name for name in vars(checks) if name.startswith("check")} - {"checks"}


def test_unknown_words_stay_together():
    claim = parse("label", "about three, give or take", True)
    assert numbers(claim) == ("", "about three, give or take", "", "")
    assert claim.passed


LINE = '<div class="il-check {kind}">{label}<span class="il-numbers">exactly 1</span></div>'


def line(label="x", kind="il-pass"):
    return LINE.format(kind=kind, label=f'<span class="il-label">{label}</span>')


@pytest.mark.parametrize("kind", ["", "il-fail", "il-pass il-fail", "il-passed"])
def test_only_a_line_that_says_so_has_passed(kind):
    ((_, claim),) = read(line(kind=kind))
    assert not claim.passed


LABELS = {
    "empty": "",
    "blank": " \n ",
    "markup": "&lt;script&gt;alert(1)&lt;/script&gt;",
    "directive": "{claims}`number` and **stars** and $x_1$",
    "long": "word " * 500,
    "Greek": "σ² ∝ 1/m",
    "symbols": "²±∞",
    "quotes": "\" onclick='x' --",
    "collision": "taken",
}


@pytest.mark.parametrize("name", LABELS)
def test_any_label_gets_an_anchor_of_its_own(name):
    found = read(line(LABELS[name]), line(LABELS[name]))
    anchors = [anchor for anchor, _ in found]
    assert len(set(anchors)) == 2
    assert all(re.fullmatch(r"claim-[a-z0-9-]{1,70}", anchor) for anchor in anchors)
    assert found[0][1].section == "A heading"


def test_a_line_without_a_label_or_numbers_is_still_a_claim():
    (_, claim), (_, other) = read(LINE.format(kind="il-pass", label=""), '<div class="il-check il-pass"></div>')
    assert claim.label == other.label == ""
    assert claim.measured == "1"
    assert other.measured == ""


def test_several_lines_in_one_output_and_none_in_others():
    found = read(line("a") + line("b"), "<p>il-check is a class</p>", "<table></table>")
    assert [claim.label for _, claim in found] == ["a", "b"]


def test_summary_in_words():
    good, bad = parse("a", "exactly 1", True), parse("b", "exactly 1", False)
    assert book_claims.summary({}) == "no claims checked: the chapters were not run"
    assert book_claims.summary({"p": [good] * 1200, "q": [good]}) == "1,201 claims, all checked"
    assert book_claims.summary({"p": [good, bad], "q": [bad]}) == "3 claims, 2 of them failed"


# --- tables and chapters ----------------------------------------------------------------------------------------------


def test_a_chapter_s_number_is_that_of_its_file():
    assert book_nodes.chapter_number("chapters/08b_convolutional") == "08b"
    assert book_nodes.chapter_number("notation") is None
    assert book_nodes.chapter_number("chapters/8_short") is None
    found = {"chapters/10_a", "chapters/08b_b", "intro", "chapters/08_c"}
    assert list(book_nodes.chapters(SimpleNamespace(found_docs=found))) == ["08", "08b", "10"]


@pytest.mark.parametrize("cells", [0, 3])
def test_a_row_that_does_not_fit_the_header_is_refused(cells):
    with pytest.raises(ValueError, match=f"row must have 1 to 2 cells, as the header has, got {cells}"):
        book_nodes.table(("a", "b"), [["x"] * cells])


@pytest.mark.parametrize(
    ("docstring", "linked"),
    [
        ("Introduced in chapter 03.", ["03"]),
        (
            "Introduced in chapter 03; the averages in chapters 04 and 05, the gains in 06 and 07.",
            ["03", "04", "05", "06", "07"],
        ),
        ("Introduced in\nchapter 08b", ["08b"]),
        ("Introduced in chapter 08b\n\nArgs 12", ["08b"]),
        ("Source: :cite:p:`a2016`. Introduced in chapter 10. In 99 of 100 cases.", ["10"]),
        ("the constant 0.5 of chapter 01, and 30 layers", ["01"]),
        ("Chapter 12 of version 3.11", ["12"]),
        ("chapter 120, chapter 1, chapter 04.5", []),
        ("Already :chapter:`03`.", []),
        ("", []),
    ],
)
def test_chapters_in_docstrings_become_links(docstring, linked):
    found = book_api.link_chapters(docstring)
    assert re.findall(r":chapter:`(.*?)`", found) == (linked or re.findall(r":chapter:`(.*?)`", docstring))
    assert re.sub(r":chapter:`(.*?)`", r"\1", found) == re.sub(r":chapter:`(.*?)`", r"\1", docstring)


def test_modules_come_in_the_order_of_the_package_s_docstring():
    import initlib

    names = book_api.modules(initlib)
    assert names[0] == "initlib.runtime"
    assert names.index("initlib.fans") < names.index("initlib.schemes") < names.index("initlib.signal")
    assert set(names) == {f"initlib.{path.stem}" for path in (ROOT / "initlib").glob("[a-z]*.py")}


def test_signatures_name_array_like_and_are_lines():
    full = f"(x: {book_api.ARRAY_LIKE} | None = None)"
    found = book_api.process_signature(None, "function", "f", None, {}, full, book_api.ARRAY_LIKE)
    assert found == ("(x: ~numpy.typing.ArrayLike | None = None)", "~numpy.typing.ArrayLike")
    assert book_api.process_signature(None, "data", "f", None, {}, None, None) == (None, None)
    for kind, shown in ((LayerMoments, ""), (schemes.Scheme, "(name)")):
        assert book_api.process_signature(None, "class", "C", kind, {}, "(name)", None) == (shown, None)
    body = '<dt class="sig">f(<dl>\n<dd><em>x</em>,</dd>\n<dd>y</dd>\n</dl>\n)</dt><dl><dt>a</dt><dd>b</dd></dl>'
    context = {"body": body}
    book_api.repair_signatures(None, "api", "page.html", context, None)
    soup = BeautifulSoup(context["body"], "html.parser")
    assert [part.get_text() for part in soup.select("span.sig-line")] == ["x,", "y"]
    assert [part.name for part in soup.select_one("dl").find_all()] == ["dt", "dd"]
    book_api.repair_signatures(None, "search", "search.html", nothing := {}, None)
    assert nothing == {}


# --- the scheme card --------------------------------------------------------------------------------------------------


def test_the_card_holds_every_scheme_in_each_table():
    names = list(schemes.SCHEMES)
    for headers, rows in (book_schemes.drawn(), book_schemes.numbers()):
        assert [row[0][0].astext() for row in rows] == names
        assert {len(row) for row in rows} == {len(headers)}
    assert sorted(scheme.name for group in book_schemes.families().values() for scheme in group) == sorted(names)


@pytest.mark.parametrize("scheme", schemes.SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_every_scheme_says_what_it_is_for_and_where_it_comes_from(scheme):
    assert scheme.use
    assert (ROOT / "chapters").glob(f"{scheme.chapter}_*.ipynb")
    assert len(list((ROOT / "chapters").glob(f"{scheme.chapter}_*.ipynb"))) == 1
    if scheme.name != "zeros":
        assert re.search(rf"^@\w+{{{scheme.source},", (ROOT / "references.bib").read_text(), re.MULTILINE)


def test_use_and_chapter_are_no_part_of_a_scheme_s_identity():
    other = schemes.he_normal.replace(use="something else", chapter="99")
    assert other == schemes.he_normal
    assert repr(other) == repr(schemes.he_normal)
    assert hash(other) == hash(schemes.he_normal)


def test_numbers_of_the_card_are_those_of_the_schemes():
    _, rows = book_schemes.numbers()
    for row, scheme in zip(rows, schemes.SCHEMES.values(), strict=True):
        variance = scheme.variance(*book_schemes.FANS)
        assert float(row[1]) == pytest.approx(variance, rel=1e-3)
        if isinstance(scheme, schemes.Scheme):
            bound = scheme.bound(*book_schemes.FANS)
            assert float(row[3].replace("∞", "inf")) == pytest.approx(bound, rel=1e-3)


def test_a_table_of_the_package_in_another_order_is_noticed(monkeypatch):
    shown = schemes.table()
    swapped = [shown.rows[1], shown.rows[0], *shown.rows[2:]]
    monkeypatch.setattr(schemes, "table", lambda *_: SimpleNamespace(headers=shown.headers, rows=swapped))
    with pytest.raises(ValueError, match="must follow SCHEMES, got 'lecun_normal' for 'zeros'"):
        book_schemes.named()


# --- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paragraphs", "expected"),
    [
        ([], ""),
        (["Why?", "Because. " + "Long " * 60], "Why? Because."),
        (
            ["A first paragraph that is long enough on its own, and says what the page is about, at once.", "Second."],
            "A first paragraph that is long enough on its own, and says what the page is about, at once.",
        ),
        (["Which variance?", r"It is \sigma_w^2. More."], "Which variance?"),
        ([r"A factor x^{2} in E[x]. More."], "A factor x^2 in E[x]. More."),
        (["You will"], "You will"),
        (["word " * 100], ("word " * 39).strip() + "…"),
        (["Most follow one formula. It is this: $g^2$."], "Most follow one formula."),
    ],
)
def test_descriptions_are_whole_sentences_without_formulas(paragraphs, expected):
    paragraphs = [" ".join(text.split()) for text in paragraphs]
    assert book_descriptions.describe(paragraphs) == expected
    assert len(book_descriptions.describe(paragraphs)) <= book_descriptions.LONGEST


# --- in Sphinx, on a small book ---------------------------------------------------------------------------------------

CONF = """
project = "A small book"
extensions = ["myst_nb", "sphinxcontrib.bibtex", "book_claims", "book_api", "book_descriptions"]
exclude_patterns = ["_build"]
nb_execution_mode = "off"
bibtex_bibfiles = ["references.bib"]
myst_enable_extensions = ["dollarmath"]
napoleon_use_param = napoleon_use_rtype = False
"""
PACKAGE = {
    "__init__": '"""A package.\n\n- :mod:`small.second`\n- :mod:`small.first`\n"""\n',
    "first": '"""The first."""\n\n#: A limit: in bytes, say.\nLIMIT = 3\n\n\ndef hidden():\n    pass\n',
    "second": '''"""The second."""


def double(x):
    """Twice ``x``.

    Parameters
    ----------
    x : array, shape (R, ...)
        Any.

    Raises
    ------
    ValueError, TypeError
        Never.

    Notes
    -----
    Introduced in chapter 01, used in chapter 02.
    """
''',
    "_private": "raise RuntimeError\n",
}
PAGES = {
    "index": '---\nmyst:\n  html_meta:\n    description: A "book".\n---\n# Index\n\nHere: {claims}`summary`, '
    "{claims}`number`.\n",
    "claims": "# Claims\n\nAll of them.\n\n```{claims}\n```\n",
    "api": "# API\n\n```{package} small\n```\n",
    "bibliography": "# Bibliography\n\n```{bibliography}\n```\n",
}


class SmallBook:
    """A book in a folder, built by Sphinx in a process of its own; nothing is executed."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "chapters").mkdir()
        (folder / "small").mkdir()
        (folder / "conf.py").write_text(CONF)
        (folder / "references.bib").write_text((ROOT / "references.bib").read_text())
        for name, text in PACKAGE.items():
            (folder / "small" / f"{name}.py").write_text(text)
        for name, text in PAGES.items():
            (folder / f"{name}.md").write_text(text)

    def chapter(self, name, *outputs, title="A <title> & more", text="*Why?*\n\nBecause it is so."):
        """A chapter with an output for each string of HTML."""
        data = [new_output("display_data", {"text/html": html, "text/plain": "x"}) for html in outputs]
        cells = [new_markdown_cell(f"# {title}\n\n{text}\n\n## Part"), new_code_cell("check()", outputs=data)]
        kernel = {"language_info": {"name": "python"}}
        nbformat.write(new_notebook(cells=cells, metadata=kernel), self.folder / "chapters" / f"{name}.ipynb")

    def build(self, *options):
        """Build it; warnings, less colours and addresses."""
        path = os.pathsep.join(map(str, (self.folder, ROOT, ROOT / "_ext")))
        command = [sys.executable, "-m", "sphinx", "-q", "-n", "--no-color", "-b", "html", *options, ".", "_build/html"]
        done = subprocess.run(
            command, cwd=self.folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        warnings = [line.split(": ", 1)[-1] for line in done.stderr.splitlines() if line.strip()]
        return [warning for warning in warnings if "isn't included in any toctree" not in warning]

    def page(self, name):
        return BeautifulSoup(
            (self.folder / "_build" / "html" / f"{name}.html").read_text(encoding="utf-8"), "html.parser"
        )

    def claims(self):
        """Label, address and first mark of every claim on the page of claims."""
        return [
            (link.get_text(), link["href"], link.parent.get_text().split()[0])
            for link in self.page("claims").select("table.claims td a")
        ]

    def resolves(self, href, page="claims.html"):
        file, _, name = href.partition("#")
        target = self.folder / "_build" / "html" / (file or page)
        return bool(BeautifulSoup(target.read_text(encoding="utf-8"), "html.parser").find(id=name))


@pytest.fixture
def book(tmp_path):
    return SmallBook(tmp_path)


def test_the_page_of_claims_follows_the_chapters_from_build_to_build(book):
    book.chapter("01_one", line("a &amp; b"), line("again"), line("again"))
    book.chapter("10_ten", line("z"), title="Ten")
    book.chapter("08b_two", "<p>no check</p>", "".join(line(label) for label in LABELS.values()))
    assert book.build() == []
    shown = book.claims()
    assert len(shown) == 3 + len(LABELS) + 1
    assert all(book.resolves(href) for _, href, _ in shown)
    assert [mark for *_, mark in shown] == ["✓"] * len(shown)
    assert LABELS["quotes"] in [label for label, *_ in shown]  # as written, with straight quotes
    assert [label for label, *_ in shown[:3]] == ["a & b", "again", "again"]
    assert book.page("claims").find("script", string=re.compile("alert")) is None
    headings = [heading.get_text().rstrip("¶#") for heading in book.page("claims").select("h2")]
    assert headings == ["Chapter 1: A <title> & more", "Chapter 8b: A <title> & more", "Chapter 10: Ten"]
    number = len(shown)
    assert f"Here: {number} claims, all checked, {number}." in book.page("index").get_text()
    overview = [
        [cell.get_text() for cell in row("td")] for row in book.page("claims").select(".claims-overview tbody tr")
    ]
    assert [row[:2] for row in overview] == [
        ["Chapter 1: A <title> & more", "3"],
        ["Chapter 8b: A <title> & more", str(len(LABELS))],
        ["Chapter 10: Ten", "1"],
        ["all", str(number)],
    ]
    assert all(book.resolves(link["href"]) for link in book.page("claims").select(".claims-overview a"))

    # A chapter changes, another comes, one goes.
    book.chapter("01_one", line("a &amp; b"), line("new", kind="il-fail"))
    book.chapter("09_nine", line("nine"))
    (book.folder / "chapters" / "08b_two.ipynb").unlink()
    assert book.build() == []
    assert [(label, mark) for label, _, mark in book.claims()] == [
        ("a & b", "✓"),
        ("new", "✗"),
        ("nine", "✓"),
        ("z", "✓"),
    ]
    assert all(book.resolves(href) for _, href, _ in book.claims())
    assert "Here: 4 claims, 1 of them failed, 4." in book.page("index").get_text()

    # One goes and nothing else happens; then a build in which nothing happens at all.
    (book.folder / "chapters" / "01_one.ipynb").unlink()
    for _ in range(2):
        assert book.build() == []
        assert [label for label, *_ in book.claims()] == ["nine", "z"]
        assert "Here: 2 claims, all checked, 2." in book.page("index").get_text()


def test_without_outputs_nothing_is_claimed(book):
    book.chapter("01_one")
    assert book.build() == []
    assert book.claims() == []
    assert "there is nothing to list" in book.page("claims").get_text()
    assert "no claims checked: the chapters were not run, 0." in book.page("index").get_text()


def test_the_package_links_to_the_chapters_that_exist(book):
    book.chapter("01_one", title="One")
    assert book.build() == []
    page = book.page("api")
    names = [heading.get_text().rstrip("¶#") for heading in page.select("h2")]
    assert names == ["small.second", "small.first"]
    assert "hidden" not in page.get_text()
    assert "A limit: in bytes, say." in page.get_text()
    assert page.find(id="small.second.double")
    assert [(link.get_text(), link["href"]) for link in page.select("a[href*=chapters]")] == [
        ("1", "chapters/01_one.html")
    ]
    assert "Introduced in chapter 1, used in chapter 2." in page.get_text()

    book.chapter("02_two", title="Two")  # nothing else changes
    assert book.build() == []
    assert [link.get_text() for link in book.page("api").select("a[href*=chapters]")] == ["1", "2"]


CARD = """# Card

```{schemes} uses
```

```{schemes} drawn
```

```{schemes} numbers
```

{py:data}`initlib.schemes.he_normal`
"""


def test_the_card_in_a_book(book):
    (book.folder / "conf.py").write_text(f"{CONF}extensions.append('book_schemes')")
    (book.folder / "card.md").write_text(CARD)
    (book.folder / "careless.md").write_text("# Careless\n\n```{schemes} all\n```\n")
    book.chapter("06_he", title="Rectifiers")
    warnings = book.build()
    assert "schemes must be asked for one of uses, drawn, numbers, got 'all'" in warnings.pop(0)
    assert warnings == []
    page = book.page("card")
    link = page.find("a", href="#scheme-he-normal")
    assert link.get_text() == "initlib.schemes.he_normal"
    assert page.find(id="scheme-he-normal").name == "tr"
    assert page.select("a[href='chapters/06_he.html']")
    assert page.select("a[href^='bibliography.html#']")


CARELESS = {
    "{claims}`all`": "claims must be asked for one of number, summary, got 'all'",
    "```{package} no.such.thing\n```": "package must name a package that can be imported, got 'no.such.thing'",
    "```{package} small.first\n```": "package must name a package that can be imported, got 'small.first'",
    "```{package}\n```": "1 argument",
}


def test_careless_requests_are_reported(book):
    (book.folder / "index.md").write_text("# Index\n\n" + "\n\n".join(CARELESS) + "\n")
    warnings = book.build()
    for expected, found in zip(CARELESS.values(), warnings, strict=True):
        assert expected in found


def test_descriptions_in_the_head_of_every_page(book):
    book.chapter("01_one")
    (book.folder / "empty.md").write_text("# Empty\n")
    (book.folder / "untitled.md").write_text("")
    assert book.build("-D", "html_baseurl=https://example.org/book") in ([], ["untitled.md"])

    def tags(name):
        return {
            tag.get("property") or tag.get("name"): tag["content"] for tag in book.page(name).select("meta[content]")
        }

    chapter = tags("chapters/01_one")
    assert chapter["og:title"] == "A <title> & more"
    assert chapter["og:description"] == chapter["description"] == "Why? Because it is so."
    assert chapter["og:url"] == "https://example.org/book/chapters/01_one.html"
    assert chapter["og:image"] == "https://example.org/book/_static/cover.png"
    assert chapter["og:site_name"] == "A small book"
    assert tags("index")["description"] == tags("index")["og:description"] == 'A "book".'
    assert len(book.page("index").select("meta[name=description]")) == 1
    assert "og:description" not in tags("empty")
    assert "og:title" not in tags("search")


def test_outputs_of_the_book_s_own_checks_are_found(book):
    outcome = checks.Check("E[x²] < 1 & more", "exactly 1", True)._repr_html_()
    book.chapter("01_one", outcome)
    book.build()
    assert [label for label, *_ in book.claims()] == ["E[x²] < 1 & more"]

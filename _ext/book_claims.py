"""Every claim of the book, read off the outputs of its chapters.

A check shows one line (`initlib.checks`). Here each line on a page gets an anchor, and its label and numbers are kept
in Sphinx's environment. The directive ``{claims}`` lists them all, chapter by chapter, and the role ``{claims}`` counts
them. Notebooks are read first, and pages that list or count are read again whenever a notebook was.
"""

import re
from dataclasses import dataclass, replace
from itertools import groupby

from book_nodes import chapter_number, reference, table
from bs4 import BeautifulSoup
from docutils import nodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

# What `initlib.checks` says under a label, one pattern for each of its functions.
WORST = r"(?P<of> \((?:worst|closest) of \d+\))?"
FORMS = [
    re.compile(form + WORST)
    for form in (
        r"measured (?P<measured>\S+ ± \S+), predicted (?P<predicted>\S+); off by (?P<off>\S+ standard errors), "
        r"allowed (?P<allowed>\S+?(?: and a margin of \S+)?)",
        r"(?P<measured>\S+), predicted (?P<predicted>\S+), difference (?P<off>\S+), allowed (?P<allowed>\S+)",
        r"exactly (?P<measured>\S+)",
        r"all (?P<measured>\d+ entries) as expected",
        r"(?P<measured>\S+) against (?P<larger>\S+?)"
        r"(?:; difference (?P<off>\S+ standard errors), needed (?P<allowed>\S+))?",
    )
]
HEADERS = ("claim", "predicted", "measured", "off by", "allowed")


@dataclass(frozen=True)
class Claim:
    """One line of a check: the label, the outcome, the numbers taken apart, and the section and anchor of its page."""

    label: str
    passed: bool
    predicted: str
    measured: str
    off: str
    allowed: str
    section: str = ""
    anchor: str = ""

    @property
    def statistical(self):
        """Whether chance is involved: then distances are counted in standard errors."""
        return "s.e." in self.off


def parse(label, numbers, passed):
    """A claim from the words of a check; if it failed, or its form is unknown, the words stay together."""
    match = next(filter(None, (form.fullmatch(numbers) for form in FORMS)), None)
    if match is None or not passed:
        return Claim(label, passed, "", numbers, "", "")
    found = {name: value or "" for name, value in match.groupdict().items()}
    predicted, off = found.get("predicted", ""), found.get("off", "")
    allowed = found.get("allowed", "").replace(" and a margin of ", " + ")
    if "larger" in found:
        predicted = f"below {found['larger']}"
        off, allowed = (f"{off} below", f"at least {allowed}") if off else ("", "")
    elif "predicted" not in found:
        predicted, off, allowed = found["measured"], "0", "0"
    return Claim(label, passed, predicted, found["measured"], _short(off + found["of"]), allowed)


def _short(words):
    return words.replace("standard errors", "s.e.")


def anchor(label, taken):
    """A name for the line of a check, from its label, that its page does not use yet."""
    name = stem = f"claim-{nodes.make_id(label)[:60].rstrip('-') or 'unnamed'}"
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name)
    return name


def read_claims(doctree):
    """The claims on a page, in order; the line of each gets its anchor on the way."""
    taken = {name for node in doctree.findall(nodes.Element) for name in node["ids"]}
    claims = []
    for raw in list(doctree.findall(nodes.raw)):
        if "il-check" not in (html := raw.astext()):
            continue
        soup = BeautifulSoup(html, "html.parser")
        lines = soup.find_all(class_="il-check")
        for line in lines:
            label, numbers = (
                " ".join(part.get_text().split()) if (part := line.find(class_=name)) else ""
                for name in ("il-label", "il-numbers")
            )
            passed = "il-pass" in line["class"] and "il-fail" not in line["class"]
            line["id"] = anchor(label, taken)
            claims.append(replace(parse(label, numbers, passed), section=heading(raw), anchor=line["id"]))
        if lines:
            raw.children = [nodes.Text(str(soup))]
            raw.children[0].parent = raw
    return claims


def heading(node):
    """The heading of the innermost section that holds a node."""
    while node is not None and not isinstance(node, nodes.section):
        node = node.parent
    return node[0].astext() if node is not None and isinstance(node[0], nodes.title) else ""


def total(claims):
    """How many claims, and how many of them failed."""
    everything = [claim for page in claims.values() for claim in page]
    return len(everything), sum(not claim.passed for claim in everything)


def summary(claims):
    """The state of all claims, in words."""
    count, failed = total(claims)
    if count == 0:
        return "no claims checked: the chapters were not run"
    return f"{count:,} claims, {f'{failed:,} of them failed' if failed else 'all checked'}"


# --- in Sphinx --------------------------------------------------------------------------------------------------------


def kept(env):
    """The claims by page, and for each page that shows claims what it showed; both live as long as the environment."""
    if not hasattr(env, "book_claims"):
        env.book_claims, env.book_claims_shown = {}, {}
    return env.book_claims, env.book_claims_shown


def show(env):
    """The claims by page in the book's order, for the page that is being read."""
    claims, shown = kept(env)
    claims = {page: claims[page] for page in sorted(claims)}
    shown[env.docname] = claims
    return claims


class ClaimsRole(SphinxRole):
    """``{claims}`number` ``: how many claims there are; ``{claims}`summary` ``: and whether all of them hold."""

    def run(self):
        texts = {"number": lambda claims: f"{total(claims)[0]:,}", "summary": summary}
        if self.text not in texts:
            message = f"claims must be asked for one of {', '.join(texts)}, got {self.text!r}"
            return [], [self.inliner.reporter.error(message, line=self.lineno)]
        return [nodes.Text(texts[self.text](show(self.env)))], []


class ClaimsDirective(SphinxDirective):
    """All claims: how many in each chapter, then a section with a table for each."""

    def run(self):
        claims = {page: found for page, found in show(self.env).items() if found}
        if not claims:
            return [nodes.paragraph("", "No chapter was run when these pages were built: there is nothing to list.")]
        return [self.overview(claims), *(self.section(page, found) for page, found in claims.items())]

    def overview(self, claims):
        rows = [
            [
                [nodes.reference("", self.title(page), refid=section_id(page), internal=True)],
                f"{len(found):,}",
                f"{sum(claim.statistical for claim in found):,}",
            ]
            for page, found in claims.items()
        ]
        every = [claim for found in claims.values() for claim in found]
        rows.append(["all", f"{len(every):,}", f"{sum(claim.statistical for claim in every):,}"])
        return table(("chapter", "claims", "of them with chance"), rows, classes=["claims-overview"])

    def title(self, page):
        title, number = self.env.titles[page].astext(), chapter_number(page)
        return f"Chapter {number.lstrip('0')}: {title}" if number else title

    def section(self, page, claims):
        section = nodes.section("", nodes.title("", self.title(page)), ids=[section_id(page)])
        link = reference("doc", f"/{page}", nodes.Text("the chapter"), docname=self.env.docname)
        words = f"{len(claims)} claims" if len(claims) > 1 else "1 claim"
        if failed := sum(not claim.passed for claim in claims):
            words += f", {failed} failed"
        section += nodes.paragraph("", f"{words}, from ", link, nodes.Text("."))
        rows = []
        for above, group in groupby(claims, key=lambda claim: claim.section):
            rows += [[above]] if above else []
            rows += [self.row(page, claim) for claim in group]
        section += table(HEADERS, rows, classes=["claims"])
        return section

    def row(self, page, claim):
        mark = nodes.inline("", "✓ " if claim.passed else "✗ failed: ", classes=["il-mark"])
        label = nodes.Text(claim.label or "(no label)")
        link = reference("ref", target(page, claim), label, docname=self.env.docname)
        if not claim.predicted:
            return [[mark, link], claim.measured]
        return [[mark, link], claim.predicted, claim.measured, claim.off, claim.allowed]


def section_id(page):
    """The anchor of a chapter's section on the page of claims."""
    return f"claims-{nodes.make_id(page)}"


def target(page, claim):
    """The name under which Sphinx knows the line of a check."""
    return f"{page}#{claim.anchor}"


def collect(app, doctree):
    """Keep the claims of the page that was just read."""
    claims = read_claims(doctree)
    if claims:
        kept(app.env)[0][app.env.docname] = claims
        for claim in claims:
            app.env.get_domain("std").anonlabels[target(app.env.docname, claim)] = app.env.docname, claim.anchor


def forget(app, env, docname):
    """A page that is read again, or gone, has no claims."""
    for pages in kept(env):
        pages.pop(docname, None)


def order(app, env, docnames):
    """Notebooks first, then the rest, with the pages whose claims may have changed."""
    claims, shown = kept(env)
    notebooks = {name for name in docnames if env.doc2path(name, base=False).endswith(".ipynb")}
    for page, then in shown.items():
        if page not in docnames and (notebooks or then != claims):
            docnames.append(page)
    docnames.sort(key=lambda name: name not in notebooks)


def setup(app):
    """Called by Sphinx; see `local_extensions` in _config.yml."""
    app.add_directive("claims", ClaimsDirective)
    app.add_role("claims", ClaimsRole())
    app.connect("doctree-read", collect)
    app.connect("env-purge-doc", forget)
    app.connect("env-before-read-docs", order)
    # Pages that show claims are read after the pages that make them: in one process.
    return {"parallel_read_safe": False, "parallel_write_safe": True, "env_version": 1}

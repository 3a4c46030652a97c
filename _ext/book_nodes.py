"""Pieces of a page that the generated reference pages share: chapters by number, links to them, tables."""

import re
from pathlib import PurePosixPath

from docutils import nodes
from sphinx import addnodes

CHAPTER = re.compile(r"(\d\d[a-z]?)_")


def chapter_number(docname):
    """The number of a chapter's page as its file carries it, say 03 or 08b; none for any other page."""
    found = CHAPTER.match(PurePosixPath(docname).name)
    return found[1] if found else None


def chapters(env):
    """The pages of the chapters by their numbers, in the book's order."""
    numbered = ((chapter_number(docname), docname) for docname in env.found_docs)
    return dict(sorted((number, docname) for number, docname in numbered if number))


def reference(kind, target, *content, docname=""):
    """A link that Sphinx resolves at the end, as ``{doc}`` (kind ``doc``) or ``{ref}`` (``ref``) make them."""
    wrapped = nodes.inline("", "", *content, classes=["std", f"std-{kind}"], support_smartquotes=False)
    return addnodes.pending_xref(
        "", wrapped, refdomain="std", reftype=kind, reftarget=target, refdoc=docname, refexplicit=True, refwarn=True
    )


def chapter_link(env, number):
    """The number of a chapter, with a link if the chapter exists; the page is read again when chapters come or go."""
    if not hasattr(env, "book_chapters_known"):
        env.book_chapters_known = {}
    known = env.book_chapters_known[env.docname] = chapters(env)
    shown = nodes.Text(number.lstrip("0"))
    page = known.get(number)
    return reference("doc", f"/{page}", shown, docname=env.docname) if page else shown


def table(headers, rows, *, classes=(), ids=()):
    """A table; cells are texts or lists of inline nodes, and ``ids`` are the anchors of the rows.

    In a row of fewer cells than the header the last one takes the room that is left; a single one is a heading.
    """
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in headers), cols=len(headers))
    group += nodes.thead("", _row(headers))
    body = nodes.tbody()
    for number, row in enumerate(rows):
        if not 1 <= len(row) <= len(headers):
            raise ValueError(f"row must have 1 to {len(headers)} cells, as the header has, got {len(row)}")
        body += _row(row)
        if len(row) < len(headers):
            body[-1][-1]["morecols"] = len(headers) - len(row)
        if len(row) == 1 < len(headers):
            body[-1]["classes"].append("group")
        if number < len(ids):
            body[-1]["ids"].append(ids[number])
    group += body
    return nodes.table("", group, classes=list(classes))


def _row(cells):
    row = nodes.row()
    for cell in cells:
        inline = [nodes.Text(cell)] if isinstance(cell, str) else cell
        row += nodes.entry(
            "", nodes.paragraph("", "", *inline, support_smartquotes=False)
        )  # numbers and labels as they are
    return row

"""The reference of the package, from its docstrings.

The directive ``{package} name`` gives each module of a package a section, with everything public that has a docstring.
A docstring that names a chapter links to it: "Introduced in chapter 03".
"""

import importlib
import pkgutil
import re

from book_nodes import chapter_link, chapters
from docutils import utils
from docutils.parsers.rst import Parser
from numpy.typing import ArrayLike
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.typing import stringify_annotation

from initlib.tables import Table

ARRAY_LIKE = stringify_annotation(ArrayLike, mode="smart")
NUMBER = r"(?<![\w.`])\d\d[a-z]?(?!\w|\.\d)"
NAMED = re.compile(rf"\b[Cc]hapters?\s+{NUMBER}")
INTRODUCED = re.compile(r"\bIntroduced in chapters?\b.*?(?=\.(?:\s|$)|\n\s*\n|$)", re.DOTALL)


def link_chapters(docstring):
    """The docstring with a role around every chapter's number."""

    def linked(match):
        return re.sub(NUMBER, lambda number: f":chapter:`{number[0]}`", match[0])

    return NAMED.sub(linked, INTRODUCED.sub(linked, docstring))


def modules(package):
    """Full names of a package's public modules, in the order in which its docstring mentions them; the rest last."""
    names = [name for _, name, _ in pkgutil.iter_modules(package.__path__) if not name.startswith("_")]
    text = package.__doc__ or ""

    def place(name):
        found = re.search(rf"\b{re.escape(package.__name__)}\.{name}\b", text)
        return (found is None, found.start() if found else 0, name)

    return [f"{package.__name__}.{name}" for name in sorted(names, key=place)]


class PackageDirective(SphinxDirective):
    """A section for each module of a package; ``automodule`` fills it."""

    required_arguments = 1

    def run(self):
        try:
            package = importlib.import_module(self.arguments[0])
            names = modules(package)
        except (ImportError, AttributeError, ValueError) as error:
            message = f"package must name a package that can be imported, got {self.arguments[0]!r}: {error}"
            raise self.error(message) from error
        lines = [f".. automodule:: {package.__name__}", "   :no-index:", ""]
        for name in names:
            lines += [name, "=" * len(name), "", f".. automodule:: {name}", "   :members:"]
            lines += ["   :special-members: __call__", ""]
        return self.parse("\n".join(lines))

    def parse(self, text):
        """Nodes of text in reStructuredText, which docstrings are written in, whatever the page is written in."""
        page = self.state.document
        inner = utils.new_document(page["source"], page.settings)
        inner.reporter = page.reporter
        inner.ids, inner.nameids, inner.nametypes = page.ids, page.nameids, page.nametypes  # anchors are unique
        Parser().parse(text, inner)
        return inner.children


class ChapterRole(SphinxRole):
    """``:chapter:`03` ``: the number of a chapter, with a link if there is such a chapter."""

    def run(self):
        return [chapter_link(self.env, self.text)], []


def process_docstring(app, what, name, thing, options, lines):
    """Called by autodoc for each docstring, before napoleon.

    Napoleon takes what stands before a colon in the first line about a datum for its type: an empty comment goes first.
    """
    lines[:] = link_chapters("\n".join(lines)).split("\n")
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def process_signature(app, what, name, thing, options, signature, returns):
    """Called by autodoc for each signature: NumPy's ``ArrayLike`` is a name, not the dozen types behind it.

    A kind of table that functions return is never made by hand: it needs none.
    """
    if what == "class" and Table in thing.__mro__[1:]:
        return "", returns
    return tuple(words and words.replace(ARRAY_LIKE, "~numpy.typing.ArrayLike") for words in (signature, returns))


def outdated(app, env, added, changed, removed):
    """Pages that link to chapters, when there are other chapters than when they were read."""
    now = chapters(env)
    return [page for page, then in getattr(env, "book_chapters_known", {}).items() if then != now]


def forget(app, env, docname):
    """A page that is read again, or gone, links to nothing."""
    getattr(env, "book_chapters_known", {}).pop(docname, None)


# A signature over several lines is, to Sphinx, a list of definitions without terms, which screen readers reject.
PARAMETERS = re.compile(r"<dl>(\s*<dd>.*?</dd>\s*)</dl>", re.DOTALL)


def repair_signatures(app, pagename, templatename, context, doctree):
    """Make the parameters of a signature lines."""

    def lines(match):
        return re.sub("<(/?)dd>", lambda tag: "</span>" if tag[1] else '<span class="sig-line">', match[1])

    if '<dt class="sig' in context.get("body", ""):
        context["body"] = PARAMETERS.sub(lines, context["body"])


def setup(app):
    """Called by Sphinx; see `local_extensions` in _config.yml."""
    app.setup_extension("sphinx.ext.autodoc")
    app.setup_extension("sphinx.ext.napoleon")
    app.add_directive("package", PackageDirective)
    app.add_role("chapter", ChapterRole())
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("html-page-context", repair_signatures)
    app.connect("env-get-outdated", outdated)
    app.connect("env-purge-doc", forget)
    # What a page knew of the chapters is not merged between reading processes.
    return {"parallel_read_safe": False, "parallel_write_safe": True, "env_version": 1}

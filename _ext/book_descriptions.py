"""What search engines and message boards show of a page: its title and its own first sentences.

A page whose front matter has ``html_meta: description`` says it itself.
"""

import html
import posixpath
import re

from docutils import nodes

LONGEST = 200  # characters; what is longer is cut by those who show it
ENOUGH = 80  # a subtitle alone is shorter: the next paragraph follows
PICTURE = "_static/cover.png"
END_OF_SENTENCE = re.compile(r"(?<=[.?!])\s+")
FORMULA = re.compile(r"[\\^{}]|\w_\w")


def opening(doctree):
    """The paragraphs under the title of a page, as plain text, until the first heading or anything else."""
    title = next(doctree.findall(nodes.title), None)
    if title is None:
        return []
    paragraphs = []
    for node in title.parent.children[title.parent.index(title) + 1 :]:
        if isinstance(node, nodes.paragraph):
            paragraphs.append(" ".join(node.astext().split()))
        elif paragraphs or isinstance(node, nodes.section):
            break
    return [text for text in paragraphs if text]


def describe(paragraphs):
    """Whole sentences from the opening of a page, as many as fit; none behind the first with a formula in TeX."""
    chosen = ""
    for paragraph in paragraphs:
        for sentence in END_OF_SENTENCE.split(paragraph):
            longer = f"{chosen} {sentence}".strip()
            if len(longer) > LONGEST or FORMULA.search(sentence):
                return chosen or shorten(paragraph)
            chosen = longer
        if len(chosen) >= ENOUGH:
            break
    return chosen


def shorten(text):
    """The first words of a text that has no short sentence without a formula."""
    text = re.sub(r"[\\{}]", "", text)
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 1].rsplit(" ", 1)[0] + "…"


def add_description(app, pagename, templatename, context, doctree):
    """Called by Sphinx for each page that it writes."""
    if doctree is None:
        return
    own = next((node["content"] for node in doctree.findall(nodes.meta) if node.get("name") == "description"), None)
    text = own or describe(opening(doctree))
    tags = {"og:site_name": app.config.project, "og:type": "article", "og:title": app.env.titles[pagename].astext()}
    if text:
        tags["og:description"] = text
    if context.get("pageurl"):  # others need whole addresses: the picture is there only if the site has one
        tags["og:url"] = context["pageurl"]
        tags["og:image"] = posixpath.join(app.config.html_baseurl, PICTURE)
    lines = [f'<meta property="{name}" content="{html.escape(value)}">' for name, value in tags.items()]
    if text and not own:
        lines.append(f'<meta name="description" content="{html.escape(text)}">')
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines, ""])


def setup(app):
    """Called by Sphinx; see `local_extensions` in _config.yml."""
    app.connect("html-page-context", add_description)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

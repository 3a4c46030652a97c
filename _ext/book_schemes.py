"""The scheme card: the directive ``{schemes}`` reads every named scheme off `initlib.schemes` itself."""

import math

from book_nodes import chapter_link, table
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from initlib import schemes

FANS = 256, 1024  # of the layer whose numbers the card gives


def named():
    """Every named scheme, with its row of the package's own table."""
    shown = schemes.table(*FANS)
    pairs = list(zip(schemes.SCHEMES.values(), shown.rows, strict=True))
    for scheme, row in pairs:
        if row[0] != scheme.name:
            raise ValueError(f"the rows of schemes.table must follow SCHEMES, got {row[0]!r} for {scheme.name!r}")
    return pairs, shown.headers


def number(value):
    return "∞" if math.isinf(value) else f"{value:.4g}"


def code(text):
    return [nodes.literal("", text)] if text else ""


def anchor(scheme):
    return f"scheme-{scheme.name.replace('_', '-')}"


def drawn():
    """Header and rows: the choices that make a scheme."""
    pairs, (scheme_, variance, drawn_, *_) = named()
    rows = [
        [
            code(scheme.name),
            formula,
            number(scheme.gain) if hasattr(scheme, "gain") else "",
            code(getattr(scheme, "average", "")),
            distribution,
            number(getattr(scheme, "value", 0)),  # all but the constants are symmetric
        ]
        for scheme, (_, formula, distribution, *_) in pairs
    ]
    return (scheme_, variance, "gain", "average", drawn_, "mean"), rows


def numbers():
    """Header and rows: what a scheme gives in one layer."""
    pairs, (scheme_, _, _, std_, largest_) = named()
    rows = [
        [code(scheme.name), number(std**2), number(std), number(largest), number(largest / std) if std else ""]
        for scheme, (_, _, _, std, largest) in pairs
    ]
    return (scheme_, "variance", std_, largest_, "largest / std"), rows


def families():
    """Schemes that differ in name and distribution only, together: same use, chapter and source."""
    groups = {}
    for scheme in schemes.SCHEMES.values():
        groups.setdefault((scheme.use, scheme.chapter, getattr(scheme, "source", "")), []).append(scheme)
    return groups


class SchemesDirective(SphinxDirective):
    """A table of all schemes: what each is for (``uses``), what it draws (``drawn``), or its ``numbers`` in a layer."""

    required_arguments = 1

    def run(self):
        tables = {"uses": self.uses, "drawn": self.drawn, "numbers": lambda: table(*numbers(), classes=["schemes"])}
        if self.arguments[0] not in tables:
            raise self.error(f"schemes must be asked for one of {', '.join(tables)}, got {self.arguments[0]!r}")
        return [tables[self.arguments[0]]()]

    def drawn(self):
        anchors = []
        for scheme in schemes.SCHEMES.values():  # so that :data:`initlib.schemes.he_normal` in a docstring leads here
            anchors.append(anchor(scheme))
            name = f"{schemes.__name__}.{scheme.name}"
            self.env.get_domain("py").note_object(name, "data", anchors[-1], location=self.get_location())
        return table(*drawn(), classes=["schemes"], ids=anchors)

    def uses(self):
        rows = []
        for (use, chapter, source), group in families().items():
            names = [part for scheme in group for part in (nodes.literal("", scheme.name), nodes.Text(" "))]
            rows.append(
                [names, use, [chapter_link(self.env, chapter)] if chapter else "", self.citation(source)],
            )
        return table(("schemes", "for", "chapter", "source"), rows, classes=["schemes"])

    def citation(self, key):
        if not key:
            return ""
        found, messages = self.state.inline_text(f"{{cite:t}}`{key}`", self.lineno)
        return found + messages


def setup(app):
    """Called by Sphinx; see `local_extensions` in _config.yml."""
    app.add_directive("schemes", SchemesDirective)
    return {"parallel_read_safe": False, "parallel_write_safe": True}  # not safe because `chapter_link` is not

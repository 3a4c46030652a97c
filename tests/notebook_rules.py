"""The conventions for chapters that a machine can see, one small function each.

A rule takes a `Chapter` (or, at the end, the whole `Book`) and yields a sentence for each place that breaks it.
`test_notebooks.py` applies them to the chapters, and shows for each rule that it can fail.
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import nbformat
import yaml

COMPARED = "nbval-check-output"
TAGS = {COMPARED, "hide-input", "hide-output", "remove-input", "remove-output"}
LONGEST_CELL = 30
CODE_CELLS = (10, 25)
WORDS = (1200, 4500)
# A second page of a chapter, NNb_slug, may be shorter.
SECOND_PAGE_CODE_CELLS = (6, 25)
SECOND_PAGE_WORDS = (1000, 3300)
LAST_SECTIONS = ("Summary", "Exercises", "Further reading")
GLOBAL_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
IN_PLACE_DRAWS = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "trunc_normal_"}
SEEDING = {"manual_seed", "seed", "default_rng", "RandomState", "SeedSequence", "PCG64", "set_seed"}
PLOTS = {"figure", "subplots", "subplot_mosaic", "subplot", "plot", "hist", "imshow", "scatter", "bar", "show"}

CHAPTER_RULES, BOOK_RULES = [], []

FENCE = re.compile(r"^\s*(`{3,}|~{3,}|:{3,})")
DIRECTIVE = re.compile(r"^\s*(?:`{3,}|:{3,})\{([\w:-]+)\}[ \t]*(.*)$", re.MULTILINE)
ABSOLUTE_PATH = re.compile(
    r"""(?:^|[\s"'(=])(/(?:home|Users|tmp|root|work|mnt|usr|var|opt|content)/|[A-Za-z]:\\|~/|file://)"""
)
EQUATION = re.compile(r"^\s*\$\$[ \t]*\(([^)\s]+)\)[ \t]*$", re.MULTILINE)
MATH_DIRECTIVE = re.compile(r"^\s*(?:`{3,}|:{3,})\{math\}[^\n]*\n\s*:label:[ \t]*(\S+)", re.MULTILINE)


@dataclass
class Chapter:
    """A notebook and what the rules want to know about it."""

    name: str
    nb: nbformat.NotebookNode

    @classmethod
    def read(cls, path):
        return cls(Path(path).name, nbformat.read(path, as_version=nbformat.NO_CONVERT))

    @property
    def number(self):
        """What the name begins with: NN, or NNb for a second page."""
        return self.name.split("_")[0]

    @property
    def is_second_page(self):
        return self.number.endswith("b")

    def where(self, index):
        """How messages name a cell."""
        first = next((line for line in self.nb.cells[index].source.splitlines() if line.strip()), "empty")
        return f"{self.name}, cell {index} ({first.strip()[:50]!r})"

    def cells(self, kind):
        return [(i, cell) for i, cell in enumerate(self.nb.cells) if cell.cell_type == kind]

    @cached_property
    def trees(self):
        """Syntax trees of the code cells that parse, by index."""
        trees = {}
        for i, cell in self.cells("code"):
            try:
                trees[i] = ast.parse(cell.source)
            except SyntaxError:
                continue
        return trees

    @cached_property
    def solution_cells(self):
        """Indices of the cells between solution-start and solution-end."""
        inside, found = False, set()
        for i, cell in enumerate(self.nb.cells):
            names = [name for name, _ in DIRECTIVE.findall(cell.source)] if cell.cell_type == "markdown" else []
            if "solution-end" in names:
                inside = False
            elif inside:
                found.add(i)
            if "solution-start" in names:
                inside = True
        return found

    @cached_property
    def headings(self):
        """(cell, level, title) of every heading outside fenced blocks."""
        found = []
        for i, cell in self.cells("markdown"):
            fenced = False
            for line in cell.source.splitlines():
                if FENCE.match(line):
                    fenced = not fenced
                elif not fenced and (match := re.match(r"(#{1,6})\s+(.*)", line)):
                    found.append((i, len(match[1]), match[2].strip()))
        return found

    def calls(self, outside_solutions=False):
        """(cell, called name, call) for every call in the code."""
        for i, tree in self.trees.items():
            if outside_solutions and i in self.solution_cells:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    yield i, called(node), node


@dataclass
class Book:
    """All chapters, the other pages as text, and the table of contents."""

    chapters: list
    pages: dict = field(default_factory=dict)
    toc: dict = field(default_factory=dict)

    @classmethod
    def read(cls, root):
        root = Path(root)
        toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
        chapters = [Chapter.read(path) for path in sorted((root / "chapters").glob("*.ipynb"))]
        pages = {p.stem: p.read_text(encoding="utf-8") for p in root.glob("*.md") if p.stem == p.stem.lower()}
        return cls(chapters, pages, toc)

    @property
    def toc_entries(self):
        """(page, the page it is a section of or None), in the order of the table of contents."""

        def walk(entries, above=None):
            for entry in entries:
                yield entry["file"], above
                yield from walk(entry.get("sections", []), entry["file"])

        return [found for part in self.toc.get("parts", []) for found in walk(part["chapters"])]

    @property
    def toc_files(self):
        return [page for page, _ in self.toc_entries]

    @property
    def text(self):
        """Everything that is prose, with the figures' captions."""
        cells = [cell.source for chapter in self.chapters for _, cell in chapter.cells("markdown")]
        captions = [
            str(figure_metadata(cell).get("caption", ""))
            for chapter in self.chapters
            for _, cell in chapter.cells("code")
        ]
        return "\n\n".join([*cells, *captions, *self.pages.values()])


def called(node):
    """Dotted name of what is called: `torch.randn`, `check`, `.normal_`."""
    parts, target = [], node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    parts.append(target.id if isinstance(target, ast.Name) else "")
    return ".".join(reversed(parts))


def last(name):
    return name.rsplit(".", 1)[-1]


def tags(cell):
    return cell.metadata.get("tags", [])


def figure_metadata(cell):
    return cell.metadata.get("mystnb", {}).get("figure", {})


def prose(source):
    """Markdown without code, directives, roles and formulas."""
    source = re.sub(r"^\s*(?:`{3,}|:{3,}).*$|^\s*:[\w-]+:.*$", " ", source, flags=re.MULTILINE)
    source = re.sub(r"\$\$.*?\$\$|\$[^$]*\$|\{[\w:]+\}`[^`]*`|`[^`]*`", " ", source, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", source)


def chapter_rule(rule):
    CHAPTER_RULES.append(rule)
    return rule


def book_rule(rule):
    BOOK_RULES.append(rule)
    return rule


# --- the file ---------------------------------------------------------------------------------------------------------


@chapter_rule
def file_name(chapter):
    """Files are called NN_slug.ipynb, and the second page of a chapter NNb_slug.ipynb."""
    if not re.fullmatch(r"\d\db?_[a-z][a-z0-9_]*\.ipynb", chapter.name):
        yield f"{chapter.name}: call it NN_slug.ipynb (a second page NNb_slug.ipynb), in lower case"


@chapter_rule
def valid_format(chapter):
    """The file is a valid notebook of a version that has cell ids."""
    try:
        nbformat.validate(chapter.nb)
    except nbformat.ValidationError as error:
        yield f"{chapter.name}: not a valid notebook: {str(error).splitlines()[0]}"
    if (chapter.nb.nbformat, chapter.nb.nbformat_minor) < (4, 5):
        yield f"{chapter.name}: save it as nbformat 4.5 or later"


@chapter_rule
def cell_ids(chapter):
    """Every cell has an id of its own, so that a diff shows which cell changed."""
    ids = Counter(cell.get("id") for cell in chapter.nb.cells)
    if None in ids:
        yield f"{chapter.name}: {ids[None]} cells have no id"
    for repeated in (cell_id for cell_id, count in ids.items() if cell_id and count > 1):
        yield f"{chapter.name}: the cell id {repeated} occurs more than once"


@chapter_rule
def kernel(chapter):
    """The kernel is python3, whatever the author's environment is called."""
    name = chapter.nb.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield f"{chapter.name}: the kernel must be python3, not {name!r}"


@chapter_rule
def metadata(chapter):
    """No metadata of editors, no tags that hide cells from the tests."""
    for key in set(chapter.nb.metadata) - {"kernelspec"}:
        yield f"{chapter.name}: metadata {key!r} comes from an editor; run tools/notebooks.py strip"
    for i, cell in enumerate(chapter.nb.cells):
        for key in set(cell.metadata) - {"mystnb", "tags"}:
            yield f"{chapter.where(i)}: metadata {key!r} comes from an editor; run tools/notebooks.py strip"
        for tag in set(tags(cell)) - TAGS:
            yield f"{chapter.where(i)}: the tag {tag!r} is not used in this book; allowed: {', '.join(sorted(TAGS))}"


@chapter_rule
def no_empty_cells(chapter):
    for i, cell in enumerate(chapter.nb.cells):
        if not cell.source.strip():
            yield f"{chapter.where(i)}: empty"


# --- outputs ----------------------------------------------------------------------------------------------------------


@chapter_rule
def no_stray_outputs(chapter):
    """Outputs and counts are kept only where nbval compares them."""
    for i, cell in chapter.cells("code"):
        if COMPARED not in tags(cell) and (cell.outputs or cell.execution_count is not None):
            yield f"{chapter.where(i)}: output or execution count left behind; run tools/notebooks.py strip"


@chapter_rule
def compared_output_exists(chapter):
    """nbval passes a marked cell silently if it has no stored output or no execution count."""
    for i, cell in chapter.cells("code"):
        if COMPARED in tags(cell) and not (cell.outputs and cell.execution_count is not None):
            yield f"{chapter.where(i)}: marked for comparison but nothing is stored; run tools/notebooks.py store"


@chapter_rule
def compared_output_is_plain(chapter):
    """What is stored is short text, the same on every machine."""
    for i, cell in chapter.cells("code"):
        for output in cell.outputs:
            text = str(output.get("text", "")) + "".join(map(str, output.get("data", {}).values()))
            if output.output_type == "error" or output.get("name") == "stderr":
                yield f"{chapter.where(i)}: an error or a warning is stored as output"
            if any(kind.startswith(("image/", "application/")) for kind in output.get("data", {})):
                yield f"{chapter.where(i)}: nbval does not compare pictures; store text"
            if len(text) > 4000:
                yield f"{chapter.where(i)}: the stored output has {len(text)} characters; keep it under 4000"
            if ABSOLUTE_PATH.search(text) or re.search(r"\b0x[0-9a-f]{6,}", text):
                yield f"{chapter.where(i)}: the stored output holds a path or an address of this machine"


@chapter_rule
def no_test_bypass(chapter):
    """No comment that makes nbval skip, ignore or expect an error, and none in place of the tag."""
    for i, cell in chapter.cells("code"):
        for line in cell.source.splitlines():
            if re.match(r"\s*#\s*(NBVAL_|PYTEST_VALIDATE)", line):
                yield f"{chapter.where(i)}: remove {line.strip()!r}; cells are marked with the tag {COMPARED}"


# --- code -------------------------------------------------------------------------------------------------------------


@chapter_rule
def plain_python(chapter):
    """Code is Python: no magics, no shell."""
    for i, cell in chapter.cells("code"):
        if re.search(r"^\s*[%!]|get_ipython\(", cell.source, re.MULTILINE):
            yield f"{chapter.where(i)}: no magics and no shell commands"
        elif i not in chapter.trees:
            yield f"{chapter.where(i)}: does not parse as Python"


@chapter_rule
def short_cells(chapter):
    for i, cell in chapter.cells("code"):
        length = len(cell.source.splitlines())
        if length > LONGEST_CELL:
            yield f"{chapter.where(i)}: {length} lines; what is longer than {LONGEST_CELL} belongs in initlib"


@chapter_rule
def number_of_code_cells(chapter):
    count = sum(i not in chapter.solution_cells for i, _ in chapter.cells("code"))
    low, high = SECOND_PAGE_CODE_CELLS if chapter.is_second_page else CODE_CELLS
    if not low <= count <= high:
        yield f"{chapter.name}: {count} code cells outside solutions; wanted are {low} to {high}"


@chapter_rule
def installed_package(chapter):
    """The package is installed: nobody bends the import path or installs from a cell."""
    for i, cell in chapter.cells("code"):
        if re.search(
            r"\bsys\s*\.\s*path\b|PYTHONPATH|\bpip\s+install\b|['\"]pip['\"]|from sys import .*\bpath\b", cell.source
        ):
            yield f"{chapter.where(i)}: no sys.path and no pip; initlib is installed"


@chapter_rule
def no_silenced_warnings(chapter):
    """A warning is a defect to repair, and a cell that warns fails the build."""
    for i, cell in chapter.cells("code"):
        if re.search(
            r"\b(filterwarnings|simplefilter|catch_warnings|captureWarnings|seterr|disable_warnings)\b", cell.source
        ):
            yield f"{chapter.where(i)}: do not silence warnings"


@chapter_rule
def no_absolute_paths(chapter):
    for i, cell in enumerate(chapter.nb.cells):
        if ABSOLUTE_PATH.search(cell.source):
            yield f"{chapter.where(i)}: holds an absolute path"


@chapter_rule
def no_clock(chapter):
    """No timings and no progress bars: they differ in every run."""
    forbidden = {"time", "timeit", "datetime", "tqdm", "rich", "progressbar", "alive_progress"}
    for i, tree in chapter.trees.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.split(".")[0] for name in names} & forbidden:
                yield f"{chapter.where(i)}: imports {name}; no timings and no progress bars on the page"


@chapter_rule
def seeds_from_initlib(chapter):
    """Every seed comes from initlib, so that INITLIB_SEED shifts all of them."""
    for i, name, call in chapter.calls():
        if last(name) not in SEEDING or name in {"seed", "initlib.seed", "runtime.seed"}:
            continue
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if not any(
            isinstance(node, ast.Call) and last(called(node)) == "seed" for a in arguments for node in ast.walk(a)
        ):
            yield f"{chapter.where(i)}: {name}(...) bypasses INITLIB_SEED; use initlib.generator(n), rng(n) or seed(n)"


@chapter_rule
def no_unseeded_draws(chapter):
    """Random numbers come from a generator, or follow a global seed that initlib made."""
    seeded = False
    for i, tree in chapter.trees.items():
        names = [(called(node), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        seeded = seeded or any(last(name) == "manual_seed" and name.startswith("torch") for name, _ in names)
        for name, call in names:
            from_torch = name.startswith("torch.") and last(name) in GLOBAL_DRAWS
            if not from_torch and last(name) not in IN_PLACE_DRAWS:
                continue
            if not seeded and not any(keyword.arg in {"generator", None} for keyword in call.keywords):
                yield f"{chapter.where(i)}: {name}(...) without generator=; use initlib.generator(n)"
        for name, _ in names:
            if re.fullmatch(
                r"(np|numpy)\.random\.(?!default_rng|SeedSequence|Generator|PCG64|seed|RandomState)\w+", name
            ):
                yield f"{chapter.where(i)}: {name}(...) draws from NumPy's global state; use initlib.rng(n)"
            if re.fullmatch(r"random\.(?!seed|Random)\w+", name):
                yield f"{chapter.where(i)}: {name}(...) draws from Python's global state; use initlib.rng(n)"


# --- checks -----------------------------------------------------------------------------------------------------------


@chapter_rule
def has_check(chapter):
    """Every chapter checks something outside its solutions."""
    if not any(re.fullmatch(r"check(_\w+)?", last(name)) for _, name, _ in chapter.calls(outside_solutions=True)):
        yield f"{chapter.name}: no call of initlib's check functions outside the solutions"


@chapter_rule
def checks_can_fail(chapter):
    """A check of one constant against another says nothing."""

    def is_constant(node):
        return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and is_constant(node.operand))

    for i, name, call in chapter.calls():
        if re.fullmatch(r"check(_\w+)?", last(name)):
            values = [*call.args[1:3], *(k.value for k in call.keywords if k.arg in {"measured", "predicted"})]
            if values and all(map(is_constant, values)):
                yield f"{chapter.where(i)}: this check compares constants and cannot fail"


# --- figures ----------------------------------------------------------------------------------------------------------


def figure_cells(chapter):
    """Indices of cells that draw: directly, or by calling a function that an earlier cell defines for it."""

    def draws(node, makers):
        """Does this code make a figure? Functions that are only defined here do not count."""
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            return False
        if isinstance(node, ast.Call):
            name = called(node)
            if name in makers or (name.split(".")[0] in {"plt", "pyplot", "figures"} and last(name) in PLOTS):
                return True
            if "figures.subplots" in name:
                return True
        return any(draws(child, makers) for child in ast.iter_child_nodes(node))

    makers, found = set(), set()
    for i, tree in chapter.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(draws(statement, makers) for statement in node.body):
                makers.add(node.name)
        if draws(tree, makers):
            found.add(i)
    return found


@chapter_rule
def figures_are_described(chapter):
    """Every figure has a caption, a name and alternative text."""
    for i in figure_cells(chapter):
        cell = chapter.nb.cells[i]
        figure, image = figure_metadata(cell), cell.metadata.get("mystnb", {}).get("image", {})
        if len(str(figure.get("caption", "")).split()) < 5:
            yield f"{chapter.where(i)}: needs a caption that states the finding (mystnb: figure.caption)"
        if not re.fullmatch(r"fig-[a-z0-9]+(-[a-z0-9]+)+", str(figure.get("name", ""))):
            yield f"{chapter.where(i)}: needs a name such as fig-forward-depth (mystnb: figure.name)"
        if len(str(image.get("alt", "")).split()) < 8:
            yield f"{chapter.where(i)}: needs alternative text of at least eight words (mystnb: image.alt)"


@chapter_rule
def figures_stand_alone(chapter):
    """A figure's name and caption go to everything that its cell shows: a check is shown by a cell of its own."""
    for i, name, _ in chapter.calls():
        if chapter.nb.cells[i].metadata.get("mystnb") and re.fullmatch(r"check(_\w+)?", last(name)):
            yield f"{chapter.where(i)}: a check in the cell of a figure"


@chapter_rule
def descriptions_have_figures(chapter):
    """A caption without a figure is a leftover."""
    cells = figure_cells(chapter)
    for i, cell in enumerate(chapter.nb.cells):
        draws = any(last(name) == "plot" for j, name, _ in chapter.calls() if j == i)
        if cell.metadata.get("mystnb") and i not in cells and not draws:
            yield f"{chapter.where(i)}: has figure metadata but draws nothing"


# --- prose ------------------------------------------------------------------------------------------------------------


@chapter_rule
def one_title(chapter):
    """The first cell is Markdown and holds the only first-level heading."""
    titles = [i for i, level, _ in chapter.headings if level == 1]
    if titles != [0]:
        yield f"{chapter.name}: the first cell must hold the only title; titles found in cells {titles}"


@chapter_rule
def headings_step_by_one(chapter):
    previous = 0
    for i, level, title in chapter.headings:
        if level > previous + 1:
            yield f"{chapter.where(i)}: {title!r} jumps from level {previous} to {level}"
        previous = level


@chapter_rule
def says_what_and_how_long(chapter):
    """Near the top: what a reader will be able to do, and how long it runs."""
    top = "\n".join(cell.source for _, cell in chapter.cells("markdown")[:3])
    if not re.search(r"you will|objectives", top, re.IGNORECASE):
        yield f"{chapter.name}: the first cells must say what 'you will' be able to do (or give objectives)"
    if not re.search(r"\bseconds\b", top):
        yield f"{chapter.name}: the first cells must say how many seconds the chapter takes to run"


@chapter_rule
def last_sections(chapter):
    titles = [title for _, level, title in chapter.headings if level == 2]
    if tuple(titles[-3:]) != LAST_SECTIONS:
        yield f"{chapter.name}: must end with the sections {', '.join(LAST_SECTIONS)}; it ends with {titles[-3:]}"


@chapter_rule
def further_reading_cites(chapter):
    starts = [i for i, _, title in chapter.headings if title == "Further reading"]
    rest = "\n".join(cell.source for i, cell in chapter.cells("markdown") if starts and i >= starts[0])
    if "{cite" not in rest.partition("Further reading")[2]:
        yield f"{chapter.name}: Further reading must cite something with {{cite:t}} or {{cite:p}}"


@chapter_rule
def amount_of_prose(chapter):
    words = sum(len(re.findall(r"[A-Za-z][\w'’-]*", prose(cell.source))) for _, cell in chapter.cells("markdown"))
    low, high = SECOND_PAGE_WORDS if chapter.is_second_page else WORDS
    if not low <= words <= high:
        yield f"{chapter.name}: {words} words of prose; wanted are {low} to {high}"


# --- exercises --------------------------------------------------------------------------------------------------------


def labels(chapter, *directives):
    """Labels of exercises, or the exercises that solutions belong to."""
    for i, cell in chapter.cells("markdown"):
        for match in DIRECTIVE.finditer(cell.source):
            name, argument = match.groups()
            if name not in directives:
                continue
            if name.startswith("solution"):
                yield i, argument.strip()
            else:
                label = re.match(r"(?:\s*:[\w-]+:.*\n)*?\s*:label:[ \t]*(\S+)", cell.source[match.end() :])
                yield i, label[1] if label else ""


@chapter_rule
def exercises_have_solutions(chapter):
    """There is an exercise, and each has a label and one solution."""
    exercises = list(labels(chapter, "exercise", "exercise-start"))
    solved = Counter(label for _, label in labels(chapter, "solution", "solution-start"))
    if not exercises:
        yield f"{chapter.name}: no exercise"
    for i, label in exercises:
        if not label:
            yield f"{chapter.where(i)}: the exercise needs a :label:"
        elif solved[label] != 1:
            yield f"{chapter.where(i)}: the exercise {label} has {solved[label]} solutions"
    for label in set(solved) - {label for _, label in exercises}:
        yield f"{chapter.name}: a solution is for the exercise {label!r}, which is not here"


@chapter_rule
def solutions_run(chapter):
    """At least one solution is code, and every solution is folded and closed."""
    if not any(chapter.nb.cells[i].cell_type == "code" for i in chapter.solution_cells):
        yield f"{chapter.name}: no solution holds an executed code cell (solution-start ... solution-end)"
    gates = Counter()
    for i, cell in chapter.cells("markdown"):
        names = [name for name, _ in DIRECTIVE.findall(cell.source)]
        gates.update(names)
        if {"solution", "solution-start"} & set(names) and not re.search(r":class:.*\bdropdown\b", cell.source):
            yield f"{chapter.where(i)}: the solution needs ':class: dropdown', so that it opens on a click"
    if gates["solution-start"] != gates["solution-end"]:
        yield f"{chapter.name}: {gates['solution-start']} solution-start but {gates['solution-end']} solution-end"


# --- the whole book ---------------------------------------------------------------------------------------------------


@book_rule
def toc_and_files_agree(book):
    """Every chapter is in the table of contents, in the order of its number, and every entry exists.

    A second page NNb is a section of its chapter NN, and no other page is a section of anything.
    """
    listed = [entry for entry in book.toc_files if entry.startswith("chapters/")]
    present = [f"chapters/{Path(chapter.name).stem}" for chapter in book.chapters]
    for entry in sorted(set(present) - set(listed)):
        yield f"_toc.yml: {entry}.ipynb is not listed"
    for entry in sorted(set(listed) - set(present)):
        yield f"_toc.yml: {entry} is listed but there is no such notebook"
    if listed != sorted(listed):
        yield f"_toc.yml: chapters are not in the order of their numbers: {listed}"
    numbers = [chapter.number for chapter in book.chapters]
    if len(set(numbers)) < len(numbers):  # a gap is a chapter that is still to be written
        yield f"two chapters have the same number: {numbers}"
    first_page = {f"chapters/{Path(chapter.name).stem}": chapter.number for chapter in book.chapters}
    for entry, above in book.toc_entries:
        number = first_page.get(entry, "")
        wanted = number[:-1] if number.endswith("b") else None
        if first_page.get(above, above) != wanted:
            place = f"a section of chapter {wanted}" if wanted else "a section of nothing"
            yield f"_toc.yml: {entry} must be {place}; it stands below {above}"
    pages = {entry for entry in [book.toc.get("root"), *book.toc_files] if entry and not entry.startswith("chapters/")}
    for entry in sorted(set(book.pages) - pages):
        yield f"_toc.yml: {entry}.md is not listed"
    for entry in sorted(pages - set(book.pages)):
        yield f"_toc.yml: {entry} is listed but there is no such page"


@book_rule
def figure_names_are_unique(book):
    names = Counter(
        name
        for chapter in book.chapters
        for _, cell in chapter.cells("code")
        if (name := figure_metadata(cell).get("name"))
    )
    for name in (name for name, count in names.items() if count > 1):
        yield f"the figure name {name} is used more than once"


@book_rule
def equations_are_used(book):
    """An equation gets a number because something refers to it."""
    text = book.text
    found = Counter(EQUATION.findall(text) + MATH_DIRECTIVE.findall(text))
    for label, count in found.items():
        if count > 1:
            yield f"the equation label {label} occurs {count} times"
        if not re.search(
            r"\{(?:eq|numref|ref)\}`(?:[^`<]*<)?" + re.escape(label) + r">?`|\(#" + re.escape(label) + r"\)", text
        ):
            yield f"the equation {label} is numbered but nothing refers to it with {{eq}}"

"""Every chapter obeys the conventions, and every rule is shown to catch a chapter that breaks it."""

import copy
import json
from pathlib import Path

import nbformat
import notebooks  # tools/notebooks.py
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_rules import BOOK_RULES, CHAPTER_RULES, COMPARED, Book, Chapter

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))


# --- the book itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", CHAPTER_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter(path, rule):
    problems = list(rule(Chapter.read(path)))
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("rule", BOOK_RULES, ids=lambda rule: rule.__name__)
def test_book(rule):
    problems = list(rule(Book.read(ROOT)))
    assert not problems, "\n" + "\n".join(problems)


def test_there_are_chapters():
    assert CHAPTERS


# --- the rules can fail -----------------------------------------------------------------------------------------------

FIGURE = {
    "figure": {"caption": "The line is straight, as predicted.", "name": "fig-forward-line"},
    "image": {"alt": "A straight line from the lower left to the upper right."},
}


def good_chapter(name="01_forward.ipynb"):
    """A made-up chapter that breaks no rule."""
    top = "# Forward\n\nYou will push a second moment through a layer. It runs in 5 seconds.\n\n" + "word " * 1300
    equation = "## A formula\n\n$$\ny = x\n$$ (eq-forward-kept)\n\nUsed again: {eq}`eq-forward-kept`."
    exercise = "## Exercises\n\n```{exercise} One\n:label: ex-forward-one\nWhy?\n```"
    solution = "````{solution-start} ex-forward-one\n:label: sol-forward-one\n:class: dropdown\n````"
    cells = [
        new_markdown_cell(top),
        new_code_cell("import matplotlib.pyplot as plt\nimport initlib"),
        new_markdown_cell(equation),
        new_code_cell("initlib.check('the mean', values, 1.0)"),
        new_code_cell("plt.plot([1, 2]);", metadata={"mystnb": copy.deepcopy(FIGURE)}),
        new_code_cell(
            "print(f'{2 / 3:.4f}')",
            metadata={"tags": [COMPARED]},
            outputs=[new_output("stream", name="stdout", text="0.6667\n")],
            execution_count=1,
        ),
        *(new_code_cell(f"x = {n}") for n in range(8)),
        new_markdown_cell("## Summary\n\n- Kept."),
        new_markdown_cell(exercise),
        new_markdown_cell(solution),
        new_code_cell("print(1)"),
        new_markdown_cell("````{solution-end}\n````"),
        new_markdown_cell("## Further reading\n\n{cite:t}`lecun1998`."),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return Chapter(name, new_notebook(cells=cells, metadata=kernel))


def second_page():
    """A second page that breaks no rule: shorter than a chapter may be."""
    chapter = good_chapter("01b_more.ipynb")
    replace("word " * 1300, "word " * 1000)(chapter)
    for n in range(4):
        drop(f"x = {n}")(chapter)
    for cell in chapter.nb.cells:
        cell.source = cell.source.replace("forward", "more")
        cell.metadata = json.loads(json.dumps(cell.metadata).replace("fig-forward", "fig-more"))
    return chapter


def two_pages():
    """A book whose chapter has a second page, as a section."""
    book = good_book()
    book.chapters.append(second_page())
    book.toc["parts"][0]["chapters"][0]["sections"] = [{"file": "chapters/01b_more"}]
    return book


def good_book():
    toc = {"root": "intro", "parts": [{"chapters": [{"file": "chapters/01_forward"}, {"file": "notation"}]}]}
    return Book([good_chapter()], {"intro": "# Hello", "notation": "# Notation"}, toc)


def find(chapter, text):
    return next(cell for cell in chapter.nb.cells if text in cell.source)


def add(source, **keywords):
    """A change that adds a code cell before the summary."""

    def change(chapter):
        chapter.nb.cells.insert(6, new_code_cell(source, **keywords))

    return change


def replace(old, new):
    """A change that edits the first cell that holds `old`."""

    def change(chapter):
        cell = find(chapter, old)
        cell.source = cell.source.replace(old, new)

    return change


def edit(text, **attributes):
    """A change that sets attributes of the first cell that holds `text`."""

    def change(chapter):
        find(chapter, text).update(nbformat.from_dict(attributes))

    return change


def drop(text):
    def change(chapter):
        chapter.nb.cells.remove(find(chapter, text))

    return change


def figure_with(**changes):
    described = copy.deepcopy(FIGURE)
    for path, value in changes.items():
        group, key = path.split("_")
        described[group][key] = value
    return edit("plt.plot", metadata={"mystnb": described})


def on(path, value):
    """A change that sets an attribute of the notebook or the chapter."""

    def change(chapter):
        setattr(chapter if path == "name" else chapter.nb, path, nbformat.from_dict(value))

    return change


def stored(**output):
    return edit("2 / 3", outputs=[output], execution_count=1)


def repeat_id(chapter):
    chapter.nb.cells[1].id = chapter.nb.cells[0].id


def solve_twice(chapter):
    at = chapter.nb.cells.index(find(chapter, "solution-end"))
    again = "```{solution} ex-forward-one\n:class: dropdown\n```"
    chapter.nb.cells.insert(at + 1, new_markdown_cell(again))


BAD_CHAPTERS = [
    ("file_name", on("name", "Forward.ipynb")),
    ("file_name", on("name", "1-forward.ipynb")),
    ("file_name", on("name", "01c_forward.ipynb")),
    ("file_name", on("name", "01bforward.ipynb")),
    ("valid_format", on("nbformat_minor", 2)),
    ("valid_format", lambda chapter: chapter.nb.cells[0].pop("source")),
    ("cell_ids", lambda chapter: chapter.nb.cells[0].pop("id")),
    ("cell_ids", repeat_id),
    ("kernel", on("metadata", {"kernelspec": {"name": "my-env"}})),
    ("kernel", on("metadata", {})),
    ("metadata", on("metadata", {"kernelspec": {"name": "python3"}, "language_info": {}})),
    ("metadata", edit("print(1)", metadata={"collapsed": True})),
    ("metadata", add("1 / 0", metadata={"tags": ["raises-exception"]})),
    ("metadata", add("1 / 0", metadata={"tags": ["nbval-skip"]})),
    ("metadata", add("1 / 0", metadata={"tags": ["nbval-ignore-output"]})),
    ("metadata", add("1 / 0", metadata={"tags": ["skip-execution"]})),
    ("no_empty_cells", add(" \n")),
    ("no_stray_outputs", edit("print(1)", execution_count=3)),
    ("no_stray_outputs", edit("print(1)", outputs=[new_output("stream", text="1\n")])),
    ("compared_output_exists", edit("2 / 3", outputs=[])),
    ("compared_output_exists", edit("2 / 3", execution_count=None)),
    ("compared_output_is_plain", stored(output_type="stream", name="stderr", text="careful")),
    ("compared_output_is_plain", stored(output_type="error", ename="E", evalue="", traceback=[])),
    ("compared_output_is_plain", stored(output_type="display_data", data={"image/png": "abc"}, metadata={})),
    ("compared_output_is_plain", stored(output_type="stream", name="stdout", text="1" * 5000)),
    ("compared_output_is_plain", stored(output_type="stream", name="stdout", text="see /home/me/x")),
    ("compared_output_is_plain", stored(output_type="stream", name="stdout", text="<f at 0x7f3a2b1c>")),
    ("no_test_bypass", add("# NBVAL_SKIP\n1 / 0")),
    ("no_test_bypass", add("# NBVAL_IGNORE_OUTPUT\n1")),
    ("no_test_bypass", add("# NBVAL_RAISES_EXCEPTION\n1")),
    ("plain_python", add("%matplotlib inline")),
    ("plain_python", add("x = 1\n!ls")),
    ("plain_python", add("get_ipython().run_line_magic('x', '')")),
    ("plain_python", add("x = (1,")),
    ("short_cells", add("\n".join(["x = 1"] * 31))),
    ("number_of_code_cells", lambda chapter: [drop(f"x = {n}")(chapter) for n in range(4)]),
    ("number_of_code_cells", lambda chapter: [add(f"z = {n}")(chapter) for n in range(20)]),
    ("installed_package", add("import sys\nsys.path.append('..')")),
    ("installed_package", add("import os\nos.system('pip install torch')")),
    ("installed_package", add("import subprocess\nsubprocess.run(['python', '-m', 'pip'])")),
    ("no_silenced_warnings", add("import warnings\nwarnings.filterwarnings('ignore')")),
    ("no_silenced_warnings", add("import warnings\nwarnings.simplefilter('ignore')")),
    ("no_silenced_warnings", add("np.seterr(all='ignore')")),
    ("no_absolute_paths", add("open('/home/me/data.csv')")),
    ("no_absolute_paths", add(r"open('C:\\data.csv')")),
    ("no_absolute_paths", add("open('~/data.csv')")),
    ("no_clock", add("import time\ntime.time()")),
    ("no_clock", add("from tqdm.auto import tqdm")),
    ("seeds_from_initlib", add("torch.manual_seed(0)")),
    ("seeds_from_initlib", add("np.random.seed(1)")),
    ("seeds_from_initlib", add("import random\nrandom.seed(1)")),
    ("seeds_from_initlib", add("rng = np.random.default_rng(7)")),
    ("seeds_from_initlib", add("rng = np.random.default_rng()")),
    ("seeds_from_initlib", add("g = torch.Generator().manual_seed(2)")),
    ("no_unseeded_draws", add("x = torch.randn(3)")),
    ("no_unseeded_draws", add("w = torch.empty(3).normal_()")),
    ("no_unseeded_draws", add("torch.nn.init.uniform_(w)")),
    ("no_unseeded_draws", add("x = np.random.randn(3)")),
    ("no_unseeded_draws", add("import random\nx = random.gauss(0, 1)")),
    ("has_check", replace("initlib.check(", "print(")),
    ("checks_can_fail", add("check('one is one', 1.0, 1.0)")),
    ("checks_can_fail", add("check('minus one', measured=-1, predicted=-1)")),
    ("figures_are_described", figure_with(figure_caption="")),
    ("figures_are_described", figure_with(figure_name="")),
    ("figures_are_described", figure_with(figure_name="Figure 1")),
    ("figures_are_described", figure_with(image_alt="A plot")),
    ("figures_are_described", edit("plt.plot", metadata={})),
    ("figures_are_described", add("fig, ax = plt.subplots()")),
    ("figures_are_described", add("fig, ax = initlib.figures.subplots()")),
    ("figures_are_described", add("def draw():\n    plt.plot([1])\ndraw()")),
    ("figures_stand_alone", edit("initlib.check(", metadata={"mystnb": FIGURE})),
    ("descriptions_have_figures", edit("x = 3", metadata={"mystnb": FIGURE})),
    ("one_title", replace("# Forward", "Forward")),
    ("one_title", replace("## Summary", "# Summary")),
    ("one_title", lambda chapter: chapter.nb.cells.insert(0, new_code_cell("1"))),
    ("headings_step_by_one", replace("## Summary", "### Detail\n\n##### Too deep\n\n## Summary")),
    ("says_what_and_how_long", replace("You will", "We shall")),
    ("says_what_and_how_long", replace("5 seconds", "a while")),
    ("last_sections", replace("## Summary", "## In short")),
    ("last_sections", drop("## Further reading")),
    ("further_reading_cites", replace("{cite:t}`lecun1998`", "LeCun")),
    ("amount_of_prose", replace("word " * 1300, "word " * 300)),
    ("amount_of_prose", replace("word " * 1300, "word " * 5000)),
    ("amount_of_prose", replace("word " * 1300, "$word$ " * 1300)),
    ("exercises_have_solutions", replace(":label: ex-forward-one\n", "")),
    ("exercises_have_solutions", drop("{exercise}")),
    ("exercises_have_solutions", replace("{solution-start} ex-forward-one", "{solution-start} ex-forward-two")),
    ("exercises_have_solutions", solve_twice),
    ("solutions_run", drop("print(1)")),
    ("solutions_run", drop("solution-end")),
    ("solutions_run", replace(":class: dropdown\n", "")),
]


@pytest.mark.parametrize("rule", CHAPTER_RULES, ids=lambda rule: rule.__name__)
def test_a_good_chapter_passes(rule):
    assert list(rule(good_chapter())) == []


@pytest.mark.parametrize("rule", CHAPTER_RULES, ids=lambda rule: rule.__name__)
def test_a_good_second_page_passes(rule):
    assert list(rule(second_page())) == []


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("number_of_code_cells", lambda page: [drop(f"x = {n}")(page) for n in range(4, 8)]),
        ("number_of_code_cells", lambda page: [add(f"z = {n}")(page) for n in range(20)]),
        ("amount_of_prose", replace("word " * 1000, "word " * 900)),
        ("amount_of_prose", replace("word " * 1000, "word " * 4000)),
    ],
    ids=["few cells", "many cells", "few words", "many words"],
)
def test_a_second_page_has_limits_of_its_own(rule, change):
    page = second_page()
    change(page)
    assert list(next(each for each in CHAPTER_RULES if each.__name__ == rule)(page))


def test_what_a_second_page_may_be_a_chapter_may_not():
    page = second_page()
    page.name = "02_more.ipynb"
    broken = {rule.__name__ for rule in CHAPTER_RULES if list(rule(page))}
    assert broken == {"number_of_code_cells", "amount_of_prose"}


@pytest.mark.parametrize(
    "source",
    [
        "torch.manual_seed(initlib.seed(3))\nlayer = torch.randn(3)",
        "x = torch.randn(3, generator=initlib.generator(1))",
        "rng = initlib.rng(2)\nx = rng.normal(size=3)",
        "rng = np.random.default_rng(seed(4))",
        "def draw(ax):\n    plt.plot([1])",
        "check('a', x, 1)\ncheck_close('b', 1, x)",
    ],
)
def test_good_code_passes(source):
    chapter = good_chapter()
    add(source)(chapter)
    problems = [problem for rule in CHAPTER_RULES for problem in rule(chapter)]
    assert problems == []


@pytest.mark.parametrize(
    ("name", "change"), BAD_CHAPTERS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(BAD_CHAPTERS)]
)
def test_a_bad_chapter_is_caught(name, change):
    rule = next(rule for rule in CHAPTER_RULES if rule.__name__ == name)
    chapter = good_chapter()
    change(chapter)
    problems = list(rule(chapter))
    assert problems
    assert all(problem.startswith(chapter.name) for problem in problems)


def unlist(book):
    book.toc["parts"][0]["chapters"].pop(0)


def list_too_much(book):
    book.toc["parts"][0]["chapters"].append({"file": "chapters/02_missing"})


def wrong_order(book):
    book.chapters.append(good_chapter("02_more.ipynb"))
    book.toc["parts"][0]["chapters"].insert(0, {"file": "chapters/02_more"})


def same_number(book):
    book.chapters.append(good_chapter("01_zmore.ipynb"))
    book.toc["parts"][0]["chapters"].insert(1, {"file": "chapters/01_zmore"})


BAD_BOOKS = [
    ("toc_and_files_agree", unlist),
    ("toc_and_files_agree", list_too_much),
    ("toc_and_files_agree", wrong_order),
    ("toc_and_files_agree", same_number),
    ("toc_and_files_agree", lambda book: book.pages.update(stray="# Stray")),
    ("toc_and_files_agree", lambda book: book.pages.pop("notation")),
    ("figure_names_are_unique", lambda book: book.chapters.append(good_chapter("02_more.ipynb"))),
    ("equations_are_used", lambda book: book.chapters.append(good_chapter("02_more.ipynb"))),
    ("equations_are_used", lambda book: replace("{eq}`eq-forward-kept`", "it")(book.chapters[0])),
    ("equations_are_used", lambda book: book.pages.update(intro="```{math}\n:label: eq-unused\nx\n```")),
]


@pytest.mark.parametrize("rule", BOOK_RULES, ids=lambda rule: rule.__name__)
def test_a_good_book_passes(rule):
    assert list(rule(good_book())) == []


@pytest.mark.parametrize("rule", BOOK_RULES, ids=lambda rule: rule.__name__)
def test_a_good_book_with_a_second_page_passes(rule):
    assert list(rule(two_pages())) == []


def second_page_as_a_chapter(book):
    book.toc["parts"][0]["chapters"].insert(1, {"file": "chapters/01b_more"})
    del book.toc["parts"][0]["chapters"][0]["sections"]


def second_page_below_another_chapter(book):
    book.chapters.append(good_chapter("02_other.ipynb"))
    sections = book.toc["parts"][0]["chapters"][0].pop("sections")
    book.toc["parts"][0]["chapters"].insert(1, {"file": "chapters/02_other", "sections": sections})


def second_page_unlisted(book):
    del book.toc["parts"][0]["chapters"][0]["sections"]


def chapter_as_a_section(book):
    book.chapters.append(good_chapter("02_other.ipynb"))
    book.toc["parts"][0]["chapters"][0]["sections"].append({"file": "chapters/02_other"})


def page_as_a_section(book):
    book.toc["parts"][0]["chapters"][0]["sections"].append(book.toc["parts"][0]["chapters"].pop())


@pytest.mark.parametrize(
    "change",
    [
        second_page_as_a_chapter,
        second_page_below_another_chapter,
        second_page_unlisted,
        chapter_as_a_section,
        page_as_a_section,
    ],
    ids=lambda change: change.__name__,
)
def test_a_second_page_stands_below_its_chapter(change):
    book = two_pages()
    change(book)
    assert list(next(rule for rule in BOOK_RULES if rule.__name__ == "toc_and_files_agree")(book))


@pytest.mark.parametrize(("name", "change"), BAD_BOOKS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(BAD_BOOKS)])
def test_a_bad_book_is_caught(name, change):
    book = good_book()
    change(book)
    assert list(next(rule for rule in BOOK_RULES if rule.__name__ == name)(book))


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in CHAPTER_RULES} == {name for name, _ in BAD_CHAPTERS}
    assert {rule.__name__ for rule in BOOK_RULES} == {name for name, _ in BAD_BOOKS}


# --- the tool that strips and stores ----------------------------------------------------------------------------------


def test_strip_keeps_only_what_is_compared():
    messy = good_chapter()
    for cell in messy.nb.cells:
        cell.metadata["collapsed"] = False
        if cell.cell_type == "code":
            cell.execution_count = 9
            cell.outputs = [new_output("stream", name="stdout", text="0.6667\n")]
    messy.nb.metadata["language_info"] = {"name": "python"}
    stripped = Chapter(messy.name, notebooks.strip(messy.nb))
    assert [problem for rule in CHAPTER_RULES for problem in rule(stripped)] == []
    assert sum(bool(cell.outputs) for _, cell in stripped.cells("code")) == 1


def test_store_runs_the_notebook_and_keeps_ids(tmp_path):
    cells = [new_code_cell("print(6 * 7)", metadata={"tags": [COMPARED]}), new_code_cell("6 * 7")]
    path = tmp_path / "01_tiny.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    assert notebooks.main(["store", str(path)]) == 0
    compared, other = nbformat.read(path, as_version=4).cells
    assert (compared.outputs[0].text, compared.execution_count, compared.id) == ("42\n", 1, cells[0].id)
    assert (other.outputs, other.execution_count) == ([], None)
    before = path.read_text()
    notebooks.main(["strip", str(path)])
    assert path.read_text() == before
    assert json.loads(before)["metadata"].keys() == {"kernelspec"}

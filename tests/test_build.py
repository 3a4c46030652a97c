"""The local Sphinx extension: when must the notebooks run again, and who hosts the book?"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import book_build
import nbformat
import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from jupyter_cache import get_cache

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def root(tmp_path):
    """A small book: a package with a module and a data file, and the pins."""
    (tmp_path / "initlib" / "data").mkdir(parents=True)
    (tmp_path / "initlib" / "fans.py").write_text("GAIN = 2\n")
    (tmp_path / "initlib" / "data" / "table.csv").write_text("1,2\n")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


def fingerprint(root, **environ):
    return book_build.fingerprint(root, environ)


@pytest.mark.parametrize(
    "path", ["initlib/fans.py", "initlib/data/table.csv", "initlib/new.py", "requirements.txt", "pyproject.toml"]
)
def test_an_edit_changes_the_fingerprint(root, path):
    before = fingerprint(root)
    (root / path).write_text("something else\n")
    assert fingerprint(root) != before


def test_moving_code_between_files_changes_the_fingerprint(root):
    before = fingerprint(root)
    (root / "initlib" / "fans.py").rename(root / "initlib" / "zebra.py")
    assert fingerprint(root) != before


@pytest.mark.parametrize("name", ["INITLIB_SEED", "INITLIB_DEVICE", "INITLIB_DATA"])
def test_a_setting_changes_the_fingerprint(root, name):
    assert len({fingerprint(root), fingerprint(root, **{name: "1"}), fingerprint(root, **{name: "2"})}) == 3


def test_nothing_else_changes_the_fingerprint(root):
    before = fingerprint(root)
    (root / "initlib" / "__pycache__").mkdir()
    (root / "initlib" / "__pycache__" / "fans.cpython-311.pyc").write_bytes(b"x")
    (root / "README.md").write_text("x")
    assert fingerprint(root, HOME="elsewhere") == before


def test_the_cache_is_named_after_the_fingerprint_and_old_ones_go(root, monkeypatch):
    monkeypatch.delenv("INITLIB_SEED", raising=False)
    build = root / "_build"
    app, config = SimpleNamespace(outdir=build / "html", srcdir=root), SimpleNamespace()

    def cache():
        book_build.choose_cache(app, config)
        return config.nb_execution_cache_path

    first = cache()
    assert (build / first).parent == build
    (build / first).mkdir(parents=True)
    (build / "html").mkdir()
    assert cache() == first
    assert (build / first).exists()
    (root / "initlib" / "fans.py").write_text("GAIN = 3\n")
    assert cache() != first
    assert not (build / first).exists()
    assert (build / "html").exists()


@pytest.fixture
def app(tmp_path, monkeypatch):
    """A book of three notebooks, of which two are in the table of contents, as Sphinx hands it to the extension."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("INITLIB_DEVICE", "cpu")
    for name in ("one", "two", "elsewhere"):
        cell = nbformat.v4.new_code_cell(f"import os; print({name!r}, os.environ['OMP_NUM_THREADS'])")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / f"{name}.ipynb")
    config = SimpleNamespace(
        nb_execution_cache_path=str(tmp_path / "cache"),
        nb_execution_timeout=60,
        external_site_map=["intro", "one", "two"],
    )
    return SimpleNamespace(srcdir=tmp_path, config=config)


def printed(app, name):
    notebook = nbformat.read(app.srcdir / f"{name}.ipynb", 4)
    _, executed = get_cache(app.config.nb_execution_cache_path).merge_match_into_notebook(notebook)
    return executed.cells[0].outputs[0].text


def test_notebooks_of_the_book_run_side_by_side_on_one_thread_each(app):
    book_build.execute_side_by_side(app)
    assert [printed(app, name) for name in ("one", "two")] == ["one 1\n", "two 1\n"]
    with pytest.raises(KeyError):
        printed(app, "elsewhere")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    cache = get_cache(app.config.nb_execution_cache_path)
    assert book_build.pending(cache, [app.srcdir / "one.ipynb", app.srcdir / "two.ipynb"]) == []
    assert len(book_build.pending(cache, [app.srcdir / "one.ipynb", app.srcdir / "elsewhere.ipynb"])) == 1


@pytest.mark.parametrize(("notebooks", "device"), [(["one"], "cpu"), (["one", "two"], "meta")])
def test_a_single_notebook_and_an_accelerator_are_left_to_sphinx(app, monkeypatch, notebooks, device):
    app.config.external_site_map = notebooks
    monkeypatch.setattr(book_build.runtime, "device", lambda: SimpleNamespace(type=device))
    book_build.execute_side_by_side(app)
    cache = get_cache(app.config.nb_execution_cache_path)
    assert len(book_build.pending(cache, [app.srcdir / f"{name}.ipynb" for name in notebooks])) == len(notebooks)


def test_toggles_in_the_sidebar_say_what_they_unfold():
    html = "<li><a>8. Decay</a><details><summary><i></i></summary><ul><li><a>Images</a></li></ul></details></li>"
    context = {"generate_toctree_html": lambda kind: BeautifulSoup(html, "html.parser")}
    book_build.label_toggles(None, "intro", "page.html", context, None)
    assert context["generate_toctree_html"]("sidebar").summary["aria-label"] == "Pages of 8. Decay"
    book_build.label_toggles(None, "search", "page.html", nothing := {}, None)
    assert nothing == {}


def test_without_an_address_there_are_no_buttons():
    assert book_build.repository_options({}) == {}
    assert book_build.repository_options({"BOOK_REPOSITORY_URL": ""}) == {}


def test_the_address_fills_the_buttons():
    options = book_build.repository_options({"BOOK_REPOSITORY_URL": "https://example.org/me/book/"})
    assert options["repository_url"] == "https://example.org/me/book"
    assert options["repository_provider"] == "github"
    assert options["repository_branch"] == "main"
    assert options["use_edit_page_button"]
    assert "colab_url" not in options["launch_buttons"]
    other = book_build.repository_options({"BOOK_REPOSITORY_URL": "https://x", "BOOK_REPOSITORY_BRANCH": "dev"})
    assert other["repository_branch"] == "dev"


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    """A book of two pages with this book's own settings, built where the addresses are known."""
    folder = tmp_path_factory.mktemp("book")
    for name in ("_config.yml", "_ext", "_static", "references.bib"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "_toc.yml").write_text("format: jb-book\nroot: intro\nchapters:\n- file: chapters/01_one\n")
    (folder / "intro.md").write_text("# Opening\n\nWhat this is about.\n")
    (folder / "chapters").mkdir()
    cell = nbformat.v4.new_markdown_cell("# One\n\nText.")
    kernel = {"language_info": {"name": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata=kernel)
    nbformat.write(notebook, folder / "chapters" / "01_one.ipynb")
    addresses = {
        "BOOK_REPOSITORY_URL": "https://github.com/me/book",
        "BOOK_REPOSITORY_BRANCH": "dev",
        "BOOK_BASE_URL": "https://example.org/book/",
    }
    command = [Path(sys.executable).with_name("jupyter-book"), "build", folder, "-W", "-n"]
    done = subprocess.run(command, env=os.environ | addresses, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return lambda page: BeautifulSoup((folder / "_build" / "html" / page).read_text(encoding="utf-8"), "html.parser")


@pytest.mark.parametrize(
    ("page", "source"), [("intro.html", "intro.md"), ("chapters/01_one.html", "chapters/01_one.ipynb")]
)
def test_buttons_lead_to_the_source_of_the_page(hosted, page, source):
    links = {link["href"] for link in hosted(page).select(".dropdown-menu a[href]")}
    assert f"https://github.com/me/book/edit/dev/{source}" in links
    assert "https://github.com/me/book" in links
    assert any(link.startswith("https://github.com/me/book/issues/new?") for link in links)
    if source.endswith(".ipynb"):
        binder = next(link for link in links if "mybinder.org" in link)
        assert binder == f"https://mybinder.org/v2/gh/me/book/dev?urlpath=lab/tree/{source}"


def test_others_get_whole_addresses(hosted):
    tags = {tag["property"]: tag["content"] for tag in hosted("chapters/01_one.html").select("meta[property]")}
    assert tags["og:url"] == "https://example.org/book/chapters/01_one.html"
    assert tags["og:image"] == "https://example.org/book/_static/cover.png"
    assert (ROOT / "_static" / "cover.png").exists()


def test_every_page_is_written_again_when_contents_titles_or_style_sheets_change(tmp_path):
    app = SimpleNamespace(srcdir=tmp_path)
    titles = {"intro": nodes.title("", "Opening"), "one": nodes.title("", "One")}
    env = SimpleNamespace(toctree_includes={"intro": ["one"]}, titles=titles, found_docs={"one", "intro"})
    assert book_build.rewrite_all(app, env) == ["intro", "one"]
    assert book_build.rewrite_all(app, env) == []
    titles["one"] = nodes.title("", "First")
    assert book_build.rewrite_all(app, env) == ["intro", "one"]
    env.toctree_includes = {"intro": ["one", "two"]}
    assert book_build.rewrite_all(app, env) == ["intro", "one"]
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "book.css").write_text("a { color: red }")
    assert book_build.rewrite_all(app, env) == ["intro", "one"]
    assert book_build.rewrite_all(app, env) == []


def test_all_pages_can_be_one(tmp_path):
    """Theorems, exercises and cards of a single page, which `make pdf` prints: three extensions."""
    (tmp_path / "conf.py").write_text(
        'extensions = ["myst_parser", "sphinx_design", "sphinx_proof", "sphinx_exercise", "both"]\n'
        'myst_enable_extensions = ["colon_fence"]\n'
    )
    (tmp_path / "both.py").write_text(
        "import book_build\n\n\ndef setup(app):\n    app.connect('builder-inited', book_build.print_what_html_shows)\n"
    )
    (tmp_path / "index.md").write_text(
        "# Book\n\n::::{grid} 1\n:::{grid-item-card} Card\n:link: one\n:link-type: doc\n:::\n::::\n\n"
        "```{toctree}\none\n```\n"
    )
    (tmp_path / "one.md").write_text(
        "# One\n\n```{prf:theorem}\n:label: t\nTrue.\n```\n\n```{exercise}\n:label: e\nDo.\n```\n"
    )
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "singlehtml", ".", "out"]
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "_ext")))
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = BeautifulSoup((tmp_path / "out" / "index.html").read_text(encoding="utf-8"), "html.parser")
    assert page.select_one(".sd-card")
    assert "True." in page.select_one("div.theorem").get_text()
    assert "Do." in page.select_one("div.exercise").get_text()

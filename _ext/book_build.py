"""What the build of the book must find out for itself: is the cache still good, what must run, and who hosts the pages?

Jupyter Book keys its execution cache on the notebook alone, so an edit in `initlib` would leave old figures on the
page. Here the cache folder is named after everything else a notebook's output depends on. A new name means an empty
cache, and because the name is part of Sphinx's configuration, every page is read again too.
"""

import hashlib
import logging
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

from jupyter_cache import get_cache
from jupyter_cache.executors import load_executor
from sphinx.util import logging as sphinx_logging

from initlib import runtime

logger = sphinx_logging.getLogger(__name__)

CACHE_PREFIX = ".jupyter_cache-"
PINS = ("requirements.txt", "pyproject.toml", "benchmarks/results.json")
SETTINGS = ("INITLIB_SEED", "INITLIB_DEVICE", "INITLIB_DATA")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def fingerprint(root, environ=os.environ):
    """Hash of what a notebook's output depends on besides the notebook: package, pins, settings, Python version."""
    root = Path(root)
    digest = hashlib.sha256()
    package = (path for path in (root / "initlib").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in sorted([*package, *(root / name for name in PINS)]):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    for name in SETTINGS:
        digest.update(f"{name}={environ.get(name)!r}\n".encode())
    digest.update(f"python {sys.version_info[:2]}\n".encode())
    return digest.hexdigest()[:16]


def choose_cache(app, config):
    """Point myst-nb to the cache folder of this fingerprint and remove the folders of earlier ones."""
    build = Path(app.outdir).parent
    current = build / (CACHE_PREFIX + fingerprint(app.srcdir))
    for old in build.glob(CACHE_PREFIX + "*"):
        if old != current:
            logger.info("initlib, the pins or the settings changed: every notebook runs again")
            shutil.rmtree(old)
    config.nb_execution_cache_path = str(current)


def pending(cache, notebooks):
    """Put the notebooks into the cache's project; the keys of those whose outputs it does not hold."""
    keys = [cache.add_nb_to_project(str(path)).pk for path in notebooks]
    return [record.pk for record in cache.list_unexecuted(filter_pks=keys)]


def execute_side_by_side(app):
    """Fill the cache: notebooks run side by side, each on one thread, one for each core of the machine.

    Sphinx would run one after another. One that fails is not in the cache afterwards: Sphinx runs it again and reports
    it. An accelerator's memory is not shared out, and a single notebook gains nothing: both are left to Sphinx.
    """
    cache = get_cache(app.config.nb_execution_cache_path)
    pages = (Path(app.srcdir) / f"{name}.ipynb" for name in app.config.external_site_map)
    notebooks = [path for path in pages if path.exists()]
    todo = pending(cache, notebooks)
    if len(todo) < 2 or runtime.device().type != "cpu":
        return
    report = logging.getLogger(__name__)
    report.setLevel(logging.INFO)  # the executor names each notebook as it starts
    # Each process would cut the cache to its limit behind every notebook, and take what another has just added for old.
    whole = mock.patch.object(type(cache), "truncate_caches")
    with mock.patch.dict(os.environ, dict.fromkeys(THREADS, "1")), whole:
        load_executor("local-parallel", cache, report).run_and_cache(
            filter_pks=todo, timeout=app.config.nb_execution_timeout
        )


def repository_options(environ=os.environ):
    """Theme options for the buttons that lead to the repository; none when nobody said where it is hosted.

    Binder installs the whole environment from the repository. Colab would open the notebook without `initlib`, so
    there is no Colab button.
    """
    url = environ.get("BOOK_REPOSITORY_URL", "").rstrip("/")
    if not url:
        return {}
    return {
        "repository_url": url,
        # The theme knows only the three big hosts by name; a server of one's own most likely runs GitHub's software.
        "repository_provider": next((name for name in ("gitlab", "bitbucket") if name in url), "github"),
        "repository_branch": environ.get("BOOK_REPOSITORY_BRANCH") or "main",
        "path_to_docs": "",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
        "launch_buttons": {"binderhub_url": "https://mybinder.org", "notebook_interface": "jupyterlab"},
    }


def add_addresses(app, config):
    """Add the repository buttons, and the pages' own addresses to what others show of them, when they are known."""
    config.html_theme_options.update(repository_options())
    config.html_baseurl = os.environ.get("BOOK_BASE_URL", "")


def rewrite_all(app, env):
    """All pages, if the contents, a title or a file in _static changed since the last build: every page shows them.

    Sphinx itself would write only the pages whose sources changed; the rest would not know a new page. And it copies
    style sheets and scripts only when it writes a page.
    """
    files = sorted((Path(app.srcdir) / "_static").glob("*"))
    static = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    contents = env.toctree_includes, {name: title.astext() for name, title in env.titles.items()}, static
    if getattr(env, "book_contents", None) == contents:
        return []
    env.book_contents = contents
    return sorted(env.found_docs)


def print_what_html_shows(app):
    """Sphinx writes a single page with what an extension has for that builder alone, if one has anything, and else with
    what it has for HTML. Here one has something (sphinx-exercise): the others' theorems and cards need the rest.
    """
    known = app.registry.translation_handlers
    known["singlehtml"] = known.get("html", {}) | known.get("singlehtml", {})


def repair_page(app, pagename, templatename, context, doctree):
    """Docutils calls the bibliography a list whose children are not list items, which screen readers reject."""
    if context.get("body"):
        context["body"] = context["body"].replace(
            '<div role="list" class="citation-list">', '<div class="citation-list">'
        )


def label_toggles(app, pagename, templatename, context, doctree):
    """The theme's buttons that unfold a chapter's second page in the sidebar say nothing to screen readers."""
    generate = context.get("generate_toctree_html")
    if generate is None:
        return

    def labelled(*args, **options):
        tree = generate(*args, **options)
        for toggle in tree("summary"):
            toggle["aria-label"] = f"Pages of {toggle.find_parent('li').find('a').get_text(strip=True)}"
        return tree

    context["generate_toctree_html"] = labelled


def setup(app):
    """Called by Sphinx; see `local_extensions` in _config.yml."""
    app.connect("config-inited", choose_cache)
    app.connect("config-inited", add_addresses)
    app.connect("builder-inited", print_what_html_shows)
    app.connect("builder-inited", execute_side_by_side)
    app.connect("env-updated", rewrite_all)
    app.connect("html-page-context", repair_page)
    app.connect("html-page-context", label_toggles, priority=900)  # behind the theme, which adds the function
    return {"parallel_read_safe": True, "parallel_write_safe": True}

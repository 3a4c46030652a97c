"""What holds for initlib as a whole: its rooms, its import, its names and its documentation."""

import ast
import doctest
import importlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import initlib

ROOMS = [
    *("runtime", "tables", "fans", "schemes", "model", "layers", "calibrate", "checks", "activations"),
    *("pairs", "meanfield", "weight_free", "signal"),
    *("nets", "sections", "data", "train", "figures"),
    *("follow", "drawn", "findings", "probe"),
]
FOLDER = Path(initlib.__file__).parent
MODULES = {room: importlib.import_module(f"initlib.{room}") for room in ROOMS}


def public(module):
    """Functions and classes that a module defines under a public name."""
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == module.__name__
    }


def methods(kind):
    """Public methods and properties that a class defines itself."""
    return {
        name: getattr(thing, "fget", thing)
        for name, thing in vars(kind).items()
        if not name.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, property))
    }


PUBLIC = {f"{room}.{name}": thing for room, module in MODULES.items() for name, thing in public(module).items()}
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing)}


def imported_rooms(room):
    """Modules of initlib that a room imports, wherever in its source."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{room}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("initlib.")}
            assert "initlib" not in {alias.name for alias in node.names}, f"{room} imports the whole package"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{room} imports relatively"
            if node.module == "initlib":
                found |= {alias.name for alias in node.names}
            elif node.module and node.module.startswith("initlib."):
                found.add(node.module.split(".")[1])
    return found


def test_rooms_are_all_modules_and_are_listed_in_order():
    assert sorted(ROOMS) == sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))
    listed = re.findall(r"^- :mod:`initlib\.(\w+)`", initlib.__doc__, re.MULTILINE)
    assert listed == ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_lower_ones(room):
    lower = ROOMS[: ROOMS.index(room)]
    assert imported_rooms(room) <= set(lower)


def test_imports_are_seen():
    assert imported_rooms("signal") >= {"runtime", "schemes", "checks", "fans"}


def test_public_names_exist_and_are_complete():
    assert len(set(initlib.__all__)) == len(initlib.__all__)
    assert initlib.__all__ == sorted(initlib.__all__)
    tree = ast.parse((FOLDER / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(initlib.__all__) == imported
    assert all(hasattr(initlib, name) for name in initlib.__all__)


def test_star_import_brings_the_function_fans_and_not_the_module():
    names = {}
    exec("from initlib import *", names)
    assert set(names) - {"__builtins__"} == set(initlib.__all__)
    assert names["fans"] is MODULES["fans"].fans


def test_import_changes_no_global_state():
    code = """
        import sys, warnings, logging, os, random
        import numpy as np, torch, matplotlib, scipy.stats, tabulate, cycler
        import matplotlib.pyplot as plt, IPython.display

        def state():
            return {
                "style": dict(matplotlib.rcParams),
                "backend": matplotlib.rcParams._get_backend_or_none(),
                "torch": torch.get_rng_state().tolist(),
                "numpy": [str(part) for part in np.random.get_state()],
                "python": random.getstate(),
                "warnings": list(warnings.filters),
                "errors": np.geterr(),
                "printing": str(np.get_printoptions()),
                "dtype": torch.get_default_dtype(),
                "grad": torch.is_grad_enabled(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "threads": torch.get_num_threads(),
                "precision": torch.get_float32_matmul_precision(),
                "environment": dict(os.environ),
                "path": list(sys.path),
                "logging": logging.root.level,
                "figures": plt.get_fignums(),
            }

        before = state()
        import initlib
        after = state()
        print([name for name in before if before[name] != after[name]])
    """
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, env=os.environ | {"MPLBACKEND": "agg"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_documented_with_its_chapter(name):
    text = inspect.getdoc(PUBLIC[name])
    assert text
    assert text.splitlines()[0].endswith((".", ":"))
    if name.split(".")[1] in initlib.__all__ or name in FUNCTIONS:
        assert re.search(r"chapters? \d\d", text), f"{name} does not say in which chapter it is introduced"
        assert "ntroduced in" in text


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if inspect.isclass(thing)])
def test_every_public_method_is_documented(name):
    for method, function in methods(PUBLIC[name]).items():
        inherited = next(
            (getattr(base, method, None) for base in PUBLIC[name].__mro__[1:] if hasattr(base, method)), None
        )
        assert inspect.getdoc(function) or inspect.getdoc(inherited), f"{name}.{method}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_that_raises_says_so(name):
    source = ast.parse(textwrap.dedent(inspect.getsource(FUNCTIONS[name])))
    raised = {
        getattr(node.exc.func, "id", None)
        for node in ast.walk(source)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    text = inspect.getdoc(FUNCTIONS[name])
    _, _, section = text.partition("Raises\n------\n")
    for error in raised:
        assert error in section, f"{name} does not document {error}"


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "Parameters\n---" in inspect.getdoc(FUNCTIONS[n])])
def test_documented_parameters_are_those_of_the_signature(name):
    text = inspect.getdoc(FUNCTIONS[name])
    section = text.partition("Parameters\n----------\n")[2].partition("\n\n")[0]
    documented = [
        part.strip().lstrip("*")
        for line in section.splitlines()
        if line and not line.startswith(" ")
        for part in line.split(" : ")[0].split(",")
    ]
    assert documented == list(inspect.signature(FUNCTIONS[name]).parameters)


@pytest.mark.parametrize("room", ROOMS)
def test_examples_in_docstrings_run(room, monkeypatch):
    monkeypatch.setenv("INITLIB_DEVICE", "cpu")
    failed, _ = doctest.testmod(MODULES[room], raise_on_error=False)
    assert failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder()
    with_examples = {room for room in ROOMS if any(test.examples for test in finder.find(MODULES[room]))}
    assert with_examples >= {"fans", "schemes", "signal"}


def test_citation_keys_exist_in_the_bibliography():
    entries = set(re.findall(r"^@\w+\{([^,]+),", (FOLDER.parent / "references.bib").read_text(encoding="utf-8"), re.M))
    sources = "\n".join((FOLDER / f"{room}.py").read_text(encoding="utf-8") for room in ROOMS)
    cited = set(re.findall(r":cite:\w+:`([^`]+)`", sources)) | set(re.findall(r'source(?:: str)? ?= ?"(\w+)"', sources))
    assert len(cited) >= 5
    assert cited <= entries


def test_version_is_that_of_the_installed_package():
    assert importlib.metadata.version("initlib") == initlib.__version__

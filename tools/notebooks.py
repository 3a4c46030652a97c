"""Keep the chapters clean in git.

    python tools/notebooks.py strip chapters/*.ipynb   remove what running leaves behind (the pre-commit hook does this)
    python tools/notebooks.py store chapters/*.ipynb   run, and keep the outputs that the tests compare

Only cells tagged `nbval-check-output` keep an output. nbstripout cannot do this: nbval compares a cell only if its
execution count is kept too, so these cells get the fixed count 1 and all others none.
"""

import argparse
import sys
from pathlib import Path

import nbformat

COMPARED = "nbval-check-output"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# The cell metadata that people write; everything else comes from editors.
KEPT_METADATA = {"mystnb", "tags"}


def is_compared(cell):
    """Is this a code cell whose stored output nbval compares?"""
    return cell.cell_type == "code" and COMPARED in cell.metadata.get("tags", [])


def strip(notebook):
    """Remove outputs, counts and editors' metadata in place, except the outputs that nbval compares."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_METADATA})
        if cell.cell_type != "code":
            continue
        if not is_compared(cell):
            cell.outputs = []
        cell.execution_count = 1 if cell.outputs else None
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = 1
    return notebook


def store(notebook, folder):
    """Run the notebook in its folder; the outputs end up in the cells."""
    from nbclient import NotebookClient

    NotebookClient(
        notebook, kernel_name="python3", timeout=600, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def main(arguments=None):
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["strip", "store"])
    parser.add_argument("notebooks", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    for path in options.notebooks:
        before = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(before, as_version=4)
        if options.command == "store":
            store(notebook, path.parent)
        after = nbformat.writes(strip(notebook)) + "\n"
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{options.command}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The whole book as a PDF, printed by Chromium from the single page that `--builder singlehtml` makes: `make pdf`."""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NUMBERS = '<div style="width: 100%; text-align: center; font: 8px sans-serif"><span class="pageNumber"></span></div>'


def chromium():
    """The path of the system's Chromium or Chrome, or what CHROMIUM names; None if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def options():
    """How playwright starts it. Chromium refuses its sandbox to root, which is what containers run as."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return {"executable_path": chromium(), "args": ["--no-sandbox"] if root else []}


def pdf(source, target):
    """Print a page as a reader would (`_static/print.css`), with numbers of pages and an outline to navigate by."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**options())
        page = browser.new_page()
        page.goto(Path(source).resolve().as_uri(), timeout=0)
        page.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")
        page.pdf(
            path=target,
            format="A4",
            prefer_css_page_size=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=NUMBERS,
            outline=True,
            tagged=True,
        )
        browser.close()


if __name__ == "__main__":
    if not chromium():
        sys.exit("no Chromium or Chrome found: install one, or set CHROMIUM to its path")
    pdf(*sys.argv[1:])
    print(f"The book: {Path(sys.argv[2]).resolve()}")

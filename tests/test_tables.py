"""Tables that print in a terminal and render in a notebook."""

import dataclasses

import pytest
from bs4 import BeautifulSoup

from initlib.tables import Table


@pytest.fixture
def table():
    return Table(("name", "value"), [("a", 1 / 3), ("<b> & 'c'", 1234567.0)])


def test_text_has_headers_and_one_line_a_row(table):
    lines = str(table).splitlines()
    assert lines[0].split() == ["name", "value"]
    assert len(lines) == 2 + len(table.rows)
    assert repr(table) == str(table)


def test_numbers_keep_four_significant_digits(table):
    assert "0.3333" in str(table)
    assert "0.33333" not in str(table)
    assert "1.235e+06" in str(table)


def test_notebook_form_holds_the_same_cells_and_escapes_them(table):
    soup = BeautifulSoup(table._repr_html_(), "html.parser")
    assert [cell.text.strip() for cell in soup.find_all("th")] == ["name", "value"]
    assert [cell.text.strip() for cell in soup.find_all("td")] == ["a", "0.3333", "<b> & 'c'", "1.235e+06"]
    assert soup.find("b") is None


def test_table_without_rows_still_shows_its_headers():
    empty = Table(("name", "value"), [])
    assert str(empty).split()[:2] == ["name", "value"]
    assert "<table>" in empty._repr_html_()


def test_table_cannot_be_changed(table):
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows = []


def test_text_that_looks_like_a_number_stays_as_it_is():
    shown = str(Table(("layer", "value"), [("0.1", 1.0), ("0.10", 2.0)]))
    assert [line.split() for line in shown.splitlines()[2:]] == [["0.1", "1"], ["0.10", "2"]]

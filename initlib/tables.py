"""A small table that prints in a terminal and renders in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """Rows under headers; numbers keep four significant digits.

    Attributes
    ----------
    headers : sequence of str
    rows : sequence of sequences
        One inner sequence a row, as long as ``headers``.

    Notes
    -----
    Introduced in chapter 03.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]

    def _render(self, style: str) -> str:
        # A layer may be called 0.10: what is given as text stays text.
        text = [k for k in range(len(self.headers)) if any(isinstance(row[k], str) for row in self.rows)]
        return tabulate(
            self.rows, headers=self.headers, tablefmt=style, floatfmt=".4g", disable_numparse=text if text else False
        )

    def __str__(self) -> str:
        return self._render("simple")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._render("html")

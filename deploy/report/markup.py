"""HTML that is escaped by construction: what is no `Html` already becomes text."""

import html
from collections.abc import Iterable, Sequence

from penstock.common.text import printable

LONGEST_CELL = 300
"""Most characters of a value in a table."""


class Html(str):
    """A text that is HTML already. Only this package makes one, never from parts of a run's files."""


def text_of(value: object, length: int) -> Html:
    """Return str(value) as HTML text: cut to `length` characters, markup and unprintable ones escaped.

    Line ends stay. "... (4 more)" follows a cut text.
    Example:
        >>> text_of("<b>\\x1b[2J", 20)
        '&lt;b&gt;\\\\x1b[2J'
    """
    whole = str(value)
    more = f" ... ({len(whole) - length} more)" if len(whole) > length else ""
    return Html(html.escape(printable(whole[:length]) + more))


def element(name: str, *content: object, **attributes: str) -> Html:
    """Return an HTML element `name` with `content`, which is escaped unless it is Html.

    An attribute may end in an underscore, as `class_` does. Its value is escaped, too.
    Example:
        >>> element("td", "1 < 2", class_="number")
        '<td class="number">1 &lt; 2</td>'
    """
    named = (f' {key.rstrip("_")}="{text_of(value, 1000)}"' for key, value in attributes.items())
    inner = (one if isinstance(one, Html) else text_of(one, LONGEST_CELL) for one in content)
    return Html(f"<{name}{''.join(named)}>{''.join(inner)}</{name}>")


def table(
    heads: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "numbers", marks: bool = False
) -> Html:
    """Return a table in a box that scrolls sideways.

    `heads` and each of `rows` begin with the cell of the rows' names. `kind` is the table's class:
    "numbers" are right-aligned, "texts" left-aligned. With `marks` a row whose cells differ begins with
    the sign of inequality.
    """
    lines = []
    for name, *cells in rows:
        differs = marks and len({str(cell) for cell in cells}) > 1
        head = element("th", "≠ " if differs else "", name, scope="row")
        lines.append(element("tr", head, *(element("td", cell) for cell in cells)))
    head = element("tr", *(element("th", one, scope="col") for one in heads))
    whole = element("table", element("thead", head), element("tbody", *lines), class_=kind)
    return element("div", whole, class_="scroll")

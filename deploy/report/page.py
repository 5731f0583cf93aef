"""The page of a report: one HTML file without scripts, links to elsewhere, or anything to fetch."""

from collections.abc import Sequence
from datetime import datetime

from penstock.common.errors import ConfigError
from penstock.common.text import hide_passwords, one_line
from penstock.deploy.report import tables
from penstock.deploy.report.curves import figures
from penstock.deploy.report.markup import Html, element, text_of
from penstock.deploy.report.run_data import RunData
from penstock.deploy.report.samples_part import samples_part

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; }
* { box-sizing: border-box; }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 80rem; margin: 0 auto; padding: 0 1rem 3rem;
  background: #fff; color: #1b1d21; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3, h4 { font-size: 1rem; margin: 1rem 0 .4rem; overflow-wrap: anywhere; }
nav a { display: inline-block; margin: 0 1rem .3rem 0; color: inherit; }
.missing { border-left: .25rem solid #d9730d; padding: .1rem 1rem; background: var(--soft);
  overflow-wrap: anywhere; }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); }
.columns { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.columns > * { min-width: 0; }
figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: .4rem; min-width: 0; }
figcaption { font-size: .9rem; } figcaption small { opacity: .75; }
.key { display: inline-block; margin-right: .9rem; overflow-wrap: anywhere; }
.key i { display: inline-block; width: 1.4rem; margin-right: .3rem; vertical-align: middle; }
svg { display: block; width: 100%; height: auto; } svg text { fill: currentColor; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .4rem 0 1rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
tbody th { font-weight: normal; } .numbers td, .numbers thead th:not(:first-child) { text-align: right; }
.numbers td { font-variant-numeric: tabular-nums; }
.texts td { min-width: 10rem; max-width: 34rem; overflow-wrap: anywhere; }
article { border: 1px solid var(--line); border-radius: .4rem; padding: .2rem .8rem;
  margin-bottom: .8rem; }
article p, dt { font-size: .8rem; opacity: .75; overflow-wrap: anywhere; } dd { margin: 0 0 .5rem; }
pre { margin: 0; padding: .4rem .6rem; background: var(--soft); font-size: .85rem; max-height: 18rem;
  overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { background: #15171b; color: #e4e6ea; } }
"""


def make_page(runs: Sequence[RunData], now: datetime) -> str:
    """Return the report of one run or two as an HTML page. Each text of a run is escaped in it.

    `now` is the time that the page states. What could not be read is named at its top.
    """
    names = " and ".join(one_line(run.label) for run in runs)
    missing = [f"{run.label}: {line}" for run in runs for line in run.missing]
    try:
        curves = list(figures(runs)) or [element("p", "No step has a value to draw.")]
    except ConfigError as error:
        curves = [element("p", str(error))]
    sections = {
        "Summary": [tables.summary(runs)],
        "Curves": [element("div", *curves, class_="figures")],
        "Where the time went": tables.times(runs),
        "Samples": samples_part(runs),
        "Audit": tables.audit(runs),
        "Settings": tables.settings(runs),
        "Machine": tables.machine(runs),
    }
    links = [element("a", title, href=f"#{_place(title)}") for title in sections]
    body = element(
        "body",
        element("h1", "Penstock: ", names),
        element("p", f"Made at {now:%Y-%m-%d %H:%M}. Reward and times are those of metrics.jsonl."),
        _missing(missing),
        element("nav", *links),
        *(
            element("section", element("h2", title, id=_place(title)), *content)
            for title, content in sections.items()
        ),
    )
    head = element("title", f"Penstock: {names}") + element("style", Html(_STYLE))
    return f"{_HEAD}{head}</head>\n{body}</html>\n"


def _place(title: str) -> str:
    """Return the name by which a link finds a section."""
    return title.lower().replace(" ", "-")


def _missing(lines: Sequence[str]) -> Html:
    """Return a box with what could not be read, "" if all was there. Passwords are ***."""
    if not lines:
        return Html()
    found = [element("li", text_of(one_line(hide_passwords(line)), 1000)) for line in lines]
    return element("div", element("p", "Not in this report:"), element("ul", *found), class_="missing")

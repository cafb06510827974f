"""The pieces of a page that needs nothing but itself: no script, no font, no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #fff; --ink: #1c1e22; --soft: #666c75; --line: #e3e3de; --axis: #a9adb3;
  --quality: #2563cf; --speed: #0f7f74; --rates: #b5530d;
  --good: #1a7a45; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131518; --card: #1c1f23; --ink: #e8e9eb; --soft: #9ba1aa; --line: #2e3238; --axis: #5c626b;
    --quality: #77a9ff; --speed: #4fc3b5; --rates: #f2a45f;
    --good: #62c48c; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 2rem 1.25rem 3rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 2.2rem 0 .8rem; font-size: 1.1rem; }
h3 { margin: 0; font-size: .95rem; font-weight: 600; }
header p { margin: .35rem 0 0; color: var(--soft); }
.badge {
  display: inline-block; margin-left: .5rem; padding: .1rem .65rem; border: 1px solid; border-radius: 1rem;
  font-size: .8rem; font-weight: 600; letter-spacing: 0; vertical-align: .25rem; color: var(--soft);
}
.badge.good { color: var(--good); } .badge.bad { color: var(--bad); }
.error { padding: .7rem 1rem; border-left: 3px solid var(--bad); background: var(--card); white-space: pre-wrap; }
.tiles, .charts { display: grid; gap: .9rem; }
.tiles { margin-top: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
.card {
  min-width: 0; padding: .9rem 1rem; border: 1px solid var(--line); border-radius: 10px; background: var(--card);
}
.tile .name, .tile .more { color: var(--soft); font-size: .78rem; }
.tile .value { font-size: 1.55rem; font-weight: 650; line-height: 1.3; letter-spacing: -.01em; }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin-bottom: .3rem; }
.head .last { color: var(--soft); font-size: .85rem; }
.none { color: var(--soft); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 13px; }
.grid { stroke: var(--line); } .axis { stroke: var(--axis); }
.mark { stroke: var(--axis); stroke-dasharray: 1 4; stroke-linecap: round; stroke-width: 2; }
.level { stroke: var(--axis); stroke-dasharray: 5 4; }
.quality { --c: var(--quality); } .speed { --c: var(--speed); } .rates { --c: var(--rates); }
.curve { fill: none; stroke: var(--c); stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.curve.many { stroke-width: 1.3; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1; }
.probe rect { fill: transparent; } .cursor { stroke: var(--axis); }
.probe line, .probe circle { visibility: hidden; pointer-events: none; }
.probe:hover line, .probe:hover circle { visibility: visible; }
.columns { columns: 420px; column-gap: .9rem; }
.columns .card { max-height: 36rem; margin-bottom: .9rem; overflow: auto; break-inside: avoid; }
.columns h2 { margin: 0 0 .5rem; }
table { width: 100%; border-collapse: collapse; font-size: .88rem; }
th, td { padding: .28rem .9rem .28rem 0; border-top: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
thead th { border-top: 0; }
td:first-child { overflow-wrap: break-word; }
td:last-child, th:last-child { padding-right: 0; }
.number { text-align: right; } td.number { white-space: nowrap; }
@media (max-width: 480px) { body { padding: 1.2rem .8rem 2rem; } .card { padding: .75rem .8rem; } }
@media print { body { background: none; } .card, .columns .card { max-height: none; break-inside: avoid; } }
"""


def escape(text: object) -> str:
    """`text` as a page can show it, whatever it holds: also control characters and undecodable file names."""
    shown = "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return html.escape(shown)


def page(title: str, body: Iterable[str]) -> str:
    """A whole page, which is also well-formed XML; `body` is markup, `title` text."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head>",
            "<body>",
            *body,
            "</body></html>\n",
        ]
    )


def tile(name: str, value: str, more: str = "") -> str:
    """A number with its name above and a remark beneath."""
    remark = f'<div class="more">{escape(more)}</div>' if more else ""
    return (
        f'<div class="card tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div>{remark}</div>'
    )


def table(title: str, rows: Sequence[Sequence[object]], head: Sequence[str] = (), numbers: Sequence[int] = ()) -> str:
    """A card with a table; the columns `numbers` are set to the right. Nothing where there are no rows."""
    if not rows:
        return ""

    def row(tag: str, cells: Sequence[object]) -> str:
        kinds = [' class="number"' if number in numbers else "" for number in range(len(cells))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    top = f"<thead><tr>{row('th', head)}</tr></thead>" if head else ""
    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    return f'<section class="card"><h2>{escape(title)}</h2><table>{top}<tbody>\n{body}\n</tbody></table></section>'

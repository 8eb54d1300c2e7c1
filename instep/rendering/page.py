"""The coloured view as one HTML page: no script, nothing loaded, every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from instep.rendering.view import Block, Run, Sheet, visible

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fdfdfc; --quiet: #57606a; --line: #d0d7de;
  --said: #0b5d2e; --said-paper: #dcf5e3; --control: #6f42c1; --control-paper: #f1eafc; --link: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14171b; --quiet: #9aa4af;
  --line: #363d46; --said: #a6f0bf; --said-paper: #123b22; --control: #d2b8ff; --control-paper: #2c2144;
  --link: #79b8ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
h3 { font-size: .95rem; margin: 1.5rem 0 .3rem; display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
h3 small { font-weight: normal; color: var(--quiet); }
a { color: var(--link); } a:focus-visible, summary:focus-visible, pre:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -99rem; } .skip:focus { position: static; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 0; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .4rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.5 ui-monospace, monospace; color: var(--quiet); }
mark { background: var(--said-paper); color: var(--said); text-decoration: underline; text-underline-offset: .2em;
  text-decoration-thickness: 1px; }
.control { color: var(--control); background: var(--control-paper); border-radius: .2rem; }
mark.control { color: var(--said); background: var(--said-paper); font-weight: bold; }
.repeated pre { border-style: dashed; }
nav ol { columns: 12rem; padding-left: 1.5rem; }
"""


def page(title: str, facts: Mapping[str, Any], sheets: Sequence[Sheet]) -> str:
    """The whole page as text. `facts` stand in a list at its top."""
    rows = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()
    )
    anchors = [
        (number, place)
        for number, sheet in enumerate(sheets)
        for place, block in enumerate(sheet.blocks)
        if block.supervised_tokens
    ]
    following = dict(zip(anchors, [*anchors[1:], None], strict=True))
    body = "".join(_sheet(number, sheet, following) for number, sheet in enumerate(sheets))
    links = "".join(
        f'<li><a href="#{_anchor(at)}">message {sheets[at[0]].blocks[at[1]].message}</a></li>'
        for at in anchors
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>"
        f'<a class="skip" href="#conversation">Skip to the conversation</a>'
        f"<header><h1>{escape(title)}</h1><dl>{rows}</dl>"
        "<h2>Legend</h2><p><mark>underlined, green: trained on</mark> · context: read, not trained on · "
        '<span class="control">control token of the template</span> · ↵ line end · → tab · '
        "· blank at a line's end · dashed frame: head repeated in a later window</p>"
        f'<nav aria-label="Trained turns"><details><summary>{len(anchors)} trained turns</summary><ol>{links}</ol>'
        f'</details></nav></header><main id="conversation" tabindex="-1">{body}</main></body></html>\n'
    )


def _anchor(at: tuple[int, int]) -> str:
    return f"s{at[0]}-b{at[1]}"


def _sheet(number: int, sheet: Sheet, following: Mapping[tuple[int, int], tuple[int, int] | None]) -> str:
    blocks = "".join(_block((number, place), block, following) for place, block in enumerate(sheet.blocks))
    counts = f"{sheet.tokens:,} tokens, {sheet.supervised_tokens:,} trained on"
    return f"<section><h2>{escape(sheet.title)}: {counts}</h2>{blocks}</section>"


def _block(
    at: tuple[int, int], block: Block, following: Mapping[tuple[int, int], tuple[int, int] | None]
) -> str:
    name = "template" if block.message < 0 else f"{block.message} {block.role}"
    after = following.get(at)
    link = f'<small><a href="#{_anchor(after)}">next trained turn</a></small>' if after else ""
    count = f"<small>{block.supervised_tokens:,} tokens trained on</small>" if block.supervised_tokens else ""
    text = "".join(map(_run, block.runs))
    kind = ' class="repeated"' if block.repeated else ""
    return f'<div id="{_anchor(at)}"{kind}><h3>{escape(name)}{count}{link}</h3><pre>{text}</pre></div>'


def _run(run: Run) -> str:
    text = escape(visible(run.text))
    control = ' class="control"' if run.control else ""
    if run.weight > 0:
        return f'<mark{control} title="weight {run.weight:g}">{text}</mark>'
    return f"<span{control}>{text}</span>" if control else text

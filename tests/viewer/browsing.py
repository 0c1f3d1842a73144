"""Pages of small records, and how to point at their cells."""

import re
import time

import torch

from probes.capture import capture
from tests.probes.small import tiny, tokens
from viewer.content import View
from viewer.page import build_page

CELL = """([row, column]) => {
    const box = document.getElementById("map").getBoundingClientRect();
    return [map.screenX(column) + map.zoom / 2, map.screenY(row) + map.zoom / 2, box.left, box.top];
}"""
# Through a canvas of its own: reading the map's own again and again makes Chromium complain.
PIXEL = """([x, y]) => {
    const ratio = devicePixelRatio;
    const context = new OffscreenCanvas(1, 1).getContext("2d");
    context.drawImage(document.getElementById("map"), -Math.floor(x * ratio), -Math.floor(y * ratio));
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
}"""


def wait_until(page, condition, seconds=10):
    """Until a JavaScript expression is true. Playwright's own waiting needs `eval`, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not true after {seconds} s: {condition}"
        page.wait_for_timeout(20)


def captured(n=24, step=7, names=None, seed=0, **options):
    model = tiny(seed, **options)
    ids = tokens(n) if names is None else torch.arange(n) % 11
    names = [f" t{i}".encode() for i in ids.tolist()] if names is None else [name.encode() for name in names]
    return capture(model, ids, token_bytes=names, step=step, dtype="float32", checkpoint_hash="c0ffee")


def written(tmp_path, *records, **known):
    """The address of a page with these records as steps."""
    view = View(
        {record.info.step: record for record in records},
        title="tiny",
        known={record.info.step: known for record in records},
    )
    path = tmp_path / "page.html"
    path.write_text(build_page(view), encoding="utf-8")
    return path.as_uri()


def point_at(page, row, column):
    x, y, left, top = page.evaluate(CELL, [row, column])
    page.mouse.move(left + x, top + y)
    return left + x, top + y


def tooltip(page):
    return page.locator("#tooltip").inner_text()


def weight_in(text):
    return float(re.search(r"weight\s+([\d.e+-]+)", text)[1])


def settled(page):
    """Until the map and the words beside it show the state."""
    wait_until(page, "map.frame === null && lines.frame === null && isSettled")

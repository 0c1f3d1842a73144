"""The same page in a real browser, fed by a server: a long text as a map that zooms."""

import threading
from urllib.parse import parse_qs, urlparse

import pytest
import torch

from model.attention.mask import MaskRule
from probes.metadata import LayerInfo, RecordInfo
from probes.record import AttentionRecord
from tests.viewer.browsing import CELL, PIXEL, point_at, settled, tooltip, wait_until, weight_in
from viewer.content import View

N, BRIGHT = 5000, (4321, 1234)  # one query looks at one key, all other rows at every key alike
NAMES = [f" word{i}" for i in range(N)]


def one_bright_cell():
    q, k = torch.zeros(1, N, 2), torch.zeros(1, N, 2)
    q[0, BRIGHT[0], 0], k[0, BRIGHT[1], 0] = 20.0, 1.0
    seen = torch.arange(1, N + 1, dtype=torch.float64)
    seen[BRIGHT[0]] += torch.tensor(20.0, dtype=torch.float64).exp() - 1
    layer = LayerInfo(3, "flash", "by hand", 1.0, MaskRule())
    ids, names = tuple(range(N)), tuple(NAMES)
    info = RecordInfo(ids, names, tuple(name.encode() for name in names), "", {}, 9, "", "float32", (layer,), {})
    tensors = {"layers.3.q": q, "layers.3.k": k, "layers.3.lse": seen.log().float()[None]}
    return AttentionRecord(info, tensors)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    from viewer.server import build_app, listen

    app = build_app(View.of(one_bright_cell(), title="long"), tmp_path_factory.mktemp("tiles"))
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


def test_a_single_bright_cell_is_seen_at_every_zoom(address, open_page):
    page = open_page(address)
    steps = page.evaluate("map.palette.steps")
    assert page.evaluate("map.level") >= 3  # the whole map: a pixel stands for many pairs
    page.locator("#title").hover()
    for zoom in (0, 0.3, 0.7, 1.5, 5, 40):
        page.evaluate(f"map.centre({BRIGHT[0]}, {BRIGHT[1]}, {zoom or 1e-9})")
        bright = "[{} >> map.level, {} >> map.level]".format(*BRIGHT)
        wait_until(page, f"map.frame === null && map.valueAt(...{bright}) !== undefined")
        value, level = page.evaluate(f"[map.valueAt(...{bright}), map.level]")
        assert value == pytest.approx(1, abs=1e-3)
        row, column = (2**level * ((at >> level) + 0.5) - 0.5 for at in BRIGHT)  # the middle of the pooled cell
        settled(page)
        x, y, *_ = page.evaluate(CELL, [row, column])
        if zoom < 40:  # from there its number is written on it
            assert page.evaluate(PIXEL, [x, y]) == pytest.approx(steps[255], abs=3)
    assert page.evaluate("document.getElementById('minimap').hidden") is False


def test_click_on_a_pooled_cell_locks_its_brightest_pair(address, open_page):
    page = open_page(address)
    level = page.evaluate("map.level")
    page.mouse.click(*point_at(page, *((at >> level << level) + 2**level / 2 for at in BRIGHT)))
    assert "largest weight" in tooltip(page)
    wait_until(page, "state.isLocked && isSettled")
    assert page.evaluate("[state.focus.row, state.focus.column]") == list(BRIGHT)
    assert page.locator("#brightest li").first.inner_text().split() == ["1234", "␣word1234", "1.000"]


def test_wheel_drag_and_keys_move_the_map(address, open_page):
    page = open_page(address)
    x, y = point_at(page, 3000, 1500)
    for _ in range(12):
        page.mouse.wheel(0, -400)
        page.wait_for_timeout(10)
    assert page.evaluate("map.zoom") > 1
    _, _, left, top = page.evaluate(CELL, [3000, 1500])
    under = f"map.cellAt({round(x) - left}, {round(y) - top})"
    row, column = page.evaluate(f"[{under}.row, {under}.column]")
    assert (row, column) == pytest.approx((3000, 1500), abs=10)  # it grows about the pointer; a pixel was 10 tokens
    settled(page)
    wait_until(page, f"map.level === 0 && {under}.value !== undefined")
    page.mouse.move(round(x), round(y))
    assert weight_in(tooltip(page)) == pytest.approx(1 / (row + 1), abs=1e-6)
    before = page.evaluate("[map.view.x, map.view.y, map.zoom]")
    page.mouse.down()
    page.mouse.move(x + 90, y + 60, steps=3)
    page.mouse.move(x + 100, y + 70)
    page.mouse.up()
    moved = page.evaluate("[map.view.x, map.view.y]")
    assert moved[0] < before[0] - 20 / before[2]
    assert moved[1] < before[1] - 20 / before[2]
    assert page.evaluate("state.isLocked") is False  # a drag is no click
    page.locator("#map").focus()
    page.keyboard.press("0")
    assert page.evaluate("map.isFitted") is True


def test_go_to_token_and_search(address, open_page):
    page = open_page(address)
    page.locator("#go-to").fill("4321")
    page.locator("#go-to").press("Enter")
    wait_until(page, "state.isLocked && isSettled && !map.isFitted")
    assert page.evaluate("[state.focus.row, state.focus.column]") == list(BRIGHT)
    assert page.locator("#strip [aria-selected=true]").get_attribute("data-index") == "4321"
    page.locator("#search").fill("D777 WORD")  # across two tokens
    assert page.locator("#found").inner_text() == "1 found"
    page.locator("#search").press("Enter")
    wait_until(page, "state.focus.row === 777 && isSettled")
    assert page.locator("#found").inner_text() == "1 of 1 found"
    assert page.evaluate("map.cellAt(map.screenX(state.focus.column) + 1, map.screenY(777) + 1).row") == 777
    page.locator("#search").fill("word123")
    found = sum("word123" in name for name in NAMES)
    assert page.locator("#found").inner_text() == f"{found} found"


def test_a_link_leads_back(address, open_page):
    page = open_page(address)
    page.evaluate("lock({ row: 4321, column: 1234 })")
    page.evaluate("map.centre(4321, 1234, 20)")
    page.locator("#log").check()
    wait_until(page, "location.hash.includes('zoom=20') && location.hash.includes('log=1')")
    link = parse_qs(urlparse(page.url).fragment)
    assert {name: link[name][0] for name in ("step", "layer", "head", "row", "col", "x", "y")} == {
        **{"step": "9", "layer": "3", "head": "0", "row": "4321", "col": "1234"},
        **{"x": "1234.5", "y": "4321.5"},
    }
    other = open_page(page.url)
    wait_until(other, "isSettled && state.isLocked")
    shown = "[state.layer, state.focus.row, state.focus.column, state.log, map.zoom, map.view.x, map.view.y]"
    assert other.evaluate(shown) == pytest.approx(page.evaluate(shown), abs=0.1)
    open_page(address + "#step=1&layer=99&head=-1&row=x&col=1e9&zoom=NaN&x=&y=7")  # no complaint

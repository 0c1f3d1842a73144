"""The page in a real browser, opened from disk: what it shows is what the record says."""

import math

import pytest
import torch

from model.attention.mask import MaskRule
from tests.probes.hand_built import record_of
from tests.viewer.browsing import CELL, PIXEL, captured, point_at, settled, tooltip, wait_until, weight_in, written

HOSTILE = (
    *(
        "</script><script>window.hacked = 1</script>",
        "<img src=x onerror=alert(1)>",
        '"',
        "'",
        "&lt;",
        "{{data}}",
        "\\",
    ),
    *("שלום", "مرحبا", "\u202eabc", "👩‍👩‍👧", "\n", "\t", "\0", " ", "\u2028", "a\u0301", "`${1}`"),
)


def test_opens_from_disk_without_a_network(tmp_path, open_page):
    record = captured()
    page = open_page(written(tmp_path, record), offline=True)
    assert page.locator("#strip [role=option]").count() == 24
    assert page.locator("#heads button").count() == 8
    assert page.title() == "tiny"
    assert page.locator("#about").inner_text().split("\n") == [
        *("path", record.info.layers[0].path, "kernel", record.info.layers[0].kernel),
        *("dtype", "float32", "step", "7", "checkpoint", "c0ffee"),
    ]
    wait_until(page, "document.querySelectorAll('#heads canvas[data-step]').length === 8")
    page.locator("#heads button").nth(5).click()
    assert page.locator("#head-name").inner_text() == "1.1"


def test_hover_looks_a_click_locks_arrows_move_and_escape_unlocks(tmp_path, open_page):
    record = captured()
    weights = record.weights(0, 0)
    page = open_page(written(tmp_path, record))
    page.locator("#heads button").first.click()
    point_at(page, 9, 4)
    assert weight_in(tooltip(page)) == pytest.approx(float(weights[9, 4]), abs=1e-5)
    assert "query 9 " in tooltip(page)
    assert "key   4 " in tooltip(page)
    point_at(page, 12, 3)
    settled(page)
    assert page.evaluate("state.focus") == {"row": 12, "column": 3}
    page.mouse.click(*point_at(page, 15, 6))
    point_at(page, 3, 1)
    settled(page)
    assert page.evaluate("[state.focus, state.isLocked]") == [{"row": 15, "column": 6}, True]
    assert float(page.locator("#focus dd >> nth=-1").inner_text()) == pytest.approx(float(weights[15, 6]), abs=1e-5)
    page.locator("#map").focus()
    for key in ("ArrowUp", "ArrowRight", "Shift+ArrowUp"):
        page.keyboard.press(key)
    settled(page)
    assert page.evaluate("state.focus") == {"row": 4, "column": 7}
    assert "masked" in page.locator("#live").inner_text()  # the future
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    settled(page)
    assert (
        page.locator("#live").inner_text()
        == f"query 4 {label(record, 4)}, key 0 {label(record, 0)}, weight {weights[4, 0]:.6f}"
    )
    page.keyboard.press("Escape")
    settled(page)
    assert page.evaluate("[state.focus, state.isLocked]") == [None, False]


def label(record, index):
    return record.info.token_texts[index].replace(" ", "␣")


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "flash"},
        {"attention": "reference", "n_kv_head": 2, "attention_softcap": 3.0},
        {"attention": "reference", "position": "alibi"},
        {"attention": "window", "window": 5, "n_global": 2},
        {"attention": "flash", "causal": False},
        {"attention": "linear"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_weight_is_the_records(tmp_path, open_page, options):
    """Rows, columns and pooled tiles, against the record's own maps."""
    record = captured(70, **options)
    page = open_page(written(tmp_path, record))
    for layer, head in ((0, 0), (1, 3)):
        weights = record.weights(layer, head)
        ask = f"Promise.all(Array.from({{length: 70}}, (_, i) => source.NAME(7, {layer}, {head}, i).then(Array.from)))"
        rows = torch.tensor(page.evaluate(ask.replace("NAME", "row")))
        torch.testing.assert_close(rows.clamp_min(0), weights, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(page.evaluate(ask.replace("NAME", "column"))).T, rows, rtol=0, atol=0)
        thumb = page.evaluate(f"source.thumb(7, {layer}, {head}).then(({{values}}) => [...values])")
        pooled = record.pooled(layer, head, 35)  # 70 tokens in cells of 2 × 2
        torch.testing.assert_close(torch.tensor(thumb).view(35, 35), pooled.nan_to_num(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_masks_are_the_records(tmp_path, open_page, causal):
    """Windows, global tokens and documents: -1 just where the rule, written out here, forbids."""
    seen = torch.tensor([
        [
            (j <= i or not causal) and (abs(i - j) < 4 or i < 2 or j < 2) and (i < 9) == (j < 9)
            for j in range(20)
        ]
        for i in range(20)
    ])  # fmt: skip
    weights = seen / seen.sum(-1, keepdim=True)
    documents = torch.tensor([[5] * 9 + [6] * 11])
    record = record_of(weights, rule=MaskRule(causal=causal, window=4, n_global=2, documents=documents))
    page = open_page(written(tmp_path, record))
    rows = page.evaluate("Promise.all(Array.from({length: 20}, (_, i) => source.row(0, 0, 0, i).then(Array.from)))")
    torch.testing.assert_close(torch.tensor(rows), weights.masked_fill(~seen, -1), atol=1e-6, rtol=1e-5)
    assert "window 4, 2 global, documents" in page.locator("#head-scores").inner_text()


def test_bfloat16_is_decoded(tmp_path, open_page):
    half = captured()
    tensors = {}
    for layer in half.layers:
        for name in ("q", "k", "lse"):
            tensor = half.tensor(layer, name)
            tensors[f"layers.{layer}.{name}"] = tensor if name == "lse" else tensor.bfloat16()
    record = type(half)(half.info, tensors)
    page = open_page(written(tmp_path, record, scores={}))  # its rows do not quite sum to one
    row = page.evaluate("source.row(7, 1, 2, 23).then(Array.from)")
    exact = record.block(1, 2, slice(23, 24), slice(None))[0]
    torch.testing.assert_close(torch.tensor(row), exact, atol=1e-6, rtol=1e-5)


def test_colours_follow_the_scale(tmp_path, open_page):
    """White is 0, the darkest is 1, grey is masked; on the log scale 1e-4 is white; a hidden first token is grey."""
    record = captured()
    weights = record.weights(0, 0).double()
    page = open_page(written(tmp_path, record), color_scheme="light")
    page.locator("#heads button").first.click()
    page.locator("#title").hover()
    settled(page)
    row, column = divmod(int(weights[:, 1:].argmax()), 23)
    cells = [(row, column + 1), (20, 0), (17, 5)]
    points = {cell: page.evaluate(CELL, list(cell))[:2] for cell in [*cells, (3, 9)]}
    steps = page.evaluate("map.palette.steps")
    assert steps[0] == [255, 255, 255]
    assert [sum(step) for step in steps] == sorted((sum(step) for step in steps), reverse=True)
    grey = page.evaluate("map.palette.masked.match(/\\d+/g).map(Number)")
    colours = {cell: page.evaluate(PIXEL, point) for cell, point in points.items()}
    assert colours[3, 9] == grey
    for cell in cells:
        assert colours[cell] == steps[round(float(weights[cell]) * 255)]
    page.locator("#log").check()
    page.locator("#hide-first").check()
    settled(page)
    for cell in cells:
        share = min(max(1 + math.log10(weights[cell]) / 4, 0), 1)
        expected = grey if cell[1] == 0 else steps[round(share * 255)]
        assert page.evaluate(PIXEL, points[cell]) == expected
    assert page.locator("#ticks").inner_text().split()[-1] == "1"


def test_slider_over_training_steps(tmp_path, open_page):
    records = [captured(step=step, seed=step) for step in (0, 10, 40)]
    page = open_page(written(tmp_path, *records))
    page.locator("#heads button").nth(2).click()
    page.mouse.click(*point_at(page, 20, 11))
    for place, record in ((1, records[1]), (0, records[0]), (2, records[2])):
        page.locator("#step").fill(str(place))
        settled(page)
        shown = float(page.locator("#focus dd >> nth=-1").inner_text())
        assert shown == pytest.approx(float(record.weights(0, 2)[20, 11]), abs=1e-5)
        assert page.locator("#step-shown").inner_text() == str(record.info.step)
        wanted = f"document.querySelectorAll('#heads canvas[data-step=\"{record.info.step}\"]').length === 8"
        wait_until(page, wanted)


def test_scores_roles_ablation_and_predictions(tmp_path, open_page):
    ablation = {"how": "zero", "tokens": 99, "loss": 1.0, "change": {"0.0": 0.125, "1.3": -0.5}}
    scores = {
        f"{layer}.{head}": {"previous": 0.1 * head, "induction": 0.2 * layer} for layer in (0, 1) for head in range(4)
    }
    scores["0.1"] = {"previous": 0.95, "induction": 0.0}
    predictions = [[(f"p{i}", 0.75), ("other", 0.125)] for i in range(24)]
    known = {"ablation": ablation, "scores": scores, "predictions": predictions}
    page = open_page(written(tmp_path, captured(), **known))
    heads = page.locator("#heads button")
    assert heads.nth(1).inner_text().split("\n")[0] == "0.1"
    assert "previous token 0.95" in heads.nth(1).inner_text()
    assert heads.nth(0).get_attribute("aria-label") == "Head 0.0, ablating it changes the loss by +0.125"
    heads.nth(7).click()
    assert "loss −0.500 (zero, 99 tokens)" in page.locator("#head-scores").inner_text()
    assert page.locator("#scatter circle").count() == 8
    assert "0.1" in page.locator("#scatter text").all_text_contents()  # the extreme
    page.locator("#scatter circle").last.click()
    page.mouse.click(*point_at(page, 5, 2))
    settled(page)
    assert page.locator("#next li").first.inner_text().split("\n") == ["p5", "0.750"]
    page.locator("#score-x").select_option("ablation")
    assert page.locator("#scatter circle").count() == 2


def brightest(weights):
    """Eight at most, and none with less than a hundredth of the first one's weight."""
    best = weights.topk(8)
    return best.indices[best.values > best.values[0] / 100].tolist()


def test_brightest_and_strip_follow_source_and_destination(tmp_path, open_page):
    record = captured()
    weights = record.weights(0, 0)
    page = open_page(written(tmp_path, record))
    page.locator("#heads button").first.click()
    page.locator("#strip [data-index='18']").click()
    settled(page)
    assert page.evaluate("state.focus") == {"row": 18, "column": int(weights[18].argmax())}
    shown = [int(line.split()[0]) for line in page.locator("#brightest li").all_inner_texts()]
    assert shown == brightest(weights[18])
    page.locator("#destination").click()
    page.locator("#strip [data-index='2']").click()
    settled(page)
    shown = [int(line.split()[0]) for line in page.locator("#brightest li").all_inner_texts()]
    assert shown == brightest(weights[:, 2])
    first = page.locator(f"#strip [data-index='{shown[0]}']")
    colour = first.evaluate("(span) => span.style.background.match(/\\d+/g).map(Number)")
    assert colour == page.evaluate("map.palette.steps")[round(float(weights[shown[0], 2]) * 255)]


def test_lines_view(tmp_path, open_page):
    record = captured()
    page = open_page(written(tmp_path, record))
    page.locator("#heads button").first.click()
    page.locator("#show-lines").click()
    settled(page)
    y = page.evaluate("lines.y(8)")
    page.locator("#lines").click(position={"x": 60, "y": y})
    settled(page)
    assert page.evaluate("state.focus") == {"row": 8, "column": int(record.weights(0, 0)[8].argmax())}
    page.keyboard.press("v")
    assert page.locator("#map").is_visible()


def test_hostile_tokens_are_only_text(tmp_path, open_page):
    record = captured(len(HOSTILE), names=HOSTILE)
    page = open_page(written(tmp_path, record))
    spans = page.locator("#strip [role=option]")
    own = "(span) => span.firstChild.data"
    shown = [spans.nth(i).evaluate(own) for i in range(len(HOSTILE))]
    assert shown == page.evaluate("labels")
    assert shown[0] == HOSTILE[0].replace(" ", "␣")
    assert all((text.strip() and text.isprintable()) or "\u200d" in text for text in shown)
    assert page.evaluate("[typeof window.hacked, document.images.length]") == ["undefined", 0]
    point_at(page, 9, 0)
    assert shown[0] in tooltip(page)
    page.locator("#search").fill("<script>w")
    assert page.locator("#found").inner_text() == "1 found"


@pytest.mark.parametrize("n", [1, 2, 512])
def test_lengths(tmp_path, open_page, n):
    many = {"n_layer": 6, "n_head": 12, "n_embd": 96, "block_size": 512} if n == 512 else {}
    record = captured(n, **many)
    page = open_page(written(tmp_path, record))
    row, column = n - 1, n // 2
    x, y = point_at(page, row, column)
    page.mouse.click(x, y)
    settled(page)
    layer, head, locked = page.evaluate("[state.layer, state.head, state.focus]")
    weight = float(record.row(layer, head, locked["row"])[locked["column"]])
    assert float(page.locator("#focus dd >> nth=-1").inner_text()) == pytest.approx(weight, abs=1e-5)
    assert abs(locked["row"] - row) <= 1
    if n == 512:
        assert (tmp_path / "page.html").stat().st_size < 30e6
        wait_until(page, "document.querySelectorAll('#heads canvas[data-step]').length > 4")
        assert page.locator("#heads canvas[data-step]").count() < 72  # those that nobody sees are not made


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_the_width_and_names_every_control(tmp_path, open_page, width, scheme):
    page = open_page(written(tmp_path, captured()), viewport={"width": width, "height": 844}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    unnamed = """() => [...document.querySelectorAll("button, input, select, svg, [tabindex]")]
        .filter((one) => !one.closest("[hidden]"))
        .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
        .map((one) => one.outerHTML)"""
    assert page.evaluate(unnamed) == []
    is_dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128"
    assert page.evaluate(is_dark) == (scheme == "dark")
    before = page.locator("#theme").inner_text()
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.locator("#theme").inner_text() != before
    assert page.evaluate(is_dark)

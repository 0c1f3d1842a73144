"""Pictures, tables and terminal drawings of attention, read back and compared with the record."""

import csv
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

from model import GPT, ModelConfig
from probes.capture import capture
from probes.pictures.draw import FORBIDDEN, draw_head, draw_heads, write_csv
from probes.pictures.terminal import print_head, print_heads

torch.set_num_threads(1)
HOSTILE = [b"=1+1", b'say "x", y', b"\n", b"\0", b"</script>", "苹".encode(), "苹".encode()[:2], b"$x$", "😀".encode()]


def record_of(token_bytes, **options):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 2048, "vocab_size": 7}
    model = GPT(ModelConfig(**{**sizes, **options}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)
    return capture(model, [i % 7 for i in range(len(token_bytes))], token_bytes=token_bytes, step=12)


def pixels(path):
    """(height, width, 3) in 0..255"""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


@pytest.mark.parametrize(
    "token_bytes", [[b"a"], [b"a", b"b"], HOSTILE, [b"x" * 50_000] * 20, [b"x"] * 64, [b"x"] * 65, [b"x"] * 1500]
)
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_of_any_length_and_text(tmp_path, token_bytes, suffix):
    record = record_of(token_bytes)
    for draw, name in ((lambda p: draw_head(record, 1, 0, p), "one"), (lambda p: draw_heads(record, p), "all")):
        path = tmp_path / (name + suffix)
        draw(path)
        if suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            is_grey = (pixels(path) == tuple(bytes.fromhex(FORBIDDEN[1:]))).all(-1)
            assert (is_grey.mean() > 0.02) == (len(token_bytes) > 1)
            assert max(pixels(path).shape) < 2500
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"all{suffix}", f"one{suffix}"]


def test_the_colour_of_a_cell_is_its_weight(tmp_path):
    """A map of zeros and ones, made by keys that match one query only: blue on the diagonal, white below it."""
    record = record_of([b"a", b"b", b"c"], n_layer=1, n_head=1)
    q = 100 * torch.eye(3, 16)
    tensors = {"layers.0.q": q[None], "layers.0.k": q[None], "layers.0.lse": torch.full((1, 3), 100.0 * 100 / 4)}
    record = type(record)(record.info, tensors)
    assert torch.equal(record.weights(0, 0), torch.eye(3))
    draw_head(record, 0, 0, tmp_path / "a.png")
    picture = pixels(tmp_path / "a.png")
    dark = (np.abs(picture - (0x08, 0x30, 0x6B)).sum(-1) < 6).sum()
    grey = (np.abs(picture - 0xD8).sum(-1) < 3).sum()
    assert dark == pytest.approx(grey, rel=0.1)  # three cells each, and the dark end of the colour bar


def test_the_text_of_an_svg_is_text_and_its_title_can_be_left_out(tmp_path):
    record = record_of(HOSTILE)
    for draw, name in (
        (lambda p, **o: draw_head(record, 1, 0, p, **o), "head 1.0"),
        (lambda p, **o: draw_heads(record, p, **o), "1.1"),
    ):
        shown = []
        for title in (True, False):
            draw(tmp_path / "a.svg", title=title)
            root = ElementTree.parse(tmp_path / "a.svg").getroot()
            shown.append(["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")])
        assert {"query (attends)", "key (attended to)", "weight", "0.25"} <= set(shown[1])
        assert any(name in text for text in shown[0])
        assert any("step 12" in text for text in shown[0])
        assert not any("step 12" in text for text in shown[1])
        if name == "head 1.0":
            assert {"=1+1", 'say␣"x",␣y', "</script>", "⏎", "U+0000", "$x$"} <= set(shown[1])


def test_another_suffix_is_refused_before_anything_is_drawn(tmp_path):
    record = record_of([b"a"])
    for draw in (lambda path: draw_head(record, 0, 0, path), lambda path: draw_heads(record, path)):
        with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
            draw(tmp_path / "a.gif")
    assert list(tmp_path.iterdir()) == []


def test_csv_holds_the_exact_weights_and_the_token_texts(tmp_path):
    record = record_of(HOSTILE)
    write_csv(record, 1, 1, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    texts = ["=1+1", 'say "x", y', "\n", "\0", "</script>", "苹", "<E8 8B>", "$x$", "😀"]
    assert header == ["query \\ key", *texts]
    assert [row[0] for row in rows] == texts
    weights = torch.tensor([[float(value) for value in row[1:]] for row in rows])
    assert torch.equal(weights, record.weights(1, 1))


def drawn(draw, record, *arguments, **options):
    console = Console(file=io.StringIO(), **options)
    draw(record, *arguments, console)
    return console.file.getvalue()


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("n", [1, 9, 40, 1000])
def test_terminal_lines_fit_and_the_grid_is_straight(colour, width, n):
    record = record_of((HOSTILE * 120)[:n])
    options = {"force_terminal": True, "color_system": "truecolor"} if colour else {"no_color": True}
    for text in (
        drawn(print_head, record, 1, 0, width=width, **options),
        drawn(print_heads, record, [0, 1], [0, 1], width=width, **options),
    ):
        lines = [cell_len(_plain(line)) for line in text.split("\n")]
        assert max(lines) <= width
    if n == 9:
        grid = _plain(drawn(print_head, record, 1, 0, width=width, **options)).split("\n")
        rows = [line for line in grid if line[:6].strip().isdecimal()]
        assert {cell_len(line) for line in rows} == {7 + 10 + 1 + 2 * n} if width > 40 else {7 + 9 + 1 + 2 * n}


def _plain(text):
    return "".join(part.partition("m")[2] if i else part for i, part in enumerate(text.split("\x1b[")))


def test_the_terminal_says_when_it_pools():
    text = drawn(print_head, record_of([b"x"] * 1000), 1, 0, width=80, no_color=True)
    assert "a cell is the maximum of 28×28 weights" in text
    assert "maximum" not in drawn(print_head, record_of([b"x"] * 10), 1, 0, width=80, no_color=True)


def test_wide_characters_stand_above_their_columns():
    text = drawn(print_head, record_of([c.encode() for c in "苹果发布了"]), 0, 1, width=80, no_color=True)
    *_, first_query, below, _end = text.split("\n")
    assert first_query.startswith("     4 了 ")
    assert below == " " * 10 + "苹果发布了"


def test_a_terminal_without_unicode_gets_ascii(tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii", errors="strict") as file:
        print_head(record_of(HOSTILE), 0, 1, Console(file=file, width=80))
        print_heads(record_of([b"x"] * 300), [0], [0, 1], Console(file=file, width=80))
    assert "U+82F9" in (tmp_path / "out").read_text(encoding="ascii")

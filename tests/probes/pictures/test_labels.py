"""Token labels: no token is invisible, none is an empty box."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from probes.pictures.labels import distinct, escape_missing, escape_unencodable, fit, fonts_for, label, labels


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b" the", "␣the"),
        (b"\n", "⏎"),
        (b"\t", "⇥"),
        (b"\r\n", "U+000D⏎"),
        (b"\0", "U+0000"),
        (b"\x1b[31m", "U+001B[31m"),
        ("苹".encode(), "苹"),
        ("苹".encode()[:2], "<E8 8B>"),
        ("苹".encode()[2:], "<B9>"),
        (b"a\xe8\x8b", "a<E8 8B>"),
        (b"\xb9b", "<B9>b"),
        (b"\xff\xfe", "<FF FE>"),
        (b"\xb9 \xe8", "<B9>␣<E8>"),
        ("\u202e".encode(), "U+202E"),
        ("\u00a0".encode(), "U+00A0"),
        ("\u0301".encode(), "U+0301"),
        ("e\u0301".encode(), "e\u0301"),
        ("\ufeff".encode(), "U+FEFF"),
        (b"</script>", "</script>"),
    ],
)
def test_label(token, shown):
    assert label(token) == shown


def test_a_token_without_bytes_shows_its_id():
    assert label(b"", 12) == "#12"
    assert labels([b"a", b""], [3, 4]) == ["a", "#4"]


@given(st.binary(min_size=1, max_size=12))
def test_any_bytes_give_a_printable_label(token):
    shown = label(token)
    assert shown
    assert all(c.isprintable() for c in shown)
    assert " " not in shown.replace("<", "\0").split("\0")[0]
    assert cell_len(fit(shown, 6)) == 6


def test_repeated_labels_are_told_apart_by_position():
    assert distinct(["a", "b", "a"]) == ["a₀", "b", "a₂"]
    assert distinct(["x"] * 13)[12] == "x₁₂"


def test_missing_glyphs_become_code_points():
    fonts, drawable = fonts_for(["a␣⏎⇥₀₉", "苹\ue000"])
    assert fonts[0] == "DejaVu Sans"
    assert {ord(c) for c in "a␣⏎⇥₀₉"} <= drawable
    assert ord("\ue000") not in drawable or len(fonts) > 1
    assert escape_missing("a苹", {ord("a")}) == "aU+82F9"


def test_a_terminal_of_a_narrow_encoding_gets_code_points():
    assert escape_unencodable("a苹␣", "utf-8") == "a苹␣"
    assert escape_unencodable("a苹", "ascii") == "aU+82F9"
    assert escape_unencodable("é苹", "latin-1") == "éU+82F9"


@pytest.mark.parametrize(("text", "shown"), [("ab", "ab  "), ("abcdef", "abc…"), ("苹果", "苹果"), ("苹果x", "苹 …")])
def test_fit_counts_wide_characters_twice(text, shown):
    assert fit(text, 4) == shown
    assert cell_len(shown) == 4

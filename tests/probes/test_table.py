"""One table, printed for people and for programs."""

import json

import pytest

from probes.table import Table, print_table

TABLE = Table(
    "heads", ("head", "token", "score"), [("0.1", "a\n</script>", 0.5), ("1.0", "🙂\x1b[2J", float("nan"))], {"n": 2}
)


def test_json_is_one_object_without_nan(capsys):
    print_table(TABLE, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "title": "heads",
        "about": {"n": 2},
        "rows": [
            {"head": "0.1", "token": "a\n</script>", "score": 0.5},
            {"head": "1.0", "token": "🙂\x1b[2J", "score": None},
        ],
    }


def test_text_shows_control_characters_and_gaps(capsys):
    print_table(TABLE, as_json=False)
    out = capsys.readouterr().out
    assert "a\\n</script>" in out
    assert "🙂\\x1b[2J" in out
    assert "\x1b[2J" not in out
    assert "0.500" in out
    assert out.splitlines()[-1] == "n 2"


def test_sorting_puts_gaps_last_and_refuses_unknown_columns():
    table = Table("", ("a", "b"), [("x", None), ("y", 1.0), ("z", 3.0)])
    assert [row[0] for row in table.sorted_by("b").rows] == ["z", "y", "x"]
    assert [row[0] for row in table.sorted_by("b", descending=False).rows] == ["y", "z", "x"]
    with pytest.raises(ValueError, match="choose one of: a, b"):
        table.sorted_by("c")
    with pytest.raises(ValueError, match="3 values under 2"):
        Table("", ("a", "b"), [(1, 2, 3)])


def test_wide_tables_are_printed_in_bands_that_all_begin_with_the_first_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    names = [f"score_{i}" for i in range(6)]
    print_table(Table("wide", ("head", *names), [("0.1", *range(6))]), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["head", "score_0", "score_1"],
        ["0.1", "0", "1"],
        ["head", "score_2", "score_3"],
        ["0.1", "2", "3"],
        ["head", "score_4", "score_5"],
        ["0.1", "4", "5"],
    ]

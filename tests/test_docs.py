"""The pages are true: links lead somewhere, named lines and tests exist, and the scripts take the commands."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import probes.commands
import sample
from training.cli import parse
from training.config import parse_arguments

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = "model|data|training|probes|viewer|tests|benchmarks|configs"
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])


def spans(page):
    """What stands in backticks, and each line of the indented code blocks."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (\S.*)$", text, re.MULTILINE)


def names(file):
    """Functions, classes and Class.method of a Python file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))


def commands(page):
    """The arguments of every `python SCRIPT …`, without the comment behind it."""
    for span in spans(page):
        if match := re.match(r"(?:\.venv/bin/)?python ((?:train|sample|probe)\.py .*)", span):
            script, *arguments = shlex.split(match[1], comments=True)
            # Tables show the form of a command by words in capitals and dots.
            if not any(word in ("…", "TEXT", "RUN") for word in arguments):
                yield script, arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_lines_exist(page):
    for span in spans(page):
        if match := re.fullmatch(r"([\w/.]+\.py)::([\w.]+)", span):
            assert match[2] in set(names(REPOSITORY / match[1])), span
        elif re.fullmatch(rf"({ROOMS})/[\w/.]*", span) and "foo" not in span:
            assert (REPOSITORY / span).exists() or (REPOSITORY / f"{span}.py").exists(), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for script, arguments in commands(page):
        if script == "train.py":
            parse_arguments(arguments, script)
        else:
            parse({"sample.py": sample.Arguments, "probe.py": probes.commands.Command}[script], arguments, script)


def test_the_account_of_attention_names_every_claim():
    text = (REPOSITORY / "docs" / "attention.md").read_text(encoding="utf-8")
    claims = [name for name in names(REPOSITORY / "tests" / "test_claims.py") if name.startswith("test_claim_")]
    assert [name for name in claims if name not in text] == []
    assert len(claims) > 16


def test_a_wrong_command_and_a_wrong_name_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`python train.py --model.n_hed 3`\n\n    .venv/bin/python sample.py runs/quick --tp-k 3  # a comment\n"
    )
    assert list(commands(page)) == [
        ("train.py", ["--model.n_hed", "3"]),
        ("sample.py", ["runs/quick", "--tp-k", "3"]),
    ]
    with pytest.raises(ValueError, match="n_head"):
        parse_arguments(next(commands(page))[1], "train.py")
    assert "rotate" in set(names(REPOSITORY / "model" / "position.py"))
    assert "turns" not in set(names(REPOSITORY / "model" / "position.py"))

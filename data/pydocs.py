"""Python's own English documentation: text that is on every machine which can run this project."""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LAYOUT = 1  # of the text below; another number tells caches that the text has changed
SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip", "site-packages", "dist-packages",
    "_vendor", "pydoc_data", "__pycache__", "lib-dynload", "distutils",
}  # fmt: skip
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def read_pydocs() -> tuple[str, ...]:
    """One text for each topic of the language reference and for each documented standard library module.

    The modules are parsed, never imported. The order is that of the titles' hashes: fixed, and mixed enough for the
    end of the text, which is kept for validation, to resemble the rest. ValueError when this Python carries none.
    """
    texts = {**_topics(), **dict(_modules())}
    if not texts:
        raise ValueError("this Python carries neither its documentation nor its library's source; name a --data.source")
    return tuple(texts[title] for title in sorted(texts, key=lambda title: hashlib.sha256(title.encode()).digest()))


def pydocs_fingerprint() -> str:
    """A hash of everything that the text is made from; much quicker than making it."""
    digest = hashlib.sha256(f"pydocs {LAYOUT} {sys.version_info[:2]}".encode())
    for title, text in sorted(_topics().items()):
        digest.update(hashlib.sha256((title + "\n" + text).encode()).digest())
    for name, path in _library_files():
        digest.update(hashlib.sha256(name.encode() + b"\n" + path.read_bytes()).digest())
    return digest.hexdigest()


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return {}
    return {title: text.strip() + "\n" for title, text in topics.items()}


def _library_files() -> list[tuple[str, Path]]:
    """Name and path of every module to read, in the order of the names."""
    library = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            parts = path.relative_to(library).with_suffix("").parts
            files.append((".".join(parts).removesuffix(".__init__"), path))
    return sorted(files)


def _modules() -> Iterator[tuple[str, str]]:
    for name, path in _library_files():
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        sections = list(_sections(tree, name))
        if sections:
            yield name, "\n".join(sections)


def _sections(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """A heading and the docstring for a module or class and for each public thing in it, in the order of the source."""
    if docstring := ast.get_docstring(node):
        yield _section(name if isinstance(node, ast.Module) else f"class {name}", docstring)
    for child in node.body:
        if not isinstance(child, DEFINITIONS) or child.name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from _sections(child, f"{name}.{child.name}")
        elif docstring := ast.get_docstring(child):
            yield _section(f"{name}.{child.name}({ast.unparse(child.args)})", docstring)


def _section(heading: str, docstring: str) -> str:
    return f"{heading}\n{'=' * min(len(heading), 79)}\n\n{docstring.strip()}\n"

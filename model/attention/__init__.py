"""Attention paths: different ways to compute the same weighted sum. The folder is the registry.

A file `foo.py` here that defines a subclass of `AttentionPath` is the path `foo`, everywhere: in configs, on the
command line, in test ids and in benchmark rows.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.attention.path import AttentionPath

_NOT_PATHS = {"path", "mask"}  # and files that begin with an underscore, which paths share


def available() -> tuple[str, ...]:
    """Names of all attention paths, sorted: the stems of this folder's files. Does not import torch."""
    return tuple(sorted({file.stem for file in Path(__file__).parent.glob("[!_]*.py")} - _NOT_PATHS))


def path_class(name: str) -> "type[AttentionPath]":
    """The class of path `name`. ValueError with the choices when there is none."""
    if name not in available():
        raise ValueError(f"no attention path {name!r}; choose one of: {', '.join(available())}")
    from model.attention.path import AttentionPath

    module = importlib.import_module(f"model.attention.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, AttentionPath) and value.__module__ == module.__name__:
            return value
    raise TypeError(f"model/attention/{name}.py defines no AttentionPath")


def build(name: str, **options: Any) -> "AttentionPath":
    """Path `name` with its options.

    ValueError when there is no such path or option, or when the path does not support an option that was asked for;
    the message names the paths that do.
    """
    cls = path_class(name)
    unknown = sorted(set(options) - cls.option_names())
    if unknown:
        raise ValueError(
            f"attention path {name!r} has no option {unknown[0]!r}; it has: {', '.join(sorted(cls.option_names()))}"
        )
    path = cls(**options)
    require(path, path.option_words())
    return path


def require(path: "AttentionPath", words: set[str]) -> None:
    """ValueError unless `path` supports every capability word; names the missing ones and the paths that have them."""
    missing = words - path.supports
    if missing:
        able = [name for name in available() if words <= path_class(name).supports]
        raise ValueError(
            f"attention path {path.name!r} does not support {', '.join(sorted(missing))}; "
            f"paths that do: {', '.join(able) or 'none'}"
        )

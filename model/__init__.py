"""The model: parameters and maths. Knows no files, ranks, steps or command line."""

from typing import TYPE_CHECKING, Any

from model.config import ModelConfig

if TYPE_CHECKING:
    from model.gpt import GPT

__all__ = ["GPT", "ModelConfig"]


def __getattr__(name: str) -> Any:
    # GPT needs torch (1.5 s to import); a script's --help reads only ModelConfig and must not pay for it.
    if name == "GPT":
        from model.gpt import GPT

        return GPT
    raise AttributeError(f"module 'model' has no attribute {name!r}; it has {', '.join(__all__)}")

"""The page: attention that can be walked through in a browser, from a file or from a server. See docs/viewer.md."""

from viewer.page import show

__all__ = ["show"]

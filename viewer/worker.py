"""The one thread that computes for the server: what is asked for at once first, then tiles that are being made."""

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.record import AttentionRecord
from viewer.tiles import Tiles, key_of, load_tiles, make_tiles, save_tiles

Head = tuple[int, int, int]  # step, layer, head

_MOST_BYTES = 1 << 29  # of made tiles that are held in memory


@dataclass
class Making:
    """A head's tiles while they are made."""

    steps: Generator[float, None, Tiles]
    order: int  # the lowest goes on first
    progress: float = 0.0
    seconds: float = 0.0  # of work so far

    def to_json(self) -> dict[str, float | None]:
        left = self.seconds / self.progress * (1 - self.progress) if self.progress > 0 else None
        return {"progress": self.progress, "seconds_left": left}


class Worker:
    """One thread, because torch itself uses all cores: requests must not take them from each other.

    folder: where made tiles are kept between runs; where that cannot be written they stay in memory.
    """

    def __init__(self, records: Mapping[int, AttentionRecord], folder: Path) -> None:
        self._records, self._folder, self._can_write = records, folder, True
        self._asked = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._making: dict[Head, Making] = {}
        self._made: dict[Head, Tiles | Exception] = {}  # the last used ones at the end
        self._count = itertools.count(1)
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Any]) -> "Future[Any]":
        """Computes this before any tiles go on being made."""
        future: Future[Any] = Future()
        with self._changed:
            self._asked.append((future, task))
            self._changed.notify()
        return future

    def tiles(self, head: Head, *, is_urgent: bool) -> Tiles | Making | Exception:
        """The kept tiles of a head, how far they are, or why there are none. Urgent ones are made before others, the
        newest first."""
        with self._changed:
            if head in self._made:
                self._made[head] = self._made.pop(head)
                return self._made[head]
            order = next(self._count) * (-1 if is_urgent else 1)
            making = self._making.setdefault(head, Making(self._steps(head), order))
            making.order = min(making.order, order)
            self._changed.notify()
            return making

    def close(self) -> None:
        """Ends the thread, within one strip of rows; what was asked for and not begun is cancelled."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        for future, _ in self._asked:
            future.cancel()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._asked or self._making)
                if self._is_closed:
                    return
                asked = self._asked.popleft() if self._asked else None
                head = min(self._making, key=lambda head: self._making[head].order) if not asked else None
            if asked is not None:
                _answer(*asked)
            elif head is not None:
                self._go_on(head, self._making[head])

    def _go_on(self, head: Head, making: Making) -> None:
        started, done = time.perf_counter(), None
        try:
            making.progress = next(making.steps)
            making.seconds += time.perf_counter() - started
            return
        except StopIteration as end:
            done = end.value
        except Exception as error:  # of one head, such as one that fills the memory: the server goes on
            done = error
        with self._changed:
            del self._making[head]
            self._made[head] = done
            while len(self._made) > 1 and sum(map(_size, self._made.values())) > _MOST_BYTES:
                del self._made[next(iter(self._made))]

    def _steps(self, head: Head) -> Generator[float, None, Tiles]:
        step, layer, number = head
        record, path = self._records[step], self._folder / f"{step}-{layer}.{number}.safetensors"
        key = key_of(record, layer, number)
        tiles = load_tiles(path, key)
        if tiles is None:
            tiles = yield from make_tiles(record, layer, number)
            try:
                save_tiles(tiles, path, key)
            except ValueError as error:
                if self._can_write:
                    print(f"zoomed-out maps are not kept: {error}", file=sys.stderr)
                self._can_write = False
        return tiles


def _answer(future: "Future[Any]", task: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(task())
        except Exception as error:  # goes to whoever waits
            future.set_exception(error)


def _size(tiles: Tiles | Exception) -> int:
    return 0 if isinstance(tiles, Exception) else sum(tile.nbytes for tile in tiles.values())

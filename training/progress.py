"""What a person at the terminal sees and can do while the loop runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tqdm import tqdm

from training.config import Config
from training.state import TrainState


def progress_bar(config: Config, state: TrainState) -> tqdm:
    """Steps done, time left; on the main process only."""
    return tqdm(
        total=config.train.last_step,
        initial=state.step,
        desc="training",
        unit="step",
        dynamic_ncols=True,
        disable=not (config.log.progress and state.runtime.is_main),
    )


@contextmanager
def stop_requests(state: TrainState) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the loop after the current step, with a checkpoint; a second one ends it at once."""

    def request_stop(signal_number: int, _: FrameType | None) -> None:
        state.stop_signal = signal_number
        signal.signal(signal_number, before[signal.Signals(signal_number)])

    try:
        before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, where Python delivers no signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

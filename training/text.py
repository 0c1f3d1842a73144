"""From token ids to text as it is made, for sample.py and for the sample at the end of training."""

import codecs
from collections.abc import Callable, Iterator, Sequence

import torch

from data.tokenizer import Tokenizer
from model import GPT
from model.config import SamplingConfig
from model.generate import generate
from training.config import Config


class TextStream:
    """Turns the tokens of one sample into text, never half a character, and ends before the stop text.

    A character whose bytes come in several tokens is held back until it is whole; bytes that are no UTF-8 become
    U+FFFD. What could be the beginning of the stop text is held back until it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str = "") -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.tokens: list[int] = []
        self.text = ""  # all that was released
        self.finish = ""  # why it ended: length, stop or end_of_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """Takes the next token; returns the text that can be shown now."""
        if self.finish:
            return ""
        if token == self.tokenizer.end_of_text:
            return self.end("end_of_text")
        self.tokens.append(token)
        return self._release(self._decoder.decode(self.tokenizer.token_bytes(token)))

    def end(self, why: str = "length") -> str:
        """No more tokens come; returns what was held back."""
        if self.finish:
            return ""
        rest = self._release(self._decoder.decode(b"", final=True))
        if not self.finish:
            rest += self._held
            self.text += self._held
            self._held, self.finish = "", why
        return rest

    def _release(self, text: str) -> str:
        self._held += text
        found = self._held.find(self.stop) if self.stop else -1
        if found >= 0:
            ready, self._held, self.finish = self._held[:found], "", "stop"
        else:
            n_kept = next((n for n in range(len(self.stop) - 1, 0, -1) if self._held.endswith(self.stop[:n])), 0)
            ready, self._held = self._held[: len(self._held) - n_kept], self._held[len(self._held) - n_kept :]
        self.text += ready
        return ready


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """What an empty prompt becomes: the end-of-text token, else a newline, else the first token of the vocabulary."""
    if tokenizer.end_of_text is not None:
        return [tokenizer.end_of_text]
    return tokenizer.encode("\n", unknown="skip") or [0]


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt_tokens: list[int],
    *,
    n_samples: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int,
    stop: str = "",
    use_cache: bool = True,
) -> Iterator[tuple[list[TextStream], list[str]]]:
    """Yields, a token at a time, the streams of all samples and the text that each has just released.

    Ends when every sample has ended. The random numbers come from a generator of their own.
    """
    device = next(model.parameters()).device
    streams = [TextStream(tokenizer, stop) for _ in range(n_samples)]
    tokens = torch.tensor([prompt_tokens], device=device).expand(n_samples, -1)
    steps = generate(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        n_valid_tokens=tokenizer.vocab_size,
        generator=torch.Generator(device).manual_seed(seed),
        use_cache=use_cache,
    )
    for next_tokens in steps:
        yield streams, [stream.feed(token) for stream, token in zip(streams, next_tokens.tolist(), strict=True)]
        if all(stream.finish for stream in streams):
            return
    yield streams, [stream.end() for stream in streams]


def validation_tokens(config: Config, tokenizer: Tokenizer) -> list[int]:
    """The validation part of the text that a run was trained on. ValueError when it is not there any more."""
    from data.prepare import prepare

    try:
        corpus = prepare(config.data, show_progress=False)
        if corpus.tokenizer.hash != tokenizer.hash:
            raise ValueError("its text has another vocabulary now")
        tokens: list[int] = corpus.split(config.data.val_fraction, config.model.block_size).val.tolist()
    except ValueError as error:
        raise ValueError(f"the run's own data cannot be used ({error}); give --text or --file") from error
    return tokens


def probe_tokens(
    config: Config, tokenizer: Tokenizer, val_tokens: Callable[[], Sequence[int]], at_most: int = 256
) -> list[int]:
    """The text that a run is looked at with: probe.text, else the start of its validation split."""
    n_tokens = min(at_most, config.model.block_size)
    return tokenizer.encode(config.probe.text, unknown="skip")[:n_tokens] or list(val_tokens()[:n_tokens])


def sample_text(model: GPT, tokenizer: Tokenizer, config: Config) -> str:
    """What the model writes after config.log.sample_prompt, at temperature 0.8."""
    steps = generate_text(
        model,
        tokenizer,
        tokenizer.encode(config.log.sample_prompt, unknown="skip") or start_tokens(tokenizer),
        n_samples=1,
        max_new_tokens=config.log.sample_tokens,
        sampling=SamplingConfig(temperature=0.8),
        seed=config.run.seed,
    )
    return "".join(released[0] for _, released in steps)

"""Trains a GPT:  python train.py configs/quick.toml --run.dir runs/first

Read from top to bottom: this file says what happens in a run and in which order; training/ says how.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.cli import NonFiniteLoss, exit_on_user_error, printable
from training.config import Config, parse_arguments

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from data.tokenizer import Tokenizer
    from training.evaluate import Evaluation
    from training.parallel import Share
    from training.state import TrainState


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    config = parse_arguments(sys.argv[1:] if argv is None else argv, prog="train.py")
    try:
        state = train(config)
    except NonFiniteLoss as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    return 128 + state.stop_signal if state.stop_signal else 0


def train(config: Config) -> "TrainState":
    """Trains up to config.train.last_step, from the run directory's checkpoint if there is one; returns the state
    reached. ValueError for what the user can mend; NonFiniteLoss."""
    # Here and not above, so that --help and mistakes in the configuration answer without torch.
    from data.prepare import prepare
    from model import GPT
    from probes.timeline import look_at_heads
    from training.checkpoint import restore, save_checkpoint
    from training.evaluate import evaluate
    from training.metrics import MetricsLog, attention_kernel
    from training.optimizer import build_optimizer, build_scaler
    from training.parallel import build_loader, check_trains, compile_model, on_this_process, share_of, wrap
    from training.range_test import range_test
    from training.runtime import running, seed_rank
    from training.state import TrainState

    with running(config.run) as runtime:
        say: Callable[[str], None] = print if runtime.is_main else lambda _: None
        share = share_of(config.model, runtime)
        config.micro_batch_size(share.world_size)  # refuses a batch that does not divide
        check_trains(config.model, runtime.device)

        # Data
        with runtime.main_first():
            corpus = prepare(config.data, show_progress=config.log.progress and runtime.is_main)
        config = config.with_vocabulary(corpus.tokenizer.vocab_size)
        split = corpus.split(config.data.val_fraction, config.model.block_size)
        val_tokens = split.val[: config.train.eval_tokens + 1] if config.train.eval_tokens else split.val
        say(
            f"data: {corpus.source}, {corpus.tokenizer.name} tokenizer of {corpus.tokenizer.vocab_size:,} tokens; "
            f"{len(split.train):,} tokens to train on, {len(split.val):,} to validate on"
        )

        # Model, optimizer: everything that the loop changes is in `state`
        model = GPT(config.model).to(runtime.device)
        seed_rank(config.run, runtime)
        state = TrainState(
            model=model,
            optimizer=build_optimizer(model, config.optimizer),
            loader=build_loader(config, split.train, share),
            scaler=build_scaler(runtime),
            runtime=runtime,
        )
        if config.train.find_lr:
            range_test(config, state, functools.partial(run_steps, forward=wrap(model, runtime), share=share))
            return state
        directory = restore(config, state, corpus, say)
        compiled = compile_model(model, config.run.compile, runtime)
        say(
            f"model: {model.n_parameters():,} parameters, attention path {config.model.attention} "
            f"({attention_kernel(model, runtime)}); {runtime.device}, {runtime.dtype_name}"
        )

        # Loop
        validate = functools.partial(
            evaluate,
            compiled,
            val_tokens,
            block_size=config.model.block_size,
            n_bytes=corpus.tokenizer.n_bytes(val_tokens[1:]),
            runtime=runtime,
            share=share,
        )

        def save(name: str) -> None:
            if not state.is_finite():
                raise NonFiniteLoss(
                    f"parameters are no longer finite after step {state.step}: not saved; earlier checkpoints stay in "
                    f"{directory}; try a lower --optimizer.learning_rate than {config.optimizer.learning_rate}"
                )
            content = state.checkpoint(config, corpus, with_training=name != "best.pt")  # every process takes part
            if runtime.is_main:
                save_checkpoint(directory, name, content)

        @on_this_process(model)
        def look() -> None:
            if runtime.is_main and state.is_finite():
                scores = look_at_heads(model, corpus.tokenizer, directory, state.step, runtime.dtype_name)
                log.write_scores(state.step, scores)

        with MetricsLog(directory, config, resumed_step=state.step, enabled=runtime.is_main) as log:
            run_steps(config, state, wrap(compiled, runtime), share, validate, look, save, log.write)

    # Close, outside the process group: what follows is the main process's alone
    if runtime.is_main:
        report(config, state, corpus.tokenizer, val_tokens)
    return state


def run_steps(
    config: Config,
    state: "TrainState",
    forward: "nn.Module",
    share: "Share",
    validate: "Callable[[], Evaluation]",
    look: Callable[[], None],
    save: Callable[[str], None],
    log: Callable[[dict[str, Any]], None],
) -> None:
    """THE loop: batch, micro-steps, clip, step, log, evaluate, look at the heads, save."""
    import torch

    from model.gpt import next_token_loss
    from training.metrics import progress_bar
    from training.optimizer import learning_rate
    from training.parallel import fit_micro_batch, gradient_sync
    from training.runtime import stop_requests

    runtime, optimizer, scaler = state.runtime, state.optimizer, state.scaler
    micro_batch_size = fit_micro_batch(state.model, config, share, runtime)
    last_step, tokens_per_step = config.train.last_step, config.train.batch_size * config.model.block_size
    logged_tokens, logged_seconds = state.n_tokens, state.seconds
    with stop_requests(state), progress_bar(config, state) as bar:
        forward.train()
        while state.step < last_step and not state.stop_signal:
            started = time.perf_counter()
            step = state.step + 1
            for group in optimizer.param_groups:
                group["lr"] = group["lr_ratio"] * learning_rate(step, config.train.max_steps, config.optimizer)

            # The gradient of the mean loss over the global batch, a micro-batch at a time
            batch = (part.to(runtime.device) for part in state.loader.next_batch())
            inputs, targets, positions = share.take(*batch)  # (B, T) each, and the positions of the T
            micro_batches = list(zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True))
            local_loss = torch.zeros((), device=runtime.device)
            for i, (x, y) in enumerate(micro_batches):
                with gradient_sync(forward, is_last_micro_step=i == len(micro_batches) - 1):
                    with runtime.autocast():
                        logits = forward(x, positions=positions)
                    loss = next_token_loss(logits, y) / len(micro_batches)
                    scaler.scale(loss).backward()
                local_loss += loss.detach()

            # The update, unless a number has gone wrong
            train_loss = runtime.mean(local_loss.item())
            scaler.unscale_(optimizer)
            max_norm = config.optimizer.grad_clip or math.inf
            grad_norm = torch.nn.utils.clip_grad_norm_(forward.parameters(), max_norm).item()
            # float16 gradients may overflow now and then: the scaler then skips the step by itself.
            if not math.isfinite(train_loss) or not (math.isfinite(grad_norm) or scaler.is_enabled()):
                raise NonFiniteLoss(
                    f"loss {train_loss}, gradient norm {grad_norm} at step {step}: stopped before the update; "
                    f"checkpoints up to step {state.step} stay in {config.run.dir}; try a lower "
                    f"--optimizer.learning_rate than {config.optimizer.learning_rate}"
                )
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            state.step = step
            state.n_tokens += tokens_per_step
            state.seconds += time.perf_counter() - started
            bar.update()

            # Log
            is_last = step == last_step
            row: dict[str, Any] = {"step": step, "tokens": state.n_tokens, "seconds": state.seconds}
            is_logged = step % config.train.log_interval == 0 or is_last
            if is_logged:
                speed = (state.n_tokens - logged_tokens) / (state.seconds - logged_seconds)
                logged_tokens, logged_seconds = state.n_tokens, state.seconds
                row |= {"train_loss": train_loss, "learning_rate": optimizer.param_groups[0]["lr"]}
                row |= {"grad_norm": grad_norm, "tokens_per_second": speed}
                bar.set_postfix_str(f"loss {train_loss:.3f}, {speed:,.0f} tokens/s")

            # Evaluate
            is_evaluated = step % config.train.eval_interval == 0 or is_last
            if is_evaluated:
                evaluation = validate()
                state.val_loss, state.val_bits_per_byte = evaluation.loss, evaluation.bits_per_byte
                row |= {"val_loss": evaluation.loss, "val_bits_per_byte": evaluation.bits_per_byte}
            if is_logged or is_evaluated:
                log(row)
            if config.probe.interval and step % config.probe.interval == 0:
                look()

            # Save
            if is_evaluated and state.val_loss < state.best_val_loss:
                state.best_val_loss = state.val_loss
                save("best.pt")
            state.stop_signal = runtime.max(state.stop_signal)  # all processes stop at the same step
            if step % config.train.checkpoint_interval == 0 or is_last or state.stop_signal:
                save("last.pt")


def report(config: Config, state: "TrainState", tokenizer: "Tokenizer", val_tokens: "np.ndarray") -> None:
    """What a person wants to know of the run that has just ended, and where it lies."""
    from probes.pictures.draw import draw_heads
    from training.metrics import hardware_use, plot_losses
    from training.text import probe_tokens, sample_text
    from viewer.page import write_run_page

    directory, model = Path(config.run.dir), state.model.eval()
    if state.stop_signal:
        print(f"stopped after step {state.step} of {config.train.max_steps}; the same command continues")
        return
    plot_losses(directory)
    print(hardware_use(state))
    if config.log.sample_tokens:
        print("sample:", printable(sample_text(model, tokenizer, config)), sep="\n")
    if config.probe.max_tokens:
        tokens = probe_tokens(config, tokenizer, val_tokens.tolist, config.probe.max_tokens)
        draw_heads(write_run_page(model, tokenizer, tokens, directory, state.step), directory / "attention.png")
    print(
        f"validation loss after step {state.step}: {state.val_loss:.4f} nats per token, "
        f"{state.val_bits_per_byte:.4f} bits per byte (best {state.best_val_loss:.4f})"
    )
    print("files:", *sorted(str(path) for path in directory.iterdir() if path.is_file()), sep="\n  ")
    if config.probe.max_tokens:
        print(f"walk through its attention in a browser: {directory / 'page.html'}")


if __name__ == "__main__":
    sys.exit(main())

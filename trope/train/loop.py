"""Training: the paper's recipe as a loop that can be killed at any moment and resumed to the same end.

Notable: the data live on the device, and a step never waits for it (what is logged is read every `LOG_EVERY` steps);
what a step draws depends on its number alone, so a checkpoint is parameters, moments and counters; on one GPU a step is
one launch (`trope.train.fused`), elsewhere plain PyTorch (`trope.train.step`), which is what the former is tested
against. Under torchrun every process takes its rows of the global batch `train.batch` and has its rows of the item
table, and the result is that of one process up to rounding (on GPUs dropout masks aside, which kernels draw per
process), with `train.parts` to the bit. A checkpoint of some processes goes on with any other number. A resumed run is
bit-identical on a CPU, and on a GPU for the HSTU models, whose kernels all add in a fixed order.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from trope.config import Config
from trope.data.printable import counted, printable
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.evaluate.counting import choose_counting, read_counting
from trope.evaluate.evaluation import fitted_pulse
from trope.evaluate.streamed import evaluate
from trope.models.recommender import SequentialRecommender
from trope.runs import BEST, COUNTING, DATA, PULSE, REFIT, RunLock, open_run, seal, write_json
from trope.times import say_moment
from trope.train import checkpoint
from trope.train.agreement import check_same_command, check_same_start
from trope.train.block_order import Cursor
from trope.train.checkpoint import Checkpoints, TrainState, written_into
from trope.train.distributed import Group, process_group
from trope.train.log import RunLog, say_resumed
from trope.train.optimizer import make_optimizer, set_learning_rates
from trope.train.process import StopRequest, reproducible, stop_signals, threads_for
from trope.train.pulse import fit_pulse, keep_counts, read_pulse
from trope.train.results import say_result
from trope.train.rounds import Rounds
from trope.train.score import score_test
from trope.train.step import seed_for
from trope.train.stepper import Stepper, is_sharded
from trope.train.streamed import StreamFeed, check_streamed, go_on, make_feed

LOG_EVERY = 50
LEAST_EPOCHS = 10  # the paper's
PLATEAU_FACTOR = 0.1  # the paper's: what the learning rate is multiplied by when validation stalls


class Interrupted(Exception):
    """A signal asked the run to stop; it has saved itself. `signum` says which."""

    def __init__(self, signum: int, run: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; the run is saved, resume it with --resume: {run}")
        self.signum = signum


def train(
    data: Sequences | Stream,
    config: Config,
    out: str | Path,
    device: str = "auto",
    resume: bool = False,
    progress: bool = True,
    checkpoint_seconds: float = 300.0,
) -> dict[str, Any]:
    """Train a model into the run folder `out`; returns what metrics.json holds.

    Args:
        data: a prepared dataset; a stream of one trains within its memory.
        device: auto, cpu, cuda, or one GPU such as cuda:1.
        resume: continue the run in `out`, or begin it where there is none yet.
        progress: show a bar.
        checkpoint_seconds: longest time without a checkpoint; there is one after each epoch anyway.

    Raises:
        Interrupted: on SIGINT or SIGTERM, after saving.
        trope.train.divergence.Diverged: at a loss or gradient that is not finite; the last checkpoint is from before.
        BlockingIOError: if another process trains into `out`.
        OSError: if the folder cannot be written, as when the disk is full.
    """
    with (
        process_group(device) as group,
        reproducible(group.device),
        threads_for(config),
        stop_signals() as stop,
        RunLock() as lock,
    ):
        run, config = Path(out), config.resolved

        def say(line: str) -> None:  # the parts that have no bar take minutes on large data
            if progress and group.is_first:
                tqdm.write(line)

        if isinstance(data, Stream):
            check_streamed(data)
            if not (run / DATA).is_file():
                say(f"{printable(data.path)}: checking {counted(len(data.sizes), 'shard')} before the first step")
        if config.model.pulse and data.validates_on_test:
            data = data.with_own_validation()
        all_data = data.with_validation() if config.train.refit else None  # first: not every protocol can
        trainer = Trainer(data, config, run, group, resume, None, lock)
        trainer.run(stop, checkpoint_seconds, progress)
        chosen, seconds = trainer.state, trainer.state.seconds
        if config.model.pulse:
            trainer.fit_pulse(say)
            trainer.leave_if_asked(stop)
        trainer.choose_counting(say)
        trainer.leave_if_asked(stop)
        del trainer  # its data, graphs and moments
        if all_data is not None:
            factors = chosen.factors[: chosen.best_epoch]
            say(f"refit: {counted(chosen.best_epoch, 'epoch')}, as validation chose, with its events too")
            if isinstance(all_data, Stream) and chosen.cursor is not None:
                all_data = all_data.in_blocks_of(Cursor(*chosen.cursor).window)  # however much memory there is now
            trainer = Trainer(all_data, config, run / REFIT, group, True, factors)
            trainer.run(stop, checkpoint_seconds, progress)
            trainer.take_pulse(run, chosen.best_epoch)
            trainer.publish(run)
            seconds += trainer.state.seconds
            del trainer
        say("test: ranking the whole catalogue")
        # By one process alone: each one would take the whole model for it, beside what the others on its machine take.
        summary = group.first_does(lambda: score_test(data, config, run, group.device, chosen, seconds))
        if progress and group.is_first:
            tqdm.write(say_result(summary, config.train.criterion, run))
        return summary


class Trainer:
    """A model, its optimiser and how far they are.

    Args:
        run: the run folder, or the folder of its refit in it.
        resume: whether it may hold a run already.
        factors: None to validate after each epoch and see; or the learning rates of all epochs, over those of the
            config, that a training with validation has settled (`train.refit`).
        lock: of the run, to take before anything in its folder is read.
        lineage: of a run that follows `factors` by itself and is no refit (`trope.train.fit`).
    """

    def __init__(
        self,
        data: Sequences | Stream,
        config: Config,
        run: Path,
        group: Group,
        resume: bool,
        factors: Sequence[float] | None = None,
        lock: RunLock | None = None,
        lineage: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.run_folder, self.group, self.factors = config, run, group, factors
        self.is_refit = factors is not None and lineage is None
        if factors is None and not data.can_evaluate("valid"):
            raise ValueError(f"{data.path} has no user to validate on; prepare it with {data.protocol.alternative}")
        if data.time_span[0] == data.time_span[1] and config.rotary.kind in ("trope", "torope"):
            raise ValueError(
                f"all training events of {data.path} have one time, {say_moment(data.time_span[0])}, so a rotation by "
                "time has nothing to learn; name the column of the times in `trope prepare`, or train --model sasrec"
            )
        self.data = data.to(group.device)
        check_same_command(group, config, factors, data)
        self.feed = make_feed(self.data, config, group)
        torch.manual_seed(seed_for(config.train.seed, "init"))
        # Processes that have the item table's rows between them save and publish together.
        self.sharers = group if is_sharded(config, group) else None
        shard = None if self.sharers is None else (group.rank, group.size)
        self.model = SequentialRecommender(config, data.num_items, self.data.time_span, shard).to(group.device)
        self.optimizer = make_optimizer(self.model, config)
        self._first_rates = [float(entry["lr"]) for entry in self.optimizer.param_groups]
        self.plateau = ReduceLROnPlateau(
            self.optimizer, "max", factor=PLATEAU_FACTOR, patience=config.train.patience, threshold=0.0
        )
        # Only now, when everything could be made of this config, does a folder appear.
        if not self.is_refit:
            steps = {} if lineage is None else {"steps": self.total_steps}
            about = lineage and {**lineage, **steps}
            group.first_does(lambda: open_run(run, data, config, resume, lock, about))
        self.checkpoints = Checkpoints(run)
        latest = self.checkpoints.latest()
        self.state = TrainState() if latest is None else checkpoint.load(latest, self.model, self.optimizer)
        go_on(self.feed, self.state.cursor, self.state.step)
        # It also waits until everyone has read the checkpoint, which the first process may remove from then on.
        check_same_start(group, run.parent if self.is_refit else run, self.feed, latest)
        if self.state.best is not None:
            self.plateau.best, self.plateau.num_bad_epochs = self.state.best, self.state.stalled
        self.stepper = Stepper(
            self.model, self.data, config, self.feed, self.optimizer, group, self.state.step, self.state.loss_sum
        )
        self.loss_sum = self.stepper.loss_sum
        self._follow_factors()  # a checkpoint may be of a refit that had ended, and there may be more epochs since
        may_publish = bool(group.first_says(float(not self._may_be_refitted)))
        if group.is_first:
            self.checkpoints.tidy()
        self.take_pulse(run, self.state.best_epoch)
        if may_publish and (group.is_first or self.sharers):
            self.checkpoints.publish_best(self.model, self.state)

    @property
    def total_steps(self) -> int:
        """Steps of the run if it is not stopped early."""
        return self.epochs * self.feed.steps

    @property
    def epochs(self) -> int:
        """At most, or exactly where they are settled."""
        return self.config.train.epochs if self.factors is None else len(self.factors)

    @property
    def is_finished(self) -> bool:
        """Whether all epochs are done, or validation, which the last epoch had, has stalled for long enough."""
        state, train = self.state, self.config.train
        if state.epoch >= self.epochs:
            return True
        has_stalled = state.best is not None and state.epoch - state.best_epoch >= train.early_stop
        is_validated = state.index == 0 and state.epoch % train.eval_every == 0
        return is_validated and state.epoch >= LEAST_EPOCHS and has_stalled

    def run(self, stop: StopRequest, checkpoint_seconds: float, progress: bool) -> None:
        """Train to the end."""
        if self.group.is_first:
            self.run_folder.mkdir(exist_ok=True)
            if progress and self.state.step and not self.is_finished:
                tqdm.write(say_resumed(self.run_folder, self.state, self.epochs))
        with (
            written_into(self.run_folder),
            RunLog(self.run_folder, self.state, self.total_steps, progress, active=self.group.is_first) as log,
        ):
            try:
                self._run(log, stop, checkpoint_seconds)
            finally:
                self.feed.close()

    def _run(self, log: RunLog, stop: StopRequest, checkpoint_seconds: float) -> None:
        started, rounds = time.monotonic() - self.state.seconds, Rounds(self.group, stop, checkpoint_seconds)
        self.model.train()
        while not self.is_finished:
            while self.state.index < self.feed.steps:
                loss, norm = self.step()
                log.advance(self.state.epoch + 1, self.epochs)
                self.state.seconds = time.monotonic() - started
                if self.state.step % LOG_EVERY == 0:
                    self._log_step(log, loss, norm)
                if rounds.is_due(is_last=self.state.index == self.feed.steps):
                    self._stop_if_asked(rounds)
                    if rounds.is_late:
                        self.save()
                        rounds.saved()
            self.finish_epoch(log)
            rounds.saved()
            self._stop_if_asked(rounds)

    def step(self) -> tuple[Tensor, Tensor]:
        """One optimiser step; returns the global batch's loss and its gradient's norm, still on the device."""
        state = self.state
        loss, norm = self.stepper(state.epoch, state.index, state.step)
        state.step += 1
        state.index += 1
        return loss, norm

    def finish_epoch(self, log: RunLog) -> None:
        """Validate, adjust the learning rate, log, save."""
        self._check_finite()
        state, train = self.state, self.config.train
        mean_loss = float(self.loss_sum) / self.feed.steps
        self.loss_sum.zero_()
        state.epoch, state.index = state.epoch + 1, 0
        state.factors.append(float(self.optimizer.param_groups[0]["lr"]) / self._first_rates[0])
        metrics: dict[str, float] = {}
        if self.factors is not None:
            self._follow_factors()
        elif state.epoch % train.eval_every == 0 or state.epoch == train.epochs:
            seen, max_len = self.config.eval.filter_seen, self.config.model.max_len
            metrics = evaluate(self.model, self.data, "valid", seen, max_len, live=False).metrics
            score = self.group.first_says(metrics[train.criterion])
            if state.best is None or score > state.best:
                state.best, state.best_epoch, state.best_metrics = score, state.epoch, metrics
            self.plateau.step(score)
            self.stepper.rates_changed()
            state.stalled = self.plateau.num_bad_epochs
            log.show(**{train.criterion: f"{score:.4f}", "best": f"{state.best:.4f}"})
        log.show(loss=f"{mean_loss:.4f}")
        rate = float(self.optimizer.param_groups[0]["lr"])
        log.write(state, epoch_loss=mean_loss, lr=rate, seconds=state.seconds, **metrics)
        self.save()

    def fit_pulse(self, say: Callable[[str], None]) -> None:
        """Fit the pulse of the model that validation chose, unless that was done, and publish it with the model."""
        self.group.first_does(lambda: self._fit_pulse(say))

    def _fit_pulse(self, say: Callable[[str], None]) -> None:
        run, epoch = self.run_folder, self.state.best_epoch
        if read_pulse(run, epoch) is not None:
            return
        if self._may_be_refitted:
            raise ValueError(
                f"{run} has been refitted and has lost {PULSE}: its model has seen the validation events, so the "
                "pulse cannot be fitted again; train into another folder"
            )
        say("pulse: fitting its weights to the validation events")
        with written_into(run):
            model = SequentialRecommender.from_pretrained(run / BEST).to(self.group.device)
            assert model.pulse is not None
            model.pulse.forget()  # a run that goes on with more epochs has weights of an earlier epoch
            found = fit_pulse(model, self.data, self.config, seed_for(self.config.train.seed, "pulse"))
            keep_counts(model, self.data)
            checkpoint.publish(model, run)
            # Last: with it, nothing is fitted again.
            write_json(run / PULSE, seal({"best_epoch": epoch, **found}))

    def choose_counting(self, say: Callable[[str], None]) -> None:
        """Choose the control "MODEL + counting" for the model that validation chose, unless that was done."""
        self.group.first_does(lambda: self._choose_counting(say))

    def _choose_counting(self, say: Callable[[str], None]) -> None:
        run, epoch = self.run_folder, self.state.best_epoch
        # A refitted model has seen the validation events: what was not chosen before is not chosen then.
        if self._may_be_refitted or read_counting(run, epoch) is not None:
            return
        with written_into(run):
            model = SequentialRecommender.from_pretrained(run / BEST).to(self.group.device)
            if fitted_pulse(model) is None:
                say("counting: choosing on the validation events how much of it helps the model (a control)")
                found = choose_counting(model, self.data, self.config, seed_for(self.config.train.seed, "counting"))
                write_json(run / COUNTING, seal({"best_epoch": epoch, **found}))

    def take_pulse(self, run: Path, epoch: int) -> None:
        """Take over the weights that were fitted for the model of an epoch, if they were, with these data's counts.

        In the first process, which publishes the model; of a stream it is a pass over all events.
        """
        if self.config.model.pulse:
            self.group.first_does(lambda: self._take_pulse(run, epoch))

    def _take_pulse(self, run: Path, epoch: int) -> None:
        found = read_pulse(run, epoch)
        if found is not None:
            assert self.model.pulse is not None
            self.model.pulse.take_weights(found["weights"])
            keep_counts(self.model, self.data)

    def publish(self, run: Path) -> None:
        """Make the model as it is now that of a run."""
        if self.group.is_first or self.sharers:
            with written_into(self.run_folder):
                checkpoint.publish(self.model, run)

    @property
    def _may_be_refitted(self) -> bool:
        """Whether RUN/best may be refitted: pulse and counting were chosen for the best epoch, or never were."""
        run, epoch = self.run_folder, self.state.best_epoch
        was_chosen = any(read(run, epoch) is not None for read in (read_pulse, read_counting))
        is_older = not any((run / name).is_file() for name in (PULSE, COUNTING))
        return (run / REFIT).is_dir() and (was_chosen or is_older)

    def _follow_factors(self) -> None:
        """Where learning rates are settled, take that of the epoch to come."""
        if self.factors is not None and not self.is_finished:
            factor = self.factors[self.state.epoch]
            set_learning_rates(self.optimizer, [factor * rate for rate in self._first_rates])
            self.stepper.rates_changed()

    def save(self) -> None:
        """Write a checkpoint, unless something went wrong since the last one."""
        self._check_finite()
        self.state.loss_sum = float(self.loss_sum)
        if isinstance(self.feed, StreamFeed):
            self.state.cursor = list(self.feed.cursor(self.state.epoch, self.state.index))
        if self.group.is_first or self.sharers:
            self.checkpoints.save(self.model, self.optimizer, self.state, self.sharers)

    def _check_finite(self) -> None:
        latest = self.checkpoints.latest()
        self.stepper.guard.check(f"the last good checkpoint is {latest}" if latest else "there was no checkpoint yet")

    def _log_step(self, log: RunLog, loss: Tensor, norm: Tensor) -> None:
        self._check_finite()
        log.show(loss=f"{float(self.loss_sum) / self.state.index:.4f}")
        log.write(self.state, loss=float(loss), grad_norm=float(norm), seconds=self.state.seconds)

    def leave_if_asked(self, stop: StopRequest) -> None:
        """All processes stop where everything is saved."""
        (signum,) = self.group.largest([stop.signum])
        if signum:
            raise Interrupted(signum, self.run_folder)

    def _stop_if_asked(self, rounds: Rounds) -> None:
        """All processes stop at the same step, or the others would wait for the one that left."""
        signum = rounds.ask()
        if signum:
            self.save()
            raise Interrupted(signum, self.run_folder.parent if self.is_refit else self.run_folder)

"""One run from config to DONE: assemble the parts, then call the `Loop`.

Every error in the config is reported before the run folder is created or changed.
"""

from __future__ import annotations

import errno
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gnmr.attachment.blame import Levels
from gnmr.attachment.ranks.reduce import lost_rank
from gnmr.attachment.ranks.world import ALONE, World
from gnmr.errors import RunFailed, UserError
from gnmr.formats import Recipe
from gnmr.formats.recipes import described
from gnmr.lab.config import Config, config_hash
from gnmr.lab.data.packing import PackedSequences
from gnmr.lab.data.sequences import SequenceOrder
from gnmr.lab.models import pretrained
from gnmr.lab.stopping import (
    Stopped,
    end_at_once,
    ending,
    ends,
    handled,
    is_bypassed,
    second_ends,
    signals_collected,
    then_as_before,
)
from gnmr.lab.train.build import Parts, assemble, device_of, training_blocks, validation
from gnmr.lab.train.checkpoint import Checkpointer, HasState, gathered
from gnmr.lab.train.folder import begun_with, check_folder, done_already, locked, run_folder, say_done, unexported
from gnmr.lab.train.loop import Loop, Scorer
from gnmr.lab.train.memory import out_of_memory, peak_memory_bytes, reset_peak_memory
from gnmr.lab.train.provenance import portable_config
from gnmr.lab.train.rows import Counters, fault_rows, header, run_info
from gnmr.lab.train.wrap import refuse_processes
from gnmr.lab.views.recorder import Recorder, Silent

KEEP_CHECKPOINTS = 2
"""Number of checkpoints that remain in a run folder."""


def run(
    config: Config,
    say: Callable[[str], None],
    *,
    command: str | None = None,
    scorer: Scorer | None = None,
    world: World = ALONE,
) -> Path:
    """Train or continue one run, and return its folder. A run that is DONE is not changed.

    Args:
        config: The config of the run.
        say: Called with each line of progress.
        command: The command that repeats this run, for its header. By default, the command line of this process.
        scorer: Required if scores.tasks is not empty.
        world: The processes that take the steps together. Each of them calls this function; rank 0 writes.

    Raises:
        UserError: Before the first record is written or changed.
        RunFailed: Training cannot continue; the folder is marked FAILED.
        SystemExit: With 128 + signal after Ctrl-C or a signal of `stopping.ending`, once a checkpoint is saved. A
            handler that the caller had set for the signal is called first.
    """
    folder = run_folder(config)

    def finished() -> bool:
        check_folder(folder, config)
        return (folder / "DONE").exists()

    with world.agreed():
        refuse_processes(config)
    # Ranks with different configs would take different steps, or wait for each other forever.
    world.same("the config's hash", f"{config_hash(config)}-s{config.training.seed}")
    if world.from_first(lambda: done_already(config, say)):
        return folder
    reset_peak_memory(device_of(config.training.device))
    with ExitStack() as stack:
        stack.enter_context(then_as_before())

        def lock() -> None:
            stack.enter_context(locked(folder, "runs_dir" if config.run_dir is None else "run_dir"))

        world.from_first(lambda: lock() if folder.exists() else None)  # before the minutes that loading may take
        try:
            parts = assemble(config, folder, say, world)
        except (RuntimeError, MemoryError, OSError) as error:
            if not out_of_memory(error):
                raise
            raise UserError("the model does not fit into memory: use a smaller model.* or scale") from error
        if config.scores.tasks and not world.from_first(lambda: (folder / "DONE").exists()):
            if scorer is None:
                raise ValueError("scores.tasks: run() needs a scorer; gnmr.lab.evaluation.scores has RunScorer")
            with world.agreed():
                scorer.check(parts)
        world.from_first(lock)  # a new folder is made once nothing more can be refused
        if world.from_first(finished):  # check again: another process may have finished this run meanwhile
            if unexported(config, folder):
                checkpointer = _checkpointer(parts)
                if (newest := checkpointer.newest()) != config.total_steps:
                    raise UserError(f"training.export_hf=true: {folder} is done, and its last checkpoint is gone")
                checkpointer.load(newest)
                export(parts)
                say(f"exported {folder / 'hf'}")
            say_done(config, folder, say)
            return folder
        _train(parts, say, command or shlex.join(sys.argv), scorer)
    return folder


def _checkpointer(parts: Parts) -> Checkpointer:
    state = parts.model, parts.optimizer, parts.router, _extras(parts)
    return Checkpointer(parts.folder / "checkpoints", _owner(parts), KEEP_CHECKPOINTS, *state, world=parts.world)


def _owner(parts: Parts) -> str:
    """Return a string that identifies the run: config, seed, data, base, workers and backend.

    A run does not continue under another backend, which rounds differently.
    """
    config, converted = parts.config, parts.converted
    owner = f"{config_hash(config)}-s{config.training.seed} on data {parts.corpus.fingerprint[:12]}"
    if parts.checkpoint is not None:  # our checkpoints do not contain frozen weights
        owner += f" from checkpoint {parts.checkpoint[:12]}"
    if parts.base is not None:
        owner += f" from base {parts.base.stored.sha256[:12]}"
    if parts.compressed is not None:
        owner += f" in {parts.compressed.workers.size} workers"
    recipes = [described(path) for path in (converted.low, converted.recovery) if isinstance(path, Recipe)]
    return f"{owner} by {' and '.join(recipes)}" if recipes else owner


def _check_begun(parts: Parts) -> None:
    """Raise UserError if the folder's run began with other tokens, weights or another base than were loaded."""
    header, data, base = begun_with(parts.folder)
    loaded_base = None if parts.base is None else parts.base.stored.sha256
    for name, began, now in (
        ("the tokens of its data", data.get("fingerprint"), parts.corpus.fingerprint),
        ("the weights of model.checkpoint", header.get("checkpoint"), parts.checkpoint),
        ("the checkpoint of its base", base.get("sha256"), loaded_base),
    ):
        if began not in (None, now):
            raise UserError(
                f"{parts.folder}: {name} changed since the run began; use the files and the version of tokenizers that "
                "it began with, or choose another run_dir"
            )


def _train(parts: Parts, say: Callable[[str], None], command: str, scorer: Scorer | None) -> None:
    config, folder, training, world = parts.config, parts.folder, parts.config.training, parts.world
    with world.agreed():
        if world.first:
            _check_begun(parts)
        blocks = training_blocks(config, parts.corpus, parts.branch)
    held_out = validation(config, parts.corpus, training.eval_sequences)
    lines_to_say = [blocks.packing.summary] if isinstance(blocks, PackedSequences) else []
    checkpointer = _checkpointer(parts)
    counters, levels = Counters(), Levels()
    newest = checkpointer.newest()
    if newest is not None:
        # The state on the device first, then counters, position in the data and levels of the host.
        host = checkpointer.load(newest)
        with world.agreed():
            counters = _restored(host, newest, blocks, checkpointer.folder)
        # Without the earlier levels, a resumed run would judge spikes otherwise than one that was never stopped.
        levels.seen.extend((float(loss), float(norm)) for loss, norm in host.get("levels", []))
        lines_to_say.append(f"continuing after step {newest} of {folder}")
    with world.agreed():
        blocks.check(training.batch_size, training.seq_len)
    if config.records.verdicts and (world.size > 1 or parts.compressed is not None):
        setting = "in several processes" if world.size > 1 else "with compressed gradients"
        lines_to_say.append(f"verdicts: none {setting}, a step that spikes is not run again")
    # A run that was killed before its first checkpoint has rows too, which must not be kept beside new ones.
    goes_on = world.from_first(lambda: (folder / "steps.jsonl").exists()) or newest is not None

    info = run_info(parts, f"{config.experiment_name}/{folder.name}", counters.step)
    with ExitStack() as stack:
        # Outside of the loop there is no step to finish, so a signal ends the run at once.
        stack.enter_context(handled(ending(), end_at_once))
        recorder: Recorder | Silent = Silent()
        with world.agreed():
            if world.first:
                recorder = Recorder(info, config.records, counters.step if goes_on else None)
        stack.enter_context(recorder)
        for line in lines_to_say:
            (recorder.say if config.records.live == "log" else say)(line)
        looping = False
        try:
            _begin(recorder, parts, command, anew=newest is None)
            loop = Loop(parts, blocks, held_out, counters, checkpointer, recorder, levels, scorer)
            looping = True
            # In the loop a signal only asks: the step is finished and a checkpoint saved.
            with signals_collected(partial(_answer, say)) as stop:
                status, reason = loop(stop)
            looping = False
            if status == "done":
                export(parts)
                if config.scores.tasks:
                    loop.score()
            recorder.finish(status, reason, peak_memory_bytes(parts.device))
        except (KeyboardInterrupt, SystemExit):
            outside = f"outside the step loop, after step {counters.step}"
            how = "by a second Ctrl-C or signal, without a checkpoint" if looping else outside
            recorder.finish("interrupted", f"stopped {how}")
            raise
        except BaseException as error:
            if world.size > 1:
                ends()
            failure = _failure(error, counters.step)
            recorder.finish("failed", "a defect; see the traceback" if failure is None else str(failure))
            if failure is None or failure is error:
                raise
            raise failure from error
    if status == "interrupted":
        say(f"{reason}; the same command continues it")
        assert loop.stopped is not None
        raise Stopped(loop.stopped)


def _answer(say: Callable[[str], None], number: int) -> None:
    """Say that a signal was noticed; a step may take minutes.

    A thread says it, because the signal may have interrupted a print.
    """
    if is_bypassed(number):
        return
    again = "; a second one ends the run at once, without a checkpoint" if second_ends() else ""
    line = f"{signal.Signals(number).name}: the run stops after this step{again}"
    threading.Thread(target=say, args=(line,), daemon=True).start()


def _begin(recorder: Recorder | Silent, parts: Parts, command: str, *, anew: bool) -> None:
    """Begin the records. Set `anew` if there is no checkpoint."""
    if anew:
        recorder.say(str(parts.converted), narrow=parts.converted.brief())
        if parts.compressed is not None:
            recorder.say(str(parts.compressed))
    tree = portable_config(parts.config)
    with parts.world.agreed():
        recorder.start(OmegaConf.to_yaml(OmegaConf.create(tree)), tree, header(parts, command))
        if parts.stress:
            recorder.faults(fault_rows(parts))


def _restored(host: dict[str, Any], step: int, blocks: SequenceOrder, folder: Path) -> Counters:
    """Restore counters and the position in the data. Raises UserError for inconsistent values."""
    try:
        counters = Counters(**host["counters"])
        blocks.load_state_dict(host["blocks"])  # this writes no files
        sound = all(type(number) is int and number >= 0 for number in asdict(counters).values())
        if not sound or counters.step != step:
            raise ValueError("its numbers do not fit together")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: the checkpoint of step {step} is not one of this version ({error})") from error
    return counters


def export(parts: Parts) -> None:
    """Write adapter/ (the layout of peft), or hf/ (the layout of Hugging Face) if training.export_hf is true."""
    config, model, folder = parts.config, parts.model, parts.folder
    if not (config.model.adapter.rank or config.training.export_hf):
        return
    # A collective, which every rank must call although rank 0 alone writes.
    weights = gathered(model)

    def write() -> None:
        if config.model.adapter.rank:
            pretrained.save(model, folder / "adapter", weights=weights)
        else:
            pretrained.save(model, folder / "hf", config.model.checkpoint or parts.corpus.tokenizer_path, weights)

    parts.world.from_first(write)


def _extras(parts: Parts) -> dict[str, HasState]:
    """Return the state that the next step depends on besides model, optimizer, controller and converted model."""
    extras: dict[str, HasState] = {f"stress_{i}": stress for i, stress in enumerate(parts.stress)}
    if parts.transform is not None:
        extras["transform"] = parts.transform
    if parts.compressed is not None:
        extras["compression"] = parts.compressed
    return extras


def _failure(error: BaseException, step: int) -> UserError | RunFailed | None:
    """Return in one line why the run ended after `step` steps, or None if the error is a defect of gnmr."""
    if isinstance(error, (UserError, RunFailed)):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(f"disk full after step {step}" + (f" ({error.filename})" if error.filename else ""))
    if isinstance(error, OSError) and error.filename and error.strerror:
        return RunFailed(f"{error.filename}: {error.strerror}, after step {step}")
    if lost_rank(error):
        return RunFailed(f"another process ended, in step {step + 1}; the same command continues the run")
    if out_of_memory(error):
        return RunFailed(f"out of memory in step {step + 1}: use a smaller training.batch_size")
    return None

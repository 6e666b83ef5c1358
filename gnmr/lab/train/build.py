"""Build the parts of a run from its config. Nothing is written to the run folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from gnmr.attachment import Router, controller_of
from gnmr.attachment.blame import Levels
from gnmr.attachment.ranks.reduce import DistributedRanks
from gnmr.attachment.ranks.world import ALONE, World
from gnmr.control.evidence import PATH_EVIDENCE
from gnmr.conversion import ConvertedModel, convert
from gnmr.conversion.converting import operator_shapes
from gnmr.errors import UserError, as_user_error
from gnmr.lab import models
from gnmr.lab.config import Config, PrecisionConfig
from gnmr.lab.data import tokenizer
from gnmr.lab.data.batch import Batch
from gnmr.lab.data.cache import Documents, TokenCorpus, TokenFile
from gnmr.lab.data.packing import PackedSequences, packed_validation
from gnmr.lab.data.sequences import Branch, SequenceOrder, TrainSequences, validation_sequences
from gnmr.lab.data.tokens import prepare
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.lab.models import pretrained
from gnmr.lab.rivals.compression import build_compression, compressed_router
from gnmr.lab.rivals.greedylore import GreedyLore
from gnmr.lab.rivals.transforms import Transform, build_transform
from gnmr.lab.train.checkpoint import HasState
from gnmr.lab.train.fork_base import Base, open_base
from gnmr.lab.train.loss import Draws, loss_of
from gnmr.lab.train.memory import refuse_run
from gnmr.lab.train.optim import build_optimizer, learning_rate
from gnmr.lab.train.step import TrainStep, monitored
from gnmr.lab.train.wrap import Wrapped, refuse_compression, wrap
from gnmr.measure.blocks import named_blocks
from gnmr.measure.coverage import count
from gnmr.plan.pin_plan import read_plan

_ORACLE_PARAMETERS = 200_000_000
"""Largest model whose true gap is measured, because both paths run in every step."""
_THREADS = torch.get_num_threads()  # read before a run in this process sets its own number


class Stress(HasState, Protocol):
    """A disturbance at a known place and time."""

    def begin_step(self, step: int) -> None:
        """Switch the disturbance on or off for step `step` (from 1)."""
        ...


@dataclass
class Parts:
    """The parts of a run."""

    config: Config
    folder: Path
    corpus: TokenCorpus
    device: torch.device
    model: nn.Module
    converted: ConvertedModel
    router: Router
    optimizer: torch.optim.Optimizer
    transform: Transform | None = None
    stress: list[Stress] = field(default_factory=list)
    """Model changes that happen before a step: a window of outlier channels, then injected faults."""
    faults: FaultSchedule | None = None
    checkpoint: str | None = None
    """Fingerprint of the weights that a pretrained model starts from."""
    base: Base | None = None
    """The base run, if this run is a fork."""
    branch: Branch | None = None
    """The position in the data at which a fork continues."""
    world: World = ALONE
    """The processes that train the model."""
    wrapped: Wrapped | None = None
    """The model as the processes run it."""
    draws: Draws | None = None
    """Seeds the random numbers of each micro-batch. If None, micro-batches draw them in turn."""
    compressed: GreedyLore | None = None
    """Sends the gradients if they are compressed."""
    flops_per_token: float = 0.0
    """FLOPs of the model's forward and backward pass, see `gnmr.lab.train.throughput`."""

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text of each token, (V,) int64; None if the tokenizer's tokens do not spell a text."""
        from tokenizers import Tokenizer

        return tokenizer.token_bytes(Tokenizer.from_file(str(self.corpus.tokenizer_path)))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 1. A fork continues the schedule of its base."""
        config = self.config
        # Step s of a fork is step S + s of the schedule of a base that took S steps.
        if self.base is not None:
            return learning_rate(self.base.step + step, self.base.schedule_steps, config.optim)
        return learning_rate(step, config.optim.schedule_steps or config.training.steps, config.optim)


def assemble(config: Config, folder: Path, say: Callable[[str], None], world: World = ALONE) -> Parts:
    """Return the parts of a new run. The same config and seed give the same weights and data order."""
    # Mistakes are reported before the data is prepared, which may take hours.
    with world.agreed():
        device = device_of(config.training.device)
        refuse_run(config, device)
        base = base_of(config)
        _check_shapes(config, device)
    if world.size > 1:
        world.from_first(lambda: open_data(config, say, base) and None)  # the other ranks then find the prepared data
    with world.agreed():
        corpus = open_data(config, say, base)
        # Again with the size of the vocabulary, which the first estimate could only bound.
        refuse_run(config, device, corpus.vocab_size)
        branch = None if base is None else base.branch(config.training.seed, corpus.fingerprint, say)
        blocks = training_blocks(config, corpus)  # raises UserError if the corpus is shorter than a block
        blocks.check(config.training.batch_size, config.training.seq_len)
        validation(config, corpus, 1)
    # Ranks that read different tokens would train on a mixture that no record describes.
    world.same("the fingerprint of the data", corpus.fingerprint)
    return build_parts(config, folder, corpus, say, base=base, branch=branch, world=world)


def base_of(config: Config) -> Base | None:
    """Return the base that the run is forked from. Raises UserError if its model, data or optimizer differs."""
    if config.base is None:
        return None
    base = open_base(config.base)
    base.check(config)
    return base


def build_parts(
    config: Config,
    folder: Path,
    corpus: TokenCorpus,
    say: Callable[[str], None],
    *,
    base: Base | None = None,
    branch: Branch | None = None,
    keep: bool = False,
    world: World = ALONE,
) -> Parts:
    """Build the parts of a run whose data is open.

    Args:
        config: The run's config.
        folder: The run folder, in which nothing is written here.
        corpus: The run's tokens.
        say: Receives lines about what takes long.
        base: The base of a fork, or None.
        branch: The position in the data at which the fork continues.
        keep: Keep the base's state in memory for the next fork.
        world: The processes that train the model.

    Raises:
        UserError: If the settings do not fit the model, the processes or this machine.
    """
    training, stress, checkpoint = config.training, list[Stress](), None
    device = device_of(training.device)
    # The model in this process: its weights, its two paths, and the cost of each operator.
    with world.agreed():
        refuse_compression(config, world.size)
        torch.set_num_threads(_THREADS if training.threads is None else training.threads)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # recipes specify FP32 accumulation
        if config.model.checkpoint is None:
            born = config if base is None else base.config  # outlier channels are drawn together with the weights
            model: nn.Module = new_model(config, corpus.vocab_size, device, stress, born.training.seed)
            converted = with_paths(model, config)
        else:
            checkpoint = pretrained.fingerprint(config.model.checkpoint)
            # Our checkpoints lack frozen weights, so the fork must begin from the same ones.
            if base is not None and base.weights != checkpoint:
                raise UserError(
                    f"model.checkpoint={config.model.checkpoint}: its weights are not those that the base {base.name} "
                    "began from; give the checkpoint that it had"
                )
            model, converted = pretrained_model(config, device)
            corpus = apart(corpus, model)
            check_sizes(config, model, corpus.vocab_size)
        flops_per_token = _count_work(config, model, converted, validation(config, corpus, 1))
        # Dropout begins from the seed, whatever building the model has drawn.
        torch.manual_seed(training.seed)
        if training.export_hf:
            pretrained.need("transformers", "training.export_hf=true")
        if training.compile:
            between = converted.compile(named_blocks(model)[1])
            place = (
                "in the graphs, a block type's for each path" if between is None else f"between the graphs: {between}"
            )
            say(f"training.compile: the first step of each path takes a minute; converted linears are {place}")
        compressed = build_compression(config, model, world)
        ranks = DistributedRanks(tells_own=config.parallel == "ddp") if world.size > 1 else None
        controller = _controller(config, model, converted, ranks, compressed)
        faults = build_faults(config, converted)
    if faults is not None:
        stress.append(faults)
    # The model as all processes run it. Wrapping comes after conversion, because FSDP2 replaces the parameters.
    partly = isinstance(model, models.Decoder) and bool(model.experts())
    wrapped = wrap(model, named_blocks(model)[1], config.parallel, world, device, compressed, partly)
    controller.follow()  # FSDP2 has replaced the parameters
    if converted.shared.amax is not None:
        converted.shared.amax.come(wrapped.workers)  # this includes virtual workers
    # The optimizer is last: it refers to the parameters that the wrapper has left.
    optimizer, transform = build_optim(model, config)
    if base is not None:
        base.load_into(model, optimizer, keep)
    # With several workers, a draw must not depend on which of them runs the micro-batch.
    in_turn = config.parallel == "none" and compressed is None
    return Parts(
        config,
        folder,
        corpus,
        device,
        model,
        converted,
        controller,
        optimizer,
        transform,
        stress,
        faults,
        checkpoint=checkpoint,
        base=base,
        branch=branch,
        world=world,
        wrapped=wrapped,
        draws=None if in_turn else Draws(training.seed, converted, device),
        compressed=compressed,
        flops_per_token=flops_per_token,
    )


def _count_work(config: Config, model: nn.Module, converted: ConvertedModel, block: Batch) -> float:
    """Count the work of the newly drawn or loaded model on this block, without side effects.

    Costs are shares of this count. A resumed run counts the same again.

    Returns:
        FLOPs of a forward and backward pass per token of the block.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = device_of(config.training.device)
    try:
        # Without dropout, whose draws would shift the random numbers of the run.
        model.eval()
        with converted.no_side_effects():  # count on the paths, because converted linears are called only there
            coverage = count(model, lambda: loss_of(model, block.to(device)), converted.operators)
    finally:
        for module, mode in modes:
            module.training = mode
    converted.cost.count(coverage.work(converted.operators))
    # A multiplication comes with an addition. The backward pass multiplies twice: for the input and for the weight.
    # Weights under adapters are frozen and have no gradient; the adapters' own are too few to count.
    of_weights = 2 if config.model.adapter.rank else 3
    return 2 * (of_weights * coverage.total + 3 * coverage.attention) / config.training.seq_len


def check_plan(config: Config) -> None:
    """Raise UserError if `config.plan` was made for another model. No weights are read."""
    assert config.plan is not None
    refuse_run(config, device_of(config.training.device))
    with as_user_error("paths: "):
        shapes = operator_shapes(empty_model(config), config.precision)
    read_plan(config.plan).refuse_other(f"plan={config.plan}", shapes)


def _check_shapes(config: Config, device: torch.device) -> None:
    """Raise UserError if paths, controller, optimizer or faults do not fit the model.

    This runs before the data is prepared. Checks that need weights, and all warnings, are left to `assemble`.
    """
    with warnings.catch_warnings(action="ignore"):
        # On the meta device, which has shapes and no numbers: a large model is checked in seconds.
        model = empty_model(config)
        converted = with_paths(model, config, device)
        build_optim(model, config)
        build_faults(config, converted)
        cold = replace(config.controller, warmup_frac=0.0)  # a warm-up would switch units
        try:
            _controller(
                replace(config, controller=cold), model, converted, None, build_compression(config, model, ALONE)
            )
        except UserError:
            raise
        except Exception:  # a signal may read weights, which do not exist yet; `assemble` raises the error again
            return


def _controller(
    config: Config,
    model: nn.Module,
    converted: ConvertedModel,
    ranks: DistributedRanks | None = None,
    compressed: GreedyLore | None = None,
) -> Router:
    """Return the controller of the config. Raises UserError if it does not fit, or its evidence is unavailable."""
    if compressed is not None:
        return compressed_router(compressed, converted, model, config, ranks)
    training, record = config.training, config.records.evidence
    with as_user_error("controller: "):
        spec, steps = config.controller.spec(training.steps), training.steps
        controller = controller_of(converted, model, spec, steps=steps, seed=training.seed, record=record, ranks=ranks)
    check_evidence(config, controller.needs, converted, model)
    router = Router(converted, controller, model, config.precision.probe_tokens, config.precision.price_tokens)
    with as_user_error("records.monitor: "):
        monitored(model, router, config.records.monitor)
    return router


def open_data(config: Config, say: Callable[[str], None], base: Base | None = None) -> TokenCorpus:
    """Open the corpus of the config.

    The corpus is a stream of tokens. A pretrained model gets documents in the tokens of its tokenizer. A fork gets the
    data of `base`, which is `base_of(config)` by default. Raises UserError if the corpus is shorter than a block.
    """
    if base is None:
        base = base_of(config)
    steps = config.training.steps if base is None else base.config.training.steps
    # A fork asks for as many tokens as its base did, so that it gets the same ones.
    needed = steps * config.training.tokens_per_step
    if config.model.checkpoint is None:
        return prepare(config.data if base is None else base.data(config.data), needed, say)
    return prepare(config.data, needed, say, pretrained.local(config.model.checkpoint))


def apart(corpus: TokenCorpus, model: nn.Module) -> TokenCorpus:
    """Give each document its own sequence if the checkpoint's `model` cannot separate documents in a sequence."""
    train, val = corpus.train, corpus.val
    if not isinstance(train, Documents) or not isinstance(val, Documents) or model.separates_documents:
        return corpus
    return replace(corpus, train=replace(train, alone=True), val=replace(val, alone=True))


def tokens_of(split: TokenFile | Documents) -> np.ndarray | TokenFile:
    """Return the token ids of a split."""
    return split.tokens if isinstance(split, Documents) else split


def training_blocks(config: Config, corpus: TokenCorpus, branch: Branch | None = None) -> SequenceOrder:
    """Return the blocks in the order of `training.seed`, or in the order of a fork's `branch`."""
    training = config.training
    if isinstance(corpus.train, Documents):
        return PackedSequences(corpus.train, training.seq_len, training.seed, branch)
    return TrainSequences(corpus.train, training.seq_len, training.seed, branch)


def validation(config: Config, corpus: TokenCorpus, n: int) -> Batch:
    """Return the first `n` validation blocks, which are the same for all arms and seeds."""
    if isinstance(corpus.val, Documents):
        return packed_validation(corpus.val, config.training.seq_len, n)
    return validation_sequences(corpus.val, config.training.seq_len, n)


def build_optim(model: nn.Module, config: Config) -> tuple[torch.optim.Optimizer, Transform | None]:
    """Build the optimizer and the gradient transform of the config. Raises UserError for an unknown option."""
    optimizer = build_optimizer(model, config.optim)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return optimizer, build_transform(config.optim.transform.name, config.optim.transform.options, named)


def build_faults(config: Config, converted: ConvertedModel) -> FaultSchedule | None:
    """Build the fault schedule, or return None if faults are off. Raises UserError for unknown units or windows."""
    faults, training = config.faults, config.training
    if faults.kind == "none":
        return None
    assert faults.magnitude is not None and faults.rate is not None
    with as_user_error("faults: "):
        return FaultSchedule(
            converted,
            Fault(faults.kind, faults.magnitude, faults.rows_frac),
            faults.targets,
            training.steps,
            windows=faults.windows,
            rate=faults.rate,
            duration=faults.duration,
            seed=training.seed,
        )


def train_step(
    parts: Parts,
    controller: Router | None = None,
    levels: Levels | None = None,
    stop: Sequence[int] = (),
) -> TrainStep:
    """Build the step of a run; benchmarks call this too. `controller` replaces the run's own router."""
    config = parts.config
    return TrainStep(
        parts.model,
        controller or parts.router,
        parts.optimizer,
        clip_norm=config.optim.clip_norm,
        # The bytes are read from the autograd graph, which recomputation and compiled graphs hide.
        measure_saved=not config.training.activation_checkpointing and not parts.converted.in_graphs,
        transform=parts.transform,
        monitor=config.records.monitor,
        levels=levels,
        world=parts.world,
        wrapped=parts.wrapped,
        stop=stop,
        draws=parts.draws,
    )


def first_batch(parts: Parts) -> list[Batch]:
    """Return the micro-batches of the run's first step, on its device."""
    training = parts.config.training
    blocks = training_blocks(parts.config, parts.corpus, parts.branch)
    return [blocks.next(training.batch_size).to(parts.device) for _ in range(training.accumulation)]


def device_of(wanted: str) -> torch.device:
    """Return the device of `training.device`. Raises UserError if it is cuda and no CUDA device is available."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device=cuda: PyTorch sees no CUDA device here; use auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


# ---- the model and its two paths ----


def empty_model(config: Config) -> nn.Module:
    """Return the run's model on the meta device. No weights are read.

    A new model has the vocabulary size of data.*.
    """
    dtype = getattr(torch, config.training.dtype)
    if config.model.checkpoint is None:
        built = models.build_empty(config.model, config.data.vocab_size, config.training.seq_len)
        _outliers(config, built, torch.Generator())
        return built.to(dtype)
    model = pretrained.empty(config.model.checkpoint, dtype)
    check_sizes(config, model, 0)  # its tokenizer is not read yet
    return model


def new_model(config: Config, vocab_size: int, device: torch.device, stress: list[Stress], seed: int) -> models.Decoder:
    """Return a new model with weights drawn from `seed`. A window of outlier channels is added to `stress`."""
    training = config.training
    # Weights are drawn on the CPU in FP32, so that device and dtype do not change the initialization.
    generator = torch.Generator().manual_seed(seed)
    model = models.build(config.model, vocab_size, training.seq_len)
    model.init_weights(generator)
    stress += _outliers(config, model, generator)
    model.to(device=device, dtype=getattr(torch, training.dtype))
    model.activation_checkpointing = training.activation_checkpointing
    return model


def _outliers(config: Config, model: models.Decoder, generator: torch.Generator) -> list[Stress]:
    """Add outlier channels to the model, or return the window of steps in which it has them.

    Raises UserError if the channels do not fit the model or the window does not fit the run.
    """
    training, outliers = config.training, config.model.outlier_channels
    if outliers.number == 0:
        return []
    if not outliers.window:
        models.add_outlier_channels(model, outliers.number, outliers.gain, generator)
        return []
    # A window multiplies weights when it begins, and divides them when it ends.
    start, stop = outliers.window
    if stop > training.steps:
        raise UserError(f"model.outlier_channels.window={outliers.window}: the run has {training.steps} steps")
    if training.dtype == "bfloat16" and math.frexp(outliers.gain)[0] != 0.5:
        raise UserError(
            f"model.outlier_channels.gain={outliers.gain}: a window needs a power of two (16, 32), which bfloat16 "
            "weights can be multiplied and divided by exactly"
        )
    return [models.OutlierWindow(model, outliers.number, outliers.gain, start, stop, generator)]


def pretrained_model(config: Config, device: torch.device) -> tuple[nn.Module, ConvertedModel]:
    """Return the checkpoint's model with its two paths."""
    training, checkpoint = config.training, config.model.checkpoint
    assert checkpoint is not None
    model = pretrained.load(checkpoint, getattr(torch, training.dtype), device)
    converted = with_paths(model, config)
    if training.activation_checkpointing:
        with pretrained.quiet():
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, converted


def with_paths(model: nn.Module, config: Config, device: torch.device | None = None) -> ConvertedModel:
    """Give `model` its two paths. If the config has adapters, freeze the model and add them.

    Raises UserError if the model cannot have these paths. See `gnmr.conversion.converting` for `device`.
    """
    adapter, seed = config.model.adapter, config.training.seed
    if adapter.rank:
        model.requires_grad_(False)
    # Convert before adding adapters: how a path handles a weight may depend on whether it is trained.
    converted = build_converted(model, config.precision, seed, device)
    if adapter.rank:
        pretrained.add_adapter(model, adapter, seed)
    check_watched(config, converted)
    if config.controller.warmup_path == "16bit":
        converted.warmup_steps = config.controller.warmup_steps(config.training.steps)
    return converted


def build_converted(
    model: nn.Module, paths: PrecisionConfig, seed: int, device: torch.device | None = None
) -> ConvertedModel:
    """Give the model's linears the paths of the config. Raises UserError like `gnmr.conversion.converting`."""
    with as_user_error("paths: "):
        return convert(model, paths, seed=seed, device=device)


# ---- settings that do not fit together ----


def check_watched(config: Config, converted: ConvertedModel) -> None:
    """Raise UserError if all converted weights are frozen and the controller or low path needs their gradients."""
    if not converted.frozen:
        return
    if config.controller.observe == "parameters":
        raise UserError(
            "controller.observe=parameters: all converted weights are frozen, and no unit has a gradient of its own; "
            "use adapter (the trained parameters of each unit) or input_grad"
        )
    if converted.without_effect:
        raise UserError(
            f"precision.low={config.precision.low}: compresses what the weight gradient reads, and all converted "
            "weights are frozen; use a recipe (llm_int8) or precision.site=forward"
        )


def check_sizes(config: Config, model: nn.Module, vocab_size: int) -> None:
    """Raise UserError if a checkpoint's model cannot read this block length or vocabulary."""
    longest, length = pretrained.max_length(model), config.training.seq_len
    if length > longest:
        raise UserError(f"training.seq_len={length}: the checkpoint was made for at most {longest} tokens")
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if rows < vocab_size:
        raise UserError(
            f"model.checkpoint={config.model.checkpoint}: has embeddings for {rows} tokens, its tokenizer has "
            f"{vocab_size}; they do not belong together"
        )


def check_evidence(config: Config, needs: tuple[str, ...], converted: ConvertedModel, model: nn.Module) -> None:
    """Raise UserError if this run cannot measure the required evidence."""
    accumulation = config.training.accumulation

    def key(*names: str) -> str:
        recorded = set(names) <= set(config.records.evidence)
        return "records.evidence" if recorded else f"controller.signal={config.controller.signal}"

    if converted.recovery is None and (gaps := sorted({"gap_recovery", "true_gap"} & set(needs))):
        raise UserError(f"{key(*gaps)}: {', '.join(gaps)} needs both paths, and precision.recovery is null")
    if converted.frozen and (measured := [name for name in needs if name in PATH_EVIDENCE]):
        raise UserError(
            f"{key(*measured)}: {', '.join(measured)} is measured where a weight gradient is made, and the converted "
            "weights are frozen"
        )
    if "micro_square" in needs and accumulation < 2:
        raise UserError(
            f"{key('micro_square')}: needs micro-batches, training.accumulation={accumulation}; use 2 or more"
        )
    if "true_gap" in needs and config.compression.name != "none" and config.parallel != "none":
        raise UserError(
            f"{key('true_gap')}: its passes would send gradients too, and change what "
            f"compression.name={config.compression.name} remembers of them; use another signal"
        )
    if "true_gap" in needs:
        number = sum(p.numel() for p in model.parameters())
        if number > _ORACLE_PARAMETERS:
            raise UserError(
                f"{key('true_gap')}: runs both paths in every step, for small models: this one has {number:,} "
                f"parameters; use at most {_ORACLE_PARAMETERS:,}"
            )

"""Builds a run from its config: data, model, paths, controller, optimizer. Writes nothing to the run folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment import AttachedController, costs_of, norms_of, units_of
from gnmr.attachment.blame import Levels
from gnmr.control.evidence import PATH_EVIDENCE
from gnmr.distributed.compressed import GreedyLore
from gnmr.distributed.powersgd import PowerSgd
from gnmr.distributed.reduce import Ranks
from gnmr.distributed.world import ALONE, World
from gnmr.distributed.wrap import Wrapped, wrap
from gnmr.doctor.plan import read_plan
from gnmr.errors import UserError, told_as
from gnmr.lab import models
from gnmr.lab.config import Config, PrecisionConfig
from gnmr.lab.data.batch import Batch
from gnmr.lab.data.cache import Documents, TokenCorpus
from gnmr.lab.data.packing import PackedSequences, packed_validation
from gnmr.lab.data.sequences import Branch, TrainSequences, validation_sequences
from gnmr.lab.data.token_file import TokenFile
from gnmr.lab.data.tokens import prepare, prepare_packed
from gnmr.lab.faults.faults import Fault
from gnmr.lab.faults.schedule import FaultSchedule
from gnmr.lab.models import pretrained
from gnmr.lab.train.base import Base, open_base
from gnmr.lab.train.checkpoint import Stateful
from gnmr.lab.train.compression import CompressedController, build_compression
from gnmr.lab.train.draws import Draws
from gnmr.lab.train.memory_bound import refuse_run
from gnmr.lab.train.optim import build_optimizer, learning_rate
from gnmr.lab.train.parallel import refuse_compression
from gnmr.lab.train.step import TrainStep, monitored
from gnmr.lab.train.transforms import Transform, build_transform
from gnmr.precision import ConvertedModel, convert
from gnmr.precision.conversion import operator_shapes
from gnmr.precision.kernels.te import UNREADABLE
from gnmr.records.disk import sha256

_THREADS = torch.get_num_threads()  # before a run of this process sets its own


@dataclass
class Parts:
    """What a run is made of."""

    config: Config
    folder: Path
    corpus: TokenCorpus
    device: torch.device
    model: nn.Module
    converted: ConvertedModel
    controller: AttachedController
    optimizer: torch.optim.Optimizer
    transform: Transform | None = None
    stress: list[Stress] = field(default_factory=list)
    """Outlier channels of a window, then injected faults: changes of the model before a step."""
    faults: FaultSchedule | None = None
    checkpoint: str | None = None
    """Fingerprint of the weights that a pretrained model starts from."""
    base: Base | None = None
    """What a fork goes on from."""
    branch: Branch | None = None
    """Where a fork's data goes on."""
    world: World = ALONE
    """The processes that train it."""
    wrapped: Wrapped | None = None
    """The model as they run it."""
    draws: Draws | None = None
    """What gives each micro-batch random numbers of its own; None: they draw in turn."""
    compressed: GreedyLore | PowerSgd | None = None
    """What sends their gradients, where these are compressed."""

    def learning_rate(self, step: int) -> float:
        """Rate of step `step` (from 1) before a transform's factor; of a fork as its base would have gone on."""
        config = self.config
        if self.base is not None:
            return learning_rate(self.base.step + step, self.base.schedule_steps, config.optim)
        return learning_rate(step, config.optim.schedule_steps or config.training.steps, config.optim)


class Stress(Stateful, Protocol):
    """A disturbance of known place and time."""

    def begin_step(self, step: int) -> None:
        """Switches the disturbance on or off for step `step` (from 1)."""
        ...


class Blocks(Stateful, Protocol):
    """Training data in an order that can be saved."""

    def next(self, n: int) -> Tensor | Batch:
        """The next n blocks, in the run's order."""
        ...

    def check(self, n: int, seq_len: int) -> None:
        """Raise UserError for n blocks that cannot be held."""
        ...


def assemble(config: Config, folder: Path, say: Callable[[str], None], world: World = ALONE) -> Parts:
    """The parts of a run at its start. The same config and seed give the same weights, order and plan."""
    with world.agreed():
        device = device_of(config.training.device)
        refuse_run(config, device)
        base = base_of(config)
        _check_shapes(config, device)
    if world.size > 1:
        world.from_first(lambda: open_data(config, say, base) and None)  # what it makes the others find
    with world.agreed():
        corpus = open_data(config, say, base)
        refuse_run(config, device, corpus.vocab_size)
        branch = None if base is None else base.branch(config.fork.order, corpus.fingerprint, say)
        blocks = training_blocks(config, corpus, branch)  # refuses a corpus that is shorter than a block
        blocks.check(config.training.batch_size, config.training.seq_len)
        validation(config, corpus, 1)
    world.same("the fingerprint of the data", corpus.fingerprint)
    return build_parts(config, folder, corpus, say, base=base, branch=branch, world=world)


def base_of(config: Config) -> Base | None:
    """What the run is forked from. UserError for a base that is none, or one of another model, data or optimizer."""
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
    """`assemble` without its checks, of data that is open; `keep`: the base's state stays in memory for the next."""
    with world.agreed():
        device, model, plan, controller, stress, faults, compressed = _routed(config, corpus, say, base, world)
    partly = isinstance(model, models.Decoder) and bool(model.experts())
    wrapped = wrap(model, blocks_of(model), config.parallel, world, device, compressed, partly)
    controller.follow()  # FSDP2 has exchanged the parameters
    if plan.shared.amax is not None:
        plan.shared.amax.come(wrapped.workers)  # virtual workers too
    optimizer, transform = build_optim(model, config)
    if base is not None:
        base.load_into(model, optimizer, keep)
    of = None if config.model.checkpoint is None else pretrained.fingerprint(config.model.checkpoint)
    built = config, folder, corpus, device, model, plan, controller, optimizer, transform, stress, faults, of
    draws = None
    if config.parallel != "none" or compressed is not None:
        draws = Draws(config.training.seed, plan, device)
    return Parts(*built, base=base, branch=branch, world=world, wrapped=wrapped, draws=draws, compressed=compressed)


def _routed(
    config: Config, corpus: TokenCorpus, say: Callable[[str], None], base: Base | None, world: World
) -> tuple[
    torch.device,
    nn.Module,
    ConvertedModel,
    AttachedController,
    list[Stress],
    FaultSchedule | None,
    GreedyLore | PowerSgd | None,
]:
    """The model with its paths, controller, stress and what sends its gradients."""
    training = config.training
    refuse_compression(config, world.size)
    torch.set_num_threads(_THREADS if training.threads is None else training.threads)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # recipes ask for FP32 accumulation
    device = device_of(training.device)
    stress = list[Stress]()
    if config.model.checkpoint is None:
        born = config if base is None else base.config  # outlier channels are drawn with the weights
        model: nn.Module = _new_model(config, corpus.vocab_size, device, stress, born.training.seed)
        plan = with_paths(model, config)
    else:
        model, plan = pretrained_model(config, device)
        check_sizes(config, model, corpus.vocab_size)
    torch.manual_seed(training.seed)
    if training.export_hf:
        pretrained.need("transformers", "training.export_hf=true")
    if training.compile:
        between = plan.compile(blocks_of(model))
        place = "in the graphs, a block type's for each path" if between is None else f"between the graphs: {between}"
        say(f"training.compile: the first step of each path takes a minute; converted linears are {place}")
    compressed = build_compression(config, model, world)
    ranks = Ranks(tells_own=config.parallel == "ddp") if world.size > 1 else None
    controller = _controller(config, model, plan, ranks, compressed)
    faults = build_faults(config, plan)
    if faults is not None:
        stress.append(faults)
    return device, model, plan, controller, stress, faults, compressed


def empty_model(config: Config) -> tuple[nn.Module, int]:
    """The run's model on the meta device (shapes without contents) and its vocabulary's size; no weights are read.

    A model of ours gets the vocabulary that data.* asks for.
    """
    dtype = getattr(torch, config.training.dtype)
    if config.model.checkpoint is None:
        with torch.device("meta"):
            built = models.build(config.model, config.data.vocab_size, config.training.seq_len)
        _outliers(config, built, torch.Generator())
        return built.to(dtype), config.data.vocab_size
    model = pretrained.empty(config.model.checkpoint, dtype)
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    check_sizes(config, model, vocab_size)
    return model, vocab_size


def check_plan(config: Config) -> None:
    """UserError where the run's model is not the one that `config.plan` is of. Reads no weights."""
    assert config.plan is not None
    refuse_run(config, device_of(config.training.device))
    with told_as("paths: "):
        shapes = operator_shapes(empty_model(config)[0], config.precision)
    read_plan(config.plan).refuse_other(f"plan={config.plan}", shapes)


def _check_shapes(config: Config, device: torch.device) -> None:
    """UserError, before the data is made, for paths, controller, optimizer or faults that do not fit the model.

    Checks that need weights, and all warnings, are left to `assemble`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = empty_model(config)
        plan = with_paths(model, config, device)
        build_optim(model, config)
        check_control(config, model, plan)


def check_control(config: Config, model: nn.Module, plan: ConvertedModel) -> None:
    """UserError for faults or a controller that an `empty_model` with its paths cannot have."""
    build_faults(config, plan)
    cold = replace(config.controller, warmup_frac=0.0)  # a warm-up switches units
    try:
        compressed = build_compression(config, model, ALONE) if config.compression.routes else None
        _controller(replace(config, controller=cold), model, plan, None, compressed)
    except UserError:
        raise
    except Exception:  # a signal may read weights, which are not there yet: `assemble` will raise it
        return


def _controller(
    config: Config,
    model: nn.Module,
    plan: ConvertedModel,
    ranks: Ranks | None = None,
    compressed: GreedyLore | PowerSgd | None = None,
) -> AttachedController:
    """The controller of the config. UserError where it does not fit this run or its evidence is not available."""
    if isinstance(compressed, GreedyLore):
        return CompressedController.of(compressed, plan, model, config, ranks)
    training, record, observe = config.training, config.records.evidence, config.controller.observe
    if training.activation_checkpointing and plan.shared.engine is not None and plan.shared.engine.delayed:
        raise UserError(
            "training.activation_checkpointing=true: recomputes the forward pass, in which Transformer Engine moves "
            "delayed scales; use a recipe without, or precision.backend=scaled_mm"
        )
    with told_as("controller: "):
        spec = config.controller.spec(training.steps)
        costs, pinned = costs_of(plan, spec)
        units = units_of(plan, model, observe, costs)
        norms = norms_of(model, units, observe)
        steps, seed = training.steps, training.seed
        controller = AttachedController(
            units, spec, steps=steps, seed=seed, record=record, norms=norms, whole_cost=1.0, pinned=pinned, ranks=ranks
        )
    _check_evidence(config, controller.needs, plan, model)
    controller.attach_converted(plan, model, config.precision.probe_tokens, config.precision.price_tokens)
    with told_as("records.monitor: "):
        monitored(model, controller, config.records.monitor)
    return controller


def open_data(config: Config, say: Callable[[str], None], base: Base | None = None) -> TokenCorpus:
    """The corpus of the config: one stream of tokens, for a pretrained model documents in its own tokens, for a fork
    what its base read (`base_of` where none is given).

    UserError where it is shorter than a block.
    """
    if base is None:
        base = base_of(config)
    steps = config.training.steps if base is None else base.config.training.steps
    needed = steps * config.training.tokens_per_step
    if config.model.checkpoint is None:
        return prepare(config.data if base is None else base.data(config.data), needed, say)
    return prepare_packed(config.data, needed, say, pretrained.local(config.model.checkpoint))


def tokens_of(split: TokenFile | Documents) -> np.ndarray | TokenFile:
    """The token ids of a split."""
    return split.tokens if isinstance(split, Documents) else split


def tokenizer_digest(corpus: TokenCorpus) -> str:
    """sha256 of the corpus' tokenizer.json."""
    return sha256(corpus.tokenizer_path)


def training_blocks(config: Config, corpus: TokenCorpus, branch: Branch | None = None) -> Blocks:
    """Return the blocks in the order of `training.seed`, or of a fork in its `branch`."""
    training = config.training
    if isinstance(corpus.train, Documents):
        return PackedSequences(corpus.train, training.seq_len, training.seed)
    return TrainSequences(corpus.train, training.seq_len, training.seed, branch)


def validation(config: Config, corpus: TokenCorpus, n: int) -> Tensor | Batch:
    """The first `n` validation blocks, the same in every arm and seed."""
    if isinstance(corpus.val, Documents):
        return packed_validation(corpus.val, config.training.seq_len, n)
    return validation_sequences(corpus.val, config.training.seq_len, n)


def _new_model(
    config: Config, vocab_size: int, device: torch.device, stress: list[Stress], seed: int
) -> models.Decoder:
    """A model of ours as `seed` draws it; a window of outlier channels joins the `stress`."""
    training = config.training
    # Drawn on the CPU in FP32, so that device and dtype do not change the initialisation.
    generator = torch.Generator().manual_seed(seed)
    model = models.build(config.model, vocab_size, training.seq_len)
    model.init_weights(generator)
    stress += _outliers(config, model, generator)
    model.to(device=device, dtype=getattr(torch, training.dtype))
    model.activation_checkpointing = training.activation_checkpointing
    return model


def _outliers(config: Config, model: models.Decoder, generator: torch.Generator) -> list[Stress]:
    """Gives the model its outlier channels, or returns the window of steps in which it has them.

    UserError for channels that do not fit the model and a window that does not fit the run.
    """
    training, outliers = config.training, config.model.outlier_channels
    if outliers.number == 0:
        return []
    if not outliers.window:
        models.add_outlier_channels(model, outliers.number, outliers.gain, generator)
        return []
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
    """The checkpoint's model with its two paths."""
    training, checkpoint = config.training, config.model.checkpoint
    assert checkpoint is not None
    model = pretrained.load(checkpoint, getattr(torch, training.dtype), device)
    plan = with_paths(model, config)
    if training.activation_checkpointing:
        with pretrained.quiet():
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, plan


def with_paths(model: nn.Module, config: Config, device: torch.device | None = None) -> ConvertedModel:
    """Gives `model` its two paths and, where asked for, freezes it and adds adapters.

    `device`: see `gnmr.precision.conversion`. UserError for paths that it cannot have.
    """
    adapter, seed = config.model.adapter, config.training.seed
    if adapter.rank:
        model.requires_grad_(False)
    # Before the adapters: how a path treats a weight may depend on whether it is trained.
    plan = build_converted(model, config.precision, seed, device)
    if adapter.rank:
        pretrained.add_adapter(model, adapter, seed)
    _check_watched(config, plan)
    if config.controller.warmup_path == "16bit":
        plan.warmup_steps = config.controller.warmup_steps(config.training.steps)
    return plan


def build_converted(
    model: nn.Module, paths: PrecisionConfig, seed: int, device: torch.device | None = None
) -> ConvertedModel:
    """Gives the model's linears the paths of the config. UserError: see `gnmr.precision.conversion`."""
    with told_as("paths: "):
        return convert(model, paths, seed=seed, device=device)


def build_optim(model: nn.Module, config: Config) -> tuple[torch.optim.Optimizer, Transform | None]:
    """The optimizer and the gradient transform of the config. UserError for unknown options."""
    optimizer = build_optimizer(model, config.optim)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return optimizer, build_transform(config.optim.transform.name, config.optim.transform.options, named)


def _check_watched(config: Config, plan: ConvertedModel) -> None:
    """UserError where all converted weights are frozen and the controller or the low path needs their gradients."""
    if not plan.frozen:
        return
    if config.controller.observe == "parameters":
        raise UserError(
            "controller.observe=parameters: all converted weights are frozen, and no unit has a gradient of its own; "
            "use adapter (what is trained in each unit) or input_grad"
        )
    if plan.without_effect:
        raise UserError(
            f"precision.low={config.precision.low}: compresses what the weight gradient reads, and all converted weights are "
            "frozen; use a recipe (llm_int8) or precision.site=forward"
        )


def check_sizes(config: Config, model: nn.Module, vocab_size: int) -> None:
    """UserError for blocks or a vocabulary that a checkpoint's model cannot read."""
    longest, length = int(model.config.max_position_embeddings), config.training.seq_len  # type: ignore[union-attr,arg-type]
    if length > longest:
        raise UserError(f"training.seq_len={length}: the checkpoint was made for {longest} tokens at the most")
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if rows < vocab_size:
        raise UserError(
            f"model.checkpoint={config.model.checkpoint}: has embeddings for {rows} tokens, its tokenizer has "
            f"{vocab_size}; they do not belong together"
        )


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The transformer blocks of a model of ours or of Hugging Face's."""
    return model.layers if isinstance(model, models.Decoder) else model.model.layers  # type: ignore[return-value,union-attr]


def build_faults(config: Config, plan: ConvertedModel) -> FaultSchedule | None:
    """The schedule of the config's `faults`, None without one. UserError for units and windows that the run lacks."""
    faults, training = config.faults, config.training
    if faults.kind == "none":
        return None
    assert faults.magnitude is not None and faults.share is not None and faults.rate is not None
    assert faults.duration is not None
    with told_as("faults: "):
        return FaultSchedule(
            plan,
            Fault(faults.kind, faults.magnitude, faults.share, faults.history),
            faults.targets,
            training.steps,
            windows=faults.windows,
            rate=faults.rate,
            duration=faults.duration,
            seed=training.seed if faults.seed is None else faults.seed,
        )


def train_step(
    parts: Parts,
    controller: AttachedController | None = None,
    levels: Levels | None = None,
    stop: Sequence[int] = (),
) -> TrainStep:
    """The step of a run, which benchmarks use too; `controller`: in the place of the run's own; `levels`, `stop`: see
    there."""
    config = parts.config
    return TrainStep(
        parts.model,
        controller or parts.controller,
        parts.optimizer,
        clip_norm=config.optim.clip_norm,
        measure_saved=not config.training.activation_checkpointing
        and parts.converted.shared.engine is None
        and not parts.converted.in_graphs,
        transform=parts.transform,
        monitor=config.records.monitor,
        levels=levels,
        world=parts.world,
        wrapped=parts.wrapped,
        stop=stop,
        draws=parts.draws,
    )


def first_batch(parts: Parts) -> list[Tensor | Batch]:
    """The micro-batches of the run's first step, on its device."""
    training = parts.config.training
    blocks = training_blocks(parts.config, parts.corpus, parts.branch)
    return [blocks.next(training.batch_size).to(parts.device) for _ in range(training.accumulation)]


_ORACLE_PARAMETERS = 200_000_000


def _check_evidence(config: Config, needs: tuple[str, ...], plan: ConvertedModel, model: nn.Module) -> None:
    """UserError for evidence that this run cannot measure."""
    accumulation = config.training.accumulation

    def key(*names: str) -> str:
        asked = set(names) <= set(config.records.evidence)
        return "records.evidence" if asked else f"controller.signal={config.controller.signal}"

    if plan.shared.engine is not None and (measured := [name for name in needs if name in PATH_EVIDENCE]):
        raise UserError(f"{key(*measured)}: {', '.join(measured)}: {UNREADABLE}")
    if plan.recovery is None and (gaps := sorted({"gap_recovery", "gap_exact", "true_gap"} & set(needs))):
        raise UserError(f"{key(*gaps)}: {', '.join(gaps)} needs both paths, and precision.recovery is null")
    if plan.frozen and (measured := [name for name in needs if name in PATH_EVIDENCE]):
        raise UserError(
            f"{key(*measured)}: {', '.join(measured)} is measured where a weight gradient is made, and the converted "
            "weights are frozen"
        )
    if config.training.activation_checkpointing and "gap_exact" in needs:
        raise UserError(
            f"{key('gap_exact')}: gap_exact holds a copy of every input until backward, which "
            "training.activation_checkpointing=true is there to avoid; use gap_low, or turn that off"
        )
    if "spike_share" in needs and config.optim.name != "adamw":
        raise UserError(
            f"{key('spike_share')}: spike_share needs Adam's second moment, optim.name={config.optim.name} has none"
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
                f"parameters, {_ORACLE_PARAMETERS:,} at the most"
            )


def device_of(wanted: str) -> torch.device:
    """The device of `training.device`; UserError for cuda where there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device=cuda: PyTorch sees no CUDA device here; use auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")

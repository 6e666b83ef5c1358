"""Run the controller in torchtitan's Trainer (0.3): a converter of the model's config, and a Trainer that routes.

    # my_configs.py: torchrun ... -m torchtitan.train --module my_configs --config llama3_8b_routed
    def llama3_8b_routed() -> GnmrTrainer.Config:
        paths = GnmrConverter.Config(paths={"low": "fp8_hybrid", "recovery": "bf16"})
        config = routed(llama3_8b(), max_o=4)
        config.model_spec = model_registry("8B", converters=[paths])
        return config

The converter replaces the configs of linears, as torchtitan's own float8 converter does. Parallelize, activation
checkpointing, torch.compile and FSDP2 therefore see the linears that will have two paths. The linears get the paths
(`gnmr.attach`) after the Trainer has built and initialized the model. Norms are read after the step's last backward
pass, before clipping.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import functional as F

from gnmr.attachment import Router, attach
from gnmr.attachment.callback_tally import Tally, resuming
from gnmr.attachment.ranks import world
from gnmr.attachment.ranks.reduce import DistributedRanks
from gnmr.attachment.torchtitan_rules import (
    ControlSection,
    check_version,
    chosen,
    modules_of,
    refuse,
    refuse_compiled,
)
from gnmr.control import Decision
from gnmr.control.evidence import PATH_EVIDENCE, PRICE_EVIDENCE
from gnmr.conversion import PathLinear, PathSpec
from gnmr.conversion.resolve import paths_by_name
from gnmr.conversion.unit_names import unwrapped
from gnmr.errors import UserError, install
from gnmr.formats.recipes import Recipe
from gnmr.options import nearest
from gnmr.plan.pin_plan import read_plan

try:
    check_version()
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.models.common.linear import Linear
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise UserError(f"torchtitan cannot be imported here ({error}): {install('torchtitan')}") from error

HEADS = ("lm_head", "output")
STATE = "gnmr"
"""Key of the controller's part of a checkpoint."""


@dataclass(frozen=True)
class LinearRouting:
    """Information that the converter leaves with the linears for the Trainer."""

    options: dict[str, Any]
    """Options of `gnmr.attach`."""
    names: tuple[str, ...]
    """Names of the replaced configs."""


@dataclass(kw_only=True, slots=True)
class RoutedLinearConfig(Linear.Config):
    """The replacement of `Linear.Config`."""

    _routing: object = None


class RoutedLinear(PathLinear, Linear):
    """A torchtitan linear that `GnmrTrainer` gives two paths."""

    plain_class = Linear
    Config = RoutedLinearConfig

    def __init__(self, config: RoutedLinearConfig) -> None:
        Linear.__init__(self, config)

    def forward(self, input: Tensor) -> Tensor:
        """Compute as `PathLinear`. Raises UserError if no controller was attached."""
        if not isinstance(self, RoutedLinear):  # it was: `Module.parallelize` keeps this very function
            return F.linear(input, self.weight, self.bias)
        if not self.converted:
            raise UserError(
                "GnmrConverter: the model has linears for two paths and no controller; train it with "
                "gnmr.attachment.torchtitan.GnmrTrainer, whose config routed(config) makes"
            )
        return PathLinear.forward(self, input)


@dataclass(kw_only=True, slots=True)
class GnmrConverterConfig(QuantizationConverter.Config):
    """Either `paths` or a `plan`."""

    paths: dict[str, Any] = field(default_factory=dict)
    """Fields of `gnmr.PathSpec`; without targets, all linears in numbered layers except gates."""
    plan: str | None = None
    """A plan.json of `gnmr diagnose`, which sets the paths."""


class GnmrConverter(QuantizationConverter):
    """Mark the linears that get two paths: one of `model_registry`'s converters.

    Raises UserError if the paths are invalid, if a target matches nothing, or if a linear is not torchtitan's plain one
    (converted to float8, or fused with collectives).
    """

    Config = GnmrConverterConfig

    def __init__(self, config: GnmrConverterConfig) -> None:
        options = [option.name for option in fields(PathSpec)]
        if unknown := [name for name in config.paths if name not in options]:
            raise UserError(f"GnmrConverter: paths has no {unknown[0]!r}{nearest(unknown[0], options)}")
        if config.plan is not None and config.paths:
            raise UserError(f"GnmrConverter: plan={config.plan} says the paths; leave paths out")
        plan = None if config.plan is None else read_plan(config.plan)
        try:
            spec = PathSpec(**(config.paths if plan is None else plan.paths()))
        except ValueError as error:
            raise UserError(f"GnmrConverter: {error}") from error
        recipes = [path for path in paths_by_name(spec) if isinstance(path, Recipe)]
        if any(path.integer for path in recipes):
            raise UserError(f"GnmrConverter: low={spec.low}: recipes of integers are not supported under torchtitan")
        self._options = config.paths if plan is None else {"plan": plan}
        self._targets, self._exclude = spec.targets or [], spec.exclude
        self._recipes = bool(recipes)

    def convert(self, model_config: Any) -> Any:
        """Return the config with the marked linears replaced."""
        linears = list(model_config.traverse(Linear.Config))  # (name, config, its parent, its attribute or index)
        names = [name for fqn, *_ in linears for name in modules_of(fqn)]
        targeted = set(chosen(names, self._targets, self._exclude, self._recipes))
        routed_linears = [linear for linear in linears if not targeted.isdisjoint(modules_of(linear[0]))]
        if not routed_linears:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise UserError(f"GnmrConverter: targets {self._targets}: no linear has such a name; there are {kinds}")
        routing = LinearRouting(self._options, tuple(fqn for fqn, *_ in routed_linears))
        for fqn, linear, parent, attribute in routed_linears:
            if type(linear) is not Linear.Config:
                # The class that a config builds has no public name in torchtitan.
                kind = type(linear)._owner.__name__
                raise UserError(
                    f"GnmrConverter: {fqn} is a {kind}, and only torchtitan's plain Linear can be given two paths: "
                    "take the other converter out, or name other targets"
                )
            if fqn in HEADS:
                raise UserError(f"GnmrConverter: {fqn}: the output head stays in 16 bits; name other targets")
            # The replacement takes over every field, so that it builds the same linear.
            options = {option.name: getattr(linear, option.name) for option in fields(linear) if option.init}
            replacement = RoutedLinearConfig(**options, _routing=routing)
            if isinstance(parent, list):
                parent[attribute] = replacement
            else:
                setattr(parent, attribute, replacement)
        logger.info("gnmr: %d of %d linears will have two paths", len(routed_linears), len(linears))
        return model_config


@dataclass(kw_only=True, slots=True)
class GnmrTrainerConfig(Trainer.Config):
    """torchtitan's sections, and ours."""

    gnmr: ControlSection = field(default_factory=ControlSection)


class GnmrTrainer(Trainer):
    """torchtitan's Trainer with a controller.

    - Norms are those of the whole step's gradient, over all ranks, before clipping. It waits for the device once a
      step.
    - Decisions are the same in every rank of data parallelism (FSDP2; HSDP is not tried).
    - `Tally.figures` go to TensorBoard and W&B with torchtitan's numbers, over the steps since the last ones.
    - With `gnmr.record=FOLDER` the first rank records loss, rate and tokens too, with one all-reduce of the loss per
      step. A run that resumes from a checkpoint continues these records.
    - Validation is on the 16-bit path. MFU is not reported, because part of the GEMMs are not BF16.
    - Checkpoints hold the controller's state, and a resumed run restores it. A checkpoint without a state raises
      UserError; checkpoint.exclude_from_loading=["gnmr"] starts with a new state.

    Raises UserError for all that `torchtitan_rules.refuse` names, and for a model without `GnmrConverter`. A model with
    another precision converter or LoRA's, and compiled blocks with paths that do not go into graphs, are refused too.
    """

    Config = GnmrTrainerConfig
    """Assigned as in the classes above, because torchtitan looks for the config of a class under this name."""

    controller: Router
    decision: Decision | None = None
    """Decision of the last step."""

    def __init__(self, config: GnmrTrainerConfig) -> None:
        refuse(config)
        routing = _routing_of(config.model_spec.model)
        super().__init__(config)
        self._passes, self._losses, self._tally = 0, list[Tensor](), Tally()
        (model,) = self.model_parts
        # Now the model is built, sharded and initialized; graphs are compiled in its first pass.
        self.controller = _attached(model, routing, config)
        compiled = config.compile.enable and "model" in config.compile.components
        if compiled:
            why = self.controller.converted.enter_graphs(model.layers.values())
            refuse_compiled(why, [name for name in self.controller.needs if name in (*PATH_EVIDENCE, *PRICE_EVIDENCE)])
        if config.checkpoint.enable:
            self.checkpointer.states[STATE] = _State(self.controller)
        if config.validator.enable:
            self.validator.validate = partial(self._validate, self.validator.validate)
        # torchtitan's MFU compares with BF16's peak, and part of the GEMMs are not BF16.
        self.metrics_processor.has_quantization = True
        logger.info("gnmr: %r", self.controller)

    def train(self) -> None:
        """Train as torchtitan does. Raises UserError if a checkpoint lacks the controller's state."""
        try:
            super().train()
        except CheckpointException as error:
            # The exception tells the missing key in its text alone.
            if f"{STATE}.controller" in str(error):
                raise UserError(
                    "the checkpoint has no state of GnmrTrainer, it was saved without; go on without, or with "
                    f"checkpoint.exclude_from_loading={STATE}"
                ) from error
            raise
        if self.step >= self.config.training.steps:
            self.controller.finish()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run torchtitan's step, then log our figures after its own."""
        self._passes, self._losses = 0, []
        super().train_step(data_iterator)
        if self.metrics_processor.should_log(self.step):
            figures = self._tally.figures(len(self.controller.units))
            self.metrics_processor.logger.log(figures, self.step)
            logger.info("gnmr: %r", self.decision)
            self._tally = Tally()

    def forward_backward_step(self, **passes: Any) -> Tensor:
        """Run torchtitan's pass; after the step's last pass, read norms, decide and switch."""
        loss: Tensor = super().forward_backward_step(**passes)
        self.controller.micro_step()
        self._losses.append(loss.detach().clone())
        self._passes += 1
        # The gradient of the step is complete here, and torchtitan clips it afterwards.
        if self._passes == self.gradient_accumulation_steps:
            self.decision = self.controller.step()
            self._tally.add(self.decision, self.controller.spec.max_o)
            if self.controller.recorded:
                self._record()
        return loss

    def _record(self) -> None:
        """Record the step's figures; the losses are this rank's parts of the loss of all ranks."""
        # Every rank has to join this sum, although only the first one writes.
        total = DistributedRanks().sum({"loss": torch.stack(self._losses).sum()})["loss"].item()
        if self.controller.records:
            rate = next(iter(self.optimizers)).param_groups[0]["lr"]
            self.controller.log(loss=total, lr=float(rate), tokens=self.ntokens_seen * world.size())

    def _validate(self, validate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self.controller.converted.high_precision():
            validate(*args, **kwargs)


def routed(config: Trainer.Config, **control: Any) -> GnmrTrainerConfig:
    """Return the config of a torchtitan run for `GnmrTrainer`; `control` holds fields of `ControlSection`."""
    sections = {section.name: getattr(config, section.name) for section in fields(config) if section.init}
    return GnmrTrainerConfig(**sections, gnmr=ControlSection(**control))


def _routing_of(model_config: Any) -> LinearRouting:
    """Return what the converter left. Raises UserError if no converter ran, or if another one came after it."""
    if has_quantization(model_config):
        raise UserError(
            "GnmrTrainer: the model has linears or experts of torchtitan's own low precision (float8, MX, NVFP4); take "
            "one converter or the other"
        )
    linears = {fqn: linear for fqn, linear, *_ in model_config.traverse(Linear.Config)}
    first = next((linear for linear in linears.values() if isinstance(linear, RoutedLinearConfig)), None)
    if first is None:
        raise UserError(
            "GnmrTrainer: no linear has two paths: give model_registry converters=[GnmrConverter.Config(...)]"
        )
    routing = first._routing
    assert isinstance(routing, LinearRouting)
    for name in routing.names:
        if type(linears.get(name, first)) is not RoutedLinearConfig:
            raise UserError(
                f"GnmrTrainer: {name}: another converter (LoRA) was applied after GnmrConverter; use one of them"
            )
    return routing


def _attached(model: nn.Module, routing: LinearRouting, config: GnmrTrainerConfig) -> Router:
    """Return the model's controller. Linears that the targets leave out become plain."""
    options = dict(routing.options)
    if "plan" not in options:
        names = [unwrapped(name) for name, module in model.named_modules() if isinstance(module, RoutedLinear)]
        options = {"targets": names} | options
    # torchtitan divides the loss by the tokens of all ranks, and FSDP2 sums the gradients.
    controller = attach(model, steps=config.training.steps, share=1.0, **options, **config.gnmr.named())
    if config.gnmr.calibrate is not None:
        controller.calibrate(config.gnmr.calibrate)
    for module in model.modules():
        # A linear that got no paths must not refuse its forward pass.
        if isinstance(module, RoutedLinear) and not module.converted:
            module.__class__ = RoutedLinear.plain_class
    return controller


class _State(Stateful):
    """The controller's state in torchtitan's checkpoints: one string of bytes, the same in every rank."""

    def __init__(self, controller: Router) -> None:
        self._controller = controller

    def state_dict(self) -> dict[str, Any]:
        file, state = io.BytesIO(), self._controller.state_dict()
        if self._controller.recorded:  # the first rank knows how far the records are, any may write this
            state["record"] = world.World(world.rank(), world.size()).from_first(lambda: state["record"])
        torch.save(state, file)
        return {"controller": file.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises UserError if it does not fit."""
        with resuming("the checkpoint"):
            saved = torch.load(io.BytesIO(state["controller"]), map_location="cpu", weights_only=True)
            self._controller.load_state_dict(saved)

"""The controller in torchtitan's Trainer (0.3): a converter of the model's config, and a Trainer that routes.

    # my_configs.py: torchrun ... -m torchtitan.train --module my_configs --config llama3_8b_routed
    def llama3_8b_routed() -> GnmrTrainer.Config:
        paths = GnmrConverter.Config(paths={"low": "fp8_hybrid", "recovery": "bf16"})
        config = routed(llama3_8b(), max_o=4)
        config.model_spec = model_registry("8B", converters=[paths])
        return config

The converter exchanges the configs of linears, as torchtitan's own for float8 do, so that parallelize, activation
checkpointing, torch.compile and FSDP2 come to linears that will have two paths. They get them (`gnmr.attach`) when the
Trainer has built and initialised the model. Norms are read behind the step's last backward pass, before clipping.
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
from gnmr.control import Decision
from gnmr.control.evidence import PATH_EVIDENCE, PRICE_EVIDENCE
from gnmr.distributed import world
from gnmr.distributed.reduce import Ranks
from gnmr.doctor.plan import read_plan
from gnmr.errors import UserError, install, nearest
from gnmr.integrations.tally import Tally, resuming
from gnmr.integrations.torchtitan_rules import (
    ControlSection,
    check_version,
    chosen,
    modules_of,
    refuse,
    refuse_compiled,
)
from gnmr.precision import PathLinear, PathSpec
from gnmr.precision.compile import into_graphs
from gnmr.precision.recipes import Recipe
from gnmr.precision.resolve import named
from gnmr.precision.units import unwrapped

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
"""The controller's part of a checkpoint."""


@dataclass(frozen=True)
class Routing:
    """What the converter leaves with the linears for the Trainer."""

    options: dict[str, Any]
    """Of `gnmr.attach`."""
    names: tuple[str, ...]
    """The configs that it exchanged."""


class RoutedLinear(PathLinear, Linear):
    """torchtitan's linear that `GnmrTrainer` gives two paths."""

    plain_class = Linear

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """In place of `Linear.Config`."""

        _routing: object = None

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)

    def forward(self, input: Tensor) -> Tensor:
        """As `PathLinear`. UserError where no controller was attached."""
        if not isinstance(self, RoutedLinear):  # it was: `Module.parallelize` keeps this very function
            return F.linear(input, self.weight, self.bias)
        if not self.converted:
            raise UserError(
                "GnmrConverter: the model has linears for two paths and no controller; train it with "
                "gnmr.integrations.torchtitan.GnmrTrainer, whose config routed(config) makes"
            )
        return PathLinear.forward(self, input)


class GnmrConverter(QuantizationConverter):
    """Marks the linears that get two paths: one of `model_registry`'s converters.

    UserError for paths without sense, targets that name none, and a linear that is not torchtitan's plain one
    (converted to float8, or fused with collectives).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Either `paths` or a `plan`."""

        paths: dict[str, Any] = field(default_factory=dict)
        """Fields of `gnmr.PathSpec`; without targets all linears in numbered layers, but gates."""
        plan: str | None = None
        """plan.json of `gnmr diagnose`, which says the paths."""

    def __init__(self, config: Config) -> None:
        known = [one.name for one in fields(PathSpec)]
        if unknown := [name for name in config.paths if name not in known]:
            raise UserError(f"GnmrConverter: paths has no {unknown[0]!r}{nearest(unknown[0], known)}")
        if config.plan is not None and config.paths:
            raise UserError(f"GnmrConverter: plan={config.plan} says the paths; leave paths out")
        plan = None if config.plan is None else read_plan(config.plan)
        try:
            spec = PathSpec(**(config.paths if plan is None else plan.paths()))
        except ValueError as error:
            raise UserError(f"GnmrConverter: {error}") from error
        recipes = [path for path in named(spec) if isinstance(path, Recipe)]
        if any(path.integer for path in recipes):
            raise UserError(f"GnmrConverter: low={spec.low}: recipes of integers are not supported under torchtitan")
        self._options = config.paths if plan is None else {"plan": plan}
        self._targets, self._exclude = spec.targets or [], spec.exclude
        self._recipes = bool(recipes)

    def convert(self, model_config: Any) -> Any:
        """The same config with other linears."""
        found = list(model_config.traverse(Linear.Config))
        names = [name for fqn, *_ in found for name in modules_of(fqn)]
        wanted = set(chosen(names, self._targets, self._exclude, self._recipes))
        mine = [one for one in found if not wanted.isdisjoint(modules_of(one[0]))]
        if not mine:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise UserError(f"GnmrConverter: targets {self._targets}: no linear has such a name; there are {known}")
        routing = Routing(self._options, tuple(fqn for fqn, *_ in mine))
        for fqn, linear, parent, attr in mine:
            kind = type(linear)._owner.__name__
            if type(linear) is not Linear.Config:
                raise UserError(
                    f"GnmrConverter: {fqn} is a {kind}, and only torchtitan's plain Linear can be given two paths: "
                    "take the other converter out, or name other targets"
                )
            if fqn in HEADS:
                raise UserError(f"GnmrConverter: {fqn}: the output head stays in 16 bits; name other targets")
            new = RoutedLinear.Config(
                **{one.name: getattr(linear, one.name) for one in fields(linear) if one.init}, _routing=routing
            )
            if isinstance(parent, list):
                parent[attr] = new
            else:
                setattr(parent, attr, new)
        logger.info("gnmr: %d of %d linears will have two paths", len(mine), len(found))
        return model_config


class GnmrTrainer(Trainer):
    """torchtitan's Trainer with a controller.

    - Norms are those of the whole step's gradient, over all ranks, before clipping; waits for the device once a step.
    - Decisions are the same in every rank of data parallelism (FSDP2; HSDP is not tried).
    - `Tally.figures` go to TensorBoard and W&B with torchtitan's own numbers, over the steps since the last ones.
    - With `gnmr.record=FOLDER` the first rank keeps records of loss, rate and tokens too; a run that goes on from a
      checkpoint goes on in them. One all-reduce of the loss a step.
    - Validation is on the 16-bit path. MFU is not told: part of the GEMMs are not BF16's.
    - Checkpoints hold the controller's state, and a run that goes on takes it over. One that has none is a `UserError`;
      checkpoint.exclude_from_loading=["gnmr"] begins anew with it.

    UserError for what `torchtitan_rules.refuse` names, a model without `GnmrConverter`, with another converter of
    precision or with LoRA's, and blocks that are compiled with paths which do not go into graphs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Its sections and ours."""

        gnmr: ControlSection = field(default_factory=ControlSection)

    controller: Router
    decision: Decision | None = None
    """Of the last step."""

    def __init__(self, config: Config) -> None:
        refuse(config)
        routing = _routing_of(config.model_spec.model)
        super().__init__(config)
        self._passes, self._losses, self._tally = 0, list[Tensor](), Tally()
        (model,) = self.model_parts
        self.controller = _attached(model, routing, config)
        compiled = config.compile.enable and "model" in config.compile.components
        if compiled:
            why = into_graphs(self.controller.converted, model.layers.values())
            refuse_compiled(why, [name for name in self.controller.needs if name in (*PATH_EVIDENCE, *PRICE_EVIDENCE)])
        if config.checkpoint.enable:
            self.checkpointer.states[STATE] = _State(self.controller)
        if config.validator.enable:
            self.validator.validate = partial(self._validate, self.validator.validate)
        self.metrics_processor.has_quantization = True
        logger.info("gnmr: %r", self.controller)

    def train(self) -> None:
        """As torchtitan's. UserError for a checkpoint without our state."""
        try:
            super().train()
        except CheckpointException as error:
            if f"{STATE}.controller" in str(error):
                raise UserError(
                    "the checkpoint has no state of GnmrTrainer, it was saved without; go on without, or with "
                    f"checkpoint.exclude_from_loading={STATE}"
                ) from error
            raise
        if self.step >= self.config.training.steps:
            self.controller.finish()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """As torchtitan's, with our figures behind its own."""
        self._passes, self._losses = 0, []
        super().train_step(data_iterator)
        if self.metrics_processor.should_log(self.step):
            figures = self._tally.figures(len(self.controller.units))
            self.metrics_processor.logger.log(figures, self.step)
            logger.info("gnmr: %r", self.decision)
            self._tally = Tally()

    def forward_backward_step(self, **passes: Any) -> Tensor:
        """As torchtitan's; behind the step's last, norms, decision and switches."""
        loss: Tensor = super().forward_backward_step(**passes)
        self.controller.micro_step()
        self._losses.append(loss.detach().clone())
        self._passes += 1
        if self._passes == self.gradient_accumulation_steps:
            self.decision = self.controller.step()
            self._tally.add(self.decision, self.controller.spec.max_o)
            if self.controller.recorded:
                self._record()
        return loss

    def _record(self) -> None:
        """The step's figures; each loss is a part of that of all ranks."""
        total = Ranks().sum({"loss": torch.stack(self._losses).sum()})["loss"].item()
        if self.controller.records:
            rate = next(iter(self.optimizers)).param_groups[0]["lr"]
            self.controller.log(loss=total, lr=float(rate), tokens=self.ntokens_seen * world.size())

    def _validate(self, validate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self.controller.converted.high_precision():
            validate(*args, **kwargs)


def routed(config: Trainer.Config, **control: Any) -> GnmrTrainer.Config:
    """The config of a torchtitan run, for `GnmrTrainer`; `control`: fields of `ControlSection`."""
    own = {one.name: getattr(config, one.name) for one in fields(config) if one.init}
    return GnmrTrainer.Config(**own, gnmr=ControlSection(**control))


def _routing_of(model_config: Any) -> Routing:
    """What the converter left. UserError where there was none, or another one came behind it."""
    if has_quantization(model_config):
        raise UserError(
            "GnmrTrainer: the model has linears or experts of torchtitan's own low precision (float8, MX, NVFP4); take "
            "one converter or the other"
        )
    linears = {fqn: linear for fqn, linear, *_ in model_config.traverse(Linear.Config)}
    ours = [linear for linear in linears.values() if isinstance(linear, RoutedLinear.Config)]
    if not ours:
        raise UserError(
            "GnmrTrainer: no linear has two paths: give model_registry converters=[GnmrConverter.Config(...)]"
        )
    routing = ours[0]._routing
    assert isinstance(routing, Routing)
    for name in routing.names:
        if type(linears.get(name, ours[0])) is not RoutedLinear.Config:
            raise UserError(f"GnmrTrainer: {name}: another converter came behind GnmrConverter (LoRA); take one")
    return routing


def _attached(model: nn.Module, routing: Routing, config: GnmrTrainer.Config) -> Router:
    """The model's controller. Linears that the targets leave out after all are plain ones."""
    options = dict(routing.options)
    if "plan" not in options:
        names = [unwrapped(name) for name, module in model.named_modules() if isinstance(module, RoutedLinear)]
        options = {"targets": names} | options
    # torchtitan divides the loss by the tokens of all ranks, and FSDP2 sums the gradients.
    controller = attach(model, steps=config.training.steps, share=1.0, **options, **config.gnmr.named())
    if config.gnmr.calibrate is not None:
        controller.calibrate(config.gnmr.calibrate)
    for module in model.modules():
        if isinstance(module, RoutedLinear) and not module.converted:
            module.__class__ = RoutedLinear.plain_class
    return controller


class _State(Stateful):
    """The controller's state in torchtitan's checkpoints: one text of bytes, the same in every rank."""

    def __init__(self, controller: Router) -> None:
        self._controller = controller

    def state_dict(self) -> dict[str, Any]:
        file, state = io.BytesIO(), self._controller.state_dict()
        if self._controller.recorded:  # the first rank knows how far the records are, any may write this
            state["record"] = world.World(world.rank(), world.size()).from_first(lambda: state["record"])
        torch.save(state, file)
        return {"controller": file.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError for one that does not fit."""
        with resuming("the checkpoint"):
            saved = torch.load(io.BytesIO(state["controller"]), map_location="cpu", weights_only=True)
            self._controller.load_state_dict(saved)

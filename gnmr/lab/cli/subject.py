"""Share the model, its paths and its batches between `gnmr diagnose` and `gnmr audit`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.errors import UserError, as_user_error
from gnmr.lab.cli.parser import Parser, needs, path, recipe_of, text, whole
from gnmr.records.untrusted import exists, reading

if TYPE_CHECKING:
    from gnmr.formats import Recipe
    from gnmr.lab.config import Config
    from gnmr.lab.evaluation.blocks import TextBlocks
    from gnmr.lab.evaluation.subjects import Subject
    from gnmr.plan.pin_plan import PinPlan


def add_options(parser: Parser, batches: str) -> None:
    """Add the options for the text, its `batches` and the device."""
    parser.option("data", path, "a file of text, of which the model's own tokens are read, or a folder")
    parser.option(
        "batch_size", whole(1), f"blocks of {batches}; default: as many as make 1,024 tokens, of a checkpoint 512"
    )
    parser.option("block", whole(2), "tokens of a block; default: as the run was trained, of a checkpoint 128 at most")
    parser.option("device", text, "auto, cpu or cuda", "auto")


def asked_of(parser: Parser, argv: list[str], command: str) -> tuple[Namespace, str, Config | None]:
    """Return (the options, the place, its config if it is a run). Raises UserError before anything is loaded."""
    options, place = parser.of_one_place(argv, "run folder or checkpoint")
    if options.plan is not None and options.recipe is not None:
        raise UserError("recipe: the plan says which; leave one of them out")
    folder = Path(place).expanduser()
    # Only a run has a config.yaml; a Hugging Face checkpoint has a config.json.
    if not exists(folder / "config.yaml"):
        needs(command, "transformers")
        return options, place, None
    from gnmr.lab.config import read

    with reading(folder):
        return options, place, read(folder / "config.yaml")


def paths_of(
    options: Namespace, config: Config | None, default: str | None = None
) -> tuple[PinPlan | None, str | Recipe | None]:
    """Return (the plan, the recipe), at most one of them; a recipe that the run does not define is given by name."""
    from gnmr.plan.pin_plan import read_plan

    recipes_of_run: dict[str, Any] = {} if config is None else dict(config.precision.recipes)
    if options.plan is not None:
        return read_plan(options.plan), None
    # An audit without a recipe takes the model as it is, and a diagnosis has a default.
    if (word := options.recipe or default) is None:
        return None, None
    with as_user_error():
        return None, recipe_from("recipe", word, recipes_of_run)


def recipe_from(key: str, word: str, recipes_of_run: Mapping[str, Any]) -> str | Recipe:
    """Return the recipe that a word names, as a `Recipe` if the run defines it. Raises ValueError if it is unknown."""
    from gnmr.formats import Recipe

    name = recipe_of(key, word, recipes_of_run)
    return Recipe.of(name, recipes_of_run[name]) if name in recipes_of_run else name


def blocks_for(subject: Subject, options: Namespace, batches: int, held_out: int) -> TextBlocks:
    """Return the batches of the text that was asked for."""
    from gnmr.lab.evaluation.blocks import blocks_of

    data = None if options.data is None else options.data.expanduser()
    return blocks_of(subject, data, batches=batches, held_out=held_out, length=options.block, size=options.batch_size)


@contextmanager
def memory_bound(right: str) -> Iterator[None]:
    """Raise UserError with the remedy `right` if the block runs out of memory."""
    from gnmr.lab.train.memory import out_of_memory

    try:
        yield
    except Exception as error:
        # Any other error has its own message, or is a defect that needs its traceback.
        if not out_of_memory(error):
            raise
        raise UserError(right) from error

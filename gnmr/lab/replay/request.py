"""What to replay: the settings in the place of a run's own, and the signals to try."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gnmr.control.signals import SIGNALS
from gnmr.errors import UserError, did_you_mean, nearest
from gnmr.lab.config import ControllerConfig, from_words, load, one_line
from gnmr.lab.config import read as read_config
from gnmr.lab.replay.trace import own_loop_of
from gnmr.records.untrusted import exists


@dataclass(frozen=True)
class Request:
    """Checked words of the command line."""

    changes: tuple[str, ...] = ()
    """key=value words of the config's `controller`."""
    signals: tuple[str, ...] = ()
    """Names, where several were given; ("all",) for all that there are."""
    trust: bool = False
    """Import the signal that a run's folder names as package.module:Class."""

    def settings(self, path: Path) -> ControllerConfig:
        """The controller's settings for this run or file. UserError for values without sense, and for a signal to
        import that the folder names and the user does not trust."""
        own = own_loop_of(path)
        if own is None:
            own = read_config(path / "config.yaml").controller if exists(path / "config.yaml") else ControllerConfig()
        settings = self.over(own)
        given = any(word.startswith("signal=") for word in self.changes)
        if ":" in settings.signal and not (given or self.trust):
            raise UserError(
                f"{path / 'config.yaml'}: its signal {settings.signal} would be imported, code of its maker's choice; "
                "add --trust if you trust it, or name a signal of your own with signal=NAME"
            )
        return settings

    def over(self, own: ControllerConfig) -> ControllerConfig:
        """The changes over `own`, checked as strictly as `gnmr train` checks its own."""
        try:
            values = from_words(self.changes)
            if values.get("signal", own.signal) != own.signal:
                own = replace(own, options={})  # another signal's options are not this one's
            tree = load(OmegaConf.create({"controller": OmegaConf.merge(asdict(own), values)}))
        except (OmegaConfBaseException, YAMLError) as error:
            raise UserError(f"replay: {one_line(error)}") from error
        return replace(tree.controller, name=own.name)


def request(words: list[str], *, several: bool, trust: bool = False) -> Request:
    """Reads key=value words, `controller.` in front or not; several: whether more than one signal may be asked for."""
    known = sorted({field.name for field in fields(ControllerConfig)} - {"name"})
    changes: list[str] = []
    signals: tuple[str, ...] = ()
    for word in (word.removeprefix("controller.") for word in words):
        key, _, value = word.partition("=")
        if key.partition(".")[0] not in known:
            raise UserError(f"replay: unknown key {word!r}{nearest(word, known)} (gnmr replay --help)")
        if not value:
            raise UserError(f"replay: {word!r} has no value")
        if key == "signal" and (value == "all" or "," in value):
            signals = tuple(value.split(","))
        else:
            changes.append(word)
    if signals and not several:
        raise UserError(f"signal={','.join(signals)}: only with calibrate=SHARE or detect=SHARE; name one signal")
    if signals and (options := [word for word in changes if word.startswith("options.")]):
        raise UserError(f"{options[0]}: of which signal? Name one signal alone, or leave its options out")
    for name in signals:
        if name not in (*SIGNALS, "all") and ":" not in name:
            raise UserError(
                f"signal {name!r} is not known: use one of {', '.join(SIGNALS)}{did_you_mean(name, SIGNALS)}"
            )
    return Request(tuple(changes), signals, trust)

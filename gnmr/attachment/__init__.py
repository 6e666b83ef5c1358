"""One routed step (`Router`), for `gnmr train` and for a user's own training loop, in three lines there.

controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
...
loss.backward()
controller.step()          # before clipping and optimizer.step()

    attaching, model_units, router, path_steps   the protocol of a step
    hints, record                                advice to a loop, and its records
    blame, repeat                                why a step spiked
    trainer, lightning, torchtitan, te_debug     the same in other people's loops
    ranks                                        several processes that train one model

The names below are loaded on first use: the commands ask for the processes of torchrun without torch.
"""

from typing import TYPE_CHECKING

from gnmr import loader

__all__ = ["Router", "attach", "controller_of", "specs_of", "units_of"]

if TYPE_CHECKING:
    from gnmr.attachment.attaching import attach, controller_of, specs_of
    from gnmr.attachment.model_units import units_of
    from gnmr.attachment.router import Router

__getattr__ = loader(
    __name__,
    {
        "attaching": ("attach", "controller_of", "specs_of"),
        "model_units": ("units_of",),
        "router": ("Router",),
    },
)

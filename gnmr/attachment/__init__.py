"""The controller in a user's own training loop, in three lines.

controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
...
loss.backward()
controller.step()          # before clipping and optimizer.step()
"""

from gnmr.attachment.assembly import controller_of, units_of
from gnmr.attachment.attaching import attach, specs_of
from gnmr.attachment.router import Router

__all__ = ["Router", "attach", "controller_of", "specs_of", "units_of"]

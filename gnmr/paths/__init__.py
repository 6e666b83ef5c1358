"""Low-cost and recovery paths of linear operators. Knows nothing of the controller."""

from gnmr.paths.convert import Plan, convert
from gnmr.paths.formats import FORMATS
from gnmr.paths.saved import PathLinear

__all__ = ["FORMATS", "PathLinear", "Plan", "convert"]

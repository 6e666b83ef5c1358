"""compression.*: what data parallel workers send of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.errors import as_user_error, fields, one_of, require, whole


@dataclass(frozen=True)
class CompressionConfig:
    """Low-rank gradients in place of whole ones (docs/compressed.md)."""

    name: str = "none"
    """none; greedylore: a low path whose recovery is the dense mean, so the controller routes gradients and not
    operators."""
    rank: int = 32
    """Rows that are sent of a weight's gradient, the shorter side read first."""
    refresh_every: int = 200
    """Steps between two bases, each a dense step."""
    dense_steps: int = 1000
    """Steps at the start in which gradients are sent whole."""
    targets: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of the modules whose weights are compressed. Embedding and head never are."""
    workers: int | None = None
    """Data parallel workers. null: the processes of parallel=ddp; in one process that many virtual workers, which
    leave what as many processes do."""

    @as_user_error("compression.")
    def __post_init__(self) -> None:
        one_of(("none", "greedylore"), name=self.name)
        whole(**fields(self, "rank", "refresh_every"))
        whole(0, dense_steps=self.dense_steps)
        whole(2, or_null=True, workers=self.workers)
        require(self.targets, "targets", self.targets, "needs at least one pattern")

    @property
    def routes(self) -> bool:
        """Return True if the compressed matrices are the controller's units."""
        return self.name != "none"

    @property
    def arm(self) -> str:
        """Part of an arm's name."""
        return f"{self.name}-r{self.rank}"

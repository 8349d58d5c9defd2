"""What a model process is told at its start: plain, picklable values, decided by the model server.

Owns the records that cross the spawn boundary. Refuses objects that need torch, transformers or an open socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.logs import Format, Level
from shared.messages import SlotName


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """Which model to run, and how."""

    name: str
    """The model's name in the configuration."""
    source: str
    """`ModelConfig.model`, unresolved."""
    task: str
    """Empty for a class of the user's own."""
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    compile: bool = False
    options: dict[str, object] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()
    """Directories for the user's own classes; they go behind everything else on `sys.path`."""
    start: str = ""
    """Where a relative path as the source would start; empty: the working directory."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One incarnation of one slot."""

    slot: SlotName
    incarnation: int
    endpoint: str
    """The broker's model-facing ZeroMQ endpoint."""
    torch_device: str
    """As the process itself sees it, behind its pins: `cpu`, `cuda:0` or `mps`."""
    environment: dict[str, str]
    """Set for the process at exec, on top of the model server's own environment; holds the device pin."""
    cores: tuple[int, ...]
    """The CPU cores the process may run on; empty: all of them."""
    threads: int
    """Torch threads inside one operation."""
    runtime: RuntimeSpec
    max_batch_size: int
    max_batch_cost: int
    """Padded units of one forward; 0: the runtime's own choice."""
    log_level: Level = "info"
    log_format: Format = "console"
    tracing: bool = False
    """Whether the process sends spans of its batches."""

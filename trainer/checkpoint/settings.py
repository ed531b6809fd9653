"""The settings of checkpoints and snapshots, which every trainer's own settings contain.

Each is explained where users find it, in the settings of the trainers (core/config).
"""

from typing import Protocol


class CheckpointSettings(Protocol):
    """Settings of a job; equal on all ranks."""

    @property
    def job(self) -> str: ...

    @property
    def steps(self) -> int: ...

    @property
    def peer_timeout_s(self) -> float: ...

    @property
    def checkpoint_dir(self) -> str: ...

    @property
    def checkpoint_period_steps(self) -> int: ...

    @property
    def checkpoint_window_steps(self) -> int: ...

    @property
    def checkpoints_kept(self) -> int: ...

    @property
    def experts_per_checkpoint(self) -> int: ...

    @property
    def expert_order(self) -> str: ...

    @property
    def partial_state(self) -> str: ...

    @property
    def lost_tokens_limit(self) -> float: ...

    @property
    def snapshot_period_steps(self) -> int: ...

    @property
    def resume(self) -> str: ...

"""torchtitan's override of the data loader for batch shares: each rank reads all ranks' data.

    --override.imports pacekeeper.trainer.adapters.batch_shares.torchtitan_loader.shared_streams

torchtitan imports this module when it is named there; nothing else does.
"""

from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import override

from pacekeeper.trainer.adapters.batch_shares.torchtitan import SharedStreams


class SharedLoader(SharedStreams, BaseDataLoader):  # type: ignore[misc]
    """The loaders of all ranks, as one loader of torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Settings of the loader of each rank."""

        inner: Any


@override(  # type: ignore[untyped-decorator]
    target=BaseDataLoader.Config, description="Each rank reads the data of all ranks"
)
def shared_streams(config: Any) -> Any:
    """Return the settings of loaders of all ranks, made with `config`."""
    return SharedLoader.Config(inner=config)

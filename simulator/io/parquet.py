"""Opens Parquet files of others; needs the extra `parquet`."""

from pathlib import Path
from typing import Any

from pacekeeper.core.errors import DataError


def read_parquet(path: Path) -> Any:
    """The file's table. Raises DataError where it is none."""
    return _opened(path, "read_table")


def column_names(path: Path) -> list[str]:
    """The names of its columns, without reading them. Raises as `read_parquet`."""
    names: list[str] = _opened(path, "read_schema").names
    return names


def _opened(path: Path, how: str) -> Any:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        return getattr(parquet, how)(path)
    except (OSError, arrow.ArrowException, ValueError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: damaged Parquet: {why}") from None

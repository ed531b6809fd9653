"""Archives of numpy whose members are no arrays, or tell of more than there is: one line."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.jobs.expert_routing import read_routing
from pacekeeper.simulator.readers.step_times import ARCHIVE, read_archive


def archive(path: Path, names: tuple[str, ...], content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(f"{name}.npy", content)
    return path


def huge() -> bytes:
    """The header of an array that no memory holds."""
    file = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


@pytest.mark.parametrize("content", [b"no array", b"", huge()])
def test_members_that_are_no_arrays_are_refused_by_the_files_name(
    tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(DataError, match=r"steps\.npz"):
        read_archive(archive(tmp_path / "steps.npz", tuple(ARCHIVE), content))
    with pytest.raises(DataError, match=r"routing\.npz"):
        path = archive(tmp_path / "routing.npz", ("iteration", "counts"), content)
        read_routing(path, num_experts=2)

"""The parameter type of paths."""

from typing import Any

import click


class PathType(click.Path):
    """A path; the empty one, as of a variable that is not set, is rejected: it would be "."."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert and check the path."""
        if not str(value):
            self.fail("expected a path, got ''", param, ctx)
        return super().convert(value, param, ctx)

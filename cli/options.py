"""Kinds of options that click lacks."""

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A number in a range, and neither nan nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """nan lies in no range, but click compares with `<`; infinity lies in an open one."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number

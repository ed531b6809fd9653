"""A figure inside a page: no file beside it, no request to anybody."""

import base64
import io
from typing import Any


def inline_png(figure: Any, *, dpi: int) -> str:
    """A matplotlib figure as the address of an `img`, the picture in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

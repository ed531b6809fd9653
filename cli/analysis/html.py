"""Style and inline images of the HTML reports, which are single files without requests."""

import base64
import io
from typing import Any

PAGE_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
img { max-width: 100%; } table { border-collapse: collapse; }
th, td { text-align: left; padding: .2em .8em .2em 0; vertical-align: top;
          border-bottom: 1px solid #eee; font-weight: normal; }
th { color: #666; }"""


def inline_png(figure: Any, *, dpi: int) -> str:
    """Return a matplotlib figure as a data URL for `img`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

"""Text that others wrote, as one line of bounded length that moves no terminal's cursor. Pure.

It goes into logs, onto terminals and pages: what is no printable character becomes a blank.
"""

MAX_CHARACTERS = 500


def one_line(text: str, most: int = MAX_CHARACTERS) -> str:
    """The same text where it is fit for that already, as nearly all is."""
    if len(text) <= most and text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " for c in text[:most]).strip()

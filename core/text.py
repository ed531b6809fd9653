"""Text from other programs as one printable line of bounded length.

For logs, terminals and pages: an agent's or a trainer's text never moves a cursor.
"""

MAX_CHARACTERS = 500


def one_line(text: str, most: int = MAX_CHARACTERS) -> str:
    """`text` cut to `most` characters, each unprintable character replaced by a blank."""
    if len(text) <= most and text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " for c in text[:most]).strip()

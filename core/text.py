"""Text from other programs as one printable line of bounded length.

MAX_CHARACTERS = 500


def one_line(text: str, most: int = MAX_CHARACTERS) -> str:
    """`text` cut to `most` characters, with every unprintable character replaced by a blank."""
    if len(text) <= most and text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " for c in text[:most]).strip()

"""Tokenizers for tests: a byte-level BPE with a few merges, written as a `tokenizer.json`."""

import json
from pathlib import Path
from typing import Any

END = "<|end|>"


def write_tokenizer(
    folder: Path,
    *,
    settings: dict[str, Any] | None = None,
    is_special: bool = True,
    **changes: Any,
) -> Path:
    """A folder with `tokenizer.json` and `tokenizer_config.json`.

    Letters, the space and the line break are tokens; "th", "the" and "he" are merged; END is the
    last token, special unless `is_special` is False. `changes` replace parts of `tokenizer.json`.
    """
    letters = [*"abcdefghijklmnopqrstuvwxyz\u0120\u010a", "\u00c3", "\u00bc"]  # \u00fc is two bytes
    words = [*letters, "th", "the", "he"]
    vocab = {word: number for number, word in enumerate(words)}
    end = {
        "id": len(vocab), "content": END, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": is_special,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": vocab, "merges": [["t", "h"], ["th", "e"], ["h", "e"]],
        },
    } | changes  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if settings is None:
        settings = {"eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

"""The JSON form of a layout, used in plan files, in the store and on the wire."""

import json
import zlib
from typing import Any

from pacekeeper.core.layout.layout import ExpertReplica, Layout, ShardRun, Stage

FORMAT = 1


def encode_layout(layout: Layout) -> bytes:
    """Canonical JSON: equal layouts give equal bytes, so a digest names a layout."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "generation": layout.generation,
        "num_virtual_shards": layout.num_virtual_shards,
        "stages": [
            {
                "layers": [stage.first_layer, stage.end_layer],
                "groups": [[[r.rank, r.first, r.end] for r in group] for group in stage.groups],
            }
            for stage in layout.stages
        ],
        "experts": [
            [[[replica.rank, replica.share] for replica in replicas] for replicas in layer]
            for layer in layout.experts
        ],
        "batch_shares": [[rank, share] for rank, share in layout.batch_shares],
    }
    if layout.speeds:
        document["speeds"] = [[rank, speed] for rank, speed in layout.speeds]
    if layout.standing_by:
        document["standing_by"] = list(layout.standing_by)
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def decode_layout(data: bytes) -> Layout:
    """Parse the layout in `data`.

    Raises:
        ValueError: the bytes are not a layout; the message gives the reason.
    """
    try:
        document: Any = json.loads(data)
        if document["format"] != FORMAT:
            raise ValueError(f"layout format {document['format']}, this side reads {FORMAT}")
        return Layout(
            generation=int(document["generation"]),
            num_virtual_shards=int(document["num_virtual_shards"]),
            stages=tuple(
                Stage(
                    first_layer=int(stage["layers"][0]),
                    end_layer=int(stage["layers"][1]),
                    groups=tuple(
                        tuple(ShardRun(int(r), int(first), int(end)) for r, first, end in group)
                        for group in stage["groups"]
                    ),
                )
                for stage in document["stages"]
            ),
            experts=tuple(
                tuple(
                    tuple(ExpertReplica(int(rank), float(s)) for rank, s in replicas)
                    for replicas in layer
                )
                for layer in document["experts"]
            ),
            batch_shares=tuple((int(r), float(s)) for r, s in document["batch_shares"]),
            speeds=tuple((int(r), float(s)) for r, s in document.get("speeds", ())),
            standing_by=tuple(map(int, document.get("standing_by", ()))),
        )
    except (
        AttributeError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,  # an infinite number where a count belongs
        RecursionError,  # nested beyond any layout
        UnicodeDecodeError,
        json.JSONDecodeError,
    ) as error:
        raise ValueError(f"not a layout: {error!r}") from None


def layout_crc(layout: Layout) -> int:
    """CRC32 of a layout's JSON form: two processes compare it to check that they agree."""
    return zlib.crc32(encode_layout(layout))

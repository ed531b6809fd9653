"""A link in userspace: frames pass with a delay, at the rate of a token bucket, or not at all.

Runs inside a network namespace, between two interfaces: `python link_proxy.py A B`. It reads one
JSON line after the other from its input, each a `Shape` from then on, and answers each with "done".
"""

import heapq
import json
import random
import select
import socket
import sys
import time
from dataclasses import dataclass, field

FRAME_BYTES = 1 << 16
ALL_PROTOCOLS = 3  # ETH_P_ALL
IP_PEERS = slice(26, 34)  # source and destination of an IPv4 frame


@dataclass(kw_only=True)
class Shape:
    """What happens to frames. `peer`: only those from or to this IPv4 address; "": all.

    `bytes_per_s` 0.0: no limit. `burst_bytes`: what a bucket holds. `loss`: part of the frames.
    """

    bytes_per_s: float = 0.0
    burst_bytes: float = 65536.0
    delay_s: float = 0.0
    loss: float = 0.0
    peer: str = ""


@dataclass(kw_only=True)
class TokenBucket:
    """When a frame may pass. A frame that finds too few tokens waits for them, in order."""

    shape: Shape
    tokens: float = 0.0
    at_s: float = field(default_factory=time.monotonic)

    def pass_s(self, num_bytes: int, now_s: float) -> float:
        """Return when a frame that arrives now may pass."""
        rate = self.shape.bytes_per_s
        if rate <= 0.0:
            return now_s
        if now_s > self.at_s:
            grown = self.tokens + (now_s - self.at_s) * rate
            self.tokens, self.at_s = min(self.shape.burst_bytes, grown), now_s
        self.tokens -= num_bytes
        return self.at_s + max(0.0, -self.tokens) / rate


def main(names: list[str]) -> None:
    """Pass frames between two interfaces until the input ends."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) for _ in names]
    for end, name in zip(ends, names, strict=True):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
        end.bind((name, ALL_PROTOCOLS))
        end.setblocking(False)
    shape, buckets = Shape(), [TokenBucket(shape=Shape()) for _ in ends]
    peer = b""
    waiting: list[tuple[float, int, int, bytes]] = []
    chance, number = random.Random(0), 0
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([sys.stdin, *ends], [], [], wait_s)
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            shape = Shape(**json.loads(line))
            buckets = [TokenBucket(shape=shape) for _ in ends]
            peer = socket.inet_aton(shape.peer) if shape.peer else b""
            print("done", flush=True)
        now_s = time.monotonic()
        for source, end in enumerate(ends):
            for _ in range(64 if end in readable else 0):
                try:
                    frame, address = end.recvfrom(FRAME_BYTES)
                except BlockingIOError:
                    break
                if address[2] == socket.PACKET_OUTGOING:
                    continue
                at_s = now_s
                if not peer or peer in (frame[IP_PEERS][:4], frame[IP_PEERS][4:]):
                    if chance.random() < shape.loss:
                        continue
                    at_s = buckets[source].pass_s(len(frame), now_s) + shape.delay_s
                number += 1
                heapq.heappush(waiting, (at_s, number, 1 - source, frame))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, _, target, frame = heapq.heappop(waiting)
            try:
                ends[target].send(frame)
            except OSError:
                continue  # lost, as on a full or broken link: TCP sends it again


if __name__ == "__main__":
    main(sys.argv[1:])

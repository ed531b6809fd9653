"""A training loop with pacekeeper's five lines.

`python examples/attach.py [--ring-dir DIR] [--steps N]`; runs with or without an agent.
"""

import argparse
import random

from pacekeeper.trainer.hooks import hooks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ring-dir", default=None, help="this node's ring directory")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    batches = [[random.random()] * random.randrange(2_000, 4_000) for _ in range(arguments.steps)]

    pace = hooks.attach(job="example", rank=0, world_size=1, ring_dir=arguments.ring_dir)
    for step, batch in enumerate(batches):
        with pace.step(step) as result, pace.micro_batch_timer(tokens=len(batch)):
            total = sum(x * x for x in batch)  # the forward and backward pass
            with pace.waiting():  # waits for other ranks are not compute
                assert total >= 0.0
            result.tokens, result.loss = len(batch), total / len(batch)
    pace.detach()
    print(f"{arguments.steps} steps; ring: {pace.ring.path or pace.ring.reason}")


if __name__ == "__main__":
    main()

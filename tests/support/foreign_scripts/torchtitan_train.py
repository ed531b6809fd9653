"""torchtitan's own loop and MoE layer in one process: `torchtitan_train.py CASE.json 0`."""

import sys

import torch

from support.foreign_ranks import begin
from support.torchtitan_rank import trainer_of


def main() -> None:
    case, rank = begin(sys.argv)
    torch.distributed.init_process_group("gloo")
    trainer_of(case, rank).train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

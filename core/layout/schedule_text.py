"""A step program in letters, one line for each stage. Pure.

F3: the forward of micro-batch 3; B: its backward, W: its weight gradient, where that is split off;
F3.1: in model chunk 1. [>F3 <B0]: messages posted together: the output of F3 leaves, the input of
B0 arrives.
"""

from pacekeeper.core.layout.pipeline_schedule import ChunkKind, ChunkOp, Exchange, Program

LETTERS = {ChunkKind.FORWARD: "F", ChunkKind.BACKWARD: "B", ChunkKind.WEIGHT_GRADIENT: "W"}


def program_lines(program: Program) -> tuple[str, ...]:
    """What each stage does in a step, in order."""
    return tuple(
        " ".join(_item(item, program.num_model_chunks) for item in stage)
        for stage in program.stages
    )


def _item(item: ChunkOp | Exchange, num_model_chunks: int) -> str:
    match item:
        case ChunkOp():
            return _chunk(item, num_model_chunks)
        case Exchange():
            sends = [f">{_chunk(op, num_model_chunks)}" for op in item.sends]
            receives = [f"<{_chunk(op, num_model_chunks)}" for op in item.receives]
            return f"[{' '.join((*sends, *receives))}]"


def _chunk(op: ChunkOp, num_model_chunks: int) -> str:
    end = f".{op.model_chunk}" if num_model_chunks > 1 else ""
    return f"{LETTERS[op.kind]}{op.micro_batch}{end}"

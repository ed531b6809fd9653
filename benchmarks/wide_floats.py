"""Makes models of transformers compute in float64 throughout, in the whole process."""

import torch


def use_float64() -> None:
    """Let what asks for float32 get float64: norms, softmax and routers of the library do.

    For processes of their own: it changes torch itself.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]

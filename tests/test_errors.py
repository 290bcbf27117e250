"""Out-of-memory errors are translated; other errors pass through."""

import pytest
import torch

from unidle.errors import TrainingError, explain_out_of_memory


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 …"),
            "while allocating 20.00 MiB",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "out of memory; stop"),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` …"), "out of memory; stop"),
    ],
)
def test_out_of_memory_error_is_one_line_with_advice(error: RuntimeError, text: str) -> None:
    with pytest.raises(TrainingError) as caught, explain_out_of_memory():
        raise error
    message = str(caught.value)
    assert text in message
    assert "--n-envs" in message
    assert len(message.splitlines()) == 1


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="no such shape"), explain_out_of_memory():
        raise RuntimeError("no such shape")

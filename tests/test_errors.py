"""What becomes of errors that unidle did not raise itself."""

import pytest
import torch

from unidle.errors import TrainingError, explain_out_of_memory


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 …"),
            "while allocating 20.00 MiB",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "out of memory; stop"),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` …"), "out of memory; stop"),
    ],
)
def test_running_out_of_gpu_memory_is_one_sentence_with_what_to_do(error: RuntimeError, told: str) -> None:
    with pytest.raises(TrainingError) as caught, explain_out_of_memory():
        raise error
    sentence = str(caught.value)
    assert told in sentence
    assert "--n-envs" in sentence
    assert len(sentence.splitlines()) == 1


def test_any_other_error_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="no such shape"), explain_out_of_memory():
        raise RuntimeError("no such shape")

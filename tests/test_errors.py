"""What becomes of errors that unidle did not raise itself."""

import pytest
import torch

from unidle.errors import TrainingError, gpu_memory_told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 …"), "when 20.00 MiB more"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "out of memory; end"),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` …"), "out of memory; end"),
    ],
)
def test_running_out_of_gpu_memory_is_one_sentence_with_what_to_do(error: RuntimeError, told: str) -> None:
    with pytest.raises(TrainingError) as caught, gpu_memory_told():
        raise error
    sentence = str(caught.value)
    assert told in sentence
    assert "--n-envs" in sentence
    assert len(sentence.splitlines()) == 1


def test_any_other_error_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="no such shape"), gpu_memory_told():
        raise RuntimeError("no such shape")

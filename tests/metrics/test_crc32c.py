"""CRC-32C: known values, and tensorboardX's own implementation."""

from __future__ import annotations

import random

import pytest
from tensorboardX.record_writer import masked_crc32c as reference

from unidle.metrics.crc32c import crc32c, masked_crc32c


@pytest.mark.parametrize(
    ("data", "checksum"),
    [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (b"", 0)],
    ids=["digits", "zeros", "ones", "empty"],
)
def test_checksum_matches_published_values(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


def test_masked_checksum_matches_tensorboardx_around_block_boundaries() -> None:
    draw = random.Random(0)
    for length in (*range(12), *range(1020, 1032), 2048, 5001):
        data = draw.randbytes(length)
        assert masked_crc32c(data) == reference(data), length

"""The make-believe NVIDIA driver of the meter's tests, for the tests here."""

from meter.conftest import fake_driver

__all__ = ["fake_driver"]

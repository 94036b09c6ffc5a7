"""Make a device's context current while the driver is called by itself, not through PyTorch."""

from __future__ import annotations

from functools import cache

from .compiler import checked


class Context:
    """The context of a device that PyTorch uses too, current inside a `with`.

    A thread that has not used the device has no current context, or another device's.
    """

    def __init__(self, index: int) -> None:
        """Retain the context of device `index`."""
        from cuda.bindings import driver

        self.driver = driver
        self.name = f"cuda:{index}"
        self.handle = checked(f"{self.name}: cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(index))

    def __enter__(self) -> None:
        checked(f"{self.name}: cuCtxPushCurrent", self.driver.cuCtxPushCurrent(self.handle))

    def __exit__(self, *exception: object) -> None:
        self.driver.cuCtxPopCurrent()


@cache
def device_context(index: int) -> Context:
    """Return the context of a device."""
    return Context(index)

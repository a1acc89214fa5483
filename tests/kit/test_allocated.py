"""What the allocation check makes of the counters, without a device."""

from __future__ import annotations

import pytest

from cudnn_core.testing._cuda import allocated


class Device:
    """Each batch of runs makes the next of ``allocations`` and leaves the next of ``free`` bytes."""

    def __init__(self, free=(), allocations=()):
        self.room, self.made = 10**9, 0
        self.free, self.allocations = list(free), list(allocations)
        self.batches = []

    def repeat(self, times):
        self.batches.append(times)
        self.room -= self.free.pop(0) if self.free else 0
        self.made += self.allocations.pop(0) if self.allocations else 0

    def judge(self, shared=False):
        return allocated(self.repeat, lambda: self.made, None if shared else lambda: self.room)


@pytest.mark.parametrize("free", [(0,), (-4096,), (4096, 0), (4096, 8192, -100)])
def test_memory_that_another_process_takes_once_or_gives_back_is_not_the_engines(free):
    device = Device(free)
    assert device.judge() == ""
    assert len(device.batches) == len(free)


def test_memory_that_goes_with_every_batch_is():
    device = Device((4096, 8192, 100))
    assert device.judge() == "100 bytes less are free after 160 runs"
    assert device.batches == [10, 40, 160]


@pytest.mark.parametrize("shared", [False, True])
def test_an_allocation_of_this_process_counts_at_once(shared):
    device = Device(allocations=(3,))
    assert device.judge(shared) == "3 allocations of PyTorch in 10 runs"


def test_the_devices_free_memory_is_not_looked_at_in_a_parallel_run():
    assert Device((4096, 8192, 100)).judge(shared=True) == ""

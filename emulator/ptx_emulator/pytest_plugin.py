"""The pytest fixture `emulate`, and the options `--emulator-seed` and `--emulator-schedule`.

Contract: `emulate(compiled, *args, **options)` is `ptx_emulator.launch` with the seed and schedule of the command line
and check="raise" unless the call says otherwise: a finding fails the test. Loaded by pytest through the entry point
`ptx_emulator` (or `-p ptx_emulator.pytest_plugin`); imports the emulator on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ptx_emulator import Report


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("ptx_emulator")
    group.addoption("--emulator-seed", type=int, default=0, metavar="N", help="seed of emulated schedules (default: 0)")
    group.addoption("--emulator-schedule", choices=("late", "eager", "random"), default="late",
                    help="when asynchronous operations complete (default: late)")  # fmt: skip


@pytest.fixture  # type: ignore[untyped-decorator]  # pytest is skipped by the type checker
def emulate(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`emulate(compiled, *args, **options)`: run a compiled kernel in the emulator; findings fail the test."""
    from ptx_emulator import launch

    defaults = {
        "seed": request.config.getoption("--emulator-seed"),
        "schedule": request.config.getoption("--emulator-schedule"),
        "check": "raise",
        "progress": False,
    }

    def emulate(compiled: Any, *args: Any, **options: Any) -> Report:
        return launch(compiled, *args, **{**defaults, **options})

    return emulate

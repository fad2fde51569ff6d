"""Environments and an agent that fail on purpose; imported by Harbor, in its own Python."""

import asyncio
import re
from typing import Any

from harbor.agents.installed.base import NonZeroAgentExitCodeError
from treadle_local import LocalEnvironment
from treadle_terminus import DeferredTerminus2

SIZE = 16  # attempts of the group in which each fails in a way of its own


def place(name: str) -> int:
    """The place in its group of an attempt, from a name that a trial's begins or is part of."""
    found = re.search(r"treadle-[0-9a-f]+-\w+-(\d+)", name)
    return int(found[1]) % SIZE if found else -1


class NoStart(LocalEnvironment):
    async def start(self, force_build: bool) -> None:
        raise RuntimeError("the quota of sandboxes is used up")


class SlowStart(LocalEnvironment):
    async def start(self, force_build: bool) -> None:
        await asyncio.sleep(1000)


class _Later(LocalEnvironment):
    """Fails when the agent looks at its terminal for the second time."""

    looks = 0

    async def exec(self, command: str, **more: Any) -> Any:
        self.looks += "has-session" in command
        if self.looks == 2:
            await self.fail()
        return await super().exec(command, **more)

    async def fail(self) -> None: ...


class Dies(_Later):
    async def fail(self) -> None:
        if self._sandbox is not None:
            self._sandbox.kill()
            await self._sandbox.wait()


class TimesOut(_Later):
    async def fail(self) -> None:
        self.looks += 1
        raise TimeoutError("the provider's API did not answer")


class ByPlace(_Later):
    """Fails in three places of a group, in three ways."""

    @property
    def place(self) -> int:
        return place(self.session_id)

    async def start(self, force_build: bool) -> None:
        await (NoStart.start if self.place == 10 else LocalEnvironment.start)(self, force_build)

    async def fail(self) -> None:
        ways = {11: Dies.fail, 12: TimesOut.fail}
        if self.place in ways:
            await ways[self.place](self)


class TerminusByPlace(DeferredTerminus2):
    """Raises in two places of a group: at once, and after it has done its work."""

    async def run(self, *args: Any, **kwargs: Any) -> None:
        number = place(str(self.logs_dir))
        if number == 13:
            raise ValueError("it lost its way")
        await super().run(*args, **kwargs)
        if number == 14:
            raise NonZeroAgentExitCodeError("it ended with 1")

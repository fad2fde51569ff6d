"""Environments that fail on purpose; imported by Harbor, in its own Python."""

import asyncio
from typing import Any

from treadle_local import LocalEnvironment


class NoStart(LocalEnvironment):
    async def start(self, force_build: bool) -> None:
        raise RuntimeError("the quota of sandboxes is used up")


class SlowStart(LocalEnvironment):
    async def start(self, force_build: bool) -> None:
        await asyncio.sleep(60)


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

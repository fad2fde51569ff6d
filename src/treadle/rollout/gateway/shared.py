"""The one gateway of a run, served from the time a driver first needs it."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

from treadle.rollout.config import GatewayConfig, ImagesConfig
from treadle.rollout.gateway.gateway import Gateway

_FILES = 65536


class SharedGateway:
    """The one gateway of a run, served from the time the first driver opens it until the run ends."""

    def __init__(
        self, config: GatewayConfig, images: ImagesConfig, log: Callable[[str], None] = lambda line: None
    ) -> None:
        self._config, self._gateway = config, Gateway(images=images, log=log)
        self._serving, self._opening = AsyncExitStack(), asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._serving.aclose()

    async def open(self) -> Gateway:
        """Serve the gateway and return it. Raises ConfigError if its address is not available."""
        from treadle.rollout.gateway.serving import serving  # Starlette and uvicorn

        async with self._opening:
            if not self._gateway.url:
                # Hundreds of attempts hold a few files each.
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
                if soft != resource.RLIM_INFINITY and soft < most:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                await self._serving.enter_async_context(serving(self._gateway, self._config))
        return self._gateway

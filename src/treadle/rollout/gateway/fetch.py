"""Remote images: fetched under limits of bytes, time and redirects, from addresses that a client may reach.

A client must not make this machine reach what only this machine can reach (server-side request forgery). Names are
resolved once, every address must be public, and the connection is made to an address that was checked: a name that
resolves differently the second time gains nothing. Redirects are checked in the same way; proxies are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from typing import TYPE_CHECKING

from treadle.rollout.gateway.request import ApiError

if TYPE_CHECKING:
    import httpx

SECONDS = 10.0  # for an image, with all redirects
_REDIRECTS = 3
_HTTP = re.compile("https?://", re.IGNORECASE)
_UNICAST = ipaddress.ip_network("2000::/3")


def is_remote(url: str) -> bool:
    return bool(_HTTP.match(url))


async def fetch(url: str, largest: int, anywhere: bool) -> bytes:
    """Return what is at an http(s) URL. Raises ApiError (400).

    largest: limit of its size, in bytes. anywhere: whether also from addresses that are not public.
    """
    import httpx

    where = f"the image {url.partition('?')[0][:80]!r}"
    try:
        async with asyncio.timeout(SECONDS):
            return await _fetch(httpx.URL(url), largest, anywhere)
    except TimeoutError as error:
        raise _refusal(where, f"did not arrive within {SECONDS:g} s; send a data URL") from error
    except _Refused as error:
        raise _refusal(where, str(error)) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise _refusal(where, f"cannot be fetched: {reason:.200}; check the URL, or send a data URL") from error


class _Refused(Exception):
    """Says why an image is not fetched."""


def _refusal(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} {why}", "messages")


async def _fetch(url: httpx.URL, largest: int, anywhere: bool) -> bytes:
    import httpx

    async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as client:
        for _ in range(_REDIRECTS + 1):
            if url.scheme not in ("http", "https") or not url.host or url.userinfo:
                raise _Refused("is not at a plain http(s) URL; send a data URL")
            address = await _address(url, anywhere)
            headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
            named = {"sni_hostname": url.raw_host.decode("ascii")}  # whose certificate is checked
            async with client.stream("GET", url.copy_with(host=address), headers=headers, extensions=named) as response:
                if not response.has_redirect_location:
                    return await _body(response, largest)
                url = url.join(response.headers["location"])
    raise _Refused(f"is behind more than {_REDIRECTS} redirects; give its last URL")


async def _address(url: httpx.URL, anywhere: bool) -> str:
    """Resolve the host. Raises _Refused if any of its addresses is not public, OSError for an unknown name."""
    port = url.port or (443 if url.scheme == "https" else 80)
    resolved = await asyncio.get_running_loop().getaddrinfo(
        url.raw_host.decode("ascii").strip("[]"), port, type=socket.SOCK_STREAM
    )
    addresses = [str(entry[4][0]).partition("%")[0] for entry in resolved]
    if not anywhere and not all(map(is_public, addresses)):
        raise _Refused("is not at a public address; send a data URL, or set rollout.images.fetch to any")
    return addresses[0]


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the Internet, and not of this machine or its network."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and (ip not in _UNICAST or ip.sixtofour is not None):
        return False  # also IPv4 addresses within IPv6 ones
    return ip.is_global and not ip.is_multicast


async def _body(response: httpx.Response, largest: int) -> bytes:
    if response.status_code != 200:
        raise _Refused(f"was answered by status {response.status_code}; check the URL, or send a data URL")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _Refused("was answered compressed, although identity was requested; send a data URL")
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > largest:
            raise _Refused(f"has more than {largest} bytes; scale it down (rollout.images.max_bytes)")
    return bytes(body)

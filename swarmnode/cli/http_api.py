"""Asking a running backbone's HTTP API."""

from __future__ import annotations

import os
from typing import Any

import click
import httpx

from swarmnode.cli.checked import Checked
from swarmnode.cli.common import DEFAULT_API
from swarmnode.errors import ConnectionLostError, UsageError

TIMEOUT_S = 10.0
KEY_VARIABLE = "SWARMNODE_API_KEY"


def key_headers() -> dict[str, str]:
    """What to send for an API that asks for a key: the one in SWARMNODE_API_KEY. Wrong usage if it cannot be one.

    Only from the environment: what stands on a command line is seen by every user of the machine.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise click.UsageError(f"{KEY_VARIABLE} holds what no API key can be: characters that are not ASCII")
    return {"Authorization": f"Bearer {key}"}


def base_url(api: str) -> str:
    """`host:port` or a URL, with or without `/v1`, as the beginning of a URL; UsageError if it cannot be one."""
    base = api if api.startswith(("http://", "https://")) else f"http://{api}"
    try:
        if httpx.URL(base).host:
            return base.rstrip("/").removesuffix("/v1")
    except (httpx.InvalidURL, UnicodeError):
        pass
    raise UsageError(f"{api!r} is no address of an API; write HOST:PORT, for example {DEFAULT_API}")


def api_type() -> Checked:
    """The type of an option that says which API to ask."""
    return Checked("HOST:PORT|URL", base_url)


def nobody_there(base: str, error: Exception) -> ConnectionLostError:
    """Nothing listens at that address."""
    return ConnectionLostError(
        f"no backbone answers at {base} ({error}); start one with `swarmnode backbone`, or give --api"
    )


def no_api(base: str, reason: str = "") -> ConnectionLostError:
    """Something listens at that address, and is none."""
    told = f" ({reason})" if reason else ""
    return ConnectionLostError(
        f"{base} does not answer as a backbone's API does{told}: give the address that the backbone prints "
        "behind `api`, --api HOST:PORT; or it was stopped just now"
    )


def error_message(response: httpx.Response) -> str:
    """What an answer that is no success says; where it is about the key, also where commands take that from."""
    try:
        message = str(response.json()["error"]["message"])
        return f"{message} ({_key_hint()})" if response.status_code == 401 else message
    except (ValueError, KeyError, TypeError):
        return f"what listens there answered {response.status_code}, but not as a backbone does; give --api HOST:PORT"


def _key_hint() -> str:
    if os.environ.get(KEY_VARIABLE, "").strip():
        return f"the one in {KEY_VARIABLE} was sent"
    return f"this command would send the one in {KEY_VARIABLE}, which is not set"


def get_object(api: str, path: str) -> dict[str, Any]:
    """The JSON object behind a route; UsageError or ConnectionLostError with what to do."""
    base = base_url(api)
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=key_headers()) as client:
            response = client.get(base + path)
    except (httpx.ConnectError, UnicodeError) as error:
        raise nobody_there(base, error) from error
    except httpx.HTTPError as error:
        raise no_api(base, str(error) or type(error).__name__) from error
    if response.status_code != 200:
        raise UsageError(error_message(response))
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"what listens at {base} is no backbone; give its address: --api HOST:PORT")
    return value

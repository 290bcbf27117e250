"""Whether a run's config.yaml may name code to import: only if this user signed it, by starting or trusting the run.

The settings that name code are signed with a secret key in the user's state folder; the signatures are in the run
folder. So a run may be moved and copied, but one from elsewhere, or an edited one, is not imported without asking.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import yaml

from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.files import display_path
from unidle.envs.import_name import is_reproducible
from unidle.envs.make import has_backend
from unidle.errors import UsageError
from unidle.writing import write_atomically

_FILE = ".signatures"
_MAX_BYTES = 10_000  # of that file
_KEY_BYTES = 32
_SETTINGS = ("env", "wrappers", "network")
_OWN_NETWORKS = ("unidle.nn.link_network:LinkNetwork",)  # of presets

_signed_here: set[str] = set()  # signatures of this process, if the run folder cannot be written


def named_code(config: Config) -> dict[str, str]:
    """The settings that name code outside unidle, with their values as text."""
    env, network = config.run.env, config.recipe.network
    found = {}
    if ":" in env and is_reproducible(env) and not has_backend(env):
        kwargs = config.run.env_kwargs
        found["env"] = in_brief(env) + (f" with {in_brief(kwargs)}" if kwargs else "")
    if config.run.wrappers:
        found["wrappers"] = in_brief(list(config.run.wrappers))
    if network is not None and is_reproducible(network) and network not in _OWN_NETWORKS:
        found["network"] = in_brief(network)
    return found


def sign(folder: Path, config: Config, settings: Iterable[str] = _SETTINGS) -> None:
    """From now on, trust the code named in these `settings` of a run."""
    signatures = {name: _signature(config, name) for name in named_code(config) if name in settings}
    if not signatures:
        return
    _signed_here.update(signatures.values())
    with suppress(OSError, UsageError):  # a folder that cannot be written
        write_atomically(folder / _FILE, json.dumps({**_signatures(folder), **signatures}))


def untrusted_code(folder: Path, config: Config, settings: Iterable[str] = _SETTINGS) -> dict[str, str]:
    """Those of `settings` that name code which this user has not signed, with their values as text."""
    signatures = _signatures(folder)
    return {
        name: text
        for name, text in named_code(config).items()
        if name in settings and not _is_signed(config, name, signatures.get(name))
    }


def require_trust(folder: Path, config: Config, settings: Iterable[str], trust: bool) -> None:
    """UsageError if `settings` name code that this user has not signed; with `trust`, it is signed."""
    found = untrusted_code(folder, config, settings)
    if found and not trust:
        names = " and ".join(f"{name} {text}" for name, text in found.items())
        raise UsageError(
            f"{display_path(folder)} was not created by you on this machine, and it would import and run the {names}; "
            "if you trust it, add --trust (in Python: trust=True)."
        )
    sign(folder, config, found)


def _is_signed(config: Config, setting: str, signature: object) -> bool:
    expected = _signature(config, setting)
    return expected in _signed_here or (
        isinstance(signature, str) and hmac.compare_digest(signature.encode(errors="replace"), expected.encode())
    )


def _signature(config: Config, setting: str) -> str:
    value = config.flat()[setting]
    kwargs = config.run.env_kwargs if setting == "env" else None
    signed = [setting, list(value) if isinstance(value, tuple) else value, kwargs]
    return hmac.digest(_key(_state_folder()), yaml.safe_dump(signed).encode(), "sha256").hex()


def _signatures(folder: Path) -> dict[str, object]:
    try:
        handle = os.open(folder / _FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# -- the user's key ----------------------------------------------------------------------------------------------------


def _state_folder() -> Path | None:
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".local" / "state") / "unidle"
    except RuntimeError:  # this user has no home
        return None


@cache
def _key(folder: Path | None) -> bytes:
    """The key in the user's state folder, created when first needed; if it cannot be, one for this process alone."""
    if folder is not None:
        path = folder / "signing-key"
        with suppress(OSError):
            if not path.exists():
                _create_key(path)
            return _read_key(path)
    return secrets.token_bytes(_KEY_BYTES)


def _create_key(path: Path) -> None:
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    complete = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(complete, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
    try:
        with suppress(FileExistsError):  # by another process, at the same time
            os.link(complete, path)
    finally:
        complete.unlink()


def _read_key(path: Path) -> bytes:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        state, key = os.fstat(file.fileno()), file.read(_KEY_BYTES)
    is_private = state.st_uid == os.geteuid() and not stat.S_IMODE(state.st_mode) & 0o077
    if not is_private or len(key) < _KEY_BYTES:
        raise PermissionError(f"{path} is not a private key of this user")
    return key

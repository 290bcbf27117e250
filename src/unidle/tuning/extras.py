"""Which extras of unidle are installed, from the metadata of the installed packages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement

_COLLECTIONS = ("all", "dev")  # extras that only name others


@dataclass(frozen=True)
class Extras:
    """Extras with all their packages, and for each of the others the packages that are missing or too old."""

    complete: tuple[str, ...]
    missing: dict[str, tuple[str, ...]]


def find_extras(package: str = "unidle") -> Extras | None:
    """The extras of `package`; None if it is not installed."""
    try:
        names = metadata(package).get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return None
    lacking = {name: tuple(dict.fromkeys(_lacking(package, name))) for name in names if name not in _COLLECTIONS}
    return Extras(
        tuple(name for name, packages in lacking.items() if not packages),
        {name: packages for name, packages in lacking.items() if packages},
    )


def _lacking(package: str, extra: str) -> Iterator[str]:
    """The packages of an extra that are not installed in a version that fits."""
    for text in requires(package) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue  # not of this extra
        try:
            fits = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            fits = False
        if not fits:
            yield requirement.name
        else:
            for inner in requirement.extras:
                yield from _lacking(requirement.name, inner)

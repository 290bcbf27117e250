"""Copies of modules with a deliberate mistake."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def with_change(module: str, old: str, new: str, folder: Path, imports: dict[str, str] | None = None) -> ModuleType:
    """A copy of a module in which `new` stands for `old`, and which imports the copies named in `imports`."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert old in source
    source = source.replace(old, new)
    for original, copy in (imports or {}).items():
        source = source.replace(f"from {original} import", f"from {copy} import")
    name = "changed_" + module.rpartition(".")[2]
    path = folder / f"{name}.py"
    path.write_text(source)
    changed_spec = importlib.util.spec_from_file_location(name, path)
    assert changed_spec is not None
    assert changed_spec.loader is not None
    changed = importlib.util.module_from_spec(changed_spec)
    sys.modules[name] = changed
    changed_spec.loader.exec_module(changed)
    return changed

"""The command `headwaiter` and the public face: `from headwaiter import Model, ModelClient, InvalidInput`.

Owns the public names and the check that the packages found under our common names are ours. Refuses to import
anything before it is asked for: `import headwaiter` costs nothing and never loads torch, zmq or a web framework.
The commands themselves are in `model_worker/commands/`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frontend.blocking import BlockingModelClient as BlockingModelClient
    from frontend.client import ModelClient as ModelClient
    from frontend.dependency import headwaiter_client as headwaiter_client
    from frontend.responses import status_of as status_of
    from model_worker.runtimes.base import Model as Model
    from model_worker.runtimes.base import Progress as Progress
    from shared.errors import InvalidInput as InvalidInput
    from shared.errors import LoadError as LoadError
    from shared.errors import RequestError as RequestError

__all__ = [
    "BlockingModelClient",
    "InvalidInput",
    "LoadError",
    "Model",
    "ModelClient",
    "Progress",
    "RequestError",
    "headwaiter_client",
    "status_of",
]

_HOMES = {
    "InvalidInput": "shared.errors",
    "LoadError": "shared.errors",
    "RequestError": "shared.errors",
    "status_of": "frontend.responses",
    "Model": "model_worker.runtimes.base",
    "Progress": "model_worker.runtimes.base",
    "ModelClient": "frontend.client",
    "BlockingModelClient": "frontend.blocking",
    "headwaiter_client": "frontend.dependency",
}
_PACKAGES = ("shared", "frontend", "model_worker")
# EX_CONFIG; written out here, because the module that names it may be the one that is shadowed.
_EXIT_CONFIGURATION = 78


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headwaiter' has no attribute {name!r}; it offers {', '.join(__all__)}")
    foreign = _foreign_package()
    if foreign is not None:
        raise ImportError(foreign)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _foreign_package() -> str | None:
    """What to say when Python finds another package under one of our names; None when all of them are ours."""
    ours = Path(__file__).resolve().parent
    for package in _PACKAGES:
        loaded = sys.modules.get(package)
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(package)
        expected = ours / package / "__init__.py"
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != expected:
            found = f"Python finds {_place(spec)} instead of" if spec else "Python does not find"
            return (
                f"headwaiter needs its own package {package!r}, but {found} {expected.parent}: rename yours, "
                "take its folder off PYTHONPATH, or start from another directory (python -P leaves the working "
                "directory off the path); your own model classes belong into python_path, which comes last"
            )
    return None


def _place(spec: importlib.machinery.ModuleSpec) -> str:
    if spec.origin is not None:
        return spec.origin
    return ", ".join(spec.submodule_search_locations or ()) or "a module without a file"


def main() -> None:
    """The command line. Exits with one of the codes that the help of each command lists."""
    foreign = _foreign_package()
    if foreign is not None:
        print(f"headwaiter: {foreign}", file=sys.stderr)
        raise SystemExit(_EXIT_CONFIGURATION)
    from shared.processes import open_standard_streams

    open_standard_streams()
    from model_worker.commands.application import run

    raise SystemExit(run())


if __name__ == "__main__":
    main()

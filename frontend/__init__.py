"""The front workers: HTTP in front of the model server.

Its name and that of `shared` are common words, so a folder of the user's can take the place of `shared`. That is told
here, before any module fails for the lack of something in it.
"""

import importlib.util
import pathlib

_ours = pathlib.Path(__file__).parent.with_name("shared") / "__init__.py"
_found = importlib.util.find_spec("shared")
if _found is None or _found.origin is None or not _ours.samefile(_found.origin):
    raise ImportError(
        f"headwaiter needs its own package 'shared', in {_ours.parent}, but Python finds "
        f"{_found.origin if _found else 'none'}: use python -P, which leaves the working directory off the path, "
        "start in another directory, or rename yours"
    )

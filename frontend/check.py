"""`python -m frontend.check`: makes the application that a front worker would serve, and says why that cannot be.

For everybody who starts front workers and is none: what a user's routers import stays in this process, which ends.
Owns nothing that lasts: what the application keeps in files it keeps in a directory of its own meanwhile.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from frontend.__main__ import ExitCode
from frontend.app import create_app
from shared.config import Config
from shared.errors import ConfigurationError


def main() -> int:
    try:
        config = Config.load()
        with tempfile.TemporaryDirectory(prefix="headwaiter-") as directory:
            create_app(config.model_copy(update={"run_dir": Path(directory) / "run"}))
    except ConfigurationError as error:
        print(f"headwaiter: {error}", file=sys.stderr)
        return ExitCode.CONFIGURATION
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())

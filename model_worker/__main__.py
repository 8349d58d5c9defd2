"""`python -m model_worker`: the model server alone, as supervisord starts it.

Kept small on purpose: a spawned model process imports this module again, as `__mp_main__`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    from model_worker.start import ExitCode, run_model_server
    from shared.errors import ConfigurationError
    from shared.processes import open_standard_streams

    open_standard_streams()
    parser = argparse.ArgumentParser(
        prog="python -m model_worker",
        description="Runs the model server: the broker and one model process per slot.",
    )
    parser.add_argument("--config", type=Path, help="configuration file (default: $HEADWAITER_CONFIG, headwaiter.toml)")
    parser.add_argument(
        "--exit-with-parent", type=int, metavar="PID", help="stop when PID, which started this process, ends"
    )
    arguments = parser.parse_args()
    try:
        return run_model_server(arguments.config, parent_pid=arguments.exit_with_parent)
    except ConfigurationError as error:
        print(f"headwaiter: {error}", file=sys.stderr)
        return ExitCode.CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())

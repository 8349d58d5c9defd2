"""Writes `docs/configuration.md` from `shared/config.py`: `python -m shared.reference docs/configuration.md`.

Owns the page's shape. Everything it says about a key comes from the key's own definition, so the page cannot drift
from the program; a test compares the committed file with what this module writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared.config import CONFIG_FILE_VARIABLE, DEFAULT_CONFIG_FILE, ENV_PREFIX, Config, ModelConfig
from shared.key_words import section_of, type_words

INTRODUCTION = f"""\
# Configuration

<!-- Written by `make docs` from shared/config.py. Change the texts there. -->

One TOML file describes everything. `headwaiter` takes the file that `--config` names, else the one that
`{CONFIG_FILE_VARIABLE}` names, else `{DEFAULT_CONFIG_FILE}` in the working directory, else none.

```toml
[http]
port = 8080

[[models]]
name = "sentiment"
model = "./models/sentiment"
task = "text-classification"
```

- A key that does not exist is refused, in the file and in the environment, with the keys that do exist.
- Every key can be set by an environment variable too, which wins over the file: `{ENV_PREFIX}HTTP__PORT=9000`. Lists
  and tables are JSON there, and `{ENV_PREFIX}MODELS` replaces all `[[models]]` of the file.
- A flag of the command line wins over both.
- `headwaiter config` prints what results, and where each value came from.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    fields = Config.model_fields
    top = {name: field for name, field in fields.items() if not section_of(field.annotation) and name != "models"}
    parts.append(_section("At the top of the file", "", "", top))
    for name, field in fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts.append(_section(f"`[{name}]`", _text(section.__doc__), f"{name.upper()}__", section.model_fields))
    parts.append(_section("`[[models]]`", _text(ModelConfig.__doc__), None, ModelConfig.model_fields))
    parts.append('`device` may be written for `devices`, with one name or number: `device = "cpu"`, `device = 0`.\n')
    return "\n".join(parts)


def _section(title: str, text: str, variable_prefix: str | None, fields: dict[str, FieldInfo]) -> str:
    return "\n".join([f"## {title}", "", *([text, ""] if text else []), *_rows(variable_prefix, fields), ""])


def _rows(variable_prefix: str | None, fields: dict[str, FieldInfo]) -> Iterator[str]:
    with_variables = variable_prefix is not None
    yield "| key | type | default | meaning |" + (" variable |" if with_variables else "")
    yield "| --- | --- | --- | --- |" + (" --- |" if with_variables else "")
    for name, field in fields.items():
        row = f"| `{name}` | {type_words(field)} | {_default_words(field)} | {_text(field.description)} |"
        if with_variables:
            row += f" `{ENV_PREFIX}{variable_prefix}{name.upper()}` |"
        yield row


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _default_words(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "–"
    if isinstance(default, tuple):
        return "`[" + ", ".join(f'"{entry}"' for entry in default) + "]`"
    if isinstance(default, float):
        return f"`{default:g}`"
    # What JSON writes is TOML as well, an empty table included.
    return f"`{json.dumps(default)}`"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m shared.reference FILE")
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()

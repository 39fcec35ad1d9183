"""Rows of the tile tables as Python source: printed ready to paste, or put in the place of those that there are."""

from __future__ import annotations

import ast
import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flashhopper.bench import BenchError
from flashhopper.bench.configs import AnyConfig
from flashhopper.config import BackwardConfig, ForwardConfig
from flashhopper.heuristics import BackwardRow, TileRow

AnyRow = TileRow | BackwardRow
LINE = 120
INDENT = 4
FAR = 10**6  # columns to the left: there any text fits on its line


def row_source(row: AnyRow, indent: int = INDENT) -> str:
    """The row as it stands in a table, as ``ruff format`` would have it, from its first letter to its last bracket."""
    defaults = row._field_defaults
    arguments = [(None if name not in defaults else name, value) for name, value in row._asdict().items()]
    kept = [(name, value) for name, value in arguments if name is None or value != defaults[name]]
    return _call(type(row).__name__, kept, indent)


def _call(name: str, arguments: Sequence[tuple[str | None, Any]], indent: int, before: int = 0) -> str:
    """A call after ``before`` characters of a line that begins at column ``indent``: on one line if it fits with the
    comma after it, else with an argument a line."""
    flat = f"{name}({', '.join(_argument(key, value, -FAR) for key, value in arguments)})"
    if indent + before + len(flat) + 1 <= LINE:
        return flat
    inner = indent + INDENT
    lines = [f"{' ' * inner}{_argument(key, value, inner)},\n" for key, value in arguments]
    return f"{name}(\n{''.join(lines)}{' ' * indent})"


def _argument(key: str | None, value: Any, indent: int) -> str:
    """``key=value`` that begins at column ``indent``, over as many lines as it takes."""
    name = "" if key is None else f"{key}="
    if isinstance(value, ForwardConfig | BackwardConfig):
        text = _call(type(value).__name__, _config_arguments(value), indent, len(name))
    elif isinstance(value, str):
        text = _quoted(value) if indent + len(_quoted(value)) + 1 <= LINE else _wrapped(value, indent)
    else:
        text = repr(value)
    return name + text


def _config_arguments(config: AnyConfig) -> list[tuple[str | None, Any]]:
    fields = dataclasses.fields(config)
    required: list[tuple[str | None, Any]] = [
        (None, getattr(config, f.name)) for f in fields if f.default is dataclasses.MISSING
    ]
    return required + [
        (f.name, getattr(config, f.name))
        for f in fields
        if f.default is not dataclasses.MISSING and getattr(config, f.name) != f.default
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrapped(text: str, indent: int) -> str:
    """Strings that Python joins, a line each."""
    parts = textwrap.wrap(text, LINE - indent - 4, drop_whitespace=False, break_long_words=False)
    return f"\n{' ' * indent}".join(map(_quoted, parts))


def replace_rows(source: str, table: str, rows: Sequence[AnyRow], new: Mapping[int, Sequence[AnyRow]]) -> str:
    """The module ``source``, in whose ``table`` rows are replaced: by number, each with those given.

    ``rows`` are the table's as this process knows them. BenchError if the source has others, or none that can be told
    apart, and if what comes out is not what was asked for.
    """
    elements, names = _elements(source, table), _run(source)
    made = [_rows_of(element, names) for element in elements]
    if _plain(row for part in made for row in part) != _plain(rows):
        raise BenchError(f"{table} in the source is not the one that is running: has the file been edited since?")
    lines = source.encode().splitlines(keepends=True)  # ast counts columns in bytes
    number = len(rows)
    for element, part in zip(reversed(elements), reversed(made), strict=True):
        number -= len(part)
        if any(number + offset in new for offset in range(len(part))):
            wanted = [row for offset, row in enumerate(part) for row in new.get(number + offset, [row])]
            text = f",\n{' ' * INDENT}".join(map(row_source, wanted))
            _splice(lines, element, text)
    changed = b"".join(lines).decode()
    wanted_rows = [row for number, row in enumerate(rows) for row in new.get(number, [row])]
    if _plain(_run(changed)[table]) != _plain(wanted_rows):
        raise BenchError(f"{table} cannot be rewritten: the source is not of the form expected; paste the rows by hand")
    return changed


def _elements(source: str, table: str) -> list[ast.expr]:
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Tuple):
                return value.elts
    raise BenchError(f"{table} is not a tuple of rows in the source: paste the rows by hand")


def _run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "rows"}
    exec(compile(source, "rows", "exec", dont_inherit=True), names)
    return names


def _rows_of(element: ast.expr, names: dict[str, Any]) -> tuple[AnyRow, ...]:
    """What one element of the table's tuple stands for: a row, or with a star several."""
    alone = ast.fix_missing_locations(ast.Expression(ast.Tuple([element], ast.Load())))
    rows: tuple[AnyRow, ...] = eval(compile(alone, "rows", "eval"), names)
    return rows


def _plain(rows: Any) -> list[tuple[Any, ...]]:
    """To be compared whatever the class of the rows, which each run of the source makes anew."""
    return [tuple(row) for row in rows]


def _splice(lines: list[bytes], element: ast.expr, text: str) -> None:
    """Put ``text`` in the place of ``element``."""
    first, last = element.lineno - 1, (element.end_lineno or element.lineno) - 1
    head, tail = lines[first][: element.col_offset], lines[last][element.end_col_offset :]
    lines[first : last + 1] = [head + text.encode() + tail]


def unused_names(source: str) -> list[str]:
    """Private names of a module that nothing in it reads: what replaced rows leave behind."""
    tree = ast.parse(source)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = [
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and target.id.startswith("_")
    ]
    return [name for name in made if name not in read]

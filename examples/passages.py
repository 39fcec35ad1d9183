"""Text to search: short passages out of Markdown, plain text and Python docstrings, each with its file and line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_WORDS = 80  # a longer paragraph is cut between sentences
MIN_WORDS = 4  # less is a rule or a title, which answers nothing
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")
OWN_LINE = re.compile(r"\s*([-*|>]|#+|\d+\.)\s")  # list items, table rows, quotes and headings


@dataclass(frozen=True)
class Passage:
    path: Path
    line: int
    text: str


def project_files(root: Path) -> list[Path]:
    """The project's own prose: its Markdown, and its modules for their docstrings."""
    patterns = ("*.md", "docs/**/*.md", "src/**/*.py")
    return [path for pattern in patterns for path in sorted(root.glob(pattern))]


def read_passages(path: Path) -> list[Passage]:
    text = path.read_text(encoding="utf-8")
    blocks = docstrings(text) if path.suffix == ".py" else [(1, text)]
    return [
        Passage(path, line, piece)
        for first_line, block in blocks
        for line, paragraph in paragraphs(block, first_line)
        for piece in pieces(paragraph)
        if len(piece.split()) >= MIN_WORDS
    ]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands as a statement: docstrings, and those below fields and constants."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def paragraphs(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    """First line and text of each paragraph, heading, list item and table row; fenced code is left out."""
    start, words, fenced = first_line, list[str](), False
    for number, line in enumerate([*text.splitlines(), ""], first_line):
        fence = line.lstrip().startswith("```")
        if words and (not line.strip() or fence or OWN_LINE.match(line)):
            yield start, " ".join(words)
            words = []
        fenced ^= fence
        if not (fenced or fence):
            start = start if words else number
            words += line.replace("`", "").split()


def pieces(paragraph: str) -> Iterator[str]:
    """The paragraph, or runs of its sentences of at most ``MAX_WORDS`` words (a longer sentence stays whole)."""
    piece = ""
    for sentence in SENTENCE_END.split(paragraph):
        if piece and len(piece.split()) + len(sentence.split()) > MAX_WORDS:
            yield piece
            piece = ""
        piece = f"{piece} {sentence}".strip()
    if piece:
        yield piece

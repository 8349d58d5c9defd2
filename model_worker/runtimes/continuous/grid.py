"""The keys and values of a dense batch: rows x columns of cells in one piece of memory per layer, taken once.

All rows end in the same column, each begins in its own (they are padded on the left): several kinds of attention mask
by column, so a row must be without gaps, and every model allows padding on the left. A step writes one column in
place. A row that leaves is replaced by the last one; a row that joins is copied to the end of the others. The window of
columns in use moves to the right as the batch goes on, and back when it reaches the edge.

Refuses to know models; `layer_shapes` is measured by whoever makes a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from model_worker.runtimes.transfer import on_device

# Columns that are free behind the window after it has moved: moving copies all of it, so it has to pay for some steps.
_SPARE_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer, each as heads and numbers per head."""

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype

    @property
    def bytes_per_cell(self) -> int:
        return (self.keys[0] * self.keys[1] + self.values[0] * self.values[1]) * self.dtype.itemsize


class Grid:
    """Rows of one batch with their keys and values. Main thread only."""

    def __init__(self, layer_shapes: Sequence[LayerShape], cells: int, device: torch.device) -> None:
        self.cells = cells
        self.starts: list[int] = []
        """Of each row the column in which it begins. Cells to the left of it are zero: masked, they must be finite."""
        self.end = 0
        """The column that the next token of every row goes to."""
        self.begin = 0
        """The first column of the window, that of the longest row."""
        self.columns = 0
        self._device = device
        self._flat = [
            torch.empty(cells * heads * size, dtype=shape.dtype, device=device)
            for shape in layer_shapes
            for heads, size in (shape.keys, shape.values)
        ]
        self._forms = [form for shape in layer_shapes for form in (shape.keys, shape.values)]
        self._tensors: list[torch.Tensor] = []  # each flat one as [rows, heads, columns, size]
        layers: list[Any] = [_GridLayer(self, index) for index in range(len(layer_shapes))]
        self.cache = Cache(layers=layers)
        """What transformers' models take as their cache."""
        self._starts_tensor: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def width(self) -> int:
        """Columns that are in use."""
        return self.end - self.begin

    def tokens(self, row: int) -> int:
        """How many tokens a row holds."""
        return self.end - self.starts[row]

    def open(self, lengths: Sequence[int]) -> None:
        """Makes room for prompts of these `lengths`, padded on the left, in a grid without rows; they are to be written
        by forwards that go from the first column to the last."""
        longest = max(lengths)
        self._form(longest)
        self.begin = self.end = 0
        self.starts = [longest - length for length in lengths]
        self._starts_tensor = None

    def take_over(self, columns: int, beginnings: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fills the first `columns` of an opened grid with what is known of its rows: keys and values layer by layer,
        each [heads, tokens, size], at least as many tokens as the row has in these columns."""
        for index, tensor in enumerate(self._tensors):
            tensor[: self.rows, :, :columns] = 0
            for row, (start, cells) in enumerate(zip(self.starts, beginnings, strict=True)):
                if start < columns:
                    tensor[row, :, start:columns] = cells[index][:, : columns - start]
        self.end = columns

    def cells_of(self, row: int) -> list[torch.Tensor]:
        """Keys and values of a row, layer by layer, each [heads, tokens, size]; no copies."""
        return [tensor[row, :, self.starts[row] : self.end] for tensor in self._tensors]

    def reserve(self, newcomers: int = 0, longest: int = 0) -> None:
        """Sees to it that `newcomers` with up to `longest` tokens fit beside the present rows, and one more column."""
        rows = self.rows + newcomers
        end = max(self.end, longest) if self.rows else longest
        if end >= self.columns or rows * self.columns > self.cells:
            end = max(self.width, longest)
            columns = min(end + max(_SPARE_COLUMNS, end // 4), self.cells // rows)
            if columns <= end:
                raise AssertionError(f"{rows} rows of {end + 1} columns in {self.cells} cells: too much was let in")
            self._move(end, columns)
        elif end != self.end:
            self._move(end, self.columns)

    def adopt(self, other: Grid) -> None:
        """Appends the rows of `other`, all of whose cells are written."""
        self.reserve(other.rows, other.width)
        first, rows, width = self.rows, other.rows, other.width
        own = other.attention_mask(0).bool()[:, None, :, None]
        for mine, theirs in zip(self._tensors, other._tensors, strict=True):
            here = mine[first : first + rows]
            here[:, :, : self.end - width] = 0
            here[:, :, self.end - width : self.end] = torch.where(own, theirs[:rows, :, other.begin : other.end], 0)
        self.starts += [start + self.end - other.end for start in other.starts]
        self._settle()

    def remove(self, row: int) -> None:
        """Takes a row out; the last one takes its place."""
        last = self.rows - 1
        if row != last:
            for tensor in self._tensors:
                tensor[row, :, : self.end] = tensor[last, :, : self.end]
            self.starts[row] = self.starts[last]
        self.starts.pop()
        self._settle()

    def advance(self, columns: int) -> None:
        """Takes over what a forward has written behind the window; until then it could be run again."""
        self.end += columns

    def attention_mask(self, columns: int) -> torch.Tensor:
        """int64 [rows, width + columns]: 1 where a row holds its own tokens, with `columns` that are about to come."""
        places = torch.arange(self.begin, self.end + columns, device=self._device)
        return (places >= self._starts()).long()

    def positions(self, columns: int) -> torch.Tensor:
        """int64 [rows, columns]: of the tokens that are about to come, each counted from the beginning of its row."""
        places = torch.arange(self.end, self.end + columns, device=self._device)
        return (places - self._starts()).clamp_(min=0)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts one layer's new columns behind the window and returns the window with them, without a copy."""
        end = self.end + keys.shape[-2]
        window = []
        for tensor, new in ((self._tensors[2 * layer], keys), (self._tensors[2 * layer + 1], values)):
            rows = tensor[: self.rows]
            rows[:, :, self.end : end] = new
            window.append(rows[:, :, self.begin : end])
        return window[0], window[1]

    def _starts(self) -> torch.Tensor:
        if self._starts_tensor is None:
            self._starts_tensor = on_device(self.starts, self._device).unsqueeze(1)
        return self._starts_tensor

    def _settle(self) -> None:
        """Follows a change of the rows."""
        self.begin = min(self.starts, default=self.end)
        self._starts_tensor = None

    def _form(self, columns: int) -> None:
        self.columns = columns
        rows = self.cells // columns
        self._tensors = [
            flat[: rows * heads * columns * size].view(rows, heads, columns, size)
            for flat, (heads, size) in zip(self._flat, self._forms, strict=True)
        ]

    def _move(self, end: int, columns: int) -> None:
        """Gives the memory another shape, with the window ending at `end`."""
        before, width = self._tensors, self.width
        self._form(columns)
        if self.rows:
            for old, new in zip(before, self._tensors, strict=True):
                # The two share their memory.
                live = old[: self.rows, :, self.begin : self.end].clone()
                new[: self.rows, :, : end - width] = 0
                new[: self.rows, :, end - width : end] = live
        self.starts = [start + end - self.end for start in self.starts]
        self.end = end
        self._settle()


class _GridLayer(DynamicLayer):
    """One layer of a grid, as transformers sees it: always as long as the window, whatever kind of attention it has."""

    def __init__(self, grid: Grid, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._grid = grid
        self._layer = layer
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._grid.write(self._layer, key_states, value_states)

    def get_seq_length(self, *args: Any) -> int:
        return self._grid.width

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Up to transformers 4.57 it is the positions of the query, later its length.
        length = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self._grid.width + int(length), 0

"""Continuous batching over a dense cache, for any causal language model that keeps keys and values per layer.

One step reads a bounded part of the prompts that wait and adds one token to every row that runs. Prompts are read in a
small grid of their own, several short ones together or a long one in parts, and their rows then join the others. Where
more prompts wait than rows run, they are read first, if that takes a few steps only.

Owns the rows: their cells, their next tokens, their text, their end. Refuses to queue: what joins is certain to fit, to
its end, and whoever wants to join more asks `can_join` first. Main thread only, `refusal` excepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from model_worker.runtimes import padding
from model_worker.runtimes.continuous.admission import Demand, peak_cells
from model_worker.runtimes.continuous.causal_forward import CausalForward
from model_worker.runtimes.continuous.grid import Grid
from model_worker.runtimes.continuous.prefixes import Beginning, Prefixes
from model_worker.runtimes.continuous.sampling import Draw, SamplingPlan
from model_worker.runtimes.continuous.sequences import (
    FinishReason,
    Progress,
    Room,
    Sequence,
    TokenScore,
    not_finite,
    not_wanted,
)
from model_worker.runtimes.continuous.text import StopWatch, TextStream, decoding
from model_worker.runtimes.transfer import on_device, to_device
from shared.errors import InvalidInput

# How many steps a burst may take to be read while those that run get no token: about a second on a small CPU.
_BURST_STEPS_MAX = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine may take."""

    cache_tokens: int
    """Cells of the cache, rows x columns; padding counts."""
    rows_max: int
    """Sequences at once."""
    prefill_tokens: int
    """Tokens of prompts, padding included, that one step reads: it is how long the others wait for a newcomer."""
    prefix_tokens: int = 0
    """Tokens of beginnings that several prompts have in common, kept besides; 0: each prompt is read from its first."""


@dataclass(eq=False, slots=True)
class _Row:
    """One sequence between its join and its end."""

    sequence: Sequence
    end_ids: frozenset[int]
    draw: Draw
    text: TextStream
    stops: StopWatch
    last_token: int = 0
    """The token that the next step feeds to the model."""
    new_tokens: int = 0
    has_ended: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.sequence.prompt_ids)

    def demand(self, delay_steps: int = 0) -> Demand:
        """What it will need of the grid, if it joins in so many steps."""
        fed = max(self.new_tokens - 1, 0)
        steps = self.sequence.max_new_tokens - 1 - fed
        return Demand(self.prompt_tokens + fed, steps + delay_steps)

    def take(self, token_id: int, score: TokenScore | None) -> Progress:
        """Appends a token."""
        self.last_token = token_id
        self.new_tokens += 1
        ending: FinishReason | None = None
        if token_id in self.end_ids:
            ending = "stop"
        elif self.new_tokens >= self.sequence.max_new_tokens:
            ending = "length"
        text = self.stops.push(self.text.push(token_id))
        if ending is not None and not self.stops.is_found:
            text += self.stops.push(self.text.finish())
        if self.stops.is_found:
            ending = "stop"
        elif ending is not None:
            text += self.stops.finish()
        self.has_ended = ending is not None
        return Progress(self.sequence, text, (token_id,), () if score is None else (score,), ending)

    def fail(self, error: Exception) -> Progress:
        """Ends without another token."""
        self.has_ended = True
        return Progress(self.sequence, "", ending=error)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A row that waits, and what is known of its prompt."""

    row: _Row
    beginning: Beginning

    @property
    def unread(self) -> int:
        return self.row.prompt_tokens - self.beginning.tokens


class _Reading:
    """Prompts that are being read, in a grid of their own; what is known of all of them is not read again."""

    def __init__(self, candidates: list[_Candidate], forward: CausalForward, pad_token_id: int) -> None:
        self.candidates = candidates
        self.rows = rows = [candidate.row for candidate in candidates]
        prompts = [row.sequence.prompt_ids for row in rows]
        # int64 [rows, longest]
        self._ids = to_device(padding.pad(prompts, pad_token_id, "left"), forward.device)
        self.grid = Grid(forward.layer_shapes, self._ids.numel(), forward.device)
        self.grid.open([len(prompt) for prompt in prompts])
        # All end in the same column, so each is read from where the rest of the longest rest begins.
        known = self._ids.shape[1] - max(candidate.unread for candidate in candidates)
        if known:
            self.grid.take_over(known, [candidate.beginning.cells for candidate in candidates])
        self._forward = forward

    @property
    def columns_left(self) -> int:
        return self._ids.shape[1] - self.grid.end

    def read(self, columns: int) -> torch.Tensor:
        """Goes on by at most so many columns; returns the scores [rows, vocabulary] of what comes after them."""
        return self._forward(self._ids[:, self.grid.end : self.grid.end + columns], self.grid)


def _always_wanted(sequence: Sequence) -> bool:
    return True


class DenseEngine:
    """Raises `Unsupported` for a model that it cannot drive, and `torch.OutOfMemoryError` if the cache does not fit."""

    def __init__(
        self, model: Any, tokenizer: Any, limits: Limits, *, end_ids: frozenset[int], pad_token_id: int = 0
    ) -> None:
        """`tokenizer` only decodes, and so may be shared with another thread that does nothing else with it."""
        self.limits = limits
        self.is_wanted: Callable[[Sequence], bool] = _always_wanted
        """Asked for every sequence before every step; one that nobody waits for ends with an error at once."""
        self._end_ids = end_ids
        self._pad_token_id = pad_token_id
        self._decoders = {skip: decoding(tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        with torch.inference_mode():
            self._forward = CausalForward(model)
            self._grid = Grid(self._forward.layer_shapes, limits.cache_tokens, self._forward.device)
            self._prefixes = Prefixes(self._forward.layer_shapes, limits.prefix_tokens, self._forward.device)
        # What is known of prompts takes no time to read and still takes cells.
        self._reading_cells_max = max(limits.prefill_tokens, limits.cache_tokens // 4)
        self._waiting: list[_Row] = []
        self._reading: _Reading | None = None
        self._rows: list[_Row] = []  # in the order of the grid's
        self._plan: tuple[list[_Row], SamplingPlan] | None = None

    # --- admission ---

    def refusal(self, prompt_tokens: int, max_new_tokens: int) -> InvalidInput | None:
        """Why such a sequence could never run, even alone; None: it could. Any thread."""
        needed = prompt_tokens + max_new_tokens - 1  # the last token is never fed back
        if needed < self.limits.cache_tokens:
            return None
        return InvalidInput(
            f"max_new_tokens = {max_new_tokens} and a prompt of {prompt_tokens} tokens do not fit: the cache holds "
            f"{self.limits.cache_tokens} tokens, so at most {self.limits.cache_tokens - prompt_tokens} here",
            detail={"length_tokens": prompt_tokens, "limit_tokens": self.limits.cache_tokens - 1},
        )

    def can_join(self, sequence: Sequence) -> bool:
        """Whether `join` would take it now."""
        return self.running < self.limits.rows_max and self._peak_cells(sequence) <= self.limits.cache_tokens

    @property
    def room(self) -> Room:
        return Room(self.limits.rows_max - self.running, self.limits.cache_tokens - self._peak_cells())

    @property
    def running(self) -> int:
        """Sequences that have joined and neither ended nor left."""
        return len(self._rows) + len(self._waiting) + (self._reading is not None)

    def _peak_cells(self, newcomer: Sequence | None = None) -> int:
        demands = [row.demand() for row in self._rows]
        delay_steps = 0
        if self._reading is not None:
            delay_steps = self._steps_to_read(self._reading.columns_left)
            demands.append(self._reading.rows[0].demand(delay_steps))
        # Read one after the other, though some will be read together; who comes late is there for longer.
        for row in self._waiting:
            delay_steps += self._steps_to_read(row.prompt_tokens)
            demands.append(row.demand(delay_steps))
        if newcomer is not None:
            prompt_tokens = len(newcomer.prompt_ids)
            steps = newcomer.max_new_tokens - 1 + delay_steps + self._steps_to_read(prompt_tokens)
            demands.append(Demand(prompt_tokens, steps))
        return peak_cells(demands)

    def _steps_to_read(self, tokens: int) -> int:
        return math.ceil(tokens / self.limits.prefill_tokens)

    def describe(self) -> dict[str, object]:
        """For `status`. Any thread."""
        bytes_per_token = sum(shape.bytes_per_cell for shape in self._forward.layer_shapes)
        return {
            "batching": "continuous: rows of a dense cache, padded on the left",
            "cache_tokens": self.limits.cache_tokens,
            "cache_bytes_max": self.limits.cache_tokens * bytes_per_token,
            "rows_max": self.limits.rows_max,
            "prefill_tokens": self.limits.prefill_tokens,
            "prefix_tokens": self.limits.prefix_tokens,
            "prefix_bytes_max": self.limits.prefix_tokens * bytes_per_token,
        }

    # --- coming and going ---

    def join(self, sequence: Sequence) -> None:
        """Takes a sequence in; the next steps begin to read it.

        Raises:
            ValueError: there is no room for it now; `can_join` tells beforehand.
        """
        if not self.can_join(sequence):
            raise ValueError(f"no room for a sequence of {len(sequence.prompt_ids)} + {sequence.max_new_tokens} tokens")
        guide = None if sequence.grammar is None else sequence.grammar.start()
        self._waiting.append(
            _Row(
                sequence,
                self._end_ids if sequence.end_ids is None else sequence.end_ids,
                Draw(sequence.sampling, sequence.prompt_ids, guide),
                TextStream(self._decoders[sequence.skip_special_tokens], sequence.prompt_ids),
                StopWatch(sequence.stop),
            )
        )

    @torch.inference_mode()
    def leave(self, sequence: Sequence) -> bool:
        """Ends a sequence without an event; its cells are free at once. False: it is not here (any more)."""
        for index, row in enumerate(self._rows):
            if row.sequence is sequence:
                self._remove(index)
                return True
        if self._reading is not None and self._reading.rows[0].sequence is sequence:
            self._reading = None
            return True
        waiting = [row for row in self._waiting if row.sequence is not sequence]
        was_waiting = len(waiting) < len(self._waiting)
        self._waiting = waiting
        return was_waiting

    def sequences(self) -> list[Sequence]:
        """All that have joined and neither ended nor left."""
        reading = self._reading.rows if self._reading is not None else []
        return [row.sequence for row in (*self._rows, *reading, *self._waiting)]

    # --- steps ---

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Reads some prompts and adds one token to every row, unless a burst is being read; returns what that did, one
        event per sequence at most.

        A prompt that cannot be read ends with the exception in its event. Raises whatever a step of the running rows
        raises; then all sequences have to leave before the next step.
        """
        events = self._drop_unwanted()
        parts = []
        rows = [] if self._is_burst() else list(self._rows)
        if rows:
            self._grid.reserve()
            last_tokens = on_device([[row.last_token] for row in rows], self._forward.device)
            parts.append(self._forward(last_tokens, self._grid))
        readings = self._read(events, parts)
        rows += [row for reading in readings for row in reading.rows]
        if rows:
            self._extend(rows, parts, events)
        self._remove_ended(readings)
        return events

    def _is_burst(self) -> bool:
        """Whether more wait than run, and few steps read all of them. Those that run then wait as long, and go on
        together with the others: a step that does both takes all weights from memory twice."""
        if self._reading is not None or len(self._waiting) <= len(self._rows):
            return False
        tokens = sum(row.prompt_tokens for row in self._waiting)
        return self._steps_to_read(tokens) <= _BURST_STEPS_MAX

    def _extend(self, rows: list[_Row], parts: list[torch.Tensor], events: list[Progress]) -> None:
        """Gives each of `rows` its next token, chosen by `parts`, their scores."""
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._plan is None or self._plan[0] != rows:
            plan = SamplingPlan([row.draw for row in rows], logits.shape[-1], logits.device)
            self._plan = (rows, plan)
        chosen = self._plan[1].choose(logits)
        for row, token_id, is_finite, score in zip(
            rows, chosen.token_ids, chosen.is_finite, chosen.scores, strict=True
        ):
            events.append(row.take(token_id, score) if is_finite else row.fail(_why_none(row)))

    def _read(self, events: list[Progress], parts: list[torch.Tensor]) -> list[_Reading]:
        """Goes on reading prompts; returns those that are read to the end, with their scores put behind `parts`."""
        reading = self._reading or self._next_reading()
        self._reading = None
        if reading is None:
            return []
        finished = []
        for part in self._try(reading, events):
            if part[0].columns_left:
                self._reading = part[0]
            else:
                finished.append(part[0])
                parts.append(part[1])
                for index, row in enumerate(part[0].rows):
                    self._prefixes.note(row.sequence.prompt_ids, part[0].grid.cells_of(index))
        return finished

    def _try(self, reading: _Reading, events: list[Progress]) -> list[tuple[_Reading, torch.Tensor]]:
        try:
            return [(reading, reading.read(self.limits.prefill_tokens))]
        except Exception as error:
            # This is the border of one item: whatever one prompt does to the model ends that prompt alone.
            if len(reading.rows) == 1:
                events.append(reading.rows[0].fail(error))
                return []
        alone = [_Reading([candidate], self._forward, self._pad_token_id) for candidate in reading.candidates]
        return [pair for one in alone for pair in self._try(one, events)]

    def _next_reading(self) -> _Reading | None:
        """The prompt that has waited longest, with as many of those nearest to it in length as one step can read."""
        if not self._waiting:
            return None
        first, *others = [_Candidate(row, self._prefixes.find(row.sequence.prompt_ids)) for row in self._waiting]
        group, unread, columns = [first], first.unread, first.row.prompt_tokens
        for other in sorted(others, key=lambda other: abs(other.unread - first.unread)):
            unread = max(unread, other.unread)
            columns = max(columns, other.row.prompt_tokens)
            rows = len(group) + 1
            if rows * unread > self.limits.prefill_tokens or rows * columns > self._reading_cells_max:
                break
            group.append(other)
        chosen = {id(candidate.row) for candidate in group}
        self._waiting = [row for row in self._waiting if id(row) not in chosen]
        return _Reading(group, self._forward, self._pad_token_id)

    def _remove_ended(self, readings: list[_Reading]) -> None:
        # From the last to the first: the last one takes the place of one that goes.
        for index in reversed(range(len(self._rows))):
            if self._rows[index].has_ended:
                self._remove(index)
        for reading in readings:
            for index in reversed(range(len(reading.rows))):
                if reading.rows[index].has_ended:
                    _drop(reading.rows, index)
                    reading.grid.remove(index)
            if reading.rows:
                self._grid.adopt(reading.grid)
                self._rows.extend(reading.rows)

    def _remove(self, index: int) -> None:
        _drop(self._rows, index)
        self._grid.remove(index)

    def _drop_unwanted(self) -> list[Progress]:
        unwanted = [sequence for sequence in self.sequences() if not self.is_wanted(sequence)]
        for sequence in unwanted:
            self.leave(sequence)
        return [Progress(sequence, "", ending=not_wanted()) for sequence in unwanted]


def _why_none(row: _Row) -> Exception:
    """Why a row has no next token."""
    guide = row.draw.guide
    return (guide and guide.failure()) or not_finite()


def _drop(rows: list[_Row], index: int) -> None:
    """Takes one out as a grid does: the last one takes its place."""
    last = rows.pop()
    if index < len(rows):
        rows[index] = last

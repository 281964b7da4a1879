"""Dense traces: what would be drafted, said and accepted at every token of answers, so that any policy can be replayed.

The newest token of a decoding request is its *anchor*. At anchor i of an answer (its token i) the block of drafts
stands for tokens i + 1, i + 2, ...; a step of width w accepts min(w, run) of them, and the next anchor is i + accepted
+ 1. An answer ends when its last token is the anchor. Numpy only: `trace_dense` makes traces from an engine, `simulate`
and `replay` read them.

Letters in shapes: A answers, N anchors of all answers one after another, S draft positions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.files import replace

Halfs: TypeAlias = NDArray[np.float16]
Int8s: TypeAlias = NDArray[np.int8]
Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]

FORMAT = "slipstream-dense-trace"
VERSION = 1
_ARRAYS = ("starts", "prompt_lengths", "token_ids", "runs", "sets")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseTrace:
    """Answers and their drafts. Confidence is what the drafter said, not calibrated."""

    starts_np: Int64s  # [A + 1] first anchor of each answer; the last entry is N
    prompt_lengths_np: Int32s  # [A] tokens
    token_ids_np: Int32s  # [N] tokens of the answers
    runs_np: Int8s  # [N] leading drafts that equal what followed; at most S, and no further than the answer goes
    signals: Mapping[str, Halfs]  # head, peak: [N, S] raw confidence of each draft, a probability
    set_names: tuple[str, ...]  # of prompts
    sets_np: Int32s  # [A] which of them each answer belongs to
    about: Mapping[str, Any]  # provenance: machine, command, models, sampling

    @property
    def num_answers(self) -> int:
        return len(self.prompt_lengths_np)

    @property
    def num_drafts(self) -> int:
        """S."""
        return int(next(iter(self.signals.values())).shape[1])

    @property
    def lengths_np(self) -> Int64s:
        """[A] tokens of each answer."""
        return np.diff(self.starts_np)

    def of_sets(self, names: "list[str] | tuple[str, ...]") -> "DenseTrace":
        """The answers to prompts of these sets. ConfigError names a set that is not there."""
        wanted = np.isin(self.sets_np, [self.set_index(name) for name in names])
        return self.answers(np.flatnonzero(wanted))

    def set_index(self, name: str) -> int:
        """What `sets_np` calls a set of prompts. ConfigError if it is not there."""
        if name not in self.set_names:
            raise ConfigError(f"the trace has no set {name!r}; it has {', '.join(self.set_names)}")
        return self.set_names.index(name)

    def answers(self, chosen_np: Int64s) -> "DenseTrace":
        """Some answers only, in the order given."""
        lengths = self.lengths_np[chosen_np]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = np.arange(starts[-1]) + np.repeat(self.starts_np[chosen_np] - starts[:-1], lengths)
        return DenseTrace(
            starts_np=starts, prompt_lengths_np=self.prompt_lengths_np[chosen_np], token_ids_np=self.token_ids_np[rows],
            runs_np=self.runs_np[rows], signals={name: values[rows] for name, values in self.signals.items()},
            set_names=self.set_names, sets_np=self.sets_np[chosen_np], about=self.about,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """One .npz; confidences as half floats, of which 1,000 anchors of 16 drafts and two signals take 64 KB."""
        arrays = {name: getattr(self, f"{name}_np") for name in _ARRAYS}
        arrays |= {f"signal_{name}": values for name, values in self.signals.items()}
        header = {"format": FORMAT, "version": VERSION, "sets": list(self.set_names), "about": dict(self.about)}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, lambda temporary: _save(temporary, header=np.array(json.dumps(header)), **arrays))

    @classmethod
    def load(cls, path: Path) -> "DenseTrace":
        """ConfigError says what is wrong with a file that is no dense trace. Nothing in it is executed."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            header = json.loads(str(arrays.pop("header")))
        except (OSError, ValueError, KeyError, EOFError, RecursionError) as error:
            raise ConfigError(f"trace {path}: {error}; make one with `slipstream trace`") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
            raise ConfigError(f"trace {path} is no {FORMAT} of version {VERSION}; make one with `slipstream trace`")
        if missing := [name for name in _ARRAYS if name not in arrays]:
            raise ConfigError(f"trace {path} lacks {', '.join(missing)}; make it again with `slipstream trace`")
        signals = {
            name.removeprefix("signal_"): values for name, values in arrays.items() if name.startswith("signal_")
        }
        trace = cls(
            **{f"{name}_np": arrays[name] for name in _ARRAYS}, signals=signals,
            set_names=tuple(header["sets"]), about=header["about"],
        )  # fmt: skip
        if fault := trace.fault():
            raise ConfigError(f"trace {path}: {fault}; make it again with `slipstream trace`")
        return trace

    def fault(self) -> str | None:
        """What does not fit together, None if all does."""
        if not self.signals:
            return "it holds no signal"
        starts, num_answers, num_anchors = self.starts_np, self.num_answers, len(self.token_ids_np)
        if len(starts) != num_answers + 1 or starts[0] != 0 or starts[-1] != num_anchors or (np.diff(starts) < 1).any():
            return "starts must rise from 0 to the number of tokens, one more than there are answers"
        if len(self.sets_np) != num_answers or not np.isin(self.sets_np, np.arange(len(self.set_names))).all():
            return "sets must name one of the sets for each answer"
        shapes = {values.shape for values in self.signals.values()}
        if shapes != {(num_anchors, self.num_drafts)} or len(self.runs_np) != num_anchors:
            return f"runs and signals must have a row for each of {num_anchors} tokens"
        left = np.repeat(starts[1:], self.lengths_np) - np.arange(num_anchors) - 1
        if (self.runs_np < 0).any() or (self.runs_np > np.minimum(left, self.num_drafts)).any():
            return "a run is longer than its answer or its block"
        return None


def _save(path: Path, **arrays: NDArray[Any]) -> None:
    with path.open("wb") as file:  # numpy would add a suffix to a path
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
